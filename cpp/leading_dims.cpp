#include "leading_dims.hpp"

#include <cstring>

#include "rules.hpp"

namespace addlora {
namespace {

using std::to_string;

bool differ(std::int64_t a, std::int64_t b) { return a != b && a != kUnknown && b != kUnknown; }

// The rows of a tensor without its last dimension.
std::int64_t row_count(const TensorView& view) {
  std::int64_t rows = 1;
  for (int i = 0; i < view.ndim - 1; ++i) {
    if (view.shape[i] == kUnknown) return kUnknown;
    rows *= view.shape[i];
  }
  return rows;
}

TensorView as_matrix(const TensorView& view) {
  TensorView matrix = view;
  matrix.ndim = 2;
  matrix.shape[0] = row_count(view);
  matrix.shape[1] = view.shape[view.ndim - 1];
  set_contiguous_strides(matrix);
  return matrix;
}

}  // namespace

Status collapse_leading_dims(const TensorView& y, const TensorView& x, const TensorView& indices, Rows& rows) {
  if (y.ndim < 2 || y.ndim > kMaxDims) {
    return refuse("y_shape", "y", "[..., H3] with 2 to " + to_string(kMaxDims) + " dimensions", y.shape_text());
  }
  bool same = x.ndim == y.ndim;
  for (int i = 0; same && i < y.ndim - 1; ++i) same = !differ(x.shape[i], y.shape[i]);
  if (!same) {
    return refuse("x_shape", "x", "[..., H1] with the leading dimensions of y, whose shape is " + y.shape_text(),
                  x.shape_text());
  }
  rows.y = as_matrix(y);
  rows.x = as_matrix(x);
  rows.indices = indices;
  rows.indices.ndim = 1;
  if (indices.dtype == DType::kOther && indices.other_dtype != nullptr &&
      std::strcmp(indices.other_dtype, "int64") == 0) {
    rows.indices.dtype = DType::kInt32;
  }

  // One for each row, in the shape of the rows or flat; or one for each entry of the first dimension.
  bool for_each_row = indices.ndim == y.ndim - 1;
  for (int i = 0; for_each_row && i < indices.ndim; ++i) for_each_row = !differ(indices.shape[i], y.shape[i]);
  for_each_row = for_each_row || (indices.ndim == 1 && !differ(indices.shape[0], rows.y.shape[0]));
  const bool for_each_entry = indices.ndim == 1 && !differ(indices.shape[0], y.shape[0]);
  if (!for_each_row && !for_each_entry) {
    const std::string entries = y.ndim == 2 ? "" : ", or [" + to_string(y.shape[0]) + "], one for each batch row";
    return refuse("indices_shape", "indices",
                  "one for each row of y, whose shape is " + y.shape_text() + entries, indices.shape_text());
  }
  rows.indices.shape[0] = rows.y.shape[0];
  rows.indices.strides[0] = sizeof(std::int32_t);
  if (!for_each_row && y.shape[0] > 0) rows.rows_per_index = rows.y.shape[0] / y.shape[0];
  return {};
}

}  // namespace addlora
