// Shape inference of the graph operator: the result has the shape of y. Compiled with the old C++ ABI, as MindSpore is.
#include <cstdint>
#include <vector>

class AotExtra;

extern "C" __attribute__((visibility("default"))) std::vector<int64_t> aclnnAddLoraInferShape(int *ranks,
                                                                                              int64_t **shapes,
                                                                                              AotExtra *) {
  return {shapes[0], shapes[0] + ranks[0]};
}
