// The gradients, in buffers that end where their last element does: the sanitizers see what goes beyond.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "checks.hpp"
#include "cpu/thread_pool.hpp"
#include "gradients.hpp"

namespace {

using namespace addlora;

struct Tensor {
  std::vector<char> bytes;
  TensorView view;

  Tensor(DType dtype, std::vector<std::int64_t> shape) {
    view.dtype = dtype;
    view.ndim = static_cast<int>(shape.size());
    std::size_t size = dtype_bytes(dtype);
    for (std::size_t i = 0; i < shape.size(); ++i) {
      view.shape[i] = shape[i];
      size *= static_cast<std::size_t>(shape[i]);
    }
    bytes.resize(size);
    view.data = bytes.data();
    set_contiguous_strides(view);
  }

  // Small multiples of 1/8, which every dtype holds exactly.
  void fill(std::mt19937& random) {
    const std::size_t item = dtype_bytes(view.dtype);
    for (std::size_t at = 0; at < bytes.size(); at += item) {
      const float value = static_cast<float>(static_cast<int>(random() % 17) - 8) / 8;
      std::uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      if (view.dtype == DType::kFloat32) {
        std::memcpy(&bytes[at], &bits, 4);
        continue;
      }
      std::uint32_t narrow = bits >> 16;
      if (view.dtype == DType::kFloat16) {
        const std::uint32_t sign = bits >> 16 & 0x8000;
        narrow = value == 0 ? 0 : sign | (((bits >> 23 & 0xff) - 112) << 10) | (bits >> 13 & 0x3ff);
      }
      std::memcpy(&bytes[at], &narrow, 2);
    }
  }
  float at(std::int64_t i) const {
    float value;
    std::memcpy(&value, &bytes[static_cast<std::size_t>(i) * sizeof value], sizeof value);
    return value;
  }
};

struct Sizes {
  std::int64_t b, h1, h2, h3, r, w, l;
};

std::string text(const Sizes& n, DType dtype, Gradient wanted, bool with_a) {
  return std::string(dtype_name(dtype)) + " B=" + std::to_string(n.b) + " H1=" + std::to_string(n.h1) +
         " H2=" + std::to_string(n.h2) + " R=" + std::to_string(n.r) + " W=" + std::to_string(n.w) + " gradient " +
         std::to_string(static_cast<int>(wanted)) + (with_a ? "" : " without weight_a");
}

// What the formula says, for float32.
std::vector<double> formula(const Problem& p, Gradient wanted, std::size_t count, const Tensor& g, const Tensor& x,
                            const Tensor& b, const Tensor& a, const std::vector<std::int32_t>& indices, const Sizes& n) {
  std::vector<double> exact(count);
  for (std::int64_t row = 0; row < n.b; ++row) {
    const std::int64_t w = indices[static_cast<std::size_t>(row)];
    if (w < 0 || w >= n.w) continue;
    const std::int64_t slot = w * n.l + p.layer_idx;
    for (std::int64_t r = 0; r < n.r; ++r) {
      double z = 0, dz = 0;
      for (std::int64_t k = 0; k < n.h1; ++k) z += double{a.at((slot * n.r + r) * n.h1 + k)} * x.at(row * n.h1 + k);
      for (std::int64_t h = 0; h < n.h2; ++h) {
        dz += double{g.at(row * n.h3 + p.y_offset + h)} * b.at((slot * n.h2 + h) * n.r + r);
      }
      for (std::int64_t k = 0; k < n.h1; ++k) {
        const double scaled = p.scale * dz;
        if (wanted == Gradient::kX) {
          exact[static_cast<std::size_t>(row * n.h1 + k)] += scaled * a.at((slot * n.r + r) * n.h1 + k);
        } else if (wanted == Gradient::kWeightA) {
          exact[static_cast<std::size_t>((slot * n.r + r) * n.h1 + k)] += scaled * x.at(row * n.h1 + k);
        }
      }
      for (std::int64_t h = 0; wanted == Gradient::kWeightB && h < n.h2; ++h) {
        exact[static_cast<std::size_t>((slot * n.h2 + h) * n.r + r)] +=
            p.scale * g.at(row * n.h3 + p.y_offset + h) * z;
      }
    }
  }
  return exact;
}

std::string check_one(const Sizes& n, DType dtype, Gradient wanted, bool with_a, std::mt19937& random) {
  Tensor g(dtype, {n.b, n.h3}), x(dtype, {n.b, with_a ? n.h1 : n.r}), b(dtype, {n.w, n.l, n.h2, n.r});
  Tensor a(dtype, {n.w, n.l, n.r, n.h1});
  for (Tensor* tensor : {&g, &x, &b, &a}) tensor->fill(random);
  std::vector<std::int32_t> indices(static_cast<std::size_t>(n.b));
  for (std::int32_t& index : indices) index = static_cast<std::int32_t>(random() % static_cast<unsigned>(n.w + 2)) - 1;
  TensorView index_view;
  index_view.data = indices.data();
  index_view.dtype = DType::kInt32;
  index_view.ndim = 1;
  index_view.shape[0] = n.b;
  set_contiguous_strides(index_view);

  const Tensor& like = wanted == Gradient::kX ? x : wanted == Gradient::kWeightA ? a : b;
  Problem problem;
  problem.y = &g.view;
  problem.x = &x.view;
  problem.weight_b = &b.view;
  problem.indices = &index_view;
  problem.weight_a = with_a ? &a.view : nullptr;
  problem.layer_idx = n.l - 1;
  problem.scale = 0.5;
  problem.y_offset = n.h3 - n.h2;
  problem.limits = Limits::kNone;

  std::vector<char> first;
  for (const int threads : {1, 3}) {
    cpu::set_thread_count(threads);
    Tensor out = like;
    out.view.data = out.bytes.data();
    std::fill(out.bytes.begin(), out.bytes.end(), '\xff');
    problem.out = &out.view;
    compute_gradient(problem, wanted);
    if (threads == 1) {
      first = out.bytes;
    } else if (first != out.bytes) {
      return text(n, dtype, wanted, with_a) + ": other bits with " + std::to_string(threads) + " threads";
    }
    if (dtype != DType::kFloat32 || !with_a) continue;
    const std::size_t count = out.bytes.size() / sizeof(float);
    const std::vector<double> exact = formula(problem, wanted, count, g, x, b, a, indices, n);
    for (std::size_t i = 0; i < count; ++i) {
      const double got = double{out.at(static_cast<std::int64_t>(i))};
      if (!(std::abs(got - exact[i]) <= 1e-4 * (1 + std::abs(exact[i])))) {
        return text(n, dtype, wanted, with_a) + ": element " + std::to_string(i) + ": expected " +
               std::to_string(exact[i]) + ", got " + std::to_string(got);
      }
    }
  }
  return {};
}

}  // namespace

std::string check_gradients() {
  std::mt19937 random(7);
  const Sizes sizes[] = {{5, 17, 15, 33, 3, 3, 2}, {1, 16, 16, 16, 16, 1, 1}, {40, 48, 130, 140, 17, 2, 1},
                         {140, 33, 32, 32, 16, 1, 1}, {7, 300, 64, 64, 70, 9, 2}, {0, 8, 8, 8, 2, 2, 1}};
  for (const Sizes& n : sizes) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (const Gradient wanted : {Gradient::kX, Gradient::kWeightA, Gradient::kWeightB}) {
        for (const bool with_a : {true, false}) {
          if (!with_a && wanted == Gradient::kWeightA) continue;
          if (std::string failure = check_one(n, dtype, wanted, with_a, random); !failure.empty()) return failure;
        }
      }
    }
  }
  return {};
}
