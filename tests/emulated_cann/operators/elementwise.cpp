// Operators that work element by element, broadcasting. Real numbers are computed in double and rounded once.
#include <algorithm>
#include <cmath>

#include "operator.hpp"

namespace {

using emu::Tensor;

bool any_real(const Tensor &a, const Tensor &b) { return emu::is_real(a.dtype) || emu::is_real(b.dtype); }

// out = f(a, b). Each result goes to out's dtype, a comparison's to bool.
template <class Function>
void apply(const Tensor &out, const Tensor &a, const Tensor &b, Function f) {
  const bool real = any_real(a, b) || emu::is_real(out.dtype);
  emu::for_each_element<3>(out.dims, {&out, &a, &b}, [&](const std::array<std::byte *, 3> &at) {
    if (real) {
      const auto result = f(emu::load_real(at[1], a.dtype), emu::load_real(at[2], b.dtype));
      emu::store_real(at[0], out.dtype, static_cast<double>(result));
    } else {
      const auto result = f(emu::load_integer(at[1], a.dtype), emu::load_integer(at[2], b.dtype));
      emu::store_integer(at[0], out.dtype, static_cast<int64_t>(result));
    }
  });
}

template <class Function>
void apply_scalar(const Tensor &out, const Tensor &a, const emu::Scalar &b, Function f) {
  const bool real = emu::is_real(a.dtype) || emu::is_real(b.dtype) || emu::is_real(out.dtype);
  emu::for_each_element<2>(out.dims, {&out, &a}, [&](const std::array<std::byte *, 2> &at) {
    if (real) {
      emu::store_real(at[0], out.dtype, static_cast<double>(f(emu::load_real(at[1], a.dtype), b.real)));
    } else {
      const auto result = f(emu::load_integer(at[1], a.dtype), b.integer);
      emu::store_integer(at[0], out.dtype, static_cast<int64_t>(result));
    }
  });
}

template <class Function>
void apply_one(const Tensor &out, const Tensor &a, Function f) {
  emu::for_each_element<2>(out.dims, {&out, &a}, [&](const std::array<std::byte *, 2> &at) {
    emu::store_real(at[0], out.dtype, f(emu::load_real(at[1], a.dtype)));
  });
}

double floor_quotient(double a, double b) { return std::floor(a / b); }
int64_t floor_quotient(int64_t a, int64_t b) {
  if (b == 0) return 0;
  return a / b - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0);
}
template <class T>
T remainder_of(T a, T b) {
  return a - floor_quotient(a, b) * b;
}

}  // namespace

#define EMU_BINARY(name, expression)                                                                  \
  EMU_OPERATOR(name,                                                                                  \
               emu::plan_small(function, {self, other, out}, results,                                 \
                               [](const std::vector<Tensor> &t) {                                     \
                                 apply(t[2], t[0], t[1], [](auto a, auto b) { return (expression); }); \
                               }),                                                                    \
               const aclTensor *self, const aclTensor *other, const aclTensor *out)

#define EMU_BINARY_SCALAR(name, expression)                                                              \
  EMU_OPERATOR(name,                                                                                     \
               emu::plan_small(function, {self, out}, results,                                           \
                               [b = emu::scalar_of(other)](const std::vector<Tensor> &t) {               \
                                 apply_scalar(t[1], t[0], b, [](auto a, auto b) { return (expression); }); \
                               }),                                                                       \
               const aclTensor *self, const aclScalar *other, const aclTensor *out)

#define EMU_INPLACE(name, expression)                                                                  \
  EMU_OPERATOR(name,                                                                                   \
               emu::plan_small(function, {self, other}, results,                                       \
                               [](const std::vector<Tensor> &t) {                                      \
                                 apply(t[0], t[0], t[1], [](auto a, auto b) { return (expression); }); \
                               }),                                                                     \
               const aclTensor *self, const aclTensor *other)

#define EMU_INPLACE_SCALAR(name, expression)                                                               \
  EMU_OPERATOR(name,                                                                                       \
               emu::plan_small(function, {self}, results,                                                  \
                               [b = emu::scalar_of(other)](const std::vector<Tensor> &t) {                 \
                                 apply_scalar(t[0], t[0], b, [](auto a, auto b) { return (expression); }); \
                               }),                                                                         \
               const aclTensor *self, const aclScalar *other)

// self + alpha * other, with one sign or the other.
#define EMU_ALPHA(name, sign)                                                                                \
  EMU_OPERATOR(name,                                                                                         \
               emu::plan_small(function, {self, other, out}, results,                                        \
                               [s = emu::scalar_of(alpha)](const std::vector<Tensor> &t) {                   \
                                 apply(t[2], t[0], t[1], [s](auto a, auto b) {                               \
                                   return a sign static_cast<decltype(b)>(s.real) * b;                       \
                                 });                                                                         \
                               }),                                                                           \
               const aclTensor *self, const aclTensor *other, const aclScalar *alpha, const aclTensor *out)

#define EMU_ALPHA_SCALAR(name, sign)                                                                         \
  EMU_OPERATOR(name,                                                                                         \
               emu::plan_small(function, {self, out}, results,                                               \
                               [b = emu::scalar_of(other), s = emu::scalar_of(alpha)](                       \
                                   const std::vector<Tensor> &t) {                                           \
                                 apply_scalar(t[1], t[0], b, [s](auto a, auto b) {                           \
                                   return a sign static_cast<decltype(b)>(s.real) * b;                       \
                                 });                                                                         \
                               }),                                                                           \
               const aclTensor *self, const aclScalar *other, const aclScalar *alpha, const aclTensor *out)

#define EMU_INPLACE_ALPHA(name, sign)                                                                        \
  EMU_OPERATOR(name,                                                                                         \
               emu::plan_small(function, {self, other}, results,                                             \
                               [s = emu::scalar_of(alpha)](const std::vector<Tensor> &t) {                   \
                                 apply(t[0], t[0], t[1], [s](auto a, auto b) {                               \
                                   return a sign static_cast<decltype(b)>(s.real) * b;                       \
                                 });                                                                         \
                               }),                                                                           \
               const aclTensor *self, const aclTensor *other, const aclScalar *alpha)

#define EMU_INPLACE_ALPHA_SCALAR(name, sign)                                                                 \
  EMU_OPERATOR(name,                                                                                         \
               emu::plan_small(function, {self}, results,                                                    \
                               [b = emu::scalar_of(other), s = emu::scalar_of(alpha)](                       \
                                   const std::vector<Tensor> &t) {                                           \
                                 apply_scalar(t[0], t[0], b, [s](auto a, auto b) {                           \
                                   return a sign static_cast<decltype(b)>(s.real) * b;                       \
                                 });                                                                         \
                               }),                                                                           \
               const aclTensor *self, const aclScalar *other, const aclScalar *alpha)

#define EMU_UNARY(name, expression)                                                                \
  EMU_OPERATOR(name,                                                                               \
               emu::plan_small(function, {self, out}, results,                                     \
                               [](const std::vector<Tensor> &t) {                                  \
                                 apply_one(t[1], t[0], [](double a) { return (expression); });     \
                               }),                                                                 \
               const aclTensor *self, const aclTensor *out)

EMU_ALPHA(aclnnAdd, +)
EMU_ALPHA_SCALAR(aclnnAdds, +)
EMU_ALPHA(aclnnSub, -)
EMU_ALPHA_SCALAR(aclnnSubs, -)
EMU_INPLACE_ALPHA(aclnnInplaceAdd, +)
EMU_INPLACE_ALPHA_SCALAR(aclnnInplaceAdds, +)
EMU_INPLACE_ALPHA(aclnnInplaceSub, -)
EMU_INPLACE_ALPHA_SCALAR(aclnnInplaceSubs, -)

EMU_BINARY(aclnnMul, a *b)
EMU_BINARY_SCALAR(aclnnMuls, a *b)
EMU_INPLACE(aclnnInplaceMul, a *b)
EMU_INPLACE_SCALAR(aclnnInplaceMuls, a *b)
EMU_BINARY(aclnnDiv, static_cast<double>(a) / static_cast<double>(b))
EMU_BINARY_SCALAR(aclnnDivs, static_cast<double>(a) / static_cast<double>(b))
EMU_BINARY(aclnnFloorDivide, floor_quotient(a, b))
EMU_BINARY_SCALAR(aclnnFloorDivides, floor_quotient(a, b))
EMU_BINARY(aclnnRemainderTensorTensor, remainder_of(a, b))
EMU_BINARY_SCALAR(aclnnRemainderTensorScalar, remainder_of(a, b))
EMU_BINARY(aclnnMinimum, a < b ? a : b)
EMU_BINARY(aclnnMaximum, a > b ? a : b)
EMU_BINARY_SCALAR(aclnnPowTensorScalar, std::pow(static_cast<double>(a), static_cast<double>(b)))
EMU_BINARY(aclnnPowTensorTensor, std::pow(static_cast<double>(a), static_cast<double>(b)))

EMU_BINARY(aclnnGtTensor, a > b)
EMU_BINARY(aclnnGeTensor, a >= b)
EMU_BINARY(aclnnLtTensor, a < b)
EMU_BINARY(aclnnLeTensor, a <= b)
EMU_BINARY(aclnnEqTensor, a == b)
EMU_BINARY(aclnnNeTensor, a != b)
EMU_BINARY_SCALAR(aclnnGtScalar, a > b)
EMU_BINARY_SCALAR(aclnnGeScalar, a >= b)
EMU_BINARY_SCALAR(aclnnLtScalar, a < b)
EMU_BINARY_SCALAR(aclnnLeScalar, a <= b)
EMU_BINARY_SCALAR(aclnnEqScalar, a == b)
EMU_BINARY_SCALAR(aclnnNeScalar, a != b)
EMU_BINARY(aclnnLogicalAnd, a != 0 && b != 0)
EMU_BINARY(aclnnLogicalOr, a != 0 || b != 0)
EMU_UNARY(aclnnLogicalNot, a == 0 ? 1.0 : 0.0)

EMU_UNARY(aclnnAbs, std::fabs(a))
EMU_UNARY(aclnnNeg, -a)
EMU_UNARY(aclnnRelu, a < 0 ? 0.0 : a)
EMU_UNARY(aclnnSilu, a / (1 + std::exp(-a)))
EMU_UNARY(aclnnSigmoid, 1 / (1 + std::exp(-a)))
EMU_UNARY(aclnnTanh, std::tanh(a))
EMU_UNARY(aclnnExp, std::exp(a))
EMU_UNARY(aclnnErf, std::erf(a))
EMU_UNARY(aclnnSqrt, std::sqrt(a))
EMU_UNARY(aclnnRsqrt, 1 / std::sqrt(a))
EMU_UNARY(aclnnReciprocal, 1 / a)
EMU_UNARY(aclnnGelu, a * 0.5 * (1 + std::erf(a / std::sqrt(2.0))))

namespace {

struct Bounds {
  bool has_low, has_high;
  emu::Scalar low, high;
};

Bounds bounds_of(const aclScalar *low, const aclScalar *high) {
  Bounds bounds{low != nullptr, high != nullptr, {}, {}};
  if (low) bounds.low = emu::scalar_of(low);
  if (high) bounds.high = emu::scalar_of(high);
  return bounds;
}

void clamp(const Tensor &out, const Tensor &self, const Bounds &bounds) {
  apply_one(out, self, [&](double a) {
    if (bounds.has_low) a = std::max(a, bounds.low.real);
    if (bounds.has_high) a = std::min(a, bounds.high.real);
    return a;
  });
}

void select(const Tensor &out, const Tensor &condition, const Tensor &yes, const Tensor &no) {
  emu::for_each_element<4>(out.dims, {&out, &condition, &yes, &no}, [&](const std::array<std::byte *, 4> &at) {
    const bool chosen = emu::load_integer(at[1], condition.dtype) != 0;
    emu::copy_element(at[0], out.dtype, chosen ? at[2] : at[3], chosen ? yes.dtype : no.dtype);
  });
}

void fill_where(const Tensor &self, const Tensor &mask, const Tensor &value) {
  emu::for_each_element<3>(self.dims, {&self, &mask, &value}, [&](const std::array<std::byte *, 3> &at) {
    if (emu::load_integer(at[1], mask.dtype) != 0) emu::copy_element(at[0], self.dtype, at[2], value.dtype);
  });
}

void fill_where(const Tensor &self, const Tensor &mask, const emu::Scalar &value) {
  emu::for_each_element<2>(self.dims, {&self, &mask}, [&](const std::array<std::byte *, 2> &at) {
    if (emu::load_integer(at[1], mask.dtype) == 0) return;
    if (emu::is_real(self.dtype)) {
      emu::store_real(at[0], self.dtype, value.real);
    } else {
      emu::store_integer(at[0], self.dtype, value.integer);
    }
  });
}

}  // namespace

EMU_OPERATOR(aclnnClamp,
             emu::plan_small(function, {self, out}, results,
                             [bounds = bounds_of(low, high)](const std::vector<Tensor> &t) {
                               clamp(t[1], t[0], bounds);
                             }),
             const aclTensor *self, const aclScalar *low, const aclScalar *high, const aclTensor *out)

EMU_OPERATOR(aclnnSWhere,
             emu::plan_small(function, {condition, self, other, out}, results,
                             [](const std::vector<Tensor> &t) { select(t[3], t[0], t[1], t[2]); }),
             const aclTensor *condition, const aclTensor *self, const aclTensor *other, const aclTensor *out)

EMU_OPERATOR(aclnnInplaceMaskedFillTensor,
             emu::plan_small(function, {self, mask, value}, results,
                             [](const std::vector<Tensor> &t) { fill_where(t[0], t[1], t[2]); }),
             const aclTensor *self, const aclTensor *mask, const aclTensor *value)

EMU_OPERATOR(aclnnInplaceMaskedFillScalar,
             emu::plan_small(function, {self, mask}, results,
                             [v = emu::scalar_of(value)](const std::vector<Tensor> &t) { fill_where(t[0], t[1], v); }),
             const aclTensor *self, const aclTensor *mask, const aclScalar *value)
