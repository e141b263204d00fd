#include "overlap.hpp"

#include <algorithm>

namespace addlora {
namespace {

struct Axis {
  std::int64_t count;
  std::int64_t stride;  // positive
};

// Addresses as integers: the views may belong to different arrays, whose pointers must not be compared.
struct Range {
  std::int64_t begin;
  std::int64_t end;
};

std::int64_t extent(const Axis* axes, int count, std::int64_t item) {
  for (int i = 0; i < count; ++i) item += (axes[i].count - 1) * axes[i].stride;
  return item;
}

bool any_inside(std::int64_t begin, const Axis* axes, int count, std::int64_t item, Range range) {
  const std::int64_t size = extent(axes, count, item);
  if (begin >= range.end || begin + size <= range.begin) return false;
  // The first and the last element lie at the ends of the extent. Where both ends are outside the range, the extent
  // surrounds it and the axes decide.
  if (begin >= range.begin || begin + size <= range.end || count == 0) return true;
  // Only the steps whose own extent reaches the range are looked at.
  const Axis axis = axes[0];
  const std::int64_t inner = extent(axes + 1, count - 1, item);
  const std::int64_t before = range.begin - begin - inner;  // steps that end at or before the range begins
  const std::int64_t first = before < 0 ? 0 : before / axis.stride + 1;
  for (std::int64_t i = first; i < axis.count; ++i) {
    const std::int64_t at = begin + i * axis.stride;
    if (at >= range.end) return false;
    if (any_inside(at, axes + 1, count - 1, item, range)) return true;
  }
  return false;
}

}  // namespace

bool touches(const TensorView& view, const void* range, std::size_t bytes) {
  Axis axes[kMaxDims];
  int count = 0;
  auto begin = reinterpret_cast<std::int64_t>(view.data);
  for (int i = 0; i < view.ndim; ++i) {
    if (view.shape[i] == 0) return false;
    const std::int64_t stride = view.strides[i];
    if (stride < 0) begin += (view.shape[i] - 1) * stride;
    if (stride == 0 || view.shape[i] == 1) continue;
    const Axis axis{view.shape[i], stride < 0 ? -stride : stride};
    int at = count++;
    for (; at > 0 && axes[at - 1].stride < axis.stride; --at) axes[at] = axes[at - 1];
    axes[at] = axis;
  }
  const auto start = reinterpret_cast<std::int64_t>(range);
  return bytes > 0 && any_inside(begin, axes, count, static_cast<std::int64_t>(dtype_bytes(view.dtype)),
                                 {start, start + static_cast<std::int64_t>(bytes)});
}

}  // namespace addlora
