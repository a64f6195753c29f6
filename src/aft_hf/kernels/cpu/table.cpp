// Eq. 2 with a table of all pairs, forward and backward (see table.h).
#include "table.h"

#include <memory>
#include <map>
#include <mutex>
#include <type_traits>
#include <vector>

namespace aft {
namespace {

constexpr float SMALLEST = 0x1p-64f;  // terms below 2^-126 are lost, so 2^-62 of such a denominator each

// ----------------------------------------------------------------------------------------------- parts of vectors

#if defined(__AVX512BW__) && defined(__AVX512VL__)
static inline vf load_part(const float* p, int count) {
  if (count == VL) return load(p);  // is faster after a store
  return (vf)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p);
}
static inline vf load_part(const bf16* p, int count) {
  if (count == VL) return load(p);
  const __m256i x = _mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1), p);
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
}
static inline void store_part(float* p, vf x, int count) {
  if (count == VL) return store(p, x);
  _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), (__m512)x);
}
static inline void store_part(bf16* p, vf x, int count) {
  if (count == VL) return store(p, x);
  bf16 all[VL];
  store(all, x);
  _mm256_mask_storeu_epi16(p, __mmask16((1u << count) - 1), _mm256_loadu_si256((const __m256i*)all));
}
#else
template <class S>
static inline vf load_part(const S* p, int count) {
  return load(p, count);
}
template <class S>
static inline void store_part(S* p, vf x, int count) {
  store(p, x, count);
}
#endif

// Whether a lane is one of the first `count`.
static inline vi within(int count) {
  vi lanes;
  for (int i = 0; i < VL; ++i) lanes[i] = i;
  return lanes < count;
}

static inline void set(float* p, float x) { *p = x; }
static inline void set(bf16* p, float x) { store(p, splat(x), 1); }

// The exponent n of exp(x), where x is a maximum; NEVER if it is -inf.
static inline vf exponent_of_exp(vf x) {
  const vf n = rounded((x > LARGEST ? splat(LARGEST) : x < -LARGEST ? splat(-LARGEST) : x) * LOG2_E);
  return x < -1e30f ? splat(NEVER) : n;
}

// -------------------------------------------------------------------------------------------------------- geometry

// A head, and some rows of the batch and some of its features; all features, if the head has one key.
struct Geometry : TableProblem {
  Geometry(const TableProblem& problem, int64_t head, int64_t row, int64_t rows, int64_t feature, int64_t features)
      : TableProblem(problem), of_head(width / heads), one_key(key_width != width || of_head == 1),
        grid_rows(columns ? keys / columns : 0), head(head), row(row), rows(rows), feature(feature), c(features),
        k(one_key ? 1 : c), vectors((c + VL - 1) / VL), size(c + k) {}

  const int64_t of_head;   // features of the head
  const bool one_key;      // for all features of the head
  const int64_t grid_rows;
  const int64_t head, row, rows, feature;
  const int64_t c, k;      // features and keys of a row
  const int64_t vectors;   // of features
  const int64_t size;      // c + k, the numbers of a row in X

  int count(int64_t vector) const { return int(std::min<int64_t>(VL, c - vector * VL)); }

  // The features of token t in row b of tensors (B, T, d).
  template <class S>
  S* at(void* x, int64_t b, int64_t t, int64_t length) const {
    return (S*)x + ((row + b) * length + t) * width + head * of_head + feature;
  }
  template <class S>
  const S* at(const void* x, int64_t b, int64_t t, int64_t batch_stride, int64_t row_stride) const {
    return (const S*)x + (row + b) * batch_stride + t * row_stride + head * of_head + feature;
  }
  template <class S>
  const S* query_at(int64_t b, int64_t t) const { return at<S>(query, b, t, query_batch, query_row); }
  template <class S>
  const S* value_at(int64_t b, int64_t t) const { return at<S>(value, b, t, value_batch, value_row); }
  template <class S>
  const S* gradient_at(int64_t b, int64_t t) const { return at<S>(gradient, b, t, gradient_batch, gradient_row); }
  template <class S>
  const S* key_at(int64_t b, int64_t t) const {
    return (const S*)key + (row + b) * key_batch + t * key_row + (one_key ? head : head * of_head + feature);
  }
  template <class S>
  S* key_gradient_at(int64_t b, int64_t t) const {
    return (S*)key_gradient + ((row + b) * keys + t) * key_width + (one_key ? head : head * of_head + feature);
  }
  int64_t seen(int64_t t) const { return causal ? t + 1 : keys; }
  int64_t biases_of_head() const { return columns ? (2 * grid_rows - 1) * (2 * columns - 1) : queries * keys; }

  // Visits the biases of a query: run(first key, biases, count) for each contiguous run.
  template <class T, class Run>
  void for_each_run(T* of_head, int64_t t, const Run& run) const {
    if (!columns) return run(int64_t(0), of_head + t * keys, seen(t));
    const int64_t r = t / columns, column = t % columns, across = 2 * columns - 1;
    T* first = of_head + (grid_rows - 1 - r) * across + columns - 1 - column;
    for (int64_t i = 0; i < grid_rows; ++i) run(i * columns, first + i * across, columns);
  }
};

// --------------------------------------------------------------------------------------------------------------- W

// exp(x - shift), 0 beyond `count` entries.
static void write_exps(const float* x, float shift, int64_t count, float* out) {
  for (int64_t j = 0; j < count; j += VL) {
    const int part = int(std::min<int64_t>(VL, count - j));
    store_part(out + j, exp(load_part(x + j, part) - shift), part);
  }
}

static float largest(const float* x, int64_t count) {
  vf most = splat(-INFINITY);
  for (int64_t j = 0; j < count; j += VL) {
    const int part = int(std::min<int64_t>(VL, count - j));
    const vf some = load_part(x + j, part);
    most = max(part == VL ? some : within(part) ? some : splat(-INFINITY), most);
  }
  float top = -INFINITY;
  for (int lane = 0; lane < VL; ++lane) top = std::max(top, float(most[lane]));
  return top < -1e30f ? 0.0f : std::min(top, LARGEST);
}

// W = exp(w - M_t) of a head, (queries, stride): M_t is the largest bias of the query, or of the head on a grid.
template <class P>
void write_weights(const Geometry& g, int64_t stride, P* weights) {
  const float* biases = g.bias + g.head * g.biases_of_head();
  std::vector<float> exps(g.columns ? g.biases_of_head() : 0);
  if (g.columns) write_exps(biases, largest(biases, exps.size()), exps.size(), exps.data());
  parallel_for(g.queries, g.queries * g.keys, [&](int64_t begin, int64_t end) {
    const FlushSubnormals flush;
    std::vector<float> row(stride);
    for (int64_t t = begin; t < end; ++t) {
      float* out = std::is_same<P, float>::value ? (float*)weights + t * stride : row.data();
      const int64_t seen = g.seen(t);
      if (g.columns)
        g.for_each_run(exps.data(), t, [&](int64_t key, const float* run, int64_t count) {
          memcpy(out + key, run, count * sizeof(float));
        });
      else
        write_exps(biases + t * g.keys, largest(biases + t * g.keys, seen), seen, out);
      std::fill(out + seen, out + stride, 0.0f);
      if (!std::is_same<P, float>::value)
        for (int64_t j = 0; j < stride; j += VL) store(weights + t * stride + j, load(out + j));
    }
  });
}

// ----------------------------------------------------------------------------------------------------- the product

// Register tiles of TILE_Q rows by TILE_V vectors.
#if defined(__AVX512F__)
constexpr int TILE_Q = 12, TILE_V = 2;
#elif defined(__AVX2__)
constexpr int TILE_Q = 6, TILE_V = 2;
#else
constexpr int TILE_Q = 6, TILE_V = 4;
#endif

// A matrix of floats: entry (i, j) is data[i row + j column].
struct Matrix {
  const float* data;
  int64_t row, column;
};

// out[q] (+)= sum_j a(q, j) b[j], for Q rows and V vectors.
template <int Q, int V>
void tile(Matrix a, const float* b, int64_t b_row, int64_t count, float* out, int64_t out_row, bool add) {
  vf sums[Q][V] = {};
  const float* weights = a.data;
  for (int64_t j = 0; j < count; ++j, weights += a.column, b += b_row) {
    vf numbers[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) numbers[v] = load(b + v * VL);
#pragma GCC unroll 16
    for (int q = 0; q < Q; ++q) {
      const vf weight = splat(weights[q * a.row]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[q][v] += weight * numbers[v];
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) {
      float* to = out + q * out_row + v * VL;
      store(to, add ? load(to) + sums[q][v] : sums[q][v]);
    }
}

template <int V>
void tiles(Matrix a, int64_t rows, const float* b, int64_t b_row, int64_t count, float* out, int64_t out_row,
           bool add) {
  int64_t q = 0;
  auto next = [&](int64_t done) { q += done, a.data += done * a.row, out += done * out_row; };
  for (; q + TILE_Q <= rows; next(TILE_Q)) tile<TILE_Q, V>(a, b, b_row, count, out, out_row, add);
  for (; q + 3 <= rows; next(3)) tile<3, V>(a, b, b_row, count, out, out_row, add);
  for (; q < rows; next(1)) tile<1, V>(a, b, b_row, count, out, out_row, add);
}

// out (rows, width) (+)= a (rows, count) b (count, width), where the width is a multiple of VL.
void product(Matrix a, int64_t rows, const float* b, int64_t b_row, int64_t count, int64_t width, float* out,
             int64_t out_row, bool add = false) {
  int64_t f = 0;
  for (; f + TILE_V * VL <= width; f += TILE_V * VL) tiles<TILE_V>(a, rows, b + f, b_row, count, out + f, out_row, add);
  for (; f < width; f += VL) tiles<1>(a, rows, b + f, b_row, count, out + f, out_row, add);
}

// ------------------------------------------------------------------------------------- the product in bfloat16

// With AVX512-BF16, one instruction multiplies pairs of bfloat16 numbers and adds the products to float32 sums. The
// rows of b are interleaved in pairs.
#if defined(__AVX512F__)
#define AFT_HALF __attribute__((target("avx512bf16")))

static bool has_half_products() { return __builtin_cpu_supports("avx512bf16"); }

template <int Q, int V>
AFT_HALF void half_tile(const bf16* a, int64_t a_row, const bf16* b, int64_t b_row, int64_t pairs, float* out,
                        int64_t out_row) {
  __m512 sums[Q][V];
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) sums[q][v] = _mm512_setzero_ps();
  for (int64_t j = 0; j < pairs; ++j, a += 2, b += b_row) {
    __m512i numbers[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) numbers[v] = _mm512_loadu_si512(b + v * 2 * VL);
#pragma GCC unroll 16
    for (int q = 0; q < Q; ++q) {
      int32_t pair;
      memcpy(&pair, a + q * a_row, sizeof pair);
      const __m512bh weights = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[q][v] = _mm512_dpbf16_ps(sums[q][v], weights, (__m512bh)numbers[v]);
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(out + q * out_row + v * VL, sums[q][v]);
}

template <int V>
void half_tiles(const bf16* a, int64_t a_row, int64_t rows, const bf16* b, int64_t b_row, int64_t pairs, float* out,
                int64_t out_row) {
  int64_t q = 0;
  auto next = [&](int64_t done) { q += done, a += done * a_row, out += done * out_row; };
  for (; q + TILE_Q <= rows; next(TILE_Q)) half_tile<TILE_Q, V>(a, a_row, b, b_row, pairs, out, out_row);
  for (; q < rows; next(1)) half_tile<1, V>(a, a_row, b, b_row, pairs, out, out_row);
}

// out (rows, width) = a (rows, 2 pairs) b (2 pairs, width).
static void half_product(const bf16* a, int64_t a_row, int64_t rows, const bf16* b, int64_t b_row, int64_t pairs,
                         int64_t width, float* out, int64_t out_row) {
  int64_t f = 0;
  for (; f + TILE_V * VL <= width; f += TILE_V * VL)
    half_tiles<TILE_V>(a, a_row, rows, b + 2 * f, b_row, pairs, out + f, out_row);
  for (; f < width; f += VL) half_tiles<1>(a, a_row, rows, b + 2 * f, b_row, pairs, out + f, out_row);
}

// Two rows of numbers, rounded to bfloat16 and interleaved.
static void interleave(const float* even, const float* odd, int64_t width, bf16* out) {
  auto bits = [](vf x) { return ((vu)x + 0x7fff + (((vu)x >> 16) & 1)); };
  for (int64_t f = 0; f < width; f += VL) {
    const vf x = load(even + f), y = odd ? load(odd + f) : vf{};
    const vu low = x == x ? bits(x) >> 16 : vu{} + 0x7fc0, high = y == y ? bits(y) & 0xffff0000 : vu{} + 0x7fc00000;
    const vu pair = low | high;
    memcpy((void*)(out + 2 * f), &pair, sizeof pair);
  }
}
#else
static bool has_half_products() { return false; }
static void half_product(const bf16*, int64_t, int64_t, const bf16*, int64_t, int64_t, int64_t, float*, int64_t) {}
static void interleave(const float*, const float*, int64_t, bf16*) {}
#endif

// ------------------------------------------------------------------------------------------------------ lost queries

// exp(w) of one query as m 2^n.
struct Row {
  std::vector<float> w, m, n;
  int64_t query = -1;

  void split(const Geometry& g, int64_t t) {
    if (t == query) return;
    query = t;
    for (auto* x : {&w, &m, &n}) x->resize(g.keys + VL);
    g.for_each_run(g.bias + g.head * g.biases_of_head(), t, [&](int64_t key, const float* run, int64_t count) {
      memcpy(&w[key], run, count * sizeof(float));
    });
    for (int64_t j = 0; j < g.seen(t); j += VL) {
      const Scaled e = split_exp(load(&w[j]));
      store(&m[j], e.m), store(&n[j], e.n);
    }
  }
};

// One vector of features of a row: exp(K) as m 2^n, and V' of all keys.
struct Column {
  std::vector<float> m, n, v;

  template <class S>
  void read(const Geometry& g, int64_t b, int64_t vector, const float* center) {
    for (auto* x : {&m, &n, &v}) x->resize(g.keys * VL);
    const int part = g.count(vector);
    const vf origin = center ? load_part(center + b * g.c + vector * VL, part) : vf{};
    for (int64_t t = 0; t < g.keys; ++t) {
      const S* keys = g.key_at<S>(b, t);
      const Scaled key = split_exp(g.one_key ? splat(to_float(*keys)) : load_part(keys + vector * VL, part));
      store(&m[t * VL], key.m), store(&n[t * VL], key.n);
      const vf value = load_part(g.value_at<S>(b, t) + vector * VL, part);
      store(&v[t * VL], key.m == 0.0f ? vf{} : value - origin);
    }
  }

  // The largest exponent of K + w among the keys that the query sees.
  vf most(const Row& row, int64_t seen) const {
    vf most = splat(NEVER);
    for (int64_t j = 0; j < seen; ++j) most = max(load(&n[j * VL]) + row.n[j], most);
    return most;
  }
  vf weight(const Row& row, int64_t j, vf most) const {
    return scaled(load(&m[j * VL]) * row.m[j], load(&n[j * VL]) + row.n[j] - most);
  }

  // Eq. 2 of one query, and its denominator divided by 2^most.
  vf average(const Row& row, int64_t seen, vf most, vf* sum) const {
    vf numerator = {}, denominator = {};
    for (int64_t j = 0; j < seen; ++j) {
      if (row.m[j] == 0.0f) continue;  // hidden from this query; it may be NaN
      const vf e = weight(row, j, most);
      numerator += e * load(&v[j * VL]);
      denominator += e;
    }
    *sum = denominator;
    return denominator == 0.0f ? vf{} : numerator / denominator;
  }
};

// ------------------------------------------------------------------------------------------------------------- tasks

constexpr int64_t BLOCK = 2 * TILE_Q;        // queries whose sums are computed before they are used
constexpr int64_t CAUSAL_BLOCK = 144;        // queries that share exponents
constexpr int64_t MOST_NUMBERS = 256;        // in a row of X, if a head has one key
constexpr int64_t FEWEST_HALF = 128;         // keys of a product in bfloat16: with fewer, roundings do not average out
constexpr int64_t CACHE = 1 << 20;           // floats of W that are computed at once

static int64_t whole_vectors(int64_t count) { return (count + VL - 1) / VL * VL; }

// How the rows of the batch and the features of a head are divided.
struct Division {
  explicit Division(const TableProblem& p) {
    const Geometry g(p, 0, 0, 1, 0, 1);
    features = g.one_key ? g.of_head : std::min<int64_t>(g.of_head, VL * TILE_V / 2);
    rows = g.one_key ? std::max<int64_t>(1, std::min(p.batch, MOST_NUMBERS / (g.of_head + 1))) : 1;
    of_features = (g.of_head + features - 1) / features;
    of_rows = (p.batch + rows - 1) / rows;
    stride = whole_vectors(rows * (features + (g.one_key ? 1 : features)));
  }
  int64_t tasks() const { return of_features * of_rows; }  // of a head
  Geometry task(const TableProblem& p, int64_t head, int64_t index) const {
    const int64_t row = index % of_rows * rows, feature = index / of_rows * features;
    return Geometry(p, head, row, std::min(rows, p.batch - row), feature,
                    std::min(features, p.width / p.heads - feature));
  }
  int64_t features, rows, of_features, of_rows, stride;
};

// The sums of one vector of features of a query, and whether they are wrong.
struct Exact {
  vf numerator, denominator;
  bool lost;
};

// The memory of a thread.
struct Memory {
  Memory(const TableProblem& p, const Division& division, bool backward, bool half)
      : blocks(p.causal ? (p.queries + CAUSAL_BLOCK - 1) / CAUSAL_BLOCK : 1),
        exponents_of_block(division.rows * division.features), x(p.keys * division.stride),
        sums((backward ? p.queries : BLOCK) * division.stride), exponents(blocks * exponents_of_block + VL),
        key_m(division.rows + VL), key_e(division.rows + VL) {
    if (half) x_pairs.resize((p.keys + 1) / 2 * 2 * division.stride);
    if (!backward) return;
    center.resize(exponents_of_block), of_x.resize(BLOCK * division.stride);
    lost.resize(p.queries * division.rows * ((division.features + VL - 1) / VL));
    if (!p.bias_gradient) return;
    of_weights.resize(p.queries * whole_vectors(p.keys)), x_columns.resize(division.stride * whole_vectors(p.keys));
  }
  int64_t blocks, exponents_of_block;
  std::vector<float> x, sums, exponents, key_m, key_e, center, of_x, of_weights, of_lost, x_columns;
  std::vector<bf16> x_pairs;
  std::vector<uint8_t> lost;
  Column column;
};

// Rows of a task are far apart in memory, which CPUs do not predict well.
constexpr int64_t AHEAD = 4;

template <class S>
static inline void prefetch(const S* x, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(S)) __builtin_prefetch(x + i);
  __builtin_prefetch(x + count - 1);
}

// One task: the passes over X and the sums. Keys and queries are those of a block, first .. last - 1, where they are
// not given.
template <class S>
class Task {
 public:
  // `half_weights` is null for products in float32.
  Task(const Geometry& geometry, const float* weights, const bf16* half_weights, int64_t weights_row, int64_t stride,
       Memory& memory)
      : g(geometry), weights_(weights), half_weights_(half_weights), weights_row_(weights_row), stride_(stride),
        width_(whole_vectors(g.rows * g.size)), memory_(memory),
        center_(memory.center.empty() ? nullptr : memory.center.data()) {}

  void forward() {
    for (int64_t block = 0; block < memory_.blocks; ++block) {
      use_block(block);
      find_exponents(block);
      write_features();
      for (int64_t t = 0; half_weights_ && t < keys_end(); t += 2)
        interleave(x_of(0, t), t + 1 < keys_end() ? x_of(0, t + 1) : nullptr, width_, &memory_.x_pairs[t * stride_]);
      for (int64_t t = first_; t < last_; t += BLOCK) {
        const int64_t end = std::min(t + BLOCK, last_);
        for (int64_t b = 0; b < g.rows; ++b)
          for (int64_t query = t; query < end; ++query) {
            if (g.query) prefetch(g.query_at<S>(b, query), g.c);
            prefetch(g.template at<S>(g.output, b, query, g.queries), g.c);
          }
        multiply(t, end, memory_.sums.data());
        sums_first_ = t;
        for (int64_t b = 0; b < g.rows; ++b) write_output(b, t, end);
      }
    }
  }

  // Adds the gradient of W to `of_weights` of the memory, and the gradients of the biases from lost queries to those of
  // the problem.
  void backward() {
    for (int64_t b = 0; b < g.rows; ++b) find_center(b);
    std::fill(memory_.lost.begin(), memory_.lost.end(), 0);
    for (int64_t block = 0; block < memory_.blocks; ++block) {
      use_block(block);
      find_exponents(block);
      write_features();
      multiply(first_, last_, sums_of(0, first_));
      for (int64_t b = 0; b < g.rows; ++b) write_gradients_of_sums(b);
    }
    for (int64_t block = memory_.blocks - 1; block >= 0; --block) {
      use_block(block);
      if (block < memory_.blocks - 1) {
        for (int64_t b = 0; b < g.rows; ++b)
            rescale(g.queries - last_, sums_of(b, last_), exponents(block, b), exponents(block + 1, b));
        write_features();
      }
      const int64_t end = g.causal ? last_ : g.keys;
      for (int64_t t = first_; t < end; t += BLOCK) {
        const int64_t count = std::min(BLOCK, end - t);
        product({weights_ + first_ * weights_row_ + t, 1, weights_row_}, count, sums_of(0, first_), stride_,
                g.queries - first_, width_, memory_.of_x.data(), stride_);
        for (int64_t b = 0; b < g.rows; ++b) write_gradients(b, t, t + count);
      }
      if (g.bias_gradient) add_gradient_of_weights(first_, end);
    }
    add_gradients_of_lost();
  }

 private:
  void use_block(int64_t block) {
    block_ = block;
    first_ = block * CAUSAL_BLOCK;
    last_ = g.causal ? std::min(first_ + CAUSAL_BLOCK, g.queries) : g.queries;
  }
  int64_t keys_end() const { return g.causal ? last_ : g.keys; }
  float* exponents(int64_t block, int64_t b) const {
    return &memory_.exponents[block * memory_.exponents_of_block + b * g.k];
  }
  float* x_of(int64_t b, int64_t t) const { return &memory_.x[t * stride_ + b * g.size]; }
  float* sums_of(int64_t b, int64_t t) const { return &memory_.sums[(t - sums_first_) * stride_ + b * g.size]; }
  uint8_t* lost_of(int64_t b, int64_t vector) const { return &memory_.lost[(b * g.vectors + vector) * g.queries]; }

  // The sums of the queries from .. to - 1.
  void multiply(int64_t from, int64_t to, float* sums) const {
    if (half_weights_)
      return half_product(half_weights_ + from * weights_row_, weights_row_, to - from, memory_.x_pairs.data(),
                          2 * stride_, ((g.causal ? to : g.keys) + 1) / 2, width_, sums, stride_);
    product({weights_ + from * weights_row_, weights_row_, 1}, to - from, memory_.x.data(), stride_,
            g.causal ? to : g.keys, width_, sums, stride_);
  }

  // ------------------------------------------------------------------------------------------------------------- X

  // The exponents N of a block. X of earlier keys takes them, too.
  void find_exponents(int64_t block) const {
    for (int64_t b = 0; b < g.rows; ++b) {
      const float* before = block ? exponents(block - 1, b) : nullptr;
      for (int64_t f = 0; f < g.k; f += VL) {
        const int part = int(std::min<int64_t>(VL, g.k - f));
        vf top = splat(-INFINITY);
        for (int64_t t = first_; t < keys_end(); ++t) top = max(load_part(g.key_at<S>(b, t) + f, part), top);
        const vf n = exponent_of_exp(top);
        store_part(exponents(block, b) + f, before ? max(n, load_part(before + f, part)) : n, part);
      }
      if (before) rescale(first_, x_of(b, 0), before, exponents(block, b));
    }
  }

  // Multiplies rows of X or of sums by 2^(before - after).
  void rescale(int64_t count, float* x, const float* before, const float* after) const {
    for (int64_t f = 0; f < g.k; f += VL) {
      const int part = int(std::min<int64_t>(VL, g.k - f));
      const vf by = g.one_key ? splat(*before - *after) : load_part(before + f, part) - load_part(after + f, part);
      if (!any(by != 0.0f)) continue;
      auto scale = [&](float* at, int count) { store_part(at, scaled(load_part(at, count), by), count); };
      for (int64_t t = 0; t < count; ++t) {
        float* at = x + t * stride_;
        if (g.one_key) {
          for (int64_t j = 0; j < g.size; j += VL) scale(at + j, int(std::min<int64_t>(VL, g.size - j)));
        } else {
          scale(at + f, part), scale(at + g.c + f, part);
        }
      }
    }
  }

  // exp(K) as the product reads it, so that numerators and denominators have the same weights.
  vf stored(vf e) const {
    if (!half_weights_) return e;
    bf16 half[VL];
    store(half, e);
    return load(half);
  }

  // X of the keys of the block.
  void write_features() {
    for (int64_t t = first_; t < keys_end(); ++t) {
      if (g.one_key) write_exps_of_keys(t);
      for (int64_t b = 0; b < g.rows; ++b) {
        const S *key = g.key_at<S>(b, t), *value = g.value_at<S>(b, t);
        if (t + AHEAD < keys_end()) prefetch(key + AHEAD * g.key_row, g.k), prefetch(value + AHEAD * g.value_row, g.c);
        float* x = x_of(b, t);
        const float one_m = g.one_key ? memory_.key_m[b] : 0.0f, one_e = g.one_key ? memory_.key_e[b] : 0.0f;
        for (int64_t f = 0; f < g.c; f += VL) {
          const int part = int(std::min<int64_t>(VL, g.c - f));
          vf m = splat(one_m), e = splat(one_e), v = load_part(value + f, part);
          if (!g.one_key) {
            const Scaled own = split_exp(load_part(key + f, part));
            m = own.m, e = stored(scaled(own.m, own.n - load_part(exponents(block_, b) + f, part)));
            store_part(x + g.c + f, e, part);
          }
          if (center_) v -= load_part(center_ + b * g.c + f, part);
          store_part(x + f, m == 0.0f ? vf{} : e * v, part);  // hidden values may be NaN
        }
        if (g.one_key) x[g.c] = one_e;
      }
    }
  }

  // exp(K) of a token in all rows, if a head has one key, and its mantissas.
  void write_exps_of_keys(int64_t t) {
    for (int64_t b = 0; b < g.rows; b += VL) {
      vf key = splat(-INFINITY);
      for (int lane = 0; lane < std::min<int64_t>(VL, g.rows - b); ++lane)
        key[lane] = to_float(*g.key_at<S>(b + lane, t));
      const Scaled own = split_exp(key);
      store(&memory_.key_m[b], own.m);
      store(&memory_.key_e[b], stored(scaled(own.m, own.n - load(exponents(block_, b)))));
    }
  }

  // The center from which values of a row count: the first value of a causal row, which all queries see, or else the
  // mean. 0 where it is not finite, or the token is hidden.
  void find_center(int64_t b) const {
    const int64_t count = g.causal ? 1 : g.keys;
    for (int64_t f = 0; f < g.c; f += VL) {
      const int part = int(std::min<int64_t>(VL, g.c - f));
      vf sum = {}, seen = {};
      for (int64_t t = 0; t < count; ++t) {
        const S* keys = g.key_at<S>(b, t);
        const vf key = g.one_key ? splat(to_float(*keys)) : load_part(keys + f, part);
        sum = key > -1e30f ? sum + load_part(g.value_at<S>(b, t) + f, part) : sum;
        seen = key > -1e30f ? seen + 1.0f : seen;
      }
      const vf center = sum / max(seen, splat(1.0f));
      store_part(&memory_.center[b * g.c + f], center - center == 0.0f ? center : vf{}, part);
    }
  }

  // ---------------------------------------------------------------------------------------------------------- sums

  Exact exact_sums(const float* sums, int64_t b, int64_t vector) const {
    const int part = g.count(vector);
    const vf numerator = load_part(sums + vector * VL, part);
    const vf denominator = g.one_key ? splat(sums[g.c]) : load_part(sums + g.c + vector * VL, part);
    const vi right = (denominator >= SMALLEST) & (numerator - numerator == 0.0f);
    const vi wrong = ~right & within(part);
    if (!any(wrong)) return {numerator, denominator, false};
    // 0 is right where all keys are hidden.
    const float* n = exponents(block_, b);
    const vi empty = (g.one_key ? splat(*n) : load_part(n + vector * VL, part)) <= NEVER;
    return {empty ? vf{} : numerator, empty ? splat(INFINITY) : denominator, any(wrong & ~empty)};
  }

  vf lost_average(int64_t b, int64_t t, int64_t vector) {
    if (b != column_row_ || vector != column_vector_) {
      memory_.column.read<S>(g, b, vector, center_);
      column_row_ = b, column_vector_ = vector;
    }
    row_.split(g, t);
    vf sum;
    return memory_.column.average(row_, g.seen(t), memory_.column.most(row_, g.seen(t)), &sum);
  }

  // Divides and gates the sums of the queries begin .. end - 1.
  void write_output(int64_t b, int64_t begin, int64_t end) {
    for (int64_t vector = 0; vector < g.vectors; ++vector) {
      const int part = g.count(vector);
      for (int64_t t = begin; t < end; ++t) {
        Exact sums = exact_sums(sums_of(b, t), b, vector);
        if (sums.lost) sums = {lost_average(b, t, vector), splat(1.0f), false};
        if (g.query)  // sigmoid(q) = 1 / (1 + exp(-q))
          sums.denominator *= 1.0f + exp(min(splat(60.0f), -load_part(g.query_at<S>(b, t) + vector * VL, part)));
        store_part(g.template at<S>(g.output, b, t, g.queries) + vector * VL, sums.numerator / sums.denominator, part);
      }
    }
  }

  // ----------------------------------------------------------------------------------------------------- gradients

  // Multiplies the gradient of an output by the gate, which is the gradient of its average y, and writes the gradient
  // of the query.
  vf gradient_of_average(int64_t b, int64_t t, int64_t f, int part, vf y) const {
    const vf gradient = load_part(g.gradient_at<S>(b, t) + f, part);
    if (!g.query) return gradient;
    const vf gate = sigmoid(load_part(g.query_at<S>(b, t) + f, part));
    store_part(g.template at<S>(g.query_gradient, b, t, g.queries) + f, gradient * y * gate * (1.0f - gate), part);
    return gradient * gate;
  }

  // With y = numerator / denominator and the gradient g of y, the gradients of the sums are
  //   of the numerator  a = g / denominator,    of the denominator  -a y  (summed over the features that share a key).
  // They replace the sums of the queries of the block. Lost queries get 0 and are marked.
  void write_gradients_of_sums(int64_t b) const {
    for (int64_t t = first_; t < last_; ++t) {
      float* sums = sums_of(b, t);
      vf of_denominator = {};
      for (int64_t vector = 0; vector < g.vectors; ++vector) {
        const int part = g.count(vector);
        const int64_t f = vector * VL;
        const Exact exact = exact_sums(sums, b, vector);
        lost_of(b, vector)[t] = exact.lost;
        vf a = {}, of_sum = {};
        if (!exact.lost) {
          const vf y = exact.numerator / exact.denominator;
          a = gradient_of_average(b, t, f, part, y + load_part(center_ + b * g.c + f, part)) / exact.denominator;
          of_sum = -a * y;
        }
        if (g.one_key)
          of_denominator += part == VL ? of_sum : within(part) ? of_sum : vf{};
        else
          store_part(sums + g.c + f, of_sum, part);
        store_part(sums + f, a, part);
      }
      if (g.one_key) sums[g.c] = sum_of(of_denominator);
    }
  }

  // The gradients of V and K of the keys begin .. end - 1, from those of X = (E V', E):
  //   dV = E dX_1,    dK = E V' dX_1 + E dX_2.
  void write_gradients(int64_t b, int64_t begin, int64_t end) const {
    for (int64_t t = begin; t < end; ++t) {
      const float *x = x_of(b, t), *of_x = &memory_.of_x[(t - begin) * stride_ + b * g.size];
      S *of_value = g.template at<S>(g.value_gradient, b, t, g.keys), *of_key = g.template key_gradient_at<S>(b, t);
      vf sum = {};
      for (int64_t f = 0; f < g.c; f += VL) {
        const int part = int(std::min<int64_t>(VL, g.c - f));
        const vf e = g.one_key ? splat(x[g.c]) : load_part(x + g.c + f, part), of_product = load_part(of_x + f, part);
        const vf from_value = load_part(x + f, part) * of_product;
        store_part(of_value + f, e == 0.0f ? vf{} : e * of_product, part);
        if (g.one_key)
          sum += from_value;
        else
          store_part(of_key + f, e == 0.0f ? vf{} : from_value + e * load_part(of_x + g.c + f, part), part);
      }
      if (g.one_key) set(of_key, x[g.c] == 0.0f ? 0.0f : sum_of(sum) + x[g.c] * of_x[g.c]);
    }
  }

  // dW += (gradients of sums) X^T, for the keys begin .. end - 1 and all queries that see them.
  void add_gradient_of_weights(int64_t begin, int64_t end) const {
    const int64_t width = whole_vectors(end - begin), count = g.rows * g.size;
    float* columns = memory_.x_columns.data();
    for (int64_t j = 0; j < width; j += VL)
      for (int64_t f = 0; f < count; ++f) {
        vf keys = {};
        const int part = int(std::min<int64_t>(VL, end - begin - j));
        for (int lane = 0; lane < part; ++lane) keys[lane] = memory_.x[(begin + j + lane) * stride_ + f];
        store(columns + f * width + j, keys);
      }
    product({sums_of(0, first_), stride_, 1}, g.queries - first_, columns, width, count, width,
            &memory_.of_weights[first_ * whole_vectors(g.keys) + begin], whole_vectors(g.keys), true);
  }

  // Adds the gradients from lost queries, with p_t' = exp(K_t' + w_tt') / denominator:
  //   dV_t' += p_t' g,    dK_t' and dw_tt' += p_t' g (V_t' - Y).
  void add_gradients_of_lost() {
    std::vector<float> of_value, of_key, of_bias(g.keys);
    Column& column = memory_.column;
    for (int64_t b = 0; b < g.rows; ++b)
      for (int64_t vector = 0; vector < g.vectors; ++vector) {
        const uint8_t* lost = lost_of(b, vector);
        if (!memchr(lost, 1, g.queries)) continue;
        const int part = g.count(vector);
        const int64_t f = vector * VL;
        column.read<S>(g, b, vector, center_);
        of_value.assign(g.keys * VL, 0.0f), of_key.assign(g.keys * VL, 0.0f);
        for (int64_t t = 0; t < g.queries; ++t) {
          if (!lost[t]) continue;
          row_.split(g, t);
          const int64_t seen = g.seen(t);
          const vf most = column.most(row_, seen);
          vf sum;
          const vf y = column.average(row_, seen, most, &sum), center = load_part(center_ + b * g.c + f, part);
          vf gradient = gradient_of_average(b, t, f, part, sum == 0.0f ? vf{} : y + center);
          gradient = sum == 0.0f ? vf{} : gradient / sum;
          for (int64_t j = 0; j < seen; ++j) {
            of_bias[j] = 0.0f;
            if (row_.m[j] == 0.0f) continue;
            const vf from_value = column.weight(row_, j, most) * gradient;
            const vf from_key = from_value * (load(&column.v[j * VL]) - y);
            store(&of_value[j * VL], load(&of_value[j * VL]) + from_value);
            store(&of_key[j * VL], load(&of_key[j * VL]) + from_key);
            if (g.bias_gradient) of_bias[j] = sum_of(from_key);
          }
          if (!g.bias_gradient) continue;
          memory_.of_lost.resize(memory_.of_weights.size());
          float* to = &memory_.of_lost[t * whole_vectors(g.keys)];
          for (int64_t j = 0; j < seen; ++j) to[j] += of_bias[j];
        }
        for (int64_t t = 0; t < g.keys; ++t) {
          S *value = g.template at<S>(g.value_gradient, b, t, g.keys) + f, *key = g.template key_gradient_at<S>(b, t);
          store_part(value, load_part(value, part) + load(&of_value[t * VL]), part);
          if (g.one_key)
            set(key, to_float(*key) + sum_of(load(&of_key[t * VL])));
          else
            store_part(key + f, load_part(key + f, part) + load(&of_key[t * VL]), part);
        }
      }
  }

  const Geometry g;
  const float* weights_;
  const bf16* half_weights_;
  const int64_t weights_row_, stride_, width_;
  Memory& memory_;
  const float* center_;  // null for 0
  int64_t block_ = 0, first_ = 0, last_ = 0, sums_first_ = 0;
  int64_t column_row_ = -1, column_vector_ = -1;
  Row row_;
};

// Adds a table of gradients of w, (T, whole vectors of keys), to the gradient of the biases of a head.
void add_gradient_of_biases(const Geometry& g, const std::vector<float>& table, int64_t row) {
  for (int64_t t = 0; t < g.queries; ++t)
    g.for_each_run(g.bias_gradient + g.head * g.biases_of_head(), t, [&](int64_t key, float* sum, int64_t count) {
      for (int64_t j = 0; j < count; ++j) sum[j] += table[t * row + key + j];
    });
}

// The table of gradients of w: dW W, with 0 where W = 0, which hides a key from a query, and those from lost queries.
std::vector<float> take_gradient_of_table(Memory& memory, const float* weights) {
  std::vector<float> table(memory.of_weights.size());
  for (size_t i = 0; i < table.size(); ++i) table[i] = weights[i] == 0.0f ? 0.0f : weights[i] * memory.of_weights[i];
  for (size_t i = 0; i < memory.of_lost.size(); ++i) table[i] += memory.of_lost[i];
  std::fill(memory.of_weights.begin(), memory.of_weights.end(), 0.0f);
  memory.of_lost.clear();
  return table;
}

// Computes all tasks, for as many heads at once as the cache holds W of.
template <class S>
void run(const TableProblem& p, bool backward) {
  const Division division(p);
  const int64_t row = whole_vectors(p.keys), table = p.queries * row, of_head = division.tasks();
  const int64_t numbers = p.batch * p.queries * p.width * 8;
  const int64_t at_once = std::min(p.heads, std::max(CACHE / table, num_threads(numbers)));
  const bool half = p.is_bf16 && !backward && p.keys >= FEWEST_HALF && has_half_products();
  std::unique_ptr<float[]> weights(half ? nullptr : new float[at_once * table]);
  std::unique_ptr<bf16[]> half_weights(half ? new bf16[at_once * table] : nullptr);
  for (int64_t head = 0; head < p.heads; head += at_once) {
    const int64_t heads = std::min(at_once, p.heads - head);
    for (int64_t i = 0; i < heads; ++i)
      if (half)
        write_weights(division.task(p, head + i, 0), row, &half_weights[i * table]);
      else
        write_weights(division.task(p, head + i, 0), row, &weights[i * table]);
    // Of the heads whose tasks several threads share, by head and first task. They are added in this order, so that the
    // result depends on the number of threads only.
    std::map<std::pair<int64_t, int64_t>, std::vector<float>> shared;
    std::mutex lock_of_shared;
    parallel_for(heads * of_head, numbers, [&](int64_t begin, int64_t end) {
      const FlushSubnormals flush;
      Memory memory(p, division, backward, half);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t i = task / of_head;
        const Geometry g = division.task(p, head + i, task % of_head);
        const float* of_head_weights = half ? nullptr : &weights[i * table];
        Task<S> own(g, of_head_weights, half ? &half_weights[i * table] : nullptr, row, division.stride, memory);
        if (!backward) {
          own.forward();
          continue;
        }
        own.backward();
        if (!p.bias_gradient || (task + 1 < end && (task + 1) % of_head)) continue;
        std::vector<float> of_table = take_gradient_of_table(memory, of_head_weights);
        if (begin <= i * of_head && end >= (i + 1) * of_head) {
          add_gradient_of_biases(g, of_table, row);
        } else {
          const std::lock_guard<std::mutex> lock(lock_of_shared);
          shared[{i, begin}] = std::move(of_table);
        }
      }
    });
    for (const auto& [place, of_table] : shared)
      add_gradient_of_biases(division.task(p, head + place.first, 0), of_table, row);
  }
}

}  // namespace
}  // namespace aft

AFT_EXPORT void aft_table(const aft::TableProblem* p) {
  p->is_bf16 ? aft::run<aft::bf16>(*p, false) : aft::run<float>(*p, false);
}

AFT_EXPORT void aft_table_backward(const aft::TableProblem* p) {
  p->is_bf16 ? aft::run<aft::bf16>(*p, true) : aft::run<float>(*p, true);
}
