// The gradients on the CPU, from the two products that the kernel sets have.
//
// dx is the operator itself with the banks exchanged and turned. dA and dB are products over the rows of an adapter:
// the expand kernel takes them with the ranks as its rows and the batch's rows as its ranks.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../gradients.hpp"
#include "../plan.hpp"
#include "cpu_backend.hpp"
#include "kernel_sets.hpp"
#include "thread_pool.hpp"

namespace addlora {
namespace {

using cpu::KernelSet;

// A bank as the other product reads it: [W, L, n, m] as [W, L, m, n].
TensorView turned(const TensorView& bank) {
  TensorView view = bank;
  std::swap(view.shape[2], view.shape[3]);
  std::swap(view.strides[2], view.strides[3]);
  return view;
}

// The columns of g that the operator added to.
TensorView slice_of(const Problem& forward) {
  TensorView view = *forward.y;
  view.data = view.bytes() + forward.y_offset * view.strides[1];
  view.shape[1] = forward.weight_b->shape[2];
  return view;
}

void gradient_of_x(const Problem& forward) {
  const TensorView slice = slice_of(forward);
  const TensorView turned_b = turned(*forward.weight_b);
  const TensorView turned_a = forward.weight_a == nullptr ? TensorView{} : turned(*forward.weight_a);
  // Zeros to add to: one row, read again and again.
  const std::vector<float> zeros(static_cast<std::size_t>(forward.out->shape[1]));
  TensorView zero_rows = *forward.out;
  zero_rows.data = const_cast<float*>(zeros.data());
  zero_rows.strides[0] = 0;
  Problem problem = forward;
  problem.y = &zero_rows;
  problem.x = &slice;
  problem.weight_b = forward.weight_a == nullptr ? &turned_b : &turned_a;
  problem.weight_a = forward.weight_a == nullptr ? nullptr : &turned_b;
  problem.y_offset = 0;
  problem.rounding = Rounding::kFloat32;
  if (forward.out->shape[0] > 0) cpu_backend().run(problem);
}

// Memory that a thread keeps for its calls.
class Kept {
 public:
  float* at_least(std::size_t floats) {
    if (floats > floats_) {
      memory_.reset();
      floats_ = 0;
      memory_.reset(static_cast<float*>(std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64)));
      if (memory_ == nullptr) throw std::bad_alloc();
      floats_ = floats;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<float, Free> memory_;
  std::size_t floats_ = 0;
};

// The sum over an adapter's rows of factor[i]^T value[i]: `factor` has R columns and comes out of a product (z or dz),
// `value` is x or g's slice.
class OuterProducts {
 public:
  OuterProducts(const Problem& forward, Gradient wanted, int threads)
      : forward_(forward), wanted_(wanted), slice_(slice_of(forward)), turned_b_(turned(*forward.weight_b)) {
    const bool is_a = wanted == Gradient::kWeightA;
    value_ = is_a ? forward.x : &slice_;
    source_ = is_a ? &slice_ : forward.x;
    product_ = is_a ? &turned_b_ : forward.weight_a;
    width_ = value_->shape[1];
    rank_ = forward.weight_b->shape[3];
    item_ = static_cast<std::int64_t>(dtype_bytes(value_->dtype));
    plan_ = make_plan(forward, threads);
    order_.resize(static_cast<std::size_t>(plan_.sizes.b));
    adapters_.resize(order_.size());
    counts_.resize(plan_.counting_sort ? static_cast<std::size_t>(plan_.sizes.w) : 0);
    groups_.resize(static_cast<std::size_t>(std::min(plan_.sizes.b, plan_.sizes.w) + 1));
    grouping_ = group_rows(forward, plan_, order_.data(), adapters_.data(), counts_.data(), groups_.data());
    const std::int64_t tasks = kTasksPerThread * threads;
    task_rows_ = share(grouping_.active_rows, tasks, 32, kMostRows);
    task_columns_ = share(width_ * grouping_.group_count, tasks, 64, kMostColumns);
    std::int64_t longest = 1;
    for (std::int64_t i = 0; i < grouping_.group_count; ++i) {
      Group& group = groups_[static_cast<std::size_t>(i)];
      group.first_shrink_task = shrink_tasks_;
      group.first_expand_task = expand_tasks_;
      shrink_tasks_ += divide_up(group.end - group.begin, task_rows_);
      expand_tasks_ += divide_up(width_, task_columns_);
      longest = std::max(longest, group.end - group.begin);
    }
    for (std::int64_t r = 0; r < std::max(rank_, longest); ++r) ordinals_.push_back(r);
    const std::size_t factors = static_cast<std::size_t>(grouping_.active_rows * rank_ + 15) / 16 * 16;
    const std::size_t shrink = cpu::kShrinkScratchFloats + static_cast<std::size_t>(task_rows_ * rank_);
    const std::size_t expand =
        cpu::expand_scratch_floats(longest) + static_cast<std::size_t>(2 * rank_ * task_columns_ + task_columns_);
    scratch_floats_ = (std::max(shrink, expand) + 15) / 16 * 16;
    thread_local Kept kept;
    factors_ = kept.at_least(factors + scratch_floats_ * static_cast<std::size_t>(threads));
    scratch_ = factors_ + factors;
  }

  void run(const KernelSet& kernels, int threads) {
    kernels_ = &kernels;
    element_ = value_->dtype == DType::kFloat16    ? cpu::kHalf
               : value_->dtype == DType::kBFloat16 ? cpu::kBfloat
                                                   : cpu::kSingle;
    clear_what_no_row_uses();
    FactorPhase factors(*this);
    SumPhase sums(*this);
    cpu::Phase* phases[] = {&factors, &sums};
    cpu::run_phases(phases, 2, threads);
  }

 private:
  // Of a task: fewer leave weights to be read again, more leave threads idle. No bit depends on them.
  static constexpr std::int64_t kMostRows = 128;
  static constexpr std::int64_t kMostColumns = 1024;
  static constexpr std::int64_t kTasksPerThread = 4;


  static std::int64_t divide_up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }
  // n shared among tasks, as a multiple of `step` up to `most`.
  static std::int64_t share(std::int64_t n, std::int64_t tasks, std::int64_t step, std::int64_t most) {
    return std::min(std::max(divide_up(divide_up(n, tasks), step), std::int64_t{1}) * step, most);
  }

  const Group& group_of(std::int64_t task, std::int64_t Group::* first_task) const {
    const Group* begin = groups_.data();
    const Group* after = std::upper_bound(begin, begin + grouping_.group_count, task,
                                          [&](std::int64_t t, const Group& group) { return t < group.*first_task; });
    return after[-1];
  }
  float* scratch_of(int participant) const {
    return scratch_ + static_cast<std::size_t>(participant) * scratch_floats_;
  }
  char* at_layer(const TensorView& bank, std::int64_t adapter) const {
    return bank.bytes() + adapter * bank.strides[0] + forward_.layer_idx * bank.strides[1];
  }

  void clear_what_no_row_uses() const {
    const TensorView& out = *forward_.out;
    const auto bytes = static_cast<std::size_t>(out.strides[1]);
    std::int64_t next = 0;
    for (std::int64_t slot = 0; slot < out.shape[0]; ++slot) {
      const bool used = next < grouping_.group_count && groups_[static_cast<std::size_t>(next)].adapter == slot;
      if (used) ++next;
      for (std::int64_t layer = 0; layer < out.shape[1]; ++layer) {
        if (used && layer == forward_.layer_idx) continue;
        std::memset(out.bytes() + slot * out.strides[0] + layer * out.strides[1], 0, bytes);
      }
    }
  }

  // factor[r][i] for a tile of rows.
  void factor(std::int64_t number, int participant) const {
    const Group& group = group_of(number, &Group::first_shrink_task);
    const std::int64_t begin = group.begin + (number - group.first_shrink_task) * task_rows_;
    float* const z = scratch_of(participant);
    cpu::ShrinkTask task{};
    task.x = source_->bytes();
    task.x_row_stride = source_->strides[0];
    task.x_column_stride = source_->strides[1];
    task.rows = order_.data() + begin;
    task.row_count = std::min(task_rows_, group.end - begin);
    if (product_ != nullptr) {
      task.a = at_layer(*product_, group.adapter);
      task.a_row_stride = product_->strides[2];
      task.a_column_stride = product_->strides[3];
    }
    task.h1 = source_->shape[1];
    task.z = z;
    task.z_row_stride = rank_;
    task.scratch = z + task_rows_ * rank_ + (-(task_rows_ * rank_) & 15);
    for (std::int64_t r = 0; r < rank_; r += cpu::kMaxTaskRanks) {
      task.r_begin = r;
      task.r_end = std::min(r + cpu::kMaxTaskRanks, rank_);
      // A task may have so many (row, rank) sums.
      const std::int64_t rows = cpu::kMaxTaskSums / (task.r_end - r);
      for (std::int64_t i = 0; i < std::min(task_rows_, group.end - begin); i += rows) {
        task.rows = order_.data() + begin + i;
        task.row_count = std::min(rows, std::min(task_rows_, group.end - begin) - i);
        task.z = z + i * rank_;
        kernels_->shrink[element_](task);
      }
    }
    const std::int64_t count = group.end - group.begin;
    float* const to = factors_ + group.begin * rank_ + (begin - group.begin);
    for (std::int64_t i = 0; i < std::min(task_rows_, group.end - begin); ++i) {
      for (std::int64_t r = 0; r < rank_; ++r) to[r * count + i] = z[i * rank_ + r];
    }
  }

  // Some columns of an adapter's sum.
  void sum(std::int64_t number, int participant) const {
    const Group& group = group_of(number, &Group::first_expand_task);
    const std::int64_t first = (number - group.first_expand_task) * task_columns_;
    const std::int64_t columns = std::min(task_columns_, width_ - first);
    const std::int64_t count = group.end - group.begin;
    float* const scratch = scratch_of(participant);
    char* const piece = reinterpret_cast<char*>(scratch + cpu::expand_scratch_floats(count));  // [R, columns]
    char* const zeros = piece + rank_ * task_columns_ * item_;
    std::memset(zeros, 0, static_cast<std::size_t>(task_columns_ * item_));
    cpu::ExpandTask task{};
    task.z = factors_ + group.begin * rank_;
    task.z_row_stride = count;
    task.rows = ordinals_.data();
    task.row_count = rank_;
    task.b = value_->bytes() + first * value_->strides[1];
    task.b_row_stride = value_->strides[1];
    task.b_column_stride = value_->strides[0];
    task.b_columns = order_.data() + group.begin;
    task.rank = count;
    task.h_begin = 0;
    task.h_end = columns;
    task.y = zeros;
    task.y_row_stride = 0;
    task.y_column_stride = item_;
    char* const out = at_layer(*forward_.out, group.adapter);
    const bool is_a = wanted_ == Gradient::kWeightA;
    task.out = is_a ? out + first * item_ : piece;
    task.out_row_stride = is_a ? width_ * item_ : task_columns_ * item_;
    task.scale = static_cast<float>(forward_.scale);
    task.scratch = scratch;
    kernels_->expand[element_](task);

    if (is_a) return;
    if (item_ == sizeof(std::uint16_t)) {
      turn<std::uint16_t>(piece, out, first, columns);
    } else {
      turn<std::uint32_t>(piece, out, first, columns);
    }
  }

  // [R, columns] to rows `first` .. of [H2, R].
  template <class T>
  void turn(const char* piece, char* out, std::int64_t first, std::int64_t columns) const {
    const T* from = reinterpret_cast<const T*>(piece);
    T* to = reinterpret_cast<T*>(out) + first * rank_;
    for (std::int64_t c = 0; c < columns; ++c, to += rank_) {
      for (std::int64_t r = 0; r < rank_; ++r) to[r] = from[r * task_columns_ + c];
    }
  }

  class FactorPhase final : public cpu::Phase {
   public:
    explicit FactorPhase(const OuterProducts& products) : products_(products) {}
    std::int64_t count() const override { return products_.shrink_tasks_; }
    void run(std::int64_t task, int participant) override { products_.factor(task, participant); }

   private:
    const OuterProducts& products_;
  };
  class SumPhase final : public cpu::Phase {
   public:
    explicit SumPhase(const OuterProducts& products) : products_(products) {}
    std::int64_t count() const override { return products_.expand_tasks_; }
    void run(std::int64_t task, int participant) override { products_.sum(task, participant); }

   private:
    const OuterProducts& products_;
  };

  const Problem& forward_;
  const Gradient wanted_;
  const TensorView slice_, turned_b_;
  const TensorView *value_, *source_, *product_;
  std::int64_t width_ = 0, rank_ = 0, item_ = 0, task_rows_ = 0, task_columns_ = 0;
  Plan plan_{};
  std::vector<std::int64_t> order_, adapters_, counts_, ordinals_;
  std::vector<Group> groups_;
  Grouping grouping_{};
  std::int64_t shrink_tasks_ = 0, expand_tasks_ = 0;
  float* factors_ = nullptr;  // [rows, R] for each group, turned: [R, rows of the group]
  float* scratch_ = nullptr;
  std::size_t scratch_floats_ = 0;
  const KernelSet* kernels_ = nullptr;
  cpu::Element element_ = cpu::kSingle;
};

}  // namespace

void compute_gradient(const Problem& forward, Gradient wanted) {
  if (wanted == Gradient::kX) {
    gradient_of_x(forward);
    return;
  }
  const cpu::Selection& selection = cpu::selected_kernel_set();
  if (selection.set == nullptr) throw std::invalid_argument(selection.error);
  const int threads = cpu::thread_count();
  OuterProducts(forward, wanted, threads).run(*selection.set, threads);
}

}  // namespace addlora
