// What the device does: y is added into, row by row, with the device's rounding points; out is never touched.
#include <algorithm>
#include <cstring>

#include "add_lora.hpp"
#include "error.hpp"
#include "half.hpp"
#include "ledger.hpp"
#include "memory.hpp"
#include "settings.hpp"

namespace emu {
namespace {

constexpr size_t kAddressStep = 32;
constexpr int64_t kCubeBlock = 16;

void require_aligned(const std::vector<Tensor> &operands) {
  for (const Tensor &tensor : operands) {
    if (tensor.dtype == ACL_DT_UNDEFINED || tensor.elements() == 0) continue;
    if (reinterpret_cast<uintptr_t>(tensor.begin()) % kAddressStep == 0) continue;
    ledger().misuse("tensor_unaligned", "aclnnAddLora: the data of a tensor is not 32-byte aligned");
    throw Error{kCoreException, "AI core exception: the address of a tensor is not 32-byte aligned"};
  }
}

uint16_t load_half(const std::byte *base, int64_t index) {
  uint16_t bits;
  std::memcpy(&bits, base + index * 2, sizeof bits);
  return bits;
}

void store_half(std::byte *base, int64_t index, uint16_t bits) { std::memcpy(base + index * 2, &bits, sizeof bits); }

// The cube unit works in blocks of 16 along the inner dimension and accumulates the blocks in float32.
uint16_t dot(const std::byte *left, const std::byte *right, int64_t length) {
  float sum = 0;
  for (int64_t begin = 0; begin < length; begin += kCubeBlock) {
    double block = 0;
    for (int64_t i = begin; i < std::min(begin + kCubeBlock, length); ++i)
      block += static_cast<double>(half_to_float(load_half(left, i))) *
               static_cast<double>(half_to_float(load_half(right, i)));
    sum = static_cast<float>(static_cast<double>(sum) + block);
  }
  return float_to_half(sum);
}

class Rows {
 public:
  Rows(const std::vector<Tensor> &operands, const AddLoraScalars &scalars, Workspace workspace)
      : y_(operands[kY]),
        x_(operands[kX]),
        b_(operands[kWeightB]),
        a_(operands[kWeightA]),
        scalars_(scalars),
        scale_(half_to_float(float_to_half(static_cast<float>(scalars.scale)))) {
    // The first product and the second one live where the device keeps them: in the workspace.
    const int64_t rounded = (y_.dims[0] + 15) / 16 * 16;
    std::byte *regrouped_x = workspace.data + 16777216;
    z1_ = regrouped_x + y_.dims[0] * x_.dims[1] * 2;
    z2_ = z1_ + rounded * rank() * 2;
  }

  void add(int64_t row, int64_t adapter) {
    const std::byte *x = x_.begin() + row * x_.dims[1] * 2;
    std::byte *z1 = z1_ + row * rank() * 2;
    std::byte *z2 = z2_ + row * h2() * 2;
    const int64_t slot = adapter * layers() + scalars_.layer;
    if (has_a()) {
      const std::byte *a = a_.begin() + slot * rank() * x_.dims[1] * 2;
      for (int64_t r = 0; r < rank(); ++r) store_half(z1, r, dot(x, a + r * x_.dims[1] * 2, x_.dims[1]));
      x = z1;
    }
    const std::byte *b = b_.begin() + slot * h2() * rank() * 2;
    for (int64_t column = 0; column < h2(); ++column)
      store_half(z2, column, dot(x, b + column * rank() * 2, rank()));
    accumulate(row, z2);
  }

  // The grouping table is overrun: what lies beside it is written over, this batch's first row of y included.
  void overrun(int64_t row, int32_t index) {
    ledger().misuse("index_above_w", "row " + std::to_string(row) + " has index " + std::to_string(index) + " of " +
                                         std::to_string(b_.dims[0]));
    memory().spoil_around(y_.data);
    for (int64_t column = 0; column < y_.dims[1]; ++column) store_half(y_.begin(), column, 0xffff);
  }

 private:
  bool has_a() const { return a_.dtype != ACL_DT_UNDEFINED; }
  int64_t layers() const { return b_.dims[1]; }
  int64_t h2() const { return b_.dims[2]; }
  int64_t rank() const { return b_.dims[3]; }

  void accumulate(int64_t row, const std::byte *z2) {
    std::byte *target = y_.begin() + (row * y_.dims[1] + scalars_.y_offset) * 2;
    // Only older CANN lets the range leave y; what leaves even the guard zone is dropped.
    const auto writable = static_cast<int64_t>(memory().writable_bytes(target) / 2);
    for (int64_t column = 0; column < std::min(h2(), writable); ++column) {
      const uint16_t delta = float_to_half(half_to_float(load_half(z2, column)) * scale_);
      const float sum = half_to_float(load_half(target, column)) + half_to_float(delta);
      store_half(target, column, float_to_half(sum));
    }
  }

  const Tensor &y_;
  const Tensor &x_;
  const Tensor &b_;
  const Tensor &a_;
  AddLoraScalars scalars_;
  float scale_;
  std::byte *z1_ = nullptr;
  std::byte *z2_ = nullptr;
};

}  // namespace

void add_lora_kernel(const std::vector<Tensor> &operands, const AddLoraScalars &scalars, Workspace workspace) {
  require_aligned(operands);
  const int64_t adapters = operands[kWeightB].dims[0];
  const Tensor &indices = operands[kIndices];
  const bool overruns_at_w = settings().is_310p() && adapters == 32;
  Rows rows(operands, scalars, workspace);
  for (int64_t row = 0; row < indices.dims[0]; ++row) {
    int32_t index;
    std::memcpy(&index, indices.begin() + row * 4, sizeof index);
    if (index >= 0 && index < adapters) {
      rows.add(row, index);
    } else if (index > adapters || (index == adapters && overruns_at_w)) {
      rows.overrun(row, index);
    }
  }
}

}  // namespace emu
