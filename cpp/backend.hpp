// What a backend is: something that can plan and run a checked Problem.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "add_lora.hpp"

namespace addlora {

struct BackendInfo {
  bool available = false;
  std::string reason;  // why it is not available
  std::string detail;  // what it runs on
};

// A planned call. It refers to the tensors of its Problem, which the owner keeps alive.
class Execution {
 public:
  virtual ~Execution() = default;
  virtual std::size_t workspace_bytes() const = 0;
  // Whether run() works in the workspace that it is given, or the execution owns its memory.
  virtual bool uses_workspace() const = 0;
  // Called at most once, before the first run.
  virtual void set_repeatable() = 0;
  // Reads the tensors afresh. The problem, its indices included, has been checked again by the caller; indices that only
  // the device can read are checked here. A refused run has written nothing.
  virtual Status run(void* workspace, void* stream) = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;
  virtual BackendInfo info() const = 0;
  // Whether it runs on an NPU, whose limits cannot be lifted.
  virtual bool is_device() const = 0;
  // The dtypes that y, x, the weights and out may have here, for rules and messages.
  virtual bool supports(DType dtype) const = 0;
  virtual const char* supported_dtypes() const = 0;
  // Phase one and two of a checked problem.
  virtual std::unique_ptr<Execution> plan(const Problem& problem) const = 0;
  // Both phases at once, in scratch of the backend's own.
  virtual Status run(const Problem& problem) const = 0;
};

}  // namespace addlora
