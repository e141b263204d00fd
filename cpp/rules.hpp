// THE rules of the operator: what is accepted, the code and the words of each refusal, and the output shape.
// Python's LIMITS, the README's table, MindSpore's shape inference and every backend read them from here.
#pragma once

#include <string>
#include <vector>

#include "add_lora.hpp"
#include "backend.hpp"

namespace addlora {

inline constexpr std::int64_t kMultiple = 16;
inline constexpr std::int64_t kMaxRank = 128;
inline constexpr std::int64_t kMaxAdapters = 32;
inline constexpr std::int64_t kMaxLayers = 32;
inline constexpr std::int64_t kMaxWidth = 131072;
// The device addresses a bank with 32-bit offsets.
inline constexpr std::int64_t kMaxDeviceBank = std::int64_t{1} << 32;
// A row of x wider than this overflows a buffer of the device's cores once a core has more than one row.
inline constexpr std::int64_t kMaxDeviceRow = 49152;

struct Rule {
  std::string name;
  std::string applies_to;  // the argument or arguments
  std::string text;        // what is expected
  Code code;
  bool lifted;  // whether limits="none" lifts it
};

const std::vector<Rule>& rules();

// Everything that can be known without reading an element: presence, dtypes, shapes, limits. Unknown dimensions agree.
// Views may have null data. out may be null where there is none yet (shape inference).
Status check_description(const Problem& problem, const Backend& backend);

// out is writable, contiguous, and overlaps no input but a y that it equals.
Status check_out(const Problem& problem);

// What only the device asks for: rows and banks that it would compute wrongly, without an error. h1 is kUnknown without
// weight_a.
Status check_device_sizes(std::int64_t w, std::int64_t l, std::int64_t h2, std::int64_t r, std::int64_t h1);

// Every index is at most W. Indices on a device are left to the backend.
Status check_indices(const Problem& problem);

// All of the above, in this order.
Status check(const Problem& problem, const Backend& backend);

// A workspace of the caller's: large enough, writable, and apart from every tensor.
Status check_workspace(const Problem& problem, std::size_t needed, const void* data, std::size_t bytes, bool writable);

Status refuse(const char* rule_name, const char* argument, const std::string& expected, const std::string& actual);

}  // namespace addlora
