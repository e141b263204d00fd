// aclTensor and its relatives: what a caller described, checked for nothing until an operator looks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "acl/acl_base.h"
#include "handles.hpp"

namespace emu {

struct Tensor {
  std::vector<int64_t> dims;
  std::vector<int64_t> strides;  // in elements
  int64_t offset = 0;            // in elements
  aclDataType dtype = ACL_DT_UNDEFINED;
  aclFormat format = ACL_FORMAT_ND;
  void *data = nullptr;

  int64_t rank() const { return static_cast<int64_t>(dims.size()); }
  int64_t elements() const;
  size_t element_bytes() const;
  bool contiguous() const;
  std::byte *begin() const { return static_cast<std::byte *>(data) + offset * static_cast<int64_t>(element_bytes()); }
  // Bytes from begin() to the end of the farthest element.
  size_t span_bytes() const;
  std::string describe() const;
};

// A number with its type, as an operator's scalar argument.
struct Scalar {
  aclDataType dtype;
  double real;
  int64_t integer;
};

template <class T>
struct Array {
  std::vector<T> values;
};

struct TensorList {
  std::vector<const void *> handles;
  std::vector<std::shared_ptr<Tensor>> tensors;
};

Handles<Tensor> &tensors();
Handles<Scalar> &scalars();
Handles<Array<int64_t>> &int_arrays();
Handles<Array<float>> &float_arrays();
Handles<Array<bool>> &bool_arrays();
Handles<TensorList> &tensor_lists();

std::shared_ptr<Tensor> make_tensor(const int64_t *view_dims, uint64_t view_dims_num, aclDataType dtype,
                                    const int64_t *stride, int64_t offset, aclFormat format, void *data);
std::shared_ptr<Scalar> make_scalar(const void *value, aclDataType dtype);
size_t bytes_of(aclDataType dtype);

void reset_tensors();

}  // namespace emu
