// The problems that Python passes, sums of Eq. 2, and vectors of features: their heads, and memory for them.
#pragma once

#include <memory>
#include <utility>

#include "parallel.h"
#include "vec.h"

namespace aft {

// Sums with a smaller denominator are computed again: terms below 2^-126 are lost, so 2^-34 of such a denominator each.
constexpr float SMALLEST = 0x1p-92f;

// All fields of problems have 64 bits, so that Python can pack them.
struct Tensor {  // features are contiguous
  const void* data;
  int64_t batch, row;  // strides
};

struct Problem {  // what problems of Eq. 2 have in common
  int64_t is_bf16;                    // query, key, value, output and their gradients are bfloat16, otherwise float32
  int64_t batch, length;              // B, T
  int64_t width, heads, key_width;    // d, h, and d, or h for one key per head
  Tensor query, key, value;           // (B, T, d), (B, T, d or h), (B, T, d); query may be null
  const float* bias;                  // w, contiguous
  void* output;                       // (B, T, d), contiguous
  // The backward pass.
  Tensor gradient;                    // (B, T, d) of the output; null in the forward pass
  void *query_gradient, *key_gradient, *value_gradient;  // contiguous
  float* bias_gradient;               // filled with 0 by the caller; null if it is not needed

  int64_t numbers() const { return batch * length * width; }
  int64_t features() const { return width / heads; }  // of a head
  int64_t place(int64_t row, int64_t token, int64_t feature) const { return (row * length + token) * width + feature; }
  bool key_per_head() const { return key_width != width; }
  bool is_backward() const { return gradient.data; }
};

struct TableProblem : Problem {
  int64_t causal;  // whether a query sees only t' <= t

  int64_t seen(int64_t t) const { return causal ? t + 1 : length; }
};

struct GridProblem : Problem {
  int64_t rows, columns;
  int64_t kernel_rows, kernel_columns;  // odd; `bias` is (h, kernel_rows, kernel_columns)
  int64_t global_connectivity;

  int64_t taps() const { return kernel_rows * kernel_columns; }
};

struct BandProblem {  // of band.cpp
  int64_t is_bf16;  // u and v are bfloat16, otherwise float32
  int64_t heads, positions, features;
  int64_t start, length, window;  // the first token, T, s
  Tensor query, key;              // u and v, (h, positions, features)
  float* band;                            // w or its gradient, (T, h, s)
  void *query_gradient, *key_gradient;    // contiguous

  bool holds(int64_t query, int64_t key) const {
    return start <= query && query < start + length && key <= query && query < key + window;
  }
  int64_t place(int64_t head, int64_t query, int64_t key) const {
    return ((query - start) * heads + head) * window + window - 1 + key - query;
  }
};

// Adds a term to a sum by compensated summation (Kahan, 1965): rounding errors do not grow with the number of terms.
static inline void add_exactly(vf& sum, vf& error, vf x) {
  const vf term = x + error, next = sum + term;
  error = term - (next - sum);
  error = error == error ? error : vf{};  // infinite values stay infinite
  sum = next;
}

// Sums of exp(K + w) V and of exp(K + w), divided by 2^n. `add` keeps their rounding errors.
struct Sums {
  vf numerator = vf{}, denominator = vf{}, n = splat(NEVER);
  vf numerator_error = vf{}, denominator_error = vf{};

  void take_exponent(vf exponent) {
    for (vf* x : {&numerator, &denominator, &numerator_error, &denominator_error}) *x = scaled(*x, n - exponent);
    n = exponent;
  }
  void add(Sums other) {
    const vf most = max(n, other.n);
    take_exponent(most), other.take_exponent(most);
    add_exactly(numerator, numerator_error, other.numerator);
    add_exactly(denominator, denominator_error, other.denominator);
  }
  vf divided(vf x) const { return denominator == 0.0f ? vf{} : x / denominator; }
  vf average() const { return divided(numerator); }
  void divide(Scaled growth) {
    for (vf* x : {&numerator, &denominator, &numerator_error, &denominator_error}) *x /= growth.m;
    n -= growth.n;
  }
  void renormalize(vf size) { take_exponent(n + exponent_of(size)); }
};

// Whether sums are not exact or not finite, so that they have to be computed again.
static inline vi are_lost(vf numerator, vf denominator) {
  return ~((denominator >= SMALLEST) & (numerator - numerator == 0.0f));
}

// Adds what `each_key` visits, as visit(exp(K + w), V, ...), to sums, with an exponent of their own. Hidden values may be
// NaN.
template <class EachKey>
Sums careful_sums(Sums sums, const EachKey& each_key) {
  vf most = sums.n;
  each_key([&](Scaled e, vf, auto...) { most = max(e.n, most); });
  sums.take_exponent(most);
  each_key([&](Scaled e, vf value, auto...) {
    const vf weight = scaled(e.m, e.n - most);
    sums.numerator += e.m == 0.0f ? vf{} : weight * value;
    sums.denominator += weight;
  });
  return sums;
}

// Tokens to prefetch: the same features of tokens are far apart in memory.
constexpr int64_t AHEAD = 16;

// Where the features of a token begin.
template <class S>
const S* token_at(const Tensor& x, int64_t batch, int64_t token, int64_t feature) {
  return (const S*)x.data + batch * x.batch + token * x.row + feature;
}

template <class S>
vf read_token(const Tensor& x, int64_t batch, int64_t token, int64_t feature, int count) {
  const S* from = token_at<S>(x, batch, token, feature);
  __builtin_prefetch(from + AHEAD * x.row);
  return load(from, count);
}

// Writes to a contiguous tensor (B, T, d).
template <class S>
void write_token(const Problem& p, void* x, int64_t place, vf y, int count) {
  S* to = (S*)x + place;
  __builtin_prefetch(to + AHEAD * p.width, 1);
  store(to, y, count);
}

// A vector of features.
struct Column {
  int64_t first;
  int count;
  bool one_head;  // whether all features belong to one position-bias head; otherwise each lane has its own weights
  int64_t head;
};

// Memory for vectors, aligned to a cache line. A copy hands out the same memory again from its start.
class Scratch {
 public:
  explicit Scratch(int64_t vectors)
      : memory_(new float[vectors * VL + 16]), next_((float*)(((uintptr_t)memory_.get() + 63) / 64 * 64)) {}
  explicit Scratch(float* memory) : next_(memory) {}
  float* take(int64_t vectors) { return std::exchange(next_, next_ + vectors * VL); }

 private:
  std::shared_ptr<float[]> memory_;
  float* next_;
};

}  // namespace aft
