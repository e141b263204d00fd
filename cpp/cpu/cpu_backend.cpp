#include "cpu_backend.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "../plan.hpp"
#include "kernel_sets.hpp"
#include "thread_pool.hpp"

namespace addlora {
namespace {

using cpu::ExpandTask;
using cpu::KernelSet;
using cpu::ShrinkTask;

thread_local const char* last_ran = nullptr;

// Memory that a thread keeps for its calls.
class Scratch {
 public:
  void* at_least(std::size_t bytes) {
    if (bytes > bytes_) {
      memory_.reset();
      bytes_ = 0;
      memory_.reset(std::malloc(bytes));
      if (memory_ == nullptr) throw std::bad_alloc();
      bytes_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t bytes_ = 0;
};

const KernelSet& kernels() {
  const cpu::Selection& selection = cpu::selected_kernel_set();
  if (selection.set == nullptr) throw std::invalid_argument(selection.error);
  return *selection.set;
}

cpu::Element element_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return cpu::kHalf;
    case DType::kBFloat16: return cpu::kBfloat;
    default: return cpu::kSingle;
  }
}

// What all tasks of a call share.
struct Call {
  const Problem& problem;
  const Plan& plan;
  const KernelSet& kernels;
  cpu::Element element;
  std::int64_t item;
  std::int64_t* order;
  float* z;
  float* scratch;
  const Group* groups = nullptr;  // of the present chunk
  std::int64_t group_count = 0;
  std::int64_t chunk_begin = 0;

  float* scratch_of(int participant) const {
    return scratch + static_cast<std::size_t>(participant) * plan.layout.scratch_floats;
  }
  float* z_of(std::int64_t position) const { return z + (position - chunk_begin) * plan.sizes.r; }
  // The weights of an adapter in the layer of this call.
  const char* bank(const TensorView& weights, std::int64_t adapter) const {
    return weights.bytes() + adapter * weights.strides[0] + problem.layer_idx * weights.strides[1];
  }
  // The group that a task belongs to, by the numbers of the groups' first tasks.
  const Group& group_of(std::int64_t task, std::int64_t Group::* first_task) const {
    const Group* after = std::upper_bound(groups, groups + group_count, task,
                                          [&](std::int64_t t, const Group& group) { return t < group.*first_task; });
    return after[-1];
  }
};

// Rows of out that the products do not write: rows without an adapter, and columns outside the slice.
class CopyRows {
 public:
  CopyRows(const Call& call, std::int64_t active_rows) : call_(call), active_rows_(active_rows) {
    const Problem& p = call.problem;
    const Sizes& n = call.plan.sizes;
    if (p.out->data == p.y->data) return;  // the rules let out share y's memory only where it is y
    begin_ = n.h2 == n.h3 ? active_rows : 0;
    rows_per_task_ = std::max<std::int64_t>(1, kBytesPerTask / (n.h3 * call.item));
    count_ = (n.b - begin_ + rows_per_task_ - 1) / rows_per_task_;
  }

  std::int64_t count() const { return count_; }
  std::int64_t bytes() const {
    const Sizes& n = call_.plan.sizes;
    return count_ == 0 ? 0 : ((n.b - active_rows_) * n.h3 + active_rows_ * (n.h3 - n.h2)) * call_.item;
  }

  void run(std::int64_t task) const {
    const Sizes& n = call_.plan.sizes;
    const std::int64_t offset = call_.problem.y_offset;
    const std::int64_t first = begin_ + task * rows_per_task_;
    for (std::int64_t i = first; i < std::min(first + rows_per_task_, n.b); ++i) {
      if (i >= active_rows_) {
        copy(call_.order[i], 0, n.h3);
      } else {
        copy(call_.order[i], 0, offset);
        copy(call_.order[i], offset + n.h2, n.h3);
      }
    }
  }

 private:
  static constexpr std::int64_t kBytesPerTask = 1 << 16;

  void copy(std::int64_t row, std::int64_t begin, std::int64_t end) const {
    const TensorView& y = *call_.problem.y;
    const TensorView& out = *call_.problem.out;
    const auto item = static_cast<std::size_t>(call_.item);
    const char* from = y.bytes() + row * y.strides[0] + begin * y.strides[1];
    char* to = out.bytes() + row * out.strides[0] + begin * call_.item;
    if (y.strides[1] == call_.item) {
      std::memcpy(to, from, static_cast<std::size_t>(end - begin) * item);
      return;
    }
    for (std::int64_t i = begin; i < end; ++i, from += y.strides[1], to += item) std::memcpy(to, from, item);
  }

  const Call& call_;
  std::int64_t active_rows_;
  std::int64_t begin_ = 0;
  std::int64_t rows_per_task_ = 1;
  std::int64_t count_ = 0;
};

class ShrinkPhase final : public cpu::Phase {
 public:
  ShrinkPhase(const Call& call, const Grouping& grouping, const CopyRows* copies, std::int64_t tasks)
      : call_(call), grouping_(grouping), copies_(copies), tasks_(tasks) {}

  std::int64_t count() const override { return tasks_ + (copies_ == nullptr ? 0 : copies_->count()); }

  void run(std::int64_t number, int participant) override {
    if (number >= tasks_) {
      copies_->run(number - tasks_);
      return;
    }
    const Problem& p = call_.problem;
    const Sizes& n = call_.plan.sizes;
    const Group& group = call_.group_of(number, &Group::first_shrink_task);
    const Split split = shrink_split(call_.plan, grouping_, group);
    const std::int64_t ranges = (n.r + split.width - 1) / split.width;
    const std::int64_t local = number - group.first_shrink_task;
    const std::int64_t begin = group.begin + local / ranges * split.rows;
    const std::int64_t r = local % ranges * split.width;
    ShrinkTask task{};
    task.x = p.x->bytes();
    task.x_row_stride = p.x->strides[0];
    task.x_column_stride = p.x->strides[1];
    task.rows = call_.order + begin;
    task.row_count = std::min(split.rows, group.end - begin);
    if (p.weight_a != nullptr) {
      task.a = call_.bank(*p.weight_a, group.adapter);
      task.a_row_stride = p.weight_a->strides[2];
      task.a_column_stride = p.weight_a->strides[3];
    }
    task.h1 = n.h1;
    task.r_begin = r;
    task.r_end = std::min(r + split.width, n.r);
    task.z = call_.z_of(begin);
    task.z_row_stride = n.r;
    task.device_rounding = p.rounding == Rounding::kDevice;
    task.scratch = call_.scratch_of(participant);
    call_.kernels.shrink[call_.element](task);
  }

 private:
  const Call& call_;
  const Grouping& grouping_;
  const CopyRows* copies_;
  std::int64_t tasks_;
};

class ExpandPhase final : public cpu::Phase {
 public:
  ExpandPhase(const Call& call, Split split, std::int64_t tasks) : call_(call), split_(split), tasks_(tasks) {}

  std::int64_t count() const override { return tasks_; }

  void run(std::int64_t number, int participant) override {
    const Problem& p = call_.problem;
    const Sizes& n = call_.plan.sizes;
    const Group& group = call_.group_of(number, &Group::first_expand_task);
    const std::int64_t ranges = (n.h2 + split_.width - 1) / split_.width;
    const std::int64_t local = number - group.first_expand_task;
    const std::int64_t begin = group.begin + local / ranges * split_.rows;
    const std::int64_t h = local % ranges * split_.width;
    ExpandTask task{};
    task.z = call_.z_of(begin);
    task.z_row_stride = n.r;
    task.rows = call_.order + begin;
    task.row_count = std::min(split_.rows, group.end - begin);
    task.b = call_.bank(*p.weight_b, group.adapter);
    task.b_row_stride = p.weight_b->strides[2];
    task.b_column_stride = p.weight_b->strides[3];
    task.rank = n.r;
    task.h_begin = h;
    task.h_end = std::min(h + split_.width, n.h2);
    task.y = p.y->bytes() + p.y_offset * p.y->strides[1];
    task.y_row_stride = p.y->strides[0];
    task.y_column_stride = p.y->strides[1];
    task.out = p.out->bytes() + p.y_offset * call_.item;
    task.out_row_stride = p.out->strides[0];
    task.scale = static_cast<float>(p.scale);
    task.device_rounding = p.rounding == Rounding::kDevice;
    task.scratch = call_.scratch_of(participant);
    call_.kernels.expand[call_.element](task);
    ran_.store(task.ran, std::memory_order_relaxed);
  }

  const char* ran() const { return ran_.load(std::memory_order_relaxed); }

 private:
  const Call& call_;
  Split split_;
  std::int64_t tasks_;
  std::atomic<const char*> ran_{nullptr};
};

void run_plan(const Problem& problem, Plan plan, const KernelSet& kernels, void* workspace) {
  const auto start = reinterpret_cast<std::uintptr_t>(workspace);
  char* base = static_cast<char*>(workspace) + (-start & 63);
  const WorkspaceLayout& layout = plan.layout;
  auto* groups = reinterpret_cast<Group*>(base + layout.groups);
  Call call{problem,
            plan,
            kernels,
            element_of(problem.y->dtype),
            static_cast<std::int64_t>(dtype_bytes(problem.y->dtype)),
            reinterpret_cast<std::int64_t*>(base + layout.order),
            reinterpret_cast<float*>(base + layout.z),
            reinterpret_cast<float*>(base + layout.scratch)};
  const Grouping grouping =
      group_rows(problem, plan, call.order, reinterpret_cast<std::int64_t*>(base + layout.adapters),
                 reinterpret_cast<std::int64_t*>(base + layout.counts), groups);
  const CopyRows copies(call, grouping.active_rows);
  plan.threads = useful_threads(plan, grouping, copies.bytes());
  const Split expand = expand_split(plan, grouping);

  // A chunk is a range of the sorted rows. A group at its end is cut, and goes on in the next chunk.
  std::int64_t group_begin = 0;
  std::int64_t row = 0;
  do {
    const std::int64_t chunk_end = std::min(row + plan.chunk_rows, grouping.active_rows);
    call.chunk_begin = row;
    call.groups = groups + group_begin;
    std::int64_t shrink_tasks = 0;
    std::int64_t expand_tasks = 0;
    std::int64_t i = group_begin;
    std::int64_t cut_end = 0;
    for (; i < grouping.group_count && groups[i].begin < chunk_end; ++i) {
      Group& group = groups[i];
      cut_end = group.end;
      group.end = std::min(group.end, chunk_end);
      group.first_shrink_task = shrink_tasks;
      group.first_expand_task = expand_tasks;
      shrink_tasks += shrink_split(plan, grouping, group).tasks(group.end - group.begin, plan.sizes.r);
      expand_tasks += expand.tasks(group.end - group.begin, plan.sizes.h2);
    }
    call.group_count = i - group_begin;
    ShrinkPhase shrink_phase(call, grouping, row == 0 ? &copies : nullptr, shrink_tasks);
    ExpandPhase expand_phase(call, expand, expand_tasks);
    cpu::Phase* phases[] = {&shrink_phase, &expand_phase};
    cpu::run_phases(phases, 2, plan.threads);
    if (expand_phase.ran() != nullptr) last_ran = expand_phase.ran();
    row = chunk_end;
    group_begin = i;
    if (i > 0 && cut_end > chunk_end) {
      group_begin = i - 1;
      groups[group_begin].begin = chunk_end;
      groups[group_begin].end = cut_end;
    }
  } while (row < grouping.active_rows);
}

class CpuExecution final : public Execution {
 public:
  explicit CpuExecution(const Problem& problem)
      : problem_(problem), kernels_(kernels()), plan_(make_plan(problem, cpu::thread_count())) {}

  std::size_t workspace_bytes() const override { return plan_.layout.bytes; }
  bool uses_workspace() const override { return true; }
  void set_repeatable() override {}
  Status run(void* workspace, void*) override {
    if (plan_.sizes.b > 0) run_plan(problem_, plan_, kernels_, workspace);
    return {};
  }

 private:
  const Problem problem_;
  const KernelSet& kernels_;
  const Plan plan_;
};

class CpuBackend final : public Backend {
 public:
  const char* name() const override { return "cpu"; }

  BackendInfo info() const override {
    const cpu::Selection& selection = cpu::selected_kernel_set();
    if (selection.set == nullptr) return {false, selection.error, {}};
    return {true, {}, std::string("kernel set ") + selection.set->name};
  }

  bool is_device() const override { return false; }
  bool supports(DType dtype) const override {
    return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32;
  }
  const char* supported_dtypes() const override { return "float16, bfloat16 or float32"; }

  std::unique_ptr<Execution> plan(const Problem& problem) const override {
    return std::make_unique<CpuExecution>(problem);
  }

  Status run(const Problem& problem) const override {
    thread_local Scratch scratch;
    const KernelSet& set = kernels();
    const Plan plan = make_plan(problem, cpu::thread_count());
    run_plan(problem, plan, set, scratch.at_least(plan.layout.bytes));
    return {};
  }
};

}  // namespace

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

const char* last_kernel_set() { return last_ran; }

}  // namespace addlora
