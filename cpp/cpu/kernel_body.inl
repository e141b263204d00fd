// The two products, written once over the vector operations of an ISA file.
//
// An ISA file defines, before it includes this one and inside its anonymous namespace:
//   V                      a vector of 16 floats
//   zero() broadcast(f)    load(T*) store(T*, V) for float, Half and Bfloat
//   fma(a, b, c) mul(a, b) reduce(V): lanes l + (l+8), then +4, +2, +1
//   round_half(V)          to float16 and back
//   transpose_block(src, src_stride, dst, dst_stride): 16 x 16, converted to float
//   kTileRows, kTileSums   the register tile: most rows, most accumulators (vectors)
//   kName
//
// The order of operations of a result, which no tile size, thread count or kernel set may change:
//   z[r]   16 lanes, lane l sums x[16k + l] * a[r, 16k + l] over k in order by fused multiply-add, from zero; past
//          the end of H1 both factors are zero; then reduce()
//   d[h]   sums z[r] * b[h, r] over r in order by fused multiply-add, from zero
//   out    fma(scale, d, y), rounded once to the dtype; with device rounding each step rounded to float16 instead

constexpr int64_t kTileVectors = 4;  // vectors of columns in an expand tile, at most

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

// count elements as floats, zero up to the next multiple of 16.
template <class T>
inline void widen(const char* from, int64_t stride, int64_t count, float* to) {
  for (int64_t k = 0; k < count; k += kLanes) store(to + k, load_some<T>(from + k * stride, stride, count - k));
}

// ---- first product: shrink -------------------------------------------------------------------------------------

// sums[m][n] += x[m] * a[n], lane by lane, over `steps` vectors. TA is float where a was converted before.
template <class TA, int M, int N>
inline void shrink_tile(const float* x, const char* a, int64_t a_stride, int64_t steps, float* sums,
                        int64_t sums_stride) {
  V sum[M][N];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) sum[m][n] = load(sums + m * sums_stride + n * kLanes);
  }
  for (int64_t k = 0; k < steps; ++k) {
    V av[N];
    for (int n = 0; n < N; ++n) av[n] = load(reinterpret_cast<const TA*>(a + n * a_stride) + k * kLanes);
    for (int m = 0; m < M; ++m) {
      const V xv = load(x + m * kBlockK + k * kLanes);
      for (int n = 0; n < N; ++n) sum[m][n] = fma(xv, av[n], sum[m][n]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) store(sums + m * sums_stride + n * kLanes, sum[m][n]);
  }
}

// The ranks of a tile with M rows: as many as the registers hold.
template <int M>
constexpr int tile_ranks() {
  return kTileSums / M < 8 ? kTileSums / M : 8;
}

template <class TA, int M, int N>
inline void shrink_ranks(int64_t n, const float* x, const char* a, int64_t a_stride, int64_t steps, float* sums,
                         int64_t sums_stride) {
  if (n == N) {
    shrink_tile<TA, M, N>(x, a, a_stride, steps, sums, sums_stride);
  } else if constexpr (N > 1) {
    shrink_ranks<TA, M, N - 1>(n, x, a, a_stride, steps, sums, sums_stride);
  }
}

template <class TA, int M>
inline void shrink_rows(int64_t m, const float* x, const char* a, int64_t a_stride, int64_t ranks, int64_t steps,
                        float* sums, int64_t sums_stride) {
  if (m == M) {
    constexpr int64_t kRanks = tile_ranks<M>();
    for (int64_t r = 0; r < ranks; r += kRanks) {
      shrink_ranks<TA, M, static_cast<int>(kRanks)>(smaller(kRanks, ranks - r), x, a + r * a_stride, a_stride, steps,
                                                    sums + r * kLanes, sums_stride);
    }
  } else if constexpr (M > 1) {
    shrink_rows<TA, M - 1>(m, x, a, a_stride, ranks, steps, sums, sums_stride);
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
  const int64_t ranks = t.r_end - t.r_begin;
  const int64_t sums_stride = ranks * kLanes;
  float* const sums = t.scratch;
  float* const a_block = sums + kMaxTaskSums * kLanes;
  float* const x_block = a_block + kMaxTaskRanks * kBlockK;
  for (int64_t i = 0; i < t.row_count * sums_stride; i += kLanes) store(sums + i, zero());

  for (int64_t k = 0; k < t.h1; k += kBlockK) {
    const int64_t count = smaller(kBlockK, t.h1 - k);
    const int64_t steps = (count + kLanes - 1) / kLanes;
    const char* a = t.a + t.r_begin * t.a_row_stride + k * t.a_column_stride;
    // Weights that only one tile of rows reads are converted in registers.
    const bool direct = t.row_count <= kTileRows && t.a_column_stride == static_cast<int64_t>(sizeof(T)) &&
                        count % kLanes == 0;
    if (!direct) {
      for (int64_t r = 0; r < ranks; ++r) widen<T>(a + r * t.a_row_stride, t.a_column_stride, count, a_block + r * kBlockK);
    }
    for (int64_t i = 0; i < t.row_count; i += kTileRows) {
      const int64_t rows = smaller(kTileRows, t.row_count - i);
      for (int64_t m = 0; m < rows; ++m) {
        widen<T>(t.x + t.rows[i + m] * t.x_row_stride + k * t.x_column_stride, t.x_column_stride, count,
                 x_block + m * kBlockK);
      }
      float* tile_sums = sums + i * sums_stride;
      if (direct) {
        shrink_rows<T, kTileRows>(rows, x_block, a, t.a_row_stride, ranks, steps, tile_sums, sums_stride);
      } else {
        shrink_rows<float, kTileRows>(rows, x_block, reinterpret_cast<const char*>(a_block),
                                      kBlockK * static_cast<int64_t>(sizeof(float)), ranks, steps, tile_sums,
                                      sums_stride);
      }
    }
  }

  for (int64_t i = 0; i < t.row_count; ++i) {
    float* z = t.z + i * t.z_row_stride + t.r_begin;
    for (int64_t r = 0; r < ranks; ++r) z[r] = reduce(load(sums + i * sums_stride + r * kLanes));
    if (t.device_rounding) {
      for (int64_t r = 0; r < ranks; r += kLanes) {
        char* at = reinterpret_cast<char*>(z + r);
        store_some<float>(at, round_half(load_some<float>(at, sizeof(float), ranks - r)), ranks - r);
      }
    }
  }
}

// ---- second product: expand ------------------------------------------------------------------------------------

// to[r][c] = b[c][r] as floats, for `columns` columns; zero up to the next multiple of 16 columns.
template <class T>
inline void transpose(const ExpandTask& t, const char* b, int64_t columns, float* to) {
  if (t.b_columns != nullptr || t.b_row_stride == static_cast<int64_t>(sizeof(T))) {
    // Turned already: what lies side by side is wanted side by side.
    for (int64_t r = 0; r < t.rank; ++r) {
      const int64_t at = t.b_columns == nullptr ? r : t.b_columns[r];
      widen<T>(b + at * t.b_column_stride, t.b_row_stride, columns, to + r * kBlockColumns);
    }
    return;
  }
  for (int64_t c = 0; c < columns; c += kLanes) {
    for (int64_t r = 0; r < t.rank; r += kLanes) {
      const char* from = b + c * t.b_row_stride + r * t.b_column_stride;
      float* block = to + r * kBlockColumns + c;
      const int64_t ranks = smaller(kLanes, t.rank - r);
      if (ranks == kLanes && columns - c >= kLanes && t.b_column_stride == static_cast<int64_t>(sizeof(T))) {
        transpose_block(reinterpret_cast<const T*>(from), t.b_row_stride, block, kBlockColumns);
        continue;
      }
      for (int64_t i = 0; i < kLanes; ++i) {
        alignas(64) float row[kLanes] = {};
        if (c + i < columns) store(row, load_some<T>(from + i * t.b_row_stride, t.b_column_stride, ranks));
        for (int64_t j = 0; j < ranks; ++j) block[j * kBlockColumns + i] = row[j];
      }
    }
  }
}

template <class T>
inline V accumulate(const ExpandTask& t, V d, V scale, V y) {
  if (!t.device_rounding) return fma(scale, d, y);
  return fma(broadcast(1.0f), round_half(mul(round_half(d), scale)), y);
}

template <class T, int M, int N>
inline void expand_tile(const ExpandTask& t, int64_t first_row, const float* b, int64_t column, int64_t columns) {
  const float* z = t.z + first_row * t.z_row_stride;
  V d[M][N];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) d[m][n] = zero();
  }
  for (int64_t r = 0; r < t.rank; ++r) {
    V bv[N];
    for (int n = 0; n < N; ++n) bv[n] = load(b + r * kBlockColumns + n * kLanes);
    for (int m = 0; m < M; ++m) {
      const V zv = broadcast(z[m * t.z_row_stride + r]);
      for (int n = 0; n < N; ++n) d[m][n] = fma(zv, bv[n], d[m][n]);
    }
  }
  const V scale = t.device_rounding ? round_half(broadcast(t.scale)) : broadcast(t.scale);
  for (int m = 0; m < M; ++m) {
    const int64_t row = t.rows[first_row + m];
    const char* y = t.y + row * t.y_row_stride + column * t.y_column_stride;
    char* out = t.out + row * t.out_row_stride + column * static_cast<int64_t>(sizeof(T));
    for (int n = 0; n < N; ++n) {
      const int64_t left = columns - n * kLanes;
      const V yv = load_some<T>(y + n * kLanes * t.y_column_stride, t.y_column_stride, left);
      store_some<T>(out + n * kLanes * static_cast<int64_t>(sizeof(T)), accumulate<T>(t, d[m][n], scale, yv), left);
    }
  }
}

template <class T, int M, int N>
inline void expand_vectors(int64_t n, const ExpandTask& t, int64_t first_row, const float* b, int64_t column,
                           int64_t columns) {
  if (n == N) {
    expand_tile<T, M, N>(t, first_row, b, column, columns);
  } else if constexpr (N > 1) {
    expand_vectors<T, M, N - 1>(n, t, first_row, b, column, columns);
  }
}

template <class T, int M>
inline void expand_rows(int64_t m, const ExpandTask& t, int64_t first_row, const float* b, int64_t column,
                        int64_t columns) {
  if (m == M) {
    constexpr int64_t kVectors = kTileSums / M < kTileVectors ? kTileSums / M : kTileVectors;
    for (int64_t c = 0; c < columns; c += kVectors * kLanes) {
      const int64_t left = columns - c;
      expand_vectors<T, M, static_cast<int>(kVectors)>(smaller(kVectors, (left + kLanes - 1) / kLanes), t, first_row,
                                                       b + c, column + c, left);
    }
  } else if constexpr (M > 1) {
    expand_rows<T, M - 1>(m, t, first_row, b, column, columns);
  }
}

template <class T>
void expand(ExpandTask& t) {
  t.ran = kName;
  for (int64_t h = t.h_begin; h < t.h_end; h += kBlockColumns) {
    const int64_t columns = smaller(kBlockColumns, t.h_end - h);
    transpose<T>(t, t.b + h * t.b_row_stride, columns, t.scratch);
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
