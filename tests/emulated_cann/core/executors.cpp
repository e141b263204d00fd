#include "executors.hpp"

#include <mutex>
#include <set>
#include <utility>

#include "contexts.hpp"
#include "error.hpp"
#include "handles.hpp"
#include "ledger.hpp"
#include "memory.hpp"
#include "streams.hpp"

namespace emu {
namespace {

struct Executor {
  explicit Executor(Plan made) : plan(std::move(made)) {}

  std::mutex mutex;
  Plan plan;
  bool repeatable = false;
  bool ran = false;
};

Handles<Executor> &executors() {
  static Handles<Executor> &instance = *new Handles<Executor>("executor", kInner);
  return instance;
}

// Executors that ended without the caller destroying them. A second phase that failed while running is in both sets:
// whether CANN frees the executor then is not known, so that destroying it afterwards is neither a fault nor a need.
struct Ended {
  std::mutex mutex;
  std::set<const void *> spent;
  std::set<const void *> failed;
};

Ended &ended() {
  static Ended &instance = *new Ended;
  return instance;
}

bool is_spent(const void *handle) {
  const std::lock_guard lock(ended().mutex);
  return ended().spent.count(handle) > 0;
}

void end(aclOpExecutor *handle, bool failed) {
  (void)executors().remove(handle);
  const std::lock_guard lock(ended().mutex);
  ended().spent.insert(handle);
  if (failed) ended().failed.insert(handle);
}

std::shared_ptr<Executor> live_executor(aclOpExecutor *handle) {
  if (!handle) throw Error{kNullPointer, "the executor is null"};
  if (is_spent(handle)) {
    ledger().misuse("executor_spent", "an executor was used after it was consumed or destroyed");
    throw Error{kInner, "the executor is already consumed"};
  }
  return executors().get(handle);
}

std::vector<Tensor> bound_operands(const Plan &plan) {
  std::vector<Tensor> bound;
  for (const Operand &each : plan.operands) {
    if (!each.handle) {
      bound.emplace_back();
      continue;
    }
    if (!tensors().find(each.handle)) {
      ledger().misuse("tensor_destroyed_before_run", "a tensor of " + plan.function + " was destroyed before the run");
      throw Error{kInner, "a tensor of " + plan.function + " was destroyed before its second phase"};
    }
    if (plan.contiguous_only && !each.tensor->contiguous())
      throw Error{kInner, plan.function + ": a tensor is not contiguous"};
    bound.push_back(*each.tensor);
  }
  return bound;
}

// The device's own look at addresses, when the work runs.
void check_memory(const std::string &function, const std::vector<Tensor> &operands, Workspace workspace) {
  for (size_t i = 0; i < operands.size(); ++i) {
    const Tensor &tensor = operands[i];
    if (tensor.dtype == ACL_DT_UNDEFINED || tensor.elements() == 0) continue;
    memory().check_access(tensor.begin(), tensor.span_bytes(), function + " tensor " + std::to_string(i));
  }
  if (workspace.bytes > 0) memory().check_access(workspace.data, workspace.bytes, function + " workspace");
}

void launch(const Plan &plan, Workspace workspace, aclrtStream stream) {
  auto work = [function = plan.function, kernel = plan.kernel, operands = bound_operands(plan), workspace] {
    const std::string name = function + ".kernel";
    ledger().call(name, "");
    if (auto failure = ledger().due_failure(name)) throw *failure;
    check_memory(function, operands, workspace);
    kernel(operands, workspace);
  };
  stream_of(stream)->enqueue(std::move(work));
}

}  // namespace

Operand operand(const aclTensor *handle) {
  if (!handle) return {nullptr, nullptr};
  // A copy: replacing an address in one executor must not change the caller's tensor.
  return {handle, std::make_shared<Tensor>(*tensors().get(handle))};
}

void new_executor(Plan plan, uint64_t *workspace_bytes, aclOpExecutor **executor) {
  *workspace_bytes = plan.workspace_bytes;
  *executor = static_cast<aclOpExecutor *>(executors().add(std::make_shared<Executor>(std::move(plan))));
}

void set_repeatable(aclOpExecutor *handle) {
  const auto executor = live_executor(handle);
  const std::lock_guard lock(executor->mutex);
  if (executor->ran) throw Error{kInner, "an executor is made repeatable right after the first phase, or not at all"};
  executor->repeatable = true;
}

void set_tensor_address(aclOpExecutor *handle, size_t index, size_t relative, void *address) {
  const auto executor = live_executor(handle);
  const std::lock_guard lock(executor->mutex);
  const auto &first = executor->plan.first_operand;
  const size_t position = (index < first.size() ? first[index] : index) + relative;
  auto &operands = executor->plan.operands;
  if (position >= operands.size() || !operands[position].tensor)
    throw Error{kBadParameter, "the executor has no tensor " + std::to_string(index)};
  operands[position].tensor->data = address;
}

void destroy_executor(aclOpExecutor *handle) {
  if (!handle) throw Error{kNullPointer, "the executor is null"};
  {
    const std::lock_guard lock(ended().mutex);
    if (ended().failed.erase(handle) > 0) return;
  }
  (void)live_executor(handle);
  end(handle, false);
}

void run_executor(const std::string &function, void *workspace, uint64_t workspace_bytes, aclOpExecutor *handle,
                  aclrtStream stream) {
  require_runtime();
  const auto executor = live_executor(handle);
  const std::lock_guard lock(executor->mutex);
  const Plan &plan = executor->plan;
  if (plan.function != function) {
    ledger().misuse("executor_foreign", "an executor of " + plan.function + " was given to " + function);
    throw Error{kInner, "the executor belongs to " + plan.function};
  }
  if (workspace_bytes > 0 && !workspace) throw Error{kNullPointer, function + ": the workspace is null"};
  if (workspace_bytes < plan.workspace_bytes)
    throw Error{kBadParameter, function + ": the workspace has " + std::to_string(workspace_bytes) + " bytes of " +
                                   std::to_string(plan.workspace_bytes)};
  // Up to here the call is refused and the executor is as good as before; from here on a single-use one is spent.
  executor->ran = true;
  try {
    launch(plan, {static_cast<std::byte *>(workspace), plan.workspace_bytes}, stream);
  } catch (const Error &) {
    if (!executor->repeatable) end(handle, true);
    throw;
  }
  if (!executor->repeatable) end(handle, false);
}

void reset_executors() {
  executors().clear();
  const std::lock_guard lock(ended().mutex);
  ended().spent.clear();
  ended().failed.clear();
}

}  // namespace emu
