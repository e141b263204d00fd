#include "plan.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>

#include "cpu/kernel_set.hpp"

namespace addlora {
namespace {

// The first product of at most this many bytes is held at a time, so that scratch does not grow with the batch.
constexpr std::int64_t kMaxZBytes = 4 << 20;
constexpr std::int64_t kMinChunkRows = 64;
// Columns and rows of an expand task: more would leave threads idle at the end, fewer would transpose weights anew.
constexpr std::int64_t kMaxExpandColumns = 1024;
constexpr std::int64_t kMaxExpandRows = 512;
constexpr std::int64_t kExpandColumnsStep = 64;
constexpr std::int64_t kRankStep = 4;
// Tasks for each thread, so that one that was interrupted does not hold the others up.
constexpr std::int64_t kTasksPerThread = 4;
// Vector operations that a second thread must save to be worth waking.
constexpr std::int64_t kStepsPerThread = 16384;

constexpr std::int64_t kMaxPlannedRank = std::int64_t{1} << 31;

std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }
std::int64_t divide_up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

std::int32_t index_at(const TensorView& indices, std::int64_t row) {
  std::int32_t index;
  std::memcpy(&index, indices.bytes() + row * indices.strides[0], sizeof index);
  return index;
}

}  // namespace

Sizes sizes_of(const Problem& p) {
  const std::int64_t* bank = p.weight_b->shape;
  return {p.y->shape[0], p.x->shape[1], bank[2], p.y->shape[1], bank[0], bank[3], p.weight_a != nullptr};
}

Plan make_plan(const Problem& problem, int threads) {
  Plan plan{};
  plan.sizes = sizes_of(problem);
  const Sizes& n = plan.sizes;
  plan.threads = threads;
  // Views may repeat one element without end; no real bank has such a rank, and sizes computed from it would wrap.
  if (n.r > kMaxPlannedRank) throw std::bad_alloc();
  plan.counting_sort = n.w <= 4 * n.b + 64;
  const auto z_row_bytes = n.r * static_cast<std::int64_t>(sizeof(float));
  plan.chunk_rows = std::min(n.b, std::max(kMinChunkRows, kMaxZBytes / z_row_bytes));

  WorkspaceLayout& layout = plan.layout;
  std::size_t at = 0;
  const auto take = [&at](std::int64_t count, std::size_t size) {
    const std::size_t begin = at;
    at += (static_cast<std::size_t>(count) * size + 63) / 64 * 64;
    return begin;
  };
  layout.order = take(n.b, sizeof(std::int64_t));
  layout.adapters = take(n.b, sizeof(std::int64_t));
  layout.counts = take(plan.counting_sort ? n.w : 0, sizeof(std::int64_t));
  layout.groups = take(std::min(n.b, n.w) + 1, sizeof(Group));
  layout.z = take(plan.chunk_rows, static_cast<std::size_t>(z_row_bytes));
  layout.scratch_floats = std::max(cpu::kShrinkScratchFloats, cpu::expand_scratch_floats(n.r));
  layout.scratch = take(threads, layout.scratch_floats * sizeof(float));
  layout.bytes = n.b == 0 ? 0 : at + 63;
  return plan;
}

Grouping group_rows(const Problem& p, const Plan& plan, std::int64_t* order, std::int64_t* adapters,
                    std::int64_t* counts, Group* groups) {
  const std::int64_t w = plan.sizes.w;
  const std::int64_t b = plan.sizes.b;
  for (std::int64_t row = 0; row < b; ++row) {
    const std::int32_t index = index_at(*p.indices, row);
    adapters[row] = index < 0 || index >= w ? w : std::int64_t{index};
  }
  const auto adapter_of = [adapters](std::int64_t row) { return adapters[row]; };
  Grouping result{groups, 0, 0};
  const auto add_group = [&](std::int64_t adapter, std::int64_t begin, std::int64_t end) {
    if (end == begin) return;
    groups[result.group_count++] = {adapter, begin, end, 0, 0};
    result.active_rows = end;
  };

  if (plan.counting_sort) {
    std::fill(counts, counts + w, 0);
    for (std::int64_t row = 0; row < b; ++row) {
      const std::int64_t adapter = adapter_of(row);
      if (adapter < w) ++counts[adapter];
    }
    std::int64_t begin = 0;
    for (std::int64_t adapter = 0; adapter < w; ++adapter) {
      const std::int64_t end = begin + counts[adapter];
      add_group(adapter, begin, end);
      counts[adapter] = begin;
      begin = end;
    }
    std::int64_t without = begin;
    for (std::int64_t row = 0; row < b; ++row) {
      const std::int64_t adapter = adapter_of(row);
      order[adapter < w ? counts[adapter]++ : without++] = row;
    }
  } else {
    std::iota(order, order + b, 0);
    std::sort(order, order + b, [&](std::int64_t left, std::int64_t right) {
      const std::int64_t a = adapter_of(left);
      const std::int64_t c = adapter_of(right);
      return a != c ? a < c : left < right;
    });
    for (std::int64_t begin = 0, end = 0; begin < b; begin = end) {
      const std::int64_t adapter = adapter_of(order[begin]);
      if (adapter == w) break;
      while (end < b && adapter_of(order[end]) == adapter) ++end;
      add_group(adapter, begin, end);
    }
  }
  return result;
}

Split shrink_split(const Plan& plan, const Grouping& grouping, const Group& group) {
  const std::int64_t rank = plan.sizes.r;
  const std::int64_t wanted_tasks = kTasksPerThread * plan.threads;
  const std::int64_t rows = group.end - group.begin;
  if (!plan.sizes.has_a) return {std::max<std::int64_t>(divide_up(grouping.active_rows, wanted_tasks), 1), rank};
  if (rows <= cpu::kMaxTileRows) {
    // Few rows: the weights are the work, so threads share the ranks.
    const std::int64_t ranks = round_up(divide_up(grouping.group_count * rank, wanted_tasks), kRankStep);
    return {rows, std::min(ranks, cpu::kMaxTaskRanks)};
  }
  const std::int64_t ranks = std::min(rank, cpu::kMaxTaskRanks);
  const std::int64_t most = cpu::kMaxTaskSums / ranks / cpu::kMaxTileRows * cpu::kMaxTileRows;
  return {std::min(most, round_up(divide_up(grouping.active_rows, wanted_tasks), cpu::kMaxTileRows)), ranks};
}

Split expand_split(const Plan& plan, const Grouping& grouping) {
  const std::int64_t columns = divide_up(grouping.group_count * plan.sizes.h2, kTasksPerThread * plan.threads);
  return {kMaxExpandRows, std::min(round_up(columns, kExpandColumnsStep), kMaxExpandColumns)};
}

int useful_threads(const Plan& plan, const Grouping& grouping, std::int64_t copied_bytes) {
  const Sizes& n = plan.sizes;
  // In floating point: the sizes of views that repeat an element may be of any magnitude.
  const double width = static_cast<double>(n.h2) + (n.has_a ? static_cast<double>(n.h1) : 0.0);
  const double vectors = static_cast<double>(n.r) * width / cpu::kLanes;  // of one adapter's weights
  // A weight costs about four times as much to fetch and convert as to multiply.
  const double rows = static_cast<double>(grouping.active_rows) + 4.0 * static_cast<double>(grouping.group_count);
  const double steps = vectors * rows + static_cast<double>(copied_bytes) / 64;
  return static_cast<int>(std::clamp<double>(steps / kStepsPerThread, 1, plan.threads));
}

}  // namespace addlora
