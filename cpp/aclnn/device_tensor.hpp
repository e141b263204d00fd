// Tensors as CANN sees them: a description of device memory, and the copy of a host tensor there.
#pragma once

#include "../add_lora.hpp"
#include "handles.hpp"

namespace addlora::aclnn {

std::size_t contiguous_bytes(const TensorView& view);

// Describes device memory that holds the elements of the view one after the other.
TensorHandle describe(const TensorView& view, void* memory);

// A host tensor's place on the device, contiguous there whatever it is on the host.
class HostTensor {
 public:
  explicit HostTensor(const TensorView& host)
      : host_(host),
        bytes_(contiguous_bytes(host)),
        memory_(allocate(bytes_)),
        handle_(describe(host, memory_.get())) {}

  const Tensor* handle() const { return handle_.get(); }
  void upload();
  void download(void* to) const;

 private:
  const TensorView host_;
  std::size_t bytes_;
  DeviceMemory memory_;
  TensorHandle handle_;
};

}  // namespace addlora::aclnn
