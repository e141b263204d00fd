// libnnopbase.so: tensors and the other arguments of operators, and executors.
#include <algorithm>
#include <memory>

#include "aclnn/acl_meta.h"
#include "aclnn/aclnn_base.h"
#include "executors.hpp"
#include "export.hpp"
#include "tensors.hpp"

namespace {

template <class T>
void *add_array(emu::Handles<emu::Array<T>> &handles, const T *value, uint64_t size) {
  if (size > 0 && !value) throw emu::Error{emu::kNullPointer, "an array without values"};
  auto array = std::make_shared<emu::Array<T>>();
  array->values.assign(value, value + size);
  return handles.add(std::move(array));
}

template <class T>
int remove_handle(const emu::Call &call, emu::Handles<T> &handles, const void *handle) {
  return call.run_release([&] {
    if (!handle) throw emu::Error{emu::kNullPointer, "destroying a null handle"};
    (void)handles.remove(handle);
  });
}

// A list owns its tensors: destroying the list destroys them.
void drop_list(const aclTensorList *list) {
  const auto object = emu::tensor_lists().remove(list);
  for (const void *handle : object->handles) (void)emu::tensors().remove(handle);
}

}  // namespace

// aclInit alone is enough on the device too; how CANN answers a second aclnnInit is not known, so it is accepted.
EMU_API aclnnStatus aclnnInit(const char *) {
  return EMU_CALL.run([] {});
}
EMU_API aclnnStatus aclnnFinalize() {
  return EMU_CALL.run_release([] {});
}

EMU_API aclTensor *aclCreateTensor(const int64_t *view_dims, uint64_t view_dims_num, aclDataType dtype,
                                   const int64_t *stride, int64_t offset, aclFormat format, const int64_t *, uint64_t,
                                   void *data) {
  return EMU_CALL.run_pointer<aclTensor *>([&] {
    return emu::tensors().add(emu::make_tensor(view_dims, view_dims_num, dtype, stride, offset, format, data));
  });
}
EMU_API aclScalar *aclCreateScalar(void *value, aclDataType dtype) {
  return EMU_CALL.run_pointer<aclScalar *>([&] { return emu::scalars().add(emu::make_scalar(value, dtype)); });
}
EMU_API aclIntArray *aclCreateIntArray(const int64_t *value, uint64_t size) {
  return EMU_CALL.run_pointer<aclIntArray *>([&] { return add_array(emu::int_arrays(), value, size); });
}
EMU_API aclFloatArray *aclCreateFloatArray(const float *value, uint64_t size) {
  return EMU_CALL.run_pointer<aclFloatArray *>([&] { return add_array(emu::float_arrays(), value, size); });
}
EMU_API aclBoolArray *aclCreateBoolArray(const bool *value, uint64_t size) {
  return EMU_CALL.run_pointer<aclBoolArray *>([&] { return add_array(emu::bool_arrays(), value, size); });
}
EMU_API aclTensorList *aclCreateTensorList(const aclTensor *const *value, uint64_t size) {
  return EMU_CALL.run_pointer<aclTensorList *>([&] {
    auto list = std::make_shared<emu::TensorList>();
    for (uint64_t i = 0; i < size; ++i) {
      list->handles.push_back(value[i]);
      list->tensors.push_back(emu::tensors().get(value[i]));
    }
    return emu::tensor_lists().add(std::move(list));
  });
}

EMU_API aclnnStatus aclDestroyTensor(const aclTensor *tensor) {
  return remove_handle(EMU_CALL, emu::tensors(), tensor);
}
EMU_API aclnnStatus aclDestroyScalar(const aclScalar *scalar) {
  return remove_handle(EMU_CALL, emu::scalars(), scalar);
}
EMU_API aclnnStatus aclDestroyIntArray(const aclIntArray *array) {
  return remove_handle(EMU_CALL, emu::int_arrays(), array);
}
EMU_API aclnnStatus aclDestroyFloatArray(const aclFloatArray *array) {
  return remove_handle(EMU_CALL, emu::float_arrays(), array);
}
EMU_API aclnnStatus aclDestroyBoolArray(const aclBoolArray *array) {
  return remove_handle(EMU_CALL, emu::bool_arrays(), array);
}
EMU_API aclnnStatus aclDestroyTensorList(const aclTensorList *list) {
  return EMU_CALL.run_release([&] { drop_list(list); });
}

EMU_API aclnnStatus aclGetViewShape(const aclTensor *tensor, int64_t **view_dims, uint64_t *view_dims_num) {
  return EMU_CALL.run([&] {
    const auto object = emu::tensors().get(tensor);
    *view_dims_num = object->dims.size();
    *view_dims = new int64_t[object->dims.size()];
    std::copy(object->dims.begin(), object->dims.end(), *view_dims);
  });
}

EMU_API aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor *executor) {
  return EMU_CALL.run([&] { emu::set_repeatable(executor); });
}
EMU_API aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor *executor) {
  return EMU_CALL.run_release([&] { emu::destroy_executor(executor); });
}
EMU_API aclnnStatus aclSetTensorAddr(aclOpExecutor *executor, const size_t index, aclTensor *, void *address) {
  return EMU_CALL.run([&] { emu::set_tensor_address(executor, index, 0, address); });
}
EMU_API aclnnStatus aclSetDynamicTensorAddr(aclOpExecutor *executor, const size_t index, const size_t relative_index,
                                            aclTensorList *, void *address) {
  return EMU_CALL.run([&] { emu::set_tensor_address(executor, index, relative_index, address); });
}
