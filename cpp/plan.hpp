// The plan of a CPU call: rows grouped by adapter, how each group is split into tasks, and where in the workspace
// everything lies. The bits of a result depend on none of it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "add_lora.hpp"

namespace addlora {

struct Sizes {
  std::int64_t b, h1, h2, h3, w, r;
  bool has_a;
};
Sizes sizes_of(const Problem& problem);

// Byte offsets into a workspace that begins at a multiple of 64.
struct WorkspaceLayout {
  std::size_t order;    // int64 [B]: the rows, adapter by adapter in order, those without an adapter last
  std::size_t adapters;  // int64 [B]: the adapter of each row, W for none
  std::size_t counts;   // int64 [W] where counting_sort
  std::size_t groups;   // Group [min(B, W) + 1]
  std::size_t z;        // float [chunk_rows, R]: the first product
  std::size_t scratch;  // float [threads, scratch_floats]: for a kernel's task
  std::size_t scratch_floats;
  std::size_t bytes;  // in all, with what aligning the beginning may cost
};

// What is known before the indices are read.
struct Plan {
  Sizes sizes;
  int threads;              // at most
  bool counting_sort;       // else a comparison sort: its cost must not grow with W
  std::int64_t chunk_rows;  // rows whose first product is held at a time
  WorkspaceLayout layout;
};

Plan make_plan(const Problem& problem, int threads);

// The rows of one adapter, as a range of `order`, and the numbers of its first tasks.
struct Group {
  std::int64_t adapter;
  std::int64_t begin;
  std::int64_t end;
  std::int64_t first_shrink_task;
  std::int64_t first_expand_task;
};

// A group's tasks are (tile of rows) x (range of ranks), and (tile of rows) x (range of columns).
struct Split {
  std::int64_t rows;
  std::int64_t width;
  std::int64_t tasks(std::int64_t row_count, std::int64_t full_width) const {
    return (row_count + rows - 1) / rows * ((full_width + width - 1) / width);
  }
};

struct Grouping {
  Group* groups;
  std::int64_t group_count;
  std::int64_t active_rows;  // those with an adapter
};

// Sorts the rows by adapter, stably. Negative indices and W mean none. Each index is read once, into `adapters`: another
// thread may be writing to the caller's array.
Grouping group_rows(const Problem& problem, const Plan& plan, std::int64_t* order, std::int64_t* adapters,
                    std::int64_t* counts, Group* groups);

Split shrink_split(const Plan& plan, const Grouping& grouping, const Group& group);
Split expand_split(const Plan& plan, const Grouping& grouping);

// The threads that pay for their start, given what there is to do.
int useful_threads(const Plan& plan, const Grouping& grouping, std::int64_t copied_bytes);

}  // namespace addlora
