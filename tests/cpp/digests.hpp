// The fixed calls of tests/data/digests.json.
#pragma once

#include <string>

#include "recipe.hpp"
#include "views.hpp"

struct FixedCall {
  addlora::DType dtype;
  Tensor y, x, weight_b, indices, weight_a;
  addlora::Problem problem;  // without out

  explicit FixedCall(const recipe::Case& c);
  FixedCall(const FixedCall&) = delete;  // the problem points into it
  FixedCall& operator=(const FixedCall&) = delete;
  // The digest of the result, or the refusal.
  std::string run() const;
};

const recipe::Case* fixed_cases();
std::size_t fixed_case_count();
