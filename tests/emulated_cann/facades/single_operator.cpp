// libascendcl.so and libacl_op_compiler.so: operators by name (aclop*), for MindSpore only.
#include "single_operator.hpp"

#include <cstring>
#include <memory>
#include <vector>

#include "acl/acl_rt.h"
#include "error.hpp"
#include "export.hpp"
#include "handles.hpp"
#include "memory.hpp"
#include "streams.hpp"
#include "tensors.hpp"

namespace {

struct Description {
  aclDataType dtype;
  std::vector<int64_t> dims;
  const void *constant = nullptr;
};

struct Buffer {
  void *data;
  size_t bytes;
};

emu::Handles<Description> &descriptions() {
  static auto &instance = *new emu::Handles<Description>("tensor_description", emu::kInvalidParameter);
  return instance;
}

emu::Handles<Buffer> &buffers() {
  static auto &instance = *new emu::Handles<Buffer>("data_buffer", emu::kInvalidParameter);
  return instance;
}

emu::Handles<emu::Attributes> &attributes() {
  static auto &instance = *new emu::Handles<emu::Attributes>("operator_attributes", emu::kInvalidParameter);
  return instance;
}

// What an operator reads from the host (shapes, axes) is kept with the work: the caller may drop it at once.
struct Launch {
  emu::SingleOperatorCall call;
  std::vector<std::unique_ptr<std::byte[]>> host_copies;
};

emu::Tensor bind(Launch *launch, const aclTensorDesc *description_handle, const aclDataBuffer *buffer_handle) {
  const auto description = descriptions().get(description_handle);
  const auto buffer = buffers().get(buffer_handle);
  const auto &dims = description->dims;
  emu::Tensor tensor = *emu::make_tensor(dims.data(), dims.size(), description->dtype, nullptr, 0, ACL_FORMAT_ND,
                                         buffer->data);
  const void *host = description->constant;
  if (!host && buffer->data && !emu::memory().holds(buffer->data)) host = buffer->data;
  if (host) {
    auto copy = std::make_unique<std::byte[]>(tensor.span_bytes() + 1);
    std::memcpy(copy.get(), host, tensor.span_bytes());
    tensor.data = copy.get();
    launch->host_copies.push_back(std::move(copy));
  }
  return tensor;
}

void run_single_operator(const char *type, int input_count, const aclTensorDesc *const *input_descriptions,
                         const aclDataBuffer *const *inputs, int output_count,
                         const aclTensorDesc *const *output_descriptions, aclDataBuffer *const *outputs,
                         const aclopAttr *attribute, aclrtStream stream) {
  const auto &body = emu::single_operator(type);
  auto launch = std::make_shared<Launch>();
  for (int i = 0; i < input_count; ++i)
    launch->call.inputs.push_back(bind(launch.get(), input_descriptions[i], inputs[i]));
  for (int i = 0; i < output_count; ++i)
    launch->call.outputs.push_back(bind(launch.get(), output_descriptions[i], outputs[i]));
  if (attribute) launch->call.attributes = *attributes().get(attribute);
  emu::ledger().call(type, "");
  emu::stream_of(stream)->enqueue([launch, &body] { body(launch->call); });
}

}  // namespace

EMU_API aclTensorDesc *aclCreateTensorDesc(aclDataType dtype, int rank, const int64_t *dims, int) {
  return EMU_CALL.run_pointer<aclTensorDesc *>([&] {
    auto description = std::make_shared<Description>();
    description->dtype = dtype;
    description->dims.assign(dims, dims + rank);
    return descriptions().add(std::move(description));
  });
}
EMU_API void aclDestroyTensorDesc(const aclTensorDesc *handle) {
  (void)EMU_CALL.run_release([&] { (void)descriptions().remove(handle); });
}
EMU_API aclError aclSetTensorConst(aclTensorDesc *handle, void *data, size_t) {
  return EMU_CALL.run([&] { descriptions().get(handle)->constant = data; });
}
EMU_API size_t aclGetTensorDescNumDims(const aclTensorDesc *handle) { return descriptions().get(handle)->dims.size(); }
EMU_API int64_t aclGetTensorDescDim(const aclTensorDesc *handle, size_t axis) {
  return descriptions().get(handle)->dims[axis];
}

EMU_API aclDataBuffer *aclCreateDataBuffer(void *data, size_t bytes) {
  return EMU_CALL.run_pointer<aclDataBuffer *>([&] { return buffers().add(std::make_shared<Buffer>(Buffer{data, bytes})); });
}
EMU_API aclError aclDestroyDataBuffer(const aclDataBuffer *handle) {
  return EMU_CALL.run_release([&] { (void)buffers().remove(handle); });
}
EMU_API aclError aclUpdateDataBuffer(aclDataBuffer *handle, void *data, size_t bytes) {
  return EMU_CALL.run([&] { *buffers().get(handle) = Buffer{data, bytes}; });
}
EMU_API void *aclGetDataBufferAddr(const aclDataBuffer *handle) { return buffers().get(handle)->data; }

EMU_API aclopAttr *aclopCreateAttr() {
  return EMU_CALL.run_pointer<aclopAttr *>([] { return attributes().add(std::make_shared<emu::Attributes>()); });
}
EMU_API void aclopDestroyAttr(const aclopAttr *handle) {
  (void)EMU_CALL.run_release([&] { (void)attributes().remove(handle); });
}
EMU_API aclError aclopSetAttrInt(aclopAttr *handle, const char *name, int64_t value) {
  return EMU_CALL.run([&] { attributes().get(handle)->integers[name] = value; });
}
EMU_API aclError aclopSetAttrBool(aclopAttr *handle, const char *name, uint8_t value) {
  return EMU_CALL.run([&] { attributes().get(handle)->integers[name] = value; });
}
EMU_API aclError aclopSetAttrFloat(aclopAttr *handle, const char *name, float value) {
  return EMU_CALL.run([&] { attributes().get(handle)->reals[name] = static_cast<double>(value); });
}
EMU_API aclError aclopSetAttrString(aclopAttr *handle, const char *name, const char *value) {
  return EMU_CALL.run([&] { attributes().get(handle)->texts[name] = value; });
}
EMU_API aclError aclopSetAttrListInt(aclopAttr *handle, const char *name, int count, const int64_t *values) {
  return EMU_CALL.run([&] { attributes().get(handle)->lists[name].assign(values, values + count); });
}

EMU_API aclError aclopCompileAndExecute(const char *type, int input_count, const aclTensorDesc *const *input_descriptions,
                                        const aclDataBuffer *const *inputs, int output_count,
                                        const aclTensorDesc *const *output_descriptions, aclDataBuffer *const *outputs,
                                        const aclopAttr *attribute, int, int, const char *, aclrtStream stream) {
  return EMU_CALL.run([&] {
    run_single_operator(type, input_count, input_descriptions, inputs, output_count, output_descriptions, outputs,
                        attribute, stream);
  });
}
EMU_API aclError aclopCompileAndExecuteV2(const char *type, int input_count, aclTensorDesc **input_descriptions,
                                          aclDataBuffer **inputs, int output_count, aclTensorDesc **output_descriptions,
                                          aclDataBuffer **outputs, aclopAttr *attribute, int, int, const char *,
                                          aclrtStream stream) {
  return EMU_CALL.run([&] {
    run_single_operator(type, input_count, input_descriptions, inputs, output_count, output_descriptions, outputs,
                        attribute, stream);
  });
}

// MindSpore registers its allocator for the workspace of these operators, which need none here.
EMU_API void *aclrtAllocatorCreateDesc() {
  static char description;
  return &description;
}

// For the stub of GE's operator registry.
EMU_API bool emu_has_single_operator(const char *type) { return emu::has_single_operator(type); }
