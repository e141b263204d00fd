// What the first phase of aclnnAddLora refuses, and with which code. What it lets pass is as much a fact: the shape of
// out, the rank of weightA, sizes of zero, and, where weightA is null, whether R agrees with x.
#include "add_lora.hpp"
#include "error.hpp"
#include "settings.hpp"

namespace emu {
namespace {

void require_type(const Tensor &tensor, aclDataType dtype, const char *name) {
  const std::string who = std::string("aclnnAddLora: ") + name;
  if (tensor.dtype != dtype) throw Error{kBadParameter, who + " has an unsupported dtype: " + tensor.describe()};
  const bool plain =
      tensor.format == ACL_FORMAT_ND || tensor.format == ACL_FORMAT_NCHW || tensor.format == ACL_FORMAT_NHWC;
  if (!plain) throw Error{kBadParameter, who + " has an unsupported format: " + std::to_string(tensor.format)};
}

void require(bool holds, const std::string &rule) {
  if (!holds) throw Error{kTiling, "aclnnAddLora: tiling failed: " + rule};
}

bool is_width(int64_t size) { return size % 16 == 0 && size <= 131072; }

int64_t dim_or_zero(const Tensor &tensor, size_t index) {
  return index < tensor.dims.size() ? tensor.dims[index] : 0;
}

void check_columns(int64_t h2, int64_t h3, const AddLoraArguments &arguments) {
  const int64_t offset = arguments.y_offset;
  const int64_t slice = arguments.y_slice_size;
  if (settings().checks_column_range()) {
    require(offset >= 0 && offset < h3, "0 <= yOffset < H3");
    require(offset + h2 <= h3, "yOffset + H2 <= H3");
    require(slice >= -1 && slice <= h2, "ySliceSize is -1 or 0..H2");
  } else {
    // Older CANN lets the column range run past the end of y.
    require(offset >= 0 && offset <= h3, "0 <= yOffset <= H3");
    require(slice >= 0, "ySliceSize >= 0");
  }
}

}  // namespace

void check_add_lora_types(const Tensor &y, const Tensor &x, const Tensor &b, const Tensor &indices, const Tensor &out) {
  require_type(y, ACL_FLOAT16, "y");
  require_type(x, ACL_FLOAT16, "x");
  require_type(b, ACL_FLOAT16, "weightB");
  require_type(indices, ACL_INT32, "indices");
  require_type(out, ACL_FLOAT16, "out");
}

void check_add_lora_shapes(const Tensor &y, const Tensor &x, const Tensor &b, const Tensor &indices, const Tensor *a,
                           const AddLoraArguments &arguments) {
  require(y.rank() == 2 && x.rank() == 2, "y and x are 2-D");
  const int64_t batch = y.dims[0];
  const int64_t h3 = y.dims[1];
  const int64_t h1 = x.dims[1];
  require(x.dims[0] == batch, "y and x have the same first dimension");
  require(b.rank() == 4, "weightB is 4-D");
  const int64_t w = b.dims[0];
  const int64_t l = b.dims[1];
  const int64_t h2 = b.dims[2];
  const int64_t r = b.dims[3];
  require(h2 <= h3, "H2 <= H3");
  require(indices.rank() == 1 && indices.dims[0] == batch, "indices is 1-D of B");
  if (a) {
    require(a->dtype == ACL_FLOAT16, "weightA is float16");
    require(dim_or_zero(*a, 0) == w && dim_or_zero(*a, 1) == l && dim_or_zero(*a, 2) == r && dim_or_zero(*a, 3) == h1,
            "weightA is [W, L, R, H1]");
  }
  require(arguments.layer >= 0 && arguments.layer < l, "0 <= layerIdx < L");
  check_columns(h2, h3, arguments);
  require(r % 16 == 0, "R is a multiple of 16");
  require(!a || r <= 128, "R <= 128");
  require(w <= 32, "W <= 32");
  require(l <= 32, "L <= 32");
  require(is_width(h1) && is_width(h2) && is_width(h3), "H1, H2 and H3 are multiples of 16 and <= 131072");
}

}  // namespace emu
