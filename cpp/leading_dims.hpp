// Tensors with leading dimensions, as MindSpore models have them: y [..., H3] and x [..., H1] become rows, and indices
// may be one for each row or one for each entry of the first dimension.
#pragma once

#include "add_lora.hpp"

namespace addlora {

// The views of a call with leading dimensions as the two-dimensional ones that the rules know.
struct Rows {
  TensorView y;
  TensorView x;
  TensorView indices;
  std::int64_t rows_per_index = 1;
};

// Fills `rows`, which the rules then check. Refuses leading dimensions that do not agree. Indices of a 64-bit type
// count as 32-bit ones here: whoever runs the call narrows them.
Status collapse_leading_dims(const TensorView& y, const TensorView& x, const TensorView& indices, Rows& rows);

}  // namespace addlora
