#include "device_tensor.hpp"

#include <cstring>
#include <vector>

namespace addlora::aclnn {
namespace {

// The elements of a view, one after the other.
void gather(const TensorView& view, int axis, const char* from, char*& to) {
  const std::size_t item = dtype_bytes(view.dtype);
  for (std::int64_t i = 0; i < view.shape[axis]; ++i, from += view.strides[axis]) {
    if (axis + 1 < view.ndim) {
      gather(view, axis + 1, from, to);
    } else {
      std::memcpy(to, from, item);
      to += item;
    }
  }
}

}  // namespace

std::size_t contiguous_bytes(const TensorView& view) {
  std::size_t bytes = dtype_bytes(view.dtype);
  for (int i = 0; i < view.ndim; ++i) bytes *= static_cast<std::size_t>(view.shape[i]);
  return bytes;
}

TensorHandle describe(const TensorView& view, void* memory) {
  std::int64_t strides[kMaxDims] = {};
  std::int64_t stride = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= view.shape[i];
  }
  const auto dims = static_cast<std::uint64_t>(view.ndim);
  TensorHandle handle(cann().call.aclCreateTensor(view.shape, dims,
                                                  view.dtype == DType::kInt32 ? kAclInt32 : kAclFloat16, strides, 0,
                                                  kFormatNd, view.shape, dims, memory));
  if (handle == nullptr) throw Error(0, with_text("aclCreateTensor returned no tensor"));
  return handle;
}

void HostTensor::upload() {
  const void* from = host_.data;
  std::vector<char> staging;
  if (!host_.is_contiguous()) {
    staging.resize(bytes_);
    char* to = staging.data();
    gather(host_, 0, host_.bytes(), to);
    from = staging.data();
  }
  require(cann().call.aclrtMemcpy(memory_.get(), bytes_, from, bytes_, kHostToDevice), "aclrtMemcpy");
}

void HostTensor::download(void* to) const {
  require(cann().call.aclrtMemcpy(to, bytes_, memory_.get(), bytes_, kDeviceToHost), "aclrtMemcpy");
}

}  // namespace addlora::aclnn
