// The public C++ of the multi-LoRA operator, free of Python and of MindSpore:
//
//     out = y
//     out[i, y_offset : y_offset + H2] += scale * (x[i] @ A[indices[i], layer].T) @ B[indices[i], layer].T
//
// The path of a call: a caller (bindings.cpp, mindspore_aot.cpp, a C++ test) fills a Problem; rules.* checks it;
// a Backend plans and runs it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace addlora {

enum class DType { kFloat16, kBFloat16, kFloat32, kInt32, kOther };

const char* dtype_name(DType dtype);
std::size_t dtype_bytes(DType dtype);

inline constexpr int kMaxDims = 8;
// A dimension that shape inference does not know yet; it agrees with everything.
inline constexpr std::int64_t kUnknown = -1;

// A tensor that somebody else owns. Strides are in bytes and may be zero or negative.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kOther;
  const char* other_dtype = nullptr;  // what to call the dtype in a message where it is kOther
  int ndim = 0;                       // may exceed kMaxDims: then only the first kMaxDims are held, and no rule accepts it
  std::int64_t shape[kMaxDims] = {};
  std::int64_t strides[kMaxDims] = {};
  bool writable = true;
  bool on_device = false;  // data is an address of the NPU's memory, which the host must not read

  char* bytes() const { return static_cast<char*>(data); }
  bool is_contiguous() const;
  std::string shape_text() const;
  const char* dtype_text() const { return dtype == DType::kOther && other_dtype ? other_dtype : dtype_name(dtype); }
};

// Fills the strides of a C-contiguous view.
void set_contiguous_strides(TensorView& view);

enum class Limits { kNpu, kNone };
enum class Rounding { kFloat32, kDevice };

// One call. A null pointer is an argument that was not given.
struct Problem {
  const TensorView* y = nullptr;         // [B, H3]
  const TensorView* x = nullptr;         // [B, H1], or [B, R] without weight_a
  const TensorView* weight_b = nullptr;  // [W, L, H2, R]
  const TensorView* indices = nullptr;   // [B]
  const TensorView* weight_a = nullptr;  // [W, L, R, H1], optional
  const TensorView* out = nullptr;       // [B, H3]
  std::int64_t layer_idx = 0;
  double scale = 1.0;
  std::int64_t y_offset = 0;
  std::int64_t y_slice_size = -1;
  Limits limits = Limits::kNpu;
  Rounding rounding = Rounding::kFloat32;
};

// aclnn's codes, so that a program sees the same ones on every backend.
enum class Code : std::int32_t { kOk = 0, kNull = 161001, kInvalid = 161002, kShape = 561002 };

struct Status {
  Code code = Code::kOk;
  std::string message;
  bool ok() const { return code == Code::kOk; }
};

class Backend;

// Checks everything, then runs on the backend. A refused call has written nothing.
Status add_lora(const Problem& problem, const Backend& backend);

}  // namespace addlora
