// Tensors in random layouts, in memory of exactly their own extent: an access beyond it is one that the address
// sanitizer sees.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "add_lora.hpp"

// Random choices from a seed, or from the bytes of a fuzzer.
class Choices {
 public:
  explicit Choices(std::uint64_t seed) : state_(seed) {}
  Choices(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  std::uint64_t word();
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(word() % static_cast<std::uint64_t>(n)); }
  bool one_in(std::int64_t n) { return below(n) == 0; }

 private:
  const std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t at_ = 0;
  std::uint64_t state_ = 0;
};

struct Tensor {
  std::unique_ptr<char[]> memory;
  std::size_t bytes = 0;
  addlora::TensorView view;

  // Element i in C order.
  char* element(std::int64_t i) const;
  std::int64_t count() const;
  bool empty() const;
};

// Axes in any order, with gaps, backwards, repeated (stride 0), at any byte. Memory is filled with random elements.
Tensor random_tensor(Choices& choices, addlora::DType dtype, const std::vector<std::int64_t>& shape);
// A C-contiguous one; at_odd_byte: not even aligned to its elements.
Tensor plain_tensor(addlora::DType dtype, const std::vector<std::int64_t>& shape, bool at_odd_byte = false);
// The same elements, C-contiguous.
Tensor plain_copy(const Tensor& tensor);
