// A stand-in for CANN's header of the same name.
#ifndef EMULATED_CANN_GE_GE_API_H_
#define EMULATED_CANN_GE_GE_API_H_

#include "graph/types.h"

namespace ge {

class Graph;
class Session;

}  // namespace ge

#endif
