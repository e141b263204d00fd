// A stand-in for CANN's header of the same name.
#ifndef EMULATED_CANN_GRAPH_TENSOR_H_
#define EMULATED_CANN_GRAPH_TENSOR_H_

#include "graph/types.h"

namespace ge {

class Shape {};
class TensorDesc {};
class Tensor {};

}  // namespace ge

#endif
