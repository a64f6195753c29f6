// The problems that Python passes, sums of Eq. 2, and vectors of features: their heads, and memory for them.
#pragma once

#include <memory>
#include <utility>

#include "parallel.h"
#include "vec.h"

namespace aft {

// Sums with a smaller denominator are computed again: terms below 2^-126 are lost, so 2^-34 of such a denominator each.
constexpr float SMALLEST = 0x1p-92f;

// All fields of problems have 64 bits, so that Python can pack them. Features are contiguous, other strides are free.
struct Problem {  // what problems of Eq. 2 have in common
  int64_t is_bf16;                    // query, key, value, output and their gradients are bfloat16, otherwise float32
  int64_t batch, length;              // B, T
  int64_t width, heads, key_width;    // d, h, and d, or h for one key per head
  const void *query, *key, *value;    // (B, T, d), (B, T, d or h), (B, T, d); query may be null
  int64_t query_batch, query_row, key_batch, key_row, value_batch, value_row;  // strides
  const float* bias;                  // w, contiguous
  void* output;                       // (B, T, d), contiguous
  // The backward pass.
  const void* gradient;               // (B, T, d) of the output
  int64_t gradient_batch, gradient_row;
  void *query_gradient, *key_gradient, *value_gradient;  // contiguous
  float* bias_gradient;               // filled with 0 by the caller; null if it is not needed

  int64_t numbers() const { return batch * length * width; }
  int64_t features() const { return width / heads; }  // of a head
  bool key_per_head() const { return key_width != width; }
};

struct TableProblem : Problem {
  int64_t causal;  // whether a query sees only t' <= t

  int64_t seen(int64_t t) const { return causal ? t + 1 : length; }
};

struct GridProblem : Problem {
  int64_t rows, columns;
  int64_t kernel_rows, kernel_columns;  // odd; `bias` is (h, kernel_rows, kernel_columns)
  int64_t hides_outside;

  int64_t taps() const { return kernel_rows * kernel_columns; }
};

struct BandProblem {  // of band.cpp
  int64_t is_bf16;  // u and v are bfloat16, otherwise float32
  int64_t heads, positions, features;
  int64_t start, length, window;  // the first token, T, s
  const void *query, *key;        // u and v, (h, positions, features)
  int64_t query_head, query_row, key_head, key_row;  // strides
  float* band;                            // w or its gradient, (T, h, s)
  void *query_gradient, *key_gradient;    // contiguous

  bool holds(int64_t query, int64_t key) const {
    return start <= query && query < start + length && key <= query && query < key + window;
  }
  int64_t place(int64_t head, int64_t query, int64_t key) const {
    return ((query - start) * heads + head) * window + window - 1 + key - query;
  }
};

// Sums of exp(K + w) V and of exp(K + w), divided by 2^n.
struct Sums {
  vf numerator = vf{}, denominator = vf{}, n = splat(NEVER);

  void take_exponent(vf exponent) {
    numerator = scaled(numerator, n - exponent);
    denominator = scaled(denominator, n - exponent);
    n = exponent;
  }
  void add(Sums other) {
    const vf most = max(n, other.n);
    take_exponent(most), other.take_exponent(most);
    numerator += other.numerator, denominator += other.denominator;
  }
  vf average() const { return denominator == 0.0f ? vf{} : numerator / denominator; }
  void divide(Scaled growth) {
    numerator /= growth.m, denominator /= growth.m, n -= growth.n;
  }
  void renormalize(vf size) { take_exponent(n + exponent_of(size)); }
};

// Adds what `each_key` visits, as visit(exp(K + w), V, ...), to sums, with an exponent of their own.
template <class EachKey>
Sums careful_sums(Sums sums, const EachKey& each_key) {
  vf most = sums.n;
  each_key([&](Scaled e, vf, auto...) { most = max(e.n, most); });
  sums.take_exponent(most);
  each_key([&](Scaled e, vf value, auto...) {
    const vf weight = scaled(e.m, e.n - most);
    sums.numerator += weight * value;
    sums.denominator += weight;
  });
  return sums;
}

// Tokens to prefetch: the features of a column are far apart in memory.
constexpr int64_t AHEAD = 16;

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
