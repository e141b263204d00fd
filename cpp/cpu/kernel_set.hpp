// What a kernel set offers, in plain C types: the files that are compiled for a higher instruction set include this
// header, and must not include std headers with inline functions (the linker might keep the copy that was compiled
// for the higher set, and an older CPU would run it).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace addlora::cpu {

// The most ranks and (row, rank) sums that one shrink task may have.
constexpr int64_t kMaxTaskRanks = 64;
constexpr int64_t kMaxTaskSums = 8192;
// The most rows of a register tile, in any kernel set.
constexpr int64_t kMaxTileRows = 6;
// Lanes of the logical vector, in every kernel set: the order of operations must not depend on it.
constexpr int64_t kLanes = 16;

// Shrink with many rows: the weights that are converted at once, which stay in the first cache.
constexpr int64_t kRangeRanks = 16;
constexpr int64_t kPieceK = 256;
// With few rows: the values of x that are converted at once.
constexpr int64_t kFewFloats = 6144;
constexpr size_t kShrinkScratchFloats = kMaxTaskSums * kLanes + kFewFloats + kRangeRanks * kPieceK;

// Columns of H2 that are transposed at once: as many as stay in the second cache beside the rows of y and out, and a
// multiple of any tile's.
constexpr int64_t kBlockFloats = 32768;
constexpr int64_t kMaxTileColumns = 64;
constexpr int64_t expand_block_columns(int64_t rank) {
  const int64_t tiles = kBlockFloats / rank / kMaxTileColumns;
  return kMaxTileColumns * (tiles < 1 ? 1 : tiles);
}
constexpr size_t expand_scratch_floats(int64_t rank) {
  return static_cast<size_t>(rank * expand_block_columns(rank));
}

// z[i, r] = x[rows[i]] . a[r] for the given rows (all of one adapter) and ranks r_begin..r_end; without a, z is x.
struct ShrinkTask {
  const char* x;
  int64_t x_row_stride;  // strides are in bytes
  int64_t x_column_stride;
  const int64_t* rows;
  int64_t row_count;
  const char* a;
  int64_t a_row_stride;
  int64_t a_column_stride;
  int64_t h1;
  int64_t r_begin;
  int64_t r_end;
  float* z;
  int64_t z_row_stride;  // in floats
  bool device_rounding;
  float* scratch;    // kShrinkScratchFloats, 64-byte aligned
  const char* ran;   // the kernel writes its name here
};

// out[rows[i], h] = y[rows[i], h] + scale * (z[i] . b[h]) for columns h_begin..h_end.
struct ExpandTask {
  const float* z;
  int64_t z_row_stride;
  const int64_t* rows;
  int64_t row_count;
  const char* b;
  int64_t b_row_stride;
  int64_t b_column_stride;
  const int64_t* b_columns;  // where column r of b lies: b_columns[r] strides from b; r strides where it is null
  int64_t rank;
  int64_t h_begin;
  int64_t h_end;
  const char* y;  // at y_offset
  int64_t y_row_stride;
  int64_t y_column_stride;
  char* out;  // at y_offset; columns lie side by side
  int64_t out_row_stride;
  float scale;
  bool device_rounding;
  float* scratch;  // expand_scratch_floats(rank), 64-byte aligned
  const char* ran;
};

struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

enum Element { kHalf, kBfloat, kSingle, kElements };

struct KernelSet {
  const char* name;
  bool (*supported)();
  void (*shrink[kElements])(ShrinkTask&);
  void (*expand[kElements])(ExpandTask&);
  // For the benchmark's ceilings. `result` is 16 floats that the work begins from and ends in.
  int tile_sums;
  void (*multiply_add)(int64_t steps, float* result);  // steps * tile_sums * kLanes of them
  void (*read)(const float* data, int64_t count, float* result);  // count a multiple of 64
};

extern const KernelSet kScalarKernels;
#if defined(__x86_64__)
extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvx512Kernels;
#elif defined(__aarch64__)
extern const KernelSet kNeonKernels;
#endif

}  // namespace addlora::cpu
