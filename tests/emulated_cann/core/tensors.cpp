#include "tensors.hpp"

#include <cstring>

#include "error.hpp"
#include "half.hpp"

namespace emu {

int64_t Tensor::elements() const {
  int64_t count = 1;
  for (const int64_t dim : dims) count *= dim;
  return count;
}

size_t Tensor::element_bytes() const { return bytes_of(dtype); }

bool Tensor::contiguous() const {
  if (elements() == 0) return true;
  int64_t expected = 1;
  for (size_t i = dims.size(); i-- > 0;) {
    if (dims[i] != 1 && strides[i] != expected) return false;
    expected *= dims[i];
  }
  return true;
}

size_t Tensor::span_bytes() const {
  if (elements() == 0) return 0;
  int64_t last = 0;
  for (size_t i = 0; i < dims.size(); ++i) last += (dims[i] - 1) * strides[i];
  return static_cast<size_t>(last + 1) * element_bytes();
}

std::string Tensor::describe() const {
  std::string text = "dtype " + std::to_string(dtype) + " [";
  for (const int64_t dim : dims) text += (text.back() == '[' ? "" : ", ") + std::to_string(dim);
  return text + "]";
}

size_t bytes_of(aclDataType dtype) {
  switch (dtype) {
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_BOOL:
      return 1;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
    case ACL_UINT16:
      return 2;
    case ACL_FLOAT:
    case ACL_INT32:
    case ACL_UINT32:
      return 4;
    case ACL_DOUBLE:
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_COMPLEX64:
      return 8;
    case ACL_COMPLEX128:
      return 16;
    default:
      return 0;
  }
}

std::shared_ptr<Tensor> make_tensor(const int64_t *view_dims, uint64_t view_dims_num, aclDataType dtype,
                                    const int64_t *stride, int64_t offset, aclFormat format, void *data) {
  if (view_dims_num > 0 && !view_dims) throw Error{kNullPointer, "aclCreateTensor without dimensions"};
  auto tensor = std::make_shared<Tensor>();
  tensor->dims.assign(view_dims, view_dims + view_dims_num);
  for (const int64_t dim : tensor->dims)
    if (dim < 0) throw Error{kBadParameter, "aclCreateTensor with a negative dimension"};
  tensor->strides.resize(view_dims_num);
  if (stride) {
    tensor->strides.assign(stride, stride + view_dims_num);
  } else {
    int64_t step = 1;
    for (size_t i = view_dims_num; i-- > 0; step *= view_dims[i]) tensor->strides[i] = step;
  }
  tensor->offset = offset;
  tensor->dtype = dtype;
  tensor->format = format;
  tensor->data = data;
  return tensor;
}

namespace {

template <class T>
T read(const void *address) {
  T value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

template <class T>
Scalar integer_scalar(const void *value, aclDataType dtype) {
  const T number = read<T>(value);
  return {dtype, static_cast<double>(number), static_cast<int64_t>(number)};
}

Scalar real_scalar(double number, aclDataType dtype) {
  // Converting what an int64 cannot hold is undefined.
  const bool fits = number > -0x1p63 && number < 0x1p63;
  return {dtype, number, fits ? static_cast<int64_t>(number) : 0};
}

}  // namespace

std::shared_ptr<Scalar> make_scalar(const void *value, aclDataType dtype) {
  if (!value) throw Error{kNullPointer, "aclCreateScalar without a value"};
  const auto shared = [](Scalar scalar) { return std::make_shared<Scalar>(scalar); };
  switch (dtype) {
    case ACL_FLOAT:
      return shared(real_scalar(static_cast<double>(read<float>(value)), dtype));
    case ACL_DOUBLE:
      return shared(real_scalar(read<double>(value), dtype));
    case ACL_FLOAT16:
      return shared(real_scalar(static_cast<double>(half_to_float(read<uint16_t>(value))), dtype));
    case ACL_BF16:
      return shared(real_scalar(static_cast<double>(bfloat_to_float(read<uint16_t>(value))), dtype));
    case ACL_INT8:
      return shared(integer_scalar<int8_t>(value, dtype));
    case ACL_UINT8:
      return shared(integer_scalar<uint8_t>(value, dtype));
    case ACL_INT16:
      return shared(integer_scalar<int16_t>(value, dtype));
    case ACL_INT32:
      return shared(integer_scalar<int32_t>(value, dtype));
    case ACL_INT64:
      return shared(integer_scalar<int64_t>(value, dtype));
    case ACL_BOOL:
      return shared(integer_scalar<uint8_t>(value, dtype));
    default:
      throw Error{kBadParameter, "aclCreateScalar of dtype " + std::to_string(dtype)};
  }
}

Handles<Tensor> &tensors() {
  static Handles<Tensor> &instance = *new Handles<Tensor>("tensor", kBadParameter);
  return instance;
}

Handles<Scalar> &scalars() {
  static Handles<Scalar> &instance = *new Handles<Scalar>("scalar", kBadParameter);
  return instance;
}

Handles<Array<int64_t>> &int_arrays() {
  static auto &instance = *new Handles<Array<int64_t>>("int_array", kBadParameter);
  return instance;
}

Handles<Array<float>> &float_arrays() {
  static auto &instance = *new Handles<Array<float>>("float_array", kBadParameter);
  return instance;
}

Handles<Array<bool>> &bool_arrays() {
  static auto &instance = *new Handles<Array<bool>>("bool_array", kBadParameter);
  return instance;
}

Handles<TensorList> &tensor_lists() {
  static auto &instance = *new Handles<TensorList>("tensor_list", kBadParameter);
  return instance;
}

void reset_tensors() {
  tensors().clear();
  scalars().clear();
  int_arrays().clear();
  float_arrays().clear();
  bool_arrays().clear();
  tensor_lists().clear();
}

}  // namespace emu
