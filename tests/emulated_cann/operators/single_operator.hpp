// Operators by name: the older way, aclopCompileAndExecute, which MindSpore takes where it has no aclnn kernel.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tensors.hpp"

namespace emu {

struct Attributes {
  std::map<std::string, int64_t> integers;
  std::map<std::string, std::vector<int64_t>> lists;
  std::map<std::string, double> reals;
  std::map<std::string, std::string> texts;

  int64_t integer(const std::string &name, int64_t otherwise) const {
    const auto found = integers.find(name);
    return found == integers.end() ? otherwise : found->second;
  }
};

struct SingleOperatorCall {
  std::vector<Tensor> inputs;
  std::vector<Tensor> outputs;
  Attributes attributes;
};

using SingleOperator = std::function<void(const SingleOperatorCall &)>;

// Throws for an operator that is not emulated.
const SingleOperator &single_operator(const std::string &type);
bool has_single_operator(const std::string &type);

}  // namespace emu
