#include "rules.hpp"

#include <cstring>

#include "overlap.hpp"

namespace addlora {
namespace {

using std::to_string;

std::vector<Rule> make_rules() {
  const std::string multiple = "a multiple of " + to_string(kMultiple);
  const std::string width = multiple + " in 1.." + to_string(kMaxWidth);
  return {
      {"given", "y, x, weight_b, indices, out", "given", Code::kNull, false},
      {"dtype", "y, x, weight_b, weight_a, out", "float16, bfloat16 or float32 (aclnn: float16), the same for all",
       Code::kInvalid, false},
      {"indices_dtype", "indices", "int32", Code::kInvalid, false},
      {"rounding_dtype", "rounding", "\"device\" with float16 only", Code::kInvalid, false},
      {"y_shape", "y", "[B, H3], H3 >= 1", Code::kShape, false},
      {"x_shape", "x", "[B, H1] with the B of y and H1 >= 1; [B, R] where weight_a is None", Code::kShape, false},
      {"weight_b_shape", "weight_b", "[W, L, H2, R], each at least 1, H2 <= H3", Code::kShape, false},
      {"indices_shape", "indices", "[B] with the B of y", Code::kShape, false},
      {"weight_a_shape", "weight_a", "[W, L, R, H1] with weight_b's W, L, R and x's H1", Code::kShape, false},
      {"layer_idx", "layer_idx", "0 <= layer_idx < L", Code::kShape, false},
      {"y_offset", "y_offset", "0 <= y_offset and y_offset + H2 <= H3", Code::kShape, false},
      {"y_slice_size", "y_slice_size", "-1 or H2", Code::kShape, false},
      {"rank_multiple", "weight_b", "R " + multiple, Code::kShape, true},
      {"rank_max", "weight_b", "R <= " + to_string(kMaxRank) + " where weight_a is given", Code::kShape, true},
      {"adapters_max", "weight_b", "W <= " + to_string(kMaxAdapters), Code::kShape, true},
      {"layers_max", "weight_b", "L <= " + to_string(kMaxLayers), Code::kShape, true},
      {"h1_width", "x", "H1 " + width + " where weight_a is given", Code::kShape, true},
      {"h2_width", "weight_b", "H2 " + width, Code::kShape, true},
      {"h3_width", "y", "H3 " + width, Code::kShape, true},
      {"device_limits", "limits", "\"npu\" on the aclnn backend: the device has them", Code::kInvalid, false},
      {"device_row", "x", "H1 <= " + to_string(kMaxDeviceRow) + " on the aclnn backend, where weight_a is given",
       Code::kShape, false},
      {"device_bank", "weight_b, weight_a", "fewer than 2^32 elements on the aclnn backend", Code::kShape, false},
      {"out_shape", "out", "the shape of y", Code::kShape, false},
      {"out_memory", "out", "writable and C-contiguous", Code::kInvalid, false},
      {"out_overlap", "out", "y itself (the same data, shape and strides), or apart from every input", Code::kInvalid,
       false},
      {"index", "indices", "each at most W; negative or W: no adapter", Code::kShape, false},
      {"workspace_given", "workspace", "given where workspace_size > 0", Code::kNull, false},
      {"workspace_memory", "workspace", "a writable buffer of at least workspace_size bytes, apart from every tensor",
       Code::kInvalid, false},
      {"executor_given", "executor", "given", Code::kNull, false},
      {"executor_state", "executor", "not spent; set_repeatable only before the first run", Code::kInvalid, false},
  };
}

const Rule& rule_named(const char* name) {
  for (const Rule& rule : rules()) {
    if (rule.name == name) return rule;
  }
  return rules().front();
}

// Unknown dimensions agree with everything; shape inference checks what it can see.
bool differ(std::int64_t a, std::int64_t b) { return a != b && a != kUnknown && b != kUnknown; }
bool empty(std::int64_t n) { return n < 1 && n != kUnknown; }
bool above(std::int64_t n, std::int64_t limit) { return n > limit; }
bool off_multiple(std::int64_t n) { return n != kUnknown && n % kMultiple != 0; }

std::string size_text(std::int64_t n) { return n == kUnknown ? "?" : to_string(n); }
std::string dimension(const char* name, std::int64_t n) { return std::string(name) + " = " + size_text(n); }

struct Sizes {
  std::int64_t b, h3, h1, w, l, h2, r;
};

Sizes sizes_of(const Problem& p) {
  const std::int64_t* bank = p.weight_b->shape;
  return {p.y->shape[0], p.y->shape[1], p.x->shape[1], bank[0], bank[1], bank[2], bank[3]};
}

Status check_given(const Problem& p) {
  const struct {
    const char* name;
    const TensorView* view;
  } required[] = {{"y", p.y}, {"x", p.x}, {"weight_b", p.weight_b}, {"indices", p.indices}};
  for (const auto& argument : required) {
    if (argument.view == nullptr) return refuse("given", argument.name, "a tensor", "None");
  }
  return {};
}

Status check_dtypes(const Problem& p, const Backend& backend) {
  const struct {
    const char* name;
    const TensorView* view;
  } floats[] = {{"y", p.y}, {"x", p.x}, {"weight_b", p.weight_b}, {"weight_a", p.weight_a}, {"out", p.out}};
  for (const auto& argument : floats) {
    if (argument.view == nullptr) continue;
    if (!backend.supports(argument.view->dtype)) {
      return refuse("dtype", argument.name, std::string(backend.supported_dtypes()) + " on backend " + backend.name(),
                    argument.view->dtype_text());
    }
    if (argument.view->dtype != p.y->dtype) {
      return refuse("dtype", argument.name, std::string(p.y->dtype_text()) + ", the dtype of y",
                    argument.view->dtype_text());
    }
  }
  if (p.indices->dtype != DType::kInt32) return refuse("indices_dtype", "indices", "int32", p.indices->dtype_text());
  if (p.rounding == Rounding::kDevice && p.y->dtype != DType::kFloat16) {
    return refuse("rounding_dtype", "rounding", "\"float32\" for this dtype (\"device\" is defined for float16 only)",
                  std::string("\"device\" with ") + p.y->dtype_text());
  }
  return {};
}

Status check_shapes(const Problem& p) {
  if (p.y->ndim != 2 || empty(p.y->shape[1])) return refuse("y_shape", "y", "[B, H3] with H3 >= 1", p.y->shape_text());
  const bool has_a = p.weight_a != nullptr;
  const char* x_form = has_a ? "[B, H1] with H1 >= 1" : "[B, R] (weight_a is None)";
  if (p.x->ndim != 2 || empty(p.x->shape[1])) return refuse("x_shape", "x", x_form, p.x->shape_text());
  if (differ(p.x->shape[0], p.y->shape[0])) {
    return refuse("x_shape", "x", to_string(p.y->shape[0]) + " rows, as y has", p.x->shape_text());
  }
  bool bank_ok = p.weight_b->ndim == 4;
  for (int i = 0; bank_ok && i < 4; ++i) bank_ok = !empty(p.weight_b->shape[i]);
  if (!bank_ok) {
    return refuse("weight_b_shape", "weight_b", "[W, L, H2, R], each at least 1", p.weight_b->shape_text());
  }
  const Sizes n = sizes_of(p);
  if (n.h2 != kUnknown && n.h3 != kUnknown && n.h2 > n.h3) {
    return refuse("weight_b_shape", "weight_b", "H2 <= " + to_string(n.h3) + ", the H3 of y",
                  dimension("H2", n.h2) + " in " + p.weight_b->shape_text());
  }
  if (!has_a && differ(n.h1, n.r)) {
    return refuse("x_shape", "x", "[B, " + to_string(n.r) + "], R columns as weight_b has, because weight_a is None",
                  p.x->shape_text());
  }
  if (p.indices->ndim != 1 || differ(p.indices->shape[0], n.b)) {
    return refuse("indices_shape", "indices", "[" + to_string(n.b) + "], one for each row of y", p.indices->shape_text());
  }
  if (has_a) {
    const std::int64_t expected[4] = {n.w, n.l, n.r, n.h1};
    bool same = p.weight_a->ndim == 4;
    for (int i = 0; same && i < 4; ++i) same = !differ(p.weight_a->shape[i], expected[i]);
    if (!same) {
      TensorView wanted;
      wanted.ndim = 4;
      std::memcpy(wanted.shape, expected, sizeof expected);
      return refuse("weight_a_shape", "weight_a", wanted.shape_text() + ", [W, L, R, H1] of weight_b and x",
                    p.weight_a->shape_text());
    }
  }
  return {};
}

Status check_scalars(const Problem& p) {
  const Sizes n = sizes_of(p);
  if (p.layer_idx < 0 || (n.l != kUnknown && p.layer_idx >= n.l)) {
    return refuse("layer_idx", "layer_idx", "0 <= layer_idx < L = " + size_text(n.l), to_string(p.layer_idx));
  }
  // Subtracted, not added: y_offset + H2 may overflow.
  if (p.y_offset < 0 || (n.h2 != kUnknown && n.h3 != kUnknown && p.y_offset > n.h3 - n.h2)) {
    return refuse("y_offset", "y_offset",
                  "0 <= y_offset <= H3 - H2 = " + size_text(n.h3) + " - " + size_text(n.h2), to_string(p.y_offset));
  }
  if (p.y_slice_size != -1 && differ(p.y_slice_size, n.h2)) {
    return refuse("y_slice_size", "y_slice_size", "-1 or H2 = " + to_string(n.h2), to_string(p.y_slice_size));
  }
  return {};
}

Status check_limits(const Problem& p) {
  if (p.limits == Limits::kNone) return {};
  const Sizes n = sizes_of(p);
  const bool has_a = p.weight_a != nullptr;
  static const std::string multiple = " a multiple of " + to_string(kMultiple);
  static const std::string where = " (limits=\"none\" lifts this on the CPU)";
  if (off_multiple(n.r)) {
    return refuse("rank_multiple", "weight_b", "R" + multiple + where, dimension("R", n.r));
  }
  if (has_a && above(n.r, kMaxRank)) {
    return refuse("rank_max", "weight_b", "R <= " + to_string(kMaxRank) + where, dimension("R", n.r));
  }
  if (above(n.w, kMaxAdapters)) {
    return refuse("adapters_max", "weight_b", "W <= " + to_string(kMaxAdapters) + where, dimension("W", n.w));
  }
  if (above(n.l, kMaxLayers)) {
    return refuse("layers_max", "weight_b", "L <= " + to_string(kMaxLayers) + where, dimension("L", n.l));
  }
  const struct {
    const char* rule;
    const char* argument;
    const char* name;
    std::int64_t n;
    bool applies;
  } widths[] = {{"h1_width", "x", "H1", n.h1, has_a},
                {"h2_width", "weight_b", "H2", n.h2, true},
                {"h3_width", "y", "H3", n.h3, true}};
  for (const auto& width : widths) {
    if (width.applies && (off_multiple(width.n) || above(width.n, kMaxWidth))) {
      return refuse(width.rule, width.argument,
                    std::string(width.name) + multiple + " in 1.." + to_string(kMaxWidth) + where,
                    dimension(width.name, width.n));
    }
  }
  return {};
}

Status check_device(const Problem& p) {
  if (p.limits == Limits::kNone) {
    return refuse("device_limits", "limits", "\"npu\" on backend aclnn (its limits are the device's own)", "\"none\"");
  }
  const Sizes n = sizes_of(p);
  return check_device_sizes(n.w, n.l, n.h2, n.r, p.weight_a == nullptr ? kUnknown : n.h1);
}

bool same_memory(const TensorView& a, const TensorView& b) {
  if (a.data != b.data || a.ndim != b.ndim) return false;
  for (int i = 0; i < a.ndim; ++i) {
    if (a.shape[i] != b.shape[i] || (a.shape[i] > 1 && a.strides[i] != b.strides[i])) return false;
  }
  return true;
}

std::size_t contiguous_bytes(const TensorView& view) {
  std::size_t bytes = dtype_bytes(view.dtype);
  for (int i = 0; i < view.ndim; ++i) bytes *= static_cast<std::size_t>(view.shape[i]);
  return bytes;
}

// The first input, in the order of the arguments, that has an element in the range.
const char* input_inside(const Problem& p, const void* range, std::size_t bytes, bool y_is_out) {
  if (!y_is_out && touches(*p.y, range, bytes)) return "y";
  if (touches(*p.x, range, bytes)) return "x";
  if (touches(*p.weight_b, range, bytes)) return "weight_b";
  if (touches(*p.indices, range, bytes)) return "indices";
  if (p.weight_a != nullptr && touches(*p.weight_a, range, bytes)) return "weight_a";
  return nullptr;
}

}  // namespace

const std::vector<Rule>& rules() {
  static const std::vector<Rule> table = make_rules();
  return table;
}

Status refuse(const char* rule_name, const char* argument, const std::string& expected, const std::string& actual) {
  return {rule_named(rule_name).code, std::string(argument) + ": expected " + expected + ", got " + actual};
}

Status check_description(const Problem& p, const Backend& backend) {
  Status status = check_given(p);
  if (status.ok()) status = check_dtypes(p, backend);
  if (status.ok()) status = check_shapes(p);
  if (status.ok()) status = check_scalars(p);
  if (status.ok()) status = check_limits(p);
  if (status.ok() && backend.is_device()) status = check_device(p);
  return status;
}

Status check_device_sizes(std::int64_t w, std::int64_t l, std::int64_t h2, std::int64_t r, std::int64_t h1) {
  if (above(h1, kMaxDeviceRow)) {
    return refuse("device_row", "x", "H1 <= " + to_string(kMaxDeviceRow) + " on the NPU", dimension("H1", h1));
  }
  const struct {
    const char* name;
    std::int64_t elements;
  } banks[] = {{"weight_b", w * l * h2 * r}, {"weight_a", h1 == kUnknown ? 0 : w * l * r * h1}};
  for (const auto& bank : banks) {
    if (bank.elements >= kMaxDeviceBank) {
      return refuse("device_bank", bank.name, "fewer than 2^32 elements on the NPU", to_string(bank.elements));
    }
  }
  return {};
}

Status check_out(const Problem& p) {
  if (p.out == nullptr) return refuse("given", "out", "a tensor", "None");
  if (p.out->ndim != 2 || p.out->shape[0] != p.y->shape[0] || p.out->shape[1] != p.y->shape[1]) {
    return refuse("out_shape", "out", p.y->shape_text() + ", the shape of y", p.out->shape_text());
  }
  if (!p.out->writable) return refuse("out_memory", "out", "a writable tensor", "a read-only one");
  if (!p.out->is_contiguous()) return refuse("out_memory", "out", "a C-contiguous tensor", "a strided one");
  const char* input = input_inside(p, p.out->data, contiguous_bytes(*p.out), same_memory(*p.out, *p.y));
  if (input != nullptr) {
    return refuse("out_overlap", "out", "y itself, or memory apart from every input",
                  std::string("a tensor that overlaps ") + input);
  }
  return {};
}

Status check_indices(const Problem& p) {
  if (p.indices->on_device) return {};
  const std::int64_t w = p.weight_b->shape[0];
  const char* at = p.indices->bytes();
  for (std::int64_t i = 0; i < p.indices->shape[0]; ++i, at += p.indices->strides[0]) {
    std::int32_t index;
    std::memcpy(&index, at, sizeof index);
    if (index > w) {
      return refuse("index", "indices", "each at most W = " + to_string(w) + " (negative or W: no adapter)",
                    to_string(index) + " in row " + to_string(i));
    }
  }
  return {};
}

Status check(const Problem& p, const Backend& backend) {
  if (p.out == nullptr) {
    const Status given = check_given(p);
    return given.ok() ? refuse("given", "out", "a tensor", "None") : given;
  }
  Status status = check_description(p, backend);
  if (status.ok()) status = check_out(p);
  if (status.ok()) status = check_indices(p);
  return status;
}

Status check_workspace(const Problem& p, std::size_t needed, const void* data, std::size_t bytes, bool writable) {
  if (needed == 0) return {};
  if (data == nullptr) return refuse("workspace_given", "workspace", to_string(needed) + " bytes", "None");
  if (bytes < needed) {
    return refuse("workspace_memory", "workspace", "at least " + to_string(needed) + " bytes",
                  to_string(bytes) + " bytes");
  }
  if (!writable) return refuse("workspace_memory", "workspace", "a writable buffer", "a read-only one");
  const char* tensor = touches(*p.out, data, bytes) ? "out" : input_inside(p, data, bytes, false);
  if (tensor != nullptr) {
    return refuse("workspace_memory", "workspace", "memory apart from every tensor",
                  std::string("a buffer that overlaps ") + tensor);
  }
  return {};
}

}  // namespace addlora
