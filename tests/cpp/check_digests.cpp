#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "checks.hpp"
#include "cpu/cpu_backend.hpp"
#include "cpu/thread_pool.hpp"
#include "digests.hpp"
#include "views.hpp"

using addlora::DType;
using recipe::Case;

namespace {

const Case kCases[] = {
#include "digests.inc"
};

void fill(const Case& c, recipe::Tensor which, const Tensor& tensor) {
  const std::size_t item = addlora::dtype_bytes(tensor.view.dtype);
  for (std::int64_t i = 0; i < tensor.count(); ++i) {
    const std::uint32_t bits =
        recipe::element(c, which, static_cast<std::uint64_t>(i), recipe::format_of(tensor.view.dtype));
    std::memcpy(tensor.element(i), &bits, item);
  }
}

}  // namespace

FixedCall::FixedCall(const Case& c)
    : dtype(std::strcmp(c.dtype, "float16") == 0    ? DType::kFloat16
            : std::strcmp(c.dtype, "bfloat16") == 0 ? DType::kBFloat16
                                                    : DType::kFloat32),
      y(plain_tensor(dtype, {c.b, c.h3})),
      x(plain_tensor(dtype, {c.b, c.h1 > 0 ? c.h1 : c.r})),
      weight_b(plain_tensor(dtype, {c.w, c.l, c.h2, c.r})),
      indices(plain_tensor(DType::kInt32, {c.b})),
      weight_a(plain_tensor(dtype, {c.w, c.l, c.r, c.h1})) {
  fill(c, recipe::kY, y);
  fill(c, recipe::kX, x);
  fill(c, recipe::kB, weight_b);
  fill(c, recipe::kA, weight_a);
  for (std::int64_t row = 0; row < c.b; ++row) {
    const std::int32_t index = recipe::index(c, static_cast<std::uint64_t>(row));
    std::memcpy(indices.element(row), &index, sizeof index);
    if (c.kind != recipe::kAnyBaseRows || (index >= 0 && index < c.w)) continue;
    for (std::int64_t i = row * c.h3; i < (row + 1) * c.h3; ++i) {
      const auto bits = static_cast<std::uint32_t>(recipe::random(c, recipe::kY, static_cast<std::uint64_t>(i)));
      std::memcpy(y.element(i), &bits, addlora::dtype_bytes(dtype));
    }
  }
  problem.y = &y.view;
  problem.x = &x.view;
  problem.weight_b = &weight_b.view;
  problem.indices = &indices.view;
  problem.weight_a = c.h1 > 0 ? &weight_a.view : nullptr;
  problem.layer_idx = c.layer_idx;
  problem.scale = static_cast<double>(c.scale_quarters) / 4;
  problem.y_offset = c.y_offset;
  problem.limits = addlora::Limits::kNone;
  problem.rounding = std::strcmp(c.rounding, "device") == 0 ? addlora::Rounding::kDevice : addlora::Rounding::kFloat32;
}

std::string FixedCall::run() const {
  const Tensor out = plain_tensor(dtype, {y.view.shape[0], y.view.shape[1]});
  addlora::Problem call = problem;
  call.out = &out.view;
  const addlora::Status status = add_lora(call, addlora::cpu_backend());
  if (!status.ok()) return status.message;
  const std::uint64_t sum =
      recipe::digest(out.view.data, static_cast<std::size_t>(out.count()), addlora::dtype_bytes(dtype));
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(sum));
  return text;
}

const Case* fixed_cases() { return kCases; }
std::size_t fixed_case_count() { return std::size(kCases); }

std::string check_digests() {
  for (const Case& c : kCases) {
    const FixedCall call(c);
    for (const int threads : {1, 2, 3, 16}) {
      addlora::cpu::set_thread_count(threads);
      const std::string got = call.run();
      if (got != c.digest) {
        return std::string("case ") + std::to_string(&c - kCases) + " (" + c.dtype + ", seed " +
               std::to_string(c.seed) + ") with " + std::to_string(threads) + " threads: expected " + c.digest +
               ", got " + got;
      }
    }
  }
  return {};
}
