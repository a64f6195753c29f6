// Causal Eq. 2 with a window: what the forward and the backward pass share.
//
//   Y_t = sum_{t' <= t} exp(K_t' + w_tt') V_t' / sum_{t' <= t} exp(K_t' + w_tt'),    times sigmoid(Q_t)
//
// element-wise in the features. w_tt' is a table for the last `window` keys, t' included. Keys before them ("far" keys)
// have w = 0, or are hidden, or w decays with the distance; their sums are running sums.
//
// exp(K) is kept as m 2^n (`split_exp`). A chunk of tokens first takes one exponent for all: the largest n of a key
// that any of its queries may see. All terms are then scaled by 2^-n, and the sums are plain products. Where a
// denominator is too small to be exact (SMALLEST), its tile of queries is computed again with an exponent for each
// query. That costs about twice the time, and only for this tile and this vector of features.
#pragma once

#include <vector>

#include "columns.h"

namespace aft {

constexpr int CHUNK = 64;             // queries per chunk
constexpr int PAD = TILE - 1;         // zeros on both sides of a row of weights

// All fields have 64 bits, so that Python can pack them. Rows of features are contiguous, other strides are free.
struct CausalProblem {
  int64_t is_bf16;  // query, key, value and result are bfloat16, otherwise float32
  int64_t batch, length, width, heads;
  int64_t key_width;                    // width, or heads for one key per head
  int64_t window;                       // s
  int64_t bias_batch, bias_rows;        // bias is (1 or B, 1 or more, h, s), float32, contiguous; its last key is the query's own
  int64_t hides_outside;                // whether keys before the window are hidden
  const void *query, *key, *value;      // (B, T, d), (B, T, d or h), (B, T, d); query may be null
  int64_t query_batch, query_row, key_batch, key_row, value_batch, value_row;  // strides
  const float *bias, *slopes;           // slopes: (h,) if far keys have w = -slope (t - t'); either may be null
  const int64_t* first;                 // (B, T), the first token that each token sees; after itself for padding; or null
  void* output;                         // (B, T, d), contiguous
  // The state before the first token and after the last one; null pointers without one.
  float *keys, *values;                 // (B, h, s - 1, 1 or c), (B, h, s - 1, c): the last tokens
  float *numerator, *denominator, *maximum;  // (B, h, c), (B, h, 1 or c) twice: far sums, divided by exp(maximum)
  // The backward pass.
  const void* gradient;                 // (B, T, d) of the output
  int64_t gradient_batch, gradient_row;
  void *query_gradient, *key_gradient, *value_gradient;  // contiguous
  float* bias_gradient;                 // filled with 0 by the caller; null if it is not needed

  int64_t numbers() const { return batch * length * width; }
  int64_t bias_row(int64_t row, int64_t head, int64_t position) const {  // index of a row of w
    int64_t first_row = bias_batch > 1 ? row * bias_rows : 0;
    return (first_row + std::min(position, bias_rows - 1)) * heads + head;
  }
};

// Columns with one head each come first to last; `per_head` is how many columns share a head (1 if they do not).
struct Columns {
  std::vector<Column> all;
  int64_t per_head = 1;

  explicit Columns(const CausalProblem& p) {
    const int64_t features = p.width / p.heads;
    const bool one_head = p.heads == 1 || features % VL == 0;
    for (int64_t first = 0; first < p.width; first += VL)
      all.push_back({first, int(std::min<int64_t>(VL, p.width - first)), one_head, first / features});
    if (one_head) per_head = (features + VL - 1) / VL;
  }
};

// The documents of a row: runs of tokens that see each other. Tokens outside of them are padding.
template <class Visit>
void for_each_document(const CausalProblem& p, int64_t row, const Visit& visit) {
  if (!p.first) return visit(int64_t(0), p.length);
  const int64_t* first = p.first + row * p.length;
  for (int64_t t = 0; t < p.length;) {
    const int64_t begin = t, seen = first[t];
    if (seen > t++) continue;
    while (t < p.length && first[t] == seen) ++t;
    visit(begin, t);
  }
}

// exp(w - M) for all queries, where M = M_t is a multiple of ln 2, at least the largest w of the query. Far keys, with
// w = 0, have the weight exp(-M).
class Weights {
 public:
  explicit Weights(const CausalProblem& p)
      : stride(p.window + 2 * PAD), table_(rows(p) * stride, 0.0f), far_(rows(p), 1.0f) {
    if (!p.bias) {
      table_[PAD] = 1.0f;  // one row: w = 0
      return;
    }
    parallel_for(rows(p), rows(p) * p.window * 8, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) fill(p, r);
    });
  }

  // The row begins with PAD zeros.
  const float* row(int64_t index) const { return &table_[index * stride]; }
  float far(int64_t index) const { return far_[index]; }

  const int64_t stride;

 private:
  static int64_t rows(const CausalProblem& p) { return p.bias ? p.bias_batch * p.bias_rows * p.heads : 1; }

  void fill(const CausalProblem& p, int64_t r) {
    const float* w = p.bias + r * p.window;
    float* weights = &table_[r * stride + PAD];
    float top = p.hides_outside ? -LARGEST : 0.0f;
    for (int64_t i = 0; i < p.window; ++i) top = std::max(top, std::min(w[i], LARGEST));
    const vf most = splat(std::nearbyint(top * LOG2_E));
    for (int64_t i = 0; i < p.window; i += VL) {
      const int count = int(std::min<int64_t>(VL, p.window - i));
      Scaled e = split_exp(load(w + i, count));
      store(weights + i, scaled(e.m, e.n - most), count);
    }
    far_[r] = p.hides_outside ? 0.0f : scaled(splat(1.0f), -most)[0];
  }

  std::vector<float> table_, far_;
};

// Sums of exp(K + w) V and of exp(K + w), divided by 2^n.
struct Sums {
  vf numerator = vf{}, denominator = vf{}, n = splat(NEVER);

  void raise(vf exponent) {  // to at least n
    numerator = scaled(numerator, n - exponent);
    denominator = scaled(denominator, n - exponent);
    n = exponent;
  }
  void renormalize() {
    const vf exponent = exponent_of(denominator);
    raise(n + exponent);
  }
  vf average() const { return denominator == 0.0f ? vf{} : numerator / denominator; }
};

// One vector of features of one row: a buffer of keys and values, which holds the tokens of a chunk and, before them,
// the `reach` = window - 1 tokens that the first query of the chunk sees. Token i of the chunk is entry i + reach of
// the buffer; its window are the entries i .. i + reach; entry i - 1 is the last far one.
template <class S>
class CausalColumn {
 public:
  static int64_t vectors(const CausalProblem& p) {  // needed of the scratch memory
    return 5 * (CHUNK + p.window) + 2 * p.window + (CHUNK + 1) * (p.window + 2 * PAD);
  }

  CausalColumn(const CausalProblem& problem, const Weights& weights, int64_t row, Column column, Scratch scratch)
      : p(problem), at(column), reach(int(p.window) - 1), weights_(weights), row_(row) {
    const int64_t size = CHUNK + p.window;
    m = scratch.take(size), n = scratch.take(size), v = scratch.take(size);
    e = scratch.take(size), ev = scratch.take(size);
    query_m_ = scratch.take(p.window), query_n_ = scratch.take(p.window);
    lanes_ = scratch.take((CHUNK + 1) * weights.stride);
    if (p.slopes) {
      vf lost = splat(1.0f);
      for (int i = 0; i < at.count; ++i) {
        const double slope = p.slopes[head(i)];
        decay[i] = float(std::exp(-slope));
        lost[i] = float(std::exp(-slope * CHUNK) / std::pow(double(decay[i]), CHUNK));
      }
      correction_ = lost;
    }
  }

  int64_t head(int lane) const { return at.one_head ? at.head : (at.first + lane) / (p.width / p.heads); }

  // --------------------------------------------------------------------------------------------------- the buffer

  void hide(int from, int to) {
    for (int i = from; i < to; ++i) put(i, {vf{}, splat(NEVER)}, vf{});
  }

  void put(int i, Scaled key, vf value) {
    store(m + i * VL, key.m);
    store(n + i * VL, key.n);
    store(v + i * VL, key.m == 0.0f ? vf{} : value);  // hidden values may be NaN
  }

  // Reads tokens of the row into the buffer, from entry i on.
  void read(int64_t token, int count, int i) {
    const S* key = (const S*)p.key + row_ * p.key_batch + token * p.key_row;
    const S* value = (const S*)p.value + row_ * p.value_batch + token * p.value_row + at.first;
    for (; count > 0; --count, ++i, key += p.key_row, value += p.value_row)
      put(i, split_exp(key_of(key)), load(value, at.count));
  }

  vf key_of(const S* keys) const {
    if (p.key_width == p.width) return load(keys + at.first, at.count);
    if (at.one_head) return splat(to_float(keys[at.head]));
    vf x = {};
    for (int i = 0; i < at.count; ++i) x[i] = to_float(keys[head(i)]);
    return x;
  }

  // Moves the last `reach` of the tokens to the front.
  void advance(int count) {
    for (float* x : {m, n, v}) memmove(x, x + count * VL, reach * VL * sizeof(float));
  }

  // Gives the entries 0 .. reach + count - 1 and the far sums one exponent, `top`. Values count from `center`. Returns
  // whether all numbers are finite; otherwise the products of the fast way could spread NaN to queries that do not see
  // it.
  bool take_one_exponent(int count, vf center = vf{}) {
    top = far.n;
    for (int i = 0; i < reach + count; ++i) top = max(top, load(n + i * VL));
    vf not_finite = {};
    for (int i = 0; i < reach + count; ++i) {
      vf weight = load(m + i * VL), value = load(v + i * VL);
      not_finite += (weight + value) * 0.0f;
      weight = scaled(weight, load(n + i * VL) - top);
      store(e + i * VL, weight);
      store(ev + i * VL, weight * (value - center));
    }
    plain_ = {scaled(far.numerator, far.n - top), scaled(far.denominator, far.n - top), top};
    taken_in_ = 0;
    return !any(not_finite != 0.0f);
  }

  // ------------------------------------------------------------------------------------------------ weights of a chunk

  // Prepares the weights of the queries at positions first .. first + count - 1 of a document.
  void use_weights(int64_t first, int count) {
    position_ = first;
    if (at.one_head) {
      for (int i = 0; i < count; ++i) rows_[i] = weights_.row(bias_row(i, 0));
      return;
    }
    const int64_t size = weights_.stride * VL;
    const int different = p.bias && p.bias_rows > 1 ? count : 1;
    for (int i = 0; i < different; ++i)
      for (int lane = 0; lane < VL; ++lane) {
        const float* row = weights_.row(bias_row(i, std::min(lane, at.count - 1)));
        for (int64_t j = 0; j < weights_.stride; ++j) lanes_[i * size + j * VL + lane] = row[j];
      }
    for (int i = 0; i < count; ++i) rows_[i] = lanes_ + (different > 1 ? i * size : 0);
  }

  int64_t bias_row(int i, int lane) const {
    return p.bias ? p.bias_row(row_, head(lane), position_ + i) : 0;
  }

  vf far_weight(int i) const {
    if (at.one_head) return splat(weights_.far(bias_row(i, 0)));
    vf x = {};
    for (int lane = 0; lane < at.count; ++lane) x[lane] = weights_.far(bias_row(i, lane));
    return x;
  }

  // exp(w - M) of a query of the chunk for entry j of its window, -PAD <= j < window + PAD.
  const float* weights_of(int i) const { return rows_[i]; }

  template <bool ONE_HEAD>
  static vf weight(const float* row, int64_t j) {
    return ONE_HEAD ? splat(row[PAD + j]) : load(row + (PAD + j) * VL);
  }

  // ------------------------------------------------------------------------------------------------------------- sums

  // The sums of the queries i .. i + Q - 1 of the chunk, divided by exp(M) 2^top.
  template <int Q, bool ONE_HEAD>
  void plain_sums(int i, vf* numerator, vf* denominator) {
    const float* rows[Q];
    for (int u = 0; u < Q; ++u) {
      rows[u] = rows_[i + u];
      const vf own = far_weight(i + u);
      numerator[u] = plain_.numerator * own;
      denominator[u] = plain_.denominator * own;
      if (!p.hides_outside) {
        plain_.numerator = (plain_.numerator + load(ev + (i + u) * VL)) * decay;
        plain_.denominator = (plain_.denominator + load(e + (i + u) * VL)) * decay;
      }
    }
    if (reach == 0) {
      for (int u = 0; u < Q; ++u) {
        numerator[u] += weight<ONE_HEAD>(rows[u], 0) * load(ev + (i + u) * VL);
        denominator[u] += weight<ONE_HEAD>(rows[u], 0) * load(e + (i + u) * VL);
      }
      return;
    }
    for (int entry = i; entry < i + Q + reach; ++entry) {
      const vf weight_of_key = load(e + entry * VL), product = load(ev + entry * VL);
#pragma GCC unroll 8
      for (int u = 0; u < Q; ++u) {
        const vf w = weight<ONE_HEAD>(rows[u], entry - i - u);
        numerator[u] += w * product;
        denominator[u] += w * weight_of_key;
      }
    }
  }

  // The sums of query i of the chunk, with an exponent of its own. Queries are given in increasing order.
  Sums careful_sums(int i, vf center = vf{}) {
    take_in(i, center);
    split_weights(i);
    Sums sums = far;
    vf most = far.n;
    for (int j = 0; j <= reach; ++j) most = max(most, load(n + (i + j) * VL) + of_query(query_n_, j));
    sums.raise(most);
    for (int j = 0; j <= reach; ++j) {
      const vf weight = careful_weight(i, j, most);
      sums.numerator += weight * (load(v + (i + j) * VL) - center);
      sums.denominator += weight;
    }
    return sums;
  }

  // exp(K + w) 2^-n of entry i + j for query i, after `careful_sums` of that query.
  vf careful_weight(int i, int j, vf exponent) const {
    const vf mantissa = load(m + (i + j) * VL) * of_query(query_m_, j);
    return scaled(mantissa, load(n + (i + j) * VL) + of_query(query_n_, j) - exponent);
  }

  // Adds the entries up to `end` to the far sums, after those that were added before.
  void take_in(int end, vf center = vf{}) {
    if (p.hides_outside || taken_in_ >= end) return;
    vf most = far.n;
    for (int i = taken_in_; i < end; ++i) most = max(most, load(n + i * VL));
    far.raise(most);
    for (; taken_in_ < end; ++taken_in_) {
      const vf weight = scaled(load(m + taken_in_ * VL), load(n + taken_in_ * VL) - most);
      far.numerator = (far.numerator + weight * (load(v + taken_in_ * VL) - center)) * decay;
      far.denominator = (far.denominator + weight) * decay;
    }
  }

  // Sets the far sums to those of the next chunk. They may use the plain ones if all queries of the chunk went through
  // `plain_sums`.
  void end_chunk(int count, bool may_use_plain) {
    if (p.hides_outside) return;
    if (may_use_plain && !any(plain_.denominator < SMALLEST))
      far = plain_;
    else
      take_in(count);
    finish_far(count);
  }

  void finish_far(int count) {
    if (p.slopes && count == CHUNK) far.numerator *= correction_, far.denominator *= correction_;
    far.renormalize();
    taken_in_ = 0;
  }

  const CausalProblem& p;
  const Column at;
  const int reach;
  vf decay = splat(1.0f);  // exp(-slope)
  vf top;                  // the exponent of the chunk
  Sums far;                // of the keys before the window of the first query of the chunk
  float *m, *n, *v;        // exp(K) = m 2^n, and V
  float *e, *ev;           // exp(K) 2^-top, and its product with V
  vf correction() const { return correction_; }

 private:
  // Splits exp(w) of query i into mantissas and exponents: one number for each key, or a vector if lanes differ.
  void split_weights(int i) {
    if (!p.bias) {
      store(query_m_, splat(1.0f)), store(query_n_, vf{});
    } else if (at.one_head) {
      const float* w = p.bias + bias_row(i, 0) * p.window;
      for (int j = 0; j <= reach; j += VL) split_weights(j, load(w + j, std::min(VL, reach + 1 - j)));
    } else {
      for (int j = 0; j <= reach; ++j) {
        vf w = {};
        for (int lane = 0; lane < at.count; ++lane) w[lane] = p.bias[bias_row(i, lane) * p.window + j];
        split_weights(j * VL, w);
      }
    }
  }

  void split_weights(int place, vf w) {
    const Scaled weight = split_exp(w);
    store(query_m_ + place, weight.m), store(query_n_ + place, weight.n);
  }

  vf of_query(const float* numbers, int j) const { return at.one_head ? splat(numbers[j]) : load(numbers + j * VL); }

  const Weights& weights_;
  const int64_t row_;
  vf correction_ = splat(1.0f);  // exp(-slope CHUNK) divided by the rounded decay to the power of CHUNK
  Sums plain_;
  int taken_in_ = 0;
  int64_t position_ = 0;
  float *query_m_, *query_n_, *lanes_;
  const float* rows_[CHUNK + 2 * PAD];
};

}  // namespace aft
