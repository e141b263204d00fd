// A stand-in for CANN's header of the same name.
#ifndef EMULATED_CANN_GRAPH_OPERATOR_REG_H_
#define EMULATED_CANN_GRAPH_OPERATOR_REG_H_

#include <functional>
#include <string>

#include "graph/tensor.h"

namespace ge {

class Operator {
 public:
  Operator() = default;
  explicit Operator(const std::string &) {}
  Operator(const std::string &, const std::string &) {}
  virtual ~Operator() = default;

  void InputRegister(const std::string &) {}
  void RequiredAttrRegister(const std::string &) {}
  void OptionalInputRegister(const std::string &) {}
  void OutputRegister(const std::string &) {}
  void DynamicInputRegister(const std::string &, unsigned int, bool = true) {}
  void DynamicOutputRegister(const std::string &, unsigned int, bool = true) {}
  void InferFuncRegister(const std::function<graphStatus(Operator &)> &) {}
  std::string GetName() const { return {}; }
};

class OperatorFactory {
 public:
  static Operator CreateOperator(const std::string &, const std::string &) { return {}; }
  static bool IsExistOp(const char *) { return false; }
};

}  // namespace ge

#endif
