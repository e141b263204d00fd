// The two products, written once over the vector operations of an ISA file.
//
// An ISA file defines, before it includes this one and inside its anonymous namespace:
//   V                      a vector of 16 floats
//   zero() broadcast(f)    load(T*) store(T*, V) for float, Half and Bfloat
//   fma(a, b, c) mul(a, b) reduce(V): lanes l + (l+8), then +4, +2, +1
//   round_half(V)          to float16 and back
//   load_columns(T*, stride, V[16]): 16 x 16, the columns of rows that lie `stride` bytes apart
//   kTileRows, kTileVectors   the register tile: rows, and vectors of each row (expand) or ranks (shrink)
//   kTileSums                 the most accumulators of a tile
//   kName
//
// The order of operations of a result, which no tile size, thread count or kernel set may change:
//   z[r]   16 lanes, lane l sums x[16k + l] * a[r, 16k + l] over k in order by fused multiply-add, from zero; past
//          the end of H1 both factors are zero; then reduce()
//   d[h]   sums z[r] * b[h, r] over r in order by fused multiply-add, from zero
//   out    fma(scale, d, y), rounded once to the dtype; with device rounding each step rounded to float16 instead

inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Up to 16 elements at any stride, zero past the end.
template <class T>
inline V load_some(const char* from, int64_t stride, int64_t count) {
  if (stride == static_cast<int64_t>(sizeof(T)) && count >= kLanes) return load(reinterpret_cast<const T*>(from));
  alignas(64) T some[kLanes] = {};
  for (int64_t i = 0; i < count && i < kLanes; ++i) __builtin_memcpy(&some[i], from + i * stride, sizeof(T));
  return load(some);
}

template <class T>
inline void store_some(char* to, V v, int64_t count) {
  if (count >= kLanes) {
    store(reinterpret_cast<T*>(to), v);
    return;
  }
  alignas(64) T some[kLanes];
  store(some, v);
  __builtin_memcpy(to, some, static_cast<size_t>(count) * sizeof(T));
}

// count elements as floats in vectors that lie `to_stride` floats apart, zero at the end of the last one.
template <class T>
inline void widen(const char* from, int64_t stride, int64_t count, float* to, int64_t to_stride) {
  int64_t k = 0;
  if (stride == static_cast<int64_t>(sizeof(T))) {
    for (; k + kLanes <= count; k += kLanes, to += to_stride) store(to, load(reinterpret_cast<const T*>(from) + k));
  }
  for (; k < count; k += kLanes, to += to_stride) store(to, load_some<T>(from + k * stride, stride, count - k));
}

// ---- first product: shrink -------------------------------------------------------------------------------------

// sums[m][n] += x[m] * a[n], lane by lane, over `steps` vectors. TA is float where a was converted before. The vectors
// of x lie step by step, M of them together; those of a rank_stride and step_stride bytes apart.
template <class TA, int M, int N>
inline void shrink_tile(const float* x, const char* a, int64_t rank_stride, int64_t step_stride, int64_t steps,
                        float* sums) {
  V sum[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) prefetch(sums + ((M + m) * N + n) * kLanes);  // the next tile's
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) sum[m][n] = load(sums + (m * N + n) * kLanes);
  }
  for (int64_t k = 0; k < steps; ++k, x += M * kLanes, a += step_stride) {
    V av[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) av[n] = load(reinterpret_cast<const TA*>(a + n * rank_stride));
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const V xv = load(x + m * kLanes);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sum[m][n] = fma(xv, av[n], sum[m][n]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) store(sums + (m * N + n) * kLanes, sum[m][n]);
  }
}

template <class TA, int M, int N>
inline void shrink_ranks(int64_t n, const float* x, const char* a, int64_t rank_stride, int64_t step_stride,
                         int64_t steps, float* sums) {
  if (n == N) {
    shrink_tile<TA, M, N>(x, a, rank_stride, step_stride, steps, sums);
  } else if constexpr (N > 1) {
    shrink_ranks<TA, M, N - 1>(n, x, a, rank_stride, step_stride, steps, sums);
  }
}

// z of a tile's rows, from its sums: panels of kRanks ranks, row by row.
template <int kRanks>
inline void reduce_tiles(const float* sums, int64_t rows, int64_t ranks, float* z, int64_t z_row_stride) {
  for (int64_t first = 0; first < ranks; first += kRanks) {
    const int64_t n = smaller(kRanks, ranks - first);
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t r = 0; r < n; ++r, sums += kLanes) z[m * z_row_stride + first + r] = reduce(load(sums));
    }
  }
}

// Few rows: each weight goes from memory to registers, and is used there.
template <class T, int M>
inline void shrink_few(int64_t m, const ShrinkTask& t) {
  if (m != M) {
    if constexpr (M > 1) shrink_few<T, M - 1>(m, t);
    return;
  }
  constexpr int kRanks = kTileSums / M < 8 ? kTileSums / M : 8;
  constexpr int64_t kBlock = kFewFloats / M / kLanes * kLanes;
  const int64_t ranks = t.r_end - t.r_begin;
  float* const sums = t.scratch;
  float* const x = sums + kMaxTaskSums * kLanes;
  for (int64_t i = 0; i < M * ranks; ++i) store(sums + i * kLanes, zero());
  for (int64_t k = 0; k < t.h1; k += kBlock) {
    const int64_t count = smaller(kBlock, t.h1 - k);
#pragma GCC unroll 16
    for (int m_ = 0; m_ < M; ++m_) {
      widen<T>(t.x + t.rows[m_] * t.x_row_stride + k * t.x_column_stride, t.x_column_stride, count, x + m_ * kLanes,
               M * kLanes);
    }
    const char* a = t.a + t.r_begin * t.a_row_stride + k * t.a_column_stride;
    for (int64_t r = 0; r < ranks; r += kRanks) {
      shrink_ranks<T, M, kRanks>(smaller(kRanks, ranks - r), x, a + r * t.a_row_stride, t.a_row_stride,
                                 kLanes * static_cast<int64_t>(sizeof(T)), count / kLanes, sums + r * M * kLanes);
    }
  }
  reduce_tiles<kRanks>(sums, M, ranks, t.z + t.r_begin, t.z_row_stride);
}

// Many rows: weights are converted once for all of them, piece by piece. A piece of 16 ranks stays in the first cache,
// while rows and sums pass by.
template <int M>
inline void shrink_rows(int64_t m, const float* x, const float* a, int64_t ranks, int64_t steps, float* sums) {
  if (m != M) {
    if constexpr (M > 1) shrink_rows<M - 1>(m, x, a, ranks, steps, sums);
    return;
  }
  constexpr int64_t kVector = kLanes * static_cast<int64_t>(sizeof(float));
  for (int64_t r = 0; r < ranks; r += kTileVectors) {
    const int64_t n = smaller(kTileVectors, ranks - r);
    shrink_ranks<float, M, kTileVectors>(n, x, reinterpret_cast<const char*>(a + r * steps * kLanes), kVector,
                                         n * kVector, steps, sums + r * M * kLanes);
  }
}

template <class T>
inline void shrink_many(const ShrinkTask& t) {
  const int64_t ranks = t.r_end - t.r_begin;
  float* const sums = t.scratch;  // range by range of ranks, tile by tile of rows
  float* const x_block = sums + kMaxTaskSums * kLanes;
  float* const a_block = x_block + kFewFloats;
  for (int64_t i = 0; i < t.row_count * ranks; ++i) store(sums + i * kLanes, zero());
  for (int64_t k = 0; k < t.h1; k += kPieceK) {
    const int64_t count = smaller(kPieceK, t.h1 - k);
    const int64_t steps = (count + kLanes - 1) / kLanes;
    for (int64_t range = 0; range < ranks; range += kRangeRanks) {
      const int64_t range_ranks = smaller(kRangeRanks, ranks - range);
      // Turned weights, as gradients read them: the ranks lie side by side.
      const bool turned = t.a_row_stride == static_cast<int64_t>(sizeof(T)) && range_ranks == kLanes && count % kLanes == 0;
      for (int64_t step = 0; turned && step < steps; ++step) {
        const char* from = t.a + (t.r_begin + range) * t.a_row_stride + (k + step * kLanes) * t.a_column_stride;
        V rank[kLanes];
        load_columns(reinterpret_cast<const T*>(from), t.a_column_stride, rank);
        for (int64_t r = 0; r < kLanes; ++r) {
          const int64_t panel = r / kTileVectors * kTileVectors;
          const int64_t width = smaller(kTileVectors, kLanes - panel);
          store(a_block + (panel * steps + r - panel + step * width) * kLanes, rank[r]);
        }
      }
      for (int64_t r = 0; r < range_ranks && !turned; ++r) {
        const int64_t panel = r / kTileVectors * kTileVectors;
        widen<T>(t.a + (t.r_begin + range + r) * t.a_row_stride + k * t.a_column_stride, t.a_column_stride, count,
                 a_block + (panel * steps + r - panel) * kLanes, smaller(kTileVectors, range_ranks - panel) * kLanes);
      }
      for (int64_t i = 0; i < t.row_count; i += kTileRows) {
        const int64_t rows = smaller(kTileRows, t.row_count - i);
        for (int64_t m = 0; m < rows; ++m) {
          widen<T>(t.x + t.rows[i + m] * t.x_row_stride + k * t.x_column_stride, t.x_column_stride, count,
                   x_block + m * kLanes, rows * kLanes);
        }
        shrink_rows<kTileRows>(rows, x_block, a_block, range_ranks, steps,
                               sums + (t.row_count * range + i * range_ranks) * kLanes);
      }
    }
  }
  for (int64_t range = 0; range < ranks; range += kRangeRanks) {
    const int64_t range_ranks = smaller(kRangeRanks, ranks - range);
    for (int64_t i = 0; i < t.row_count; i += kTileRows) {
      reduce_tiles<kTileVectors>(sums + (t.row_count * range + i * range_ranks) * kLanes,
                                 smaller(kTileRows, t.row_count - i), range_ranks,
                                 t.z + i * t.z_row_stride + t.r_begin + range, t.z_row_stride);
    }
  }
}

template <class T>
void shrink(ShrinkTask& t) {
  t.ran = kName;
  if (t.a == nullptr) {
    for (int64_t i = 0; i < t.row_count; ++i) {
      const char* x = t.x + t.rows[i] * t.x_row_stride;
      for (int64_t r = t.r_begin; r < t.r_end; r += kLanes) {
        store_some<float>(reinterpret_cast<char*>(t.z + i * t.z_row_stride + r),
                          load_some<T>(x + r * t.x_column_stride, t.x_column_stride, t.r_end - r), t.r_end - r);
      }
    }
    return;
  }
  if (t.row_count <= kTileRows && t.a_column_stride == static_cast<int64_t>(sizeof(T)) && t.h1 % kLanes == 0) {
    shrink_few<T, kTileRows>(t.row_count, t);
  } else {
    shrink_many<T>(t);
  }
  if (!t.device_rounding) return;
  for (int64_t i = 0; i < t.row_count; ++i) {
    for (int64_t r = t.r_begin; r < t.r_end; r += kLanes) {
      char* at = reinterpret_cast<char*>(t.z + i * t.z_row_stride + r);
      store_some<float>(at, round_half(load_some<float>(at, sizeof(float), t.r_end - r)), t.r_end - r);
    }
  }
}

// ---- second product: expand ------------------------------------------------------------------------------------

// Whether what lies side by side is wanted side by side.
template <class T>
inline bool is_turned(const ExpandTask& t) {
  return t.b_columns != nullptr || t.b_row_stride == static_cast<int64_t>(sizeof(T));
}

// to[j] = column r + j of up to 16 x 16 weights from row h on, zero past their ends.
template <class T>
inline void load_some_columns(const ExpandTask& t, int64_t h, int64_t r, int64_t columns, int64_t ranks, V* to) {
  if (is_turned<T>(t)) {
    const char* b = t.b + h * t.b_row_stride;
    for (int64_t j = 0; j < kLanes; ++j) {
      if (j < ranks) {
        const int64_t at = t.b_columns == nullptr ? r + j : t.b_columns[r + j];
        to[j] = load_some<T>(b + at * t.b_column_stride, t.b_row_stride, columns);
      } else {
        to[j] = zero();
      }
    }
    return;
  }
  const char* from = t.b + h * t.b_row_stride + r * t.b_column_stride;
  if (columns >= kLanes && ranks >= kLanes && t.b_column_stride == static_cast<int64_t>(sizeof(T))) {
    load_columns(reinterpret_cast<const T*>(from), t.b_row_stride, to);
    return;
  }
  alignas(64) float transposed[kLanes][kLanes] = {};
  for (int64_t i = 0; i < kLanes && i < columns; ++i) {
    alignas(64) float row[kLanes];
    store(row, load_some<T>(from + i * t.b_row_stride, t.b_column_stride, ranks));
    for (int64_t j = 0; j < kLanes; ++j) transposed[j][i] = row[j];
  }
  for (int64_t j = 0; j < kLanes; ++j) to[j] = load(transposed[j]);
}

// The end of a result: vectors d[m][n] of rows `rows` at `column`. kWhole: they lie inside out, and y is contiguous.
template <class T, int M, int N, bool kWhole>
inline void finish(const ExpandTask& t, const int64_t* rows, int64_t column, V (&d)[M][N]) {
  const V scale = t.device_rounding ? round_half(broadcast(t.scale)) : broadcast(t.scale);
  const int64_t left = t.h_end - column;
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    const char* y = t.y + rows[m] * t.y_row_stride + column * t.y_column_stride;
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const V yv = kWhole ? load(reinterpret_cast<const T*>(y) + n * kLanes)
                          : load_some<T>(y + n * kLanes * t.y_column_stride, t.y_column_stride, left);
      d[m][n] = t.device_rounding ? fma(broadcast(1.0f), round_half(mul(round_half(d[m][n]), scale)), yv)
                                  : fma(scale, d[m][n], yv);
    }
  }
  // Stored after the last load: rows often lie a multiple of 4096 bytes apart, and a load that follows a store to the
  // same offset in another page waits for it.
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    T* out = reinterpret_cast<T*>(t.out + rows[m] * t.out_row_stride) + column;
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      if (kWhole) {
        store(out + n * kLanes, d[m][n]);
      } else {
        store_some<T>(reinterpret_cast<char*>(out + n * kLanes), d[m][n], left);
      }
    }
  }
}

// Few rows: each weight goes from memory to registers, and is used there.
template <class T, int M>
inline void expand_few(int64_t m, const ExpandTask& t) {
  if (m != M) {
    if constexpr (M > 1) expand_few<T, M - 1>(m, t);
    return;
  }
  const bool contiguous = t.y_column_stride == static_cast<int64_t>(sizeof(T));
  for (int64_t h = t.h_begin; h < t.h_end; h += kLanes) {
    V d[M][1];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) d[i][0] = zero();
    for (int64_t r = 0; r < t.rank; r += kLanes) {
      V b[kLanes];
      load_some_columns<T>(t, h, r, t.h_end - h, t.rank - r, b);
      const int64_t ranks = smaller(kLanes, t.rank - r);
      if (ranks == kLanes) {
#pragma GCC unroll 16
        for (int j = 0; j < kLanes; ++j) {
#pragma GCC unroll 16
          for (int i = 0; i < M; ++i) d[i][0] = fma(broadcast(t.z[i * t.z_row_stride + r + j]), b[j], d[i][0]);
        }
      } else {
        for (int64_t j = 0; j < ranks; ++j) {
#pragma GCC unroll 16
          for (int i = 0; i < M; ++i) d[i][0] = fma(broadcast(t.z[i * t.z_row_stride + r + j]), b[j], d[i][0]);
        }
      }
    }
    if (contiguous && t.h_end - h >= kLanes) {
      finish<T, M, 1, true>(t, t.rows, h, d);
    } else {
      finish<T, M, 1, false>(t, t.rows, h, d);
    }
  }
}

// Many rows: weights are transposed once, in panels of kTileVectors vectors, rank by rank.
constexpr int64_t kPanelColumns = kTileVectors * kLanes;

template <class T>
inline void transpose(const ExpandTask& t, int64_t h, int64_t columns, float* to) {
  if (is_turned<T>(t)) {
    // In runs as long as the block: memory is slow to give a cache line here and another there.
    for (int64_t r = 0; r < t.rank; ++r) {
      const int64_t at = t.b_columns == nullptr ? r : t.b_columns[r];
      const char* from = t.b + h * t.b_row_stride + at * t.b_column_stride;
      for (int64_t c = 0; c < columns; c += kLanes) {
        float* panel = to + c / kPanelColumns * kPanelColumns * t.rank + c % kPanelColumns;
        store(panel + r * kPanelColumns, load_some<T>(from + c * t.b_row_stride, t.b_row_stride, columns - c));
      }
    }
    return;
  }
  for (int64_t c = 0; c < columns; c += kLanes) {
    float* panel = to + c / kPanelColumns * kPanelColumns * t.rank + c % kPanelColumns;
    for (int64_t r = 0; r < t.rank; r += kLanes) {
      V b[kLanes];
      load_some_columns<T>(t, h + c, r, columns - c, t.rank - r, b);
      const int64_t ranks = smaller(kLanes, t.rank - r);
      for (int64_t j = 0; j < ranks; ++j) store(panel + (r + j) * kPanelColumns, b[j]);
    }
  }
}

template <class T, int M, int N, bool kWhole>
inline void expand_tile(const ExpandTask& t, int64_t first_row, const float* b, int64_t column) {
  const float* z = t.z + first_row * t.z_row_stride;
  V d[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) d[m][n] = zero();
  }
  for (int64_t r = 0; r < t.rank; ++r, b += kPanelColumns) {
    V bv[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) bv[n] = load(b + n * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const V zv = broadcast(z[m * t.z_row_stride + r]);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) d[m][n] = fma(zv, bv[n], d[m][n]);
    }
  }
  finish<T, M, N, kWhole>(t, t.rows + first_row, column, d);
}

template <class T, int M>
inline void expand_rows(int64_t m, const ExpandTask& t, int64_t first_row, const float* b, int64_t h, int64_t columns) {
  if (m != M) {
    if constexpr (M > 1) expand_rows<T, M - 1>(m, t, first_row, b, h, columns);
    return;
  }
  int64_t c = 0;
  if (t.y_column_stride == static_cast<int64_t>(sizeof(T))) {
    for (; c + kPanelColumns <= columns; c += kPanelColumns) {
      expand_tile<T, M, kTileVectors, true>(t, first_row, b + c * t.rank, h + c);
    }
  }
  for (; c < columns; c += kLanes) {
    const float* panel = b + c / kPanelColumns * kPanelColumns * t.rank + c % kPanelColumns;
    expand_tile<T, M, 1, false>(t, first_row, panel, h + c);
  }
}

template <class T>
void expand(ExpandTask& t) {
  t.ran = kName;
  if (t.row_count <= kTileRows) {
    expand_few<T, kTileRows>(t.row_count, t);
    return;
  }
  const int64_t most = expand_block_columns(t.rank);
  for (int64_t h = t.h_begin; h < t.h_end; h += most) {
    const int64_t columns = smaller(most, t.h_end - h);
    transpose<T>(t, h, columns, t.scratch);
    for (int64_t i = 0; i < t.row_count; i += kTileRows) {
      expand_rows<T, kTileRows>(smaller(kTileRows, t.row_count - i), t, i, t.scratch, h, columns);
    }
  }
}

// ---- ceilings: what this set can do at most, for the benchmark -------------------------------------------------

// steps * kTileSums * kLanes multiply-adds, in chains that do not wait for each other.
void multiply_add(int64_t steps, float* result) {
  const V x = load(result);
  V sum[kTileSums];
#pragma GCC unroll 32
  for (int i = 0; i < kTileSums; ++i) sum[i] = broadcast(static_cast<float>(i));
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 32
    for (int i = 0; i < kTileSums; ++i) sum[i] = fma(x, x, sum[i]);
  }
  V all = zero();
#pragma GCC unroll 32
  for (int i = 0; i < kTileSums; ++i) all = fma(x, sum[i], all);
  store(result, all);
}

// Reads count floats, a multiple of 64.
void read(const float* data, int64_t count, float* result) {
  V sum[4] = {zero(), zero(), zero(), zero()};
  const V one = broadcast(1.0f);
  for (int64_t i = 0; i < count; i += 4 * kLanes) {
    for (int64_t j = 0; j < 4; ++j) sum[j] = fma(one, load(data + i + j * kLanes), sum[j]);
  }
  store(result, fma(one, fma(one, sum[0], sum[1]), fma(one, sum[2], sum[3])));
}
