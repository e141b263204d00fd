// Matrix products. Sums are kept in float64 and rounded once: close to the cube unit's float32 sums, not equal.
#include "operator.hpp"

namespace {

using emu::Tensor;

std::vector<double> numbers(const Tensor &tensor) {
  std::vector<double> values;
  values.reserve(static_cast<size_t>(tensor.elements()));
  emu::for_each_element<1>(tensor.dims, {&tensor}, [&](const std::array<std::byte *, 1> &at) {
    values.push_back(emu::load_real(at[0], tensor.dtype));
  });
  return values;
}

void multiply_matrices(const Tensor &out, const Tensor &a, const Tensor &b, double alpha, const Tensor *added,
                       double beta) {
  const int64_t rows = a.dims[0];
  const int64_t inner = a.dims[1];
  const int64_t columns = b.dims[1];
  if (b.dims[0] != inner) throw emu::Error{emu::kBadParameter, a.describe() + " times " + b.describe()};
  const auto left = numbers(a);
  const auto right = numbers(b);
  std::vector<double> sums(static_cast<size_t>(rows * columns), 0.0);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t k = 0; k < inner; ++k)
      for (int64_t j = 0; j < columns; ++j)
        sums[static_cast<size_t>(i * columns + j)] +=
            left[static_cast<size_t>(i * inner + k)] * right[static_cast<size_t>(k * columns + j)];
  size_t next = 0;
  const Tensor &other = added ? *added : out;
  emu::for_each_element<2>(out.dims, {&out, &other}, [&](const std::array<std::byte *, 2> &at) {
    const double base = added ? beta * emu::load_real(at[1], other.dtype) : 0.0;
    emu::store_real(at[0], out.dtype, base + alpha * sums[next++]);
  });
}

Tensor without_axis(Tensor tensor, size_t axis) {
  tensor.dims.erase(tensor.dims.begin() + static_cast<std::ptrdiff_t>(axis));
  tensor.strides.erase(tensor.strides.begin() + static_cast<std::ptrdiff_t>(axis));
  return tensor;
}

Tensor with_axis(Tensor tensor, size_t axis) {
  tensor.dims.insert(tensor.dims.begin() + static_cast<std::ptrdiff_t>(axis), 1);
  tensor.strides.insert(tensor.strides.begin() + static_cast<std::ptrdiff_t>(axis), 0);
  return tensor;
}

// Matrices in the last two axes, broadcasting over the ones before.
void multiply_batches(const Tensor &out, const Tensor &a, const Tensor &b) {
  if (out.dims.size() == 2) {
    const auto plain = [](Tensor tensor) {
      while (tensor.dims.size() > 2) tensor = without_axis(tensor, 0);
      return tensor;
    };
    multiply_matrices(out, plain(a), plain(b), 1, nullptr, 0);
    return;
  }
  const auto part = [&](const Tensor &tensor, int64_t i) {
    if (tensor.dims.size() < out.dims.size()) return tensor;
    return without_axis(emu::slice(tensor, 0, tensor.dims[0] == 1 ? 0 : i, 1), 0);
  };
  for (int64_t i = 0; i < out.dims[0]; ++i) multiply_batches(part(out, i), part(a, i), part(b, i));
}

// As numpy.matmul: a vector is a matrix of one row or one column, and the axis goes again.
void matmul(const Tensor &out, Tensor a, Tensor b) {
  Tensor result = out;
  if (b.dims.size() == 1) {
    b = with_axis(b, 1);
    result = with_axis(result, result.dims.size());
  }
  if (a.dims.size() == 1) {
    a = with_axis(a, 0);
    result = with_axis(result, result.dims.size() - 1);
  }
  multiply_batches(result, a, b);
}

}  // namespace

EMU_OPERATOR(aclnnMm,
             emu::plan_small(function, {a, b, out}, results,
                             [](const std::vector<Tensor> &t) { matmul(t[2], t[0], t[1]); }),
             const aclTensor *a, const aclTensor *b, const aclTensor *out, int8_t)

EMU_OPERATOR(aclnnMatmul,
             emu::plan_small(function, {a, b, out}, results,
                             [](const std::vector<Tensor> &t) { matmul(t[2], t[0], t[1]); }),
             const aclTensor *a, const aclTensor *b, const aclTensor *out, int8_t)

EMU_OPERATOR(aclnnBatchMatMul,
             emu::plan_small(function, {a, b, out}, results,
                             [](const std::vector<Tensor> &t) { matmul(t[2], t[0], t[1]); }),
             const aclTensor *a, const aclTensor *b, const aclTensor *out, int8_t)

EMU_OPERATOR(aclnnAddmm,
             emu::plan_small(function, {self, a, b, out}, results,
                             [u = emu::scalar_of(beta), v = emu::scalar_of(alpha)](const std::vector<Tensor> &t) {
                               multiply_matrices(t[3], t[1], t[2], v.real, &t[0], u.real);
                             }),
             const aclTensor *self, const aclTensor *a, const aclTensor *b, const aclScalar *beta,
             const aclScalar *alpha, const aclTensor *out, int8_t)
