// Eq. 2 with a table of all pairs, forward and backward:
//
//   Y_t = sum_t' exp(K_t' + w_tt') V_t' / sum_t' exp(K_t' + w_tt'),    times sigmoid(Q_t)
//
// element-wise in the features. exp(K) is kept as m 2^n (`split_exp`), and both sums are products of
//
//   W = exp(w - M_t)                              (queries, keys), for each head
//   X = (E V', E),  E = exp(K) 2^-N               (keys, features), for each task
//
// N is the largest n of a feature (a power of two, so scaling is exact), M_t the largest bias of a query. A task is one
// row of the batch, and so few features of a head that X stays in the cache. A query whose denominator is too small to
// be exact (SMALLEST), or whose sums are not finite, is "lost": it is computed again from its own logits, with an
// exponent of its own, for this query and one vector of features only.
//
// Queries are computed in blocks. A block of a causal problem sees the keys up to its end, and N is the largest n of
// these keys, so later keys do not matter. V' = V - c counts from a center c in the backward pass, where terms cancel
// otherwise. With AVX512-BF16, problems in bfloat16 multiply pairs of bfloat16 numbers and add to float32 sums.
#include <type_traits>
#include <utility>
#include <vector>

#include "problem.h"

namespace aft {
namespace {

constexpr int64_t BLOCK = 144, STEP = 24;        // queries of a causal problem
constexpr int64_t MOST_FEATURES = 2 * VL;        // of a task
constexpr float MARGIN = 8;                      // of N of a causal problem, so that X seldom changes
constexpr float MOST_GROWTH = 60;                // of N in a block of BLOCK queries
constexpr int64_t FEWEST_KEYS = 128;   // of products in bfloat16: with fewer, roundings do not average out
constexpr int64_t CACHE = 1 << 20;     // numbers of W that are computed at once

static int64_t whole(int64_t count) { return (count + VL - 1) / VL * VL; }

// ----------------------------------------------------------------------------------------------------- the product

// Register tiles of TILE_Q rows by TILE_V vectors.
#if defined(__AVX512F__)
constexpr int TILE_Q = 12, TILE_V = 2;
#elif defined(__AVX2__)
constexpr int TILE_Q = 6, TILE_V = 2;
#else
constexpr int TILE_Q = 6, TILE_V = 4;
#endif

// Products multiply units: floats, or pairs of bfloat16 numbers, which are two terms of a sum.
struct __attribute__((may_alias)) Pair {  // of rows of bfloat16 numbers
  bf16 first, second;
};

static inline vf multiply_add(float x, vf y, vf sum) { return sum + splat(x) * y; }

AFT_PAIRS static inline vf multiply_add(Pair x, vf y, vf sum) {
  return add_pairs((vf)(vi{} + __builtin_bit_cast(int32_t, x)), y, sum);
}

// Pairs of the numbers of two rows.
AFT_PAIRS static void interleave(const float* even, const float* odd, int64_t width, Pair* out) {
  for (int64_t f = 0; f < width; f += VL) {
    const vf pairs = pairs_of(load(even + f), load(odd + f));
    memcpy((void*)(out + f), &pairs, sizeof pairs);
  }
}

// A matrix of units: entry (i, j) is data[i row + j column].
template <class U>
struct Matrix {
  const U* data;
  int64_t row, column;
};

// out[q] (+)= sum_j a(q, j) b[j], for Q rows and V vectors.
template <int Q, int V, class U>
AFT_PAIRS void tile(Matrix<U> a, const U* b, int64_t b_row, int64_t count, float* out, int64_t out_row, bool add) {
  vf sums[Q][V] = {};
  const U* units = a.data;
  for (int64_t j = 0; j < count; ++j, units += a.column, b += b_row) {
    vf numbers[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) numbers[v] = load((const float*)(b + v * VL));
#pragma GCC unroll 16
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[q][v] = multiply_add(units[q * a.row], numbers[v], sums[q][v]);
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) {
      float* to = out + q * out_row + v * VL;
      store(to, add ? load(to) + sums[q][v] : sums[q][v]);
    }
}

template <int V, class U>
void tiles(Matrix<U> a, int64_t rows, const U* b, int64_t b_row, int64_t count, float* out, int64_t out_row, bool add) {
  int64_t q = 0;
  auto next = [&](int64_t done) { q += done, a.data += done * a.row, out += done * out_row; };
  for (; q + TILE_Q <= rows; next(TILE_Q)) tile<TILE_Q, V>(a, b, b_row, count, out, out_row, add);
  for (; q + 4 <= rows; next(4)) tile<4, V>(a, b, b_row, count, out, out_row, add);
  for (; q < rows; next(1)) tile<1, V>(a, b, b_row, count, out, out_row, add);
}

// out (rows, width) (+)= a (rows, count) b (count, width), where the width is a multiple of VL.
template <class U>
void product(Matrix<U> a, int64_t rows, const U* b, int64_t b_row, int64_t count, int64_t width, float* out,
             int64_t out_row, bool add) {
  int64_t f = 0;
  for (; f + TILE_V * VL <= width; f += TILE_V * VL) tiles<TILE_V>(a, rows, b + f, b_row, count, out + f, out_row, add);
  for (; f < width; f += VL) tiles<1>(a, rows, b + f, b_row, count, out + f, out_row, add);
}

// --------------------------------------------------------------------------------------------------------------- W

static float largest(const float* x, int64_t count) {
  float top = -INFINITY;
  for (int64_t j = 0; j < count; ++j) top = std::max(top, x[j]);
  return top < -1e30f ? 0.0f : std::min(top, LARGEST);
}

// W of one head: (queries, stride), and the pairs of neighbouring queries, which the backward pass multiplies.
template <class U>
struct Weights {
  static constexpr bool PAIRS = std::is_same<U, Pair>::value;
  using Number = std::conditional_t<PAIRS, bf16, float>;

  // Queries by keys, from a query on, and keys by queries, from an even query on.
  Matrix<U> from(int64_t t) const { return {(const U*)(rows + t * stride), stride / int64_t(1 + PAIRS), 1}; }
  Matrix<U> transposed(int64_t t, int64_t key) const {
    if constexpr (PAIRS) return {columns + t / 2 * stride + key, 1, stride};
    else return {rows + t * stride + key, 1, stride};
  }

  Number* rows;
  U* columns;
  int64_t stride;
};

// W of some heads in one piece of memory.
template <class U>
class WeightsOfHeads {
 public:
  WeightsOfHeads(const TableProblem& problem, int64_t heads)
      : p(problem), stride_(whole(p.length)), pairs_((p.length + 1) / 2), rows_(new Number[heads * 2 * pairs_ * stride_]),
        columns_(PAIRS && p.is_backward() ? new U[heads * pairs_ * stride_] : nullptr) {}

  Weights<U> operator[](int64_t i) const {
    return {&rows_[i * 2 * pairs_ * stride_], columns_ ? &columns_[i * pairs_ * stride_] : nullptr, stride_};
  }

  void compute(int64_t first, int64_t heads) {
    parallel_for(heads * pairs_, heads * p.length * p.length, [&](int64_t begin, int64_t end) {
      std::vector<float> numbers(stride_);
      for (int64_t pair = begin; pair < end; ++pair) {
        const float* biases = p.bias + (first + pair / pairs_) * p.length * p.length;
        Number* rows = &rows_[pair * 2 * stride_];
        for (int64_t i = 0, t = pair % pairs_ * 2; i < 2; ++i, ++t) {
          float* out = PAIRS ? numbers.data() : (float*)rows + i * stride_;
          const int64_t seen = t < p.length ? p.seen(t) : 0;
          if (seen) write_exps(biases + t * p.length, seen, out);
          std::fill(out + seen, out + stride_, 0.0f);
          for (int64_t j = 0; PAIRS && j < stride_; j += VL) store(rows + i * stride_ + j, load(out + j));
        }
        for (int64_t j = 0; columns_ && j < stride_; ++j) {
          Number* units = (Number*)&columns_[pair * stride_ + j];
          memcpy(units, rows + j, sizeof(Number)), memcpy(units + 1, rows + stride_ + j, sizeof(Number));
        }
      }
    });
  }

 private:
  static constexpr bool PAIRS = Weights<U>::PAIRS;
  using Number = typename Weights<U>::Number;

  // exp(x - the largest x).
  static void write_exps(const float* x, int64_t count, float* out) {
    const float top = largest(x, count);
    for (int64_t j = 0; j < count; j += VL) store(out + j, exp(load(x + j, part(count - j)) - top), part(count - j));
  }

  const TableProblem& p;
  const int64_t stride_, pairs_;
  const std::unique_ptr<Number[]> rows_;
  const std::unique_ptr<U[]> columns_;
};

// ------------------------------------------------------------------------------------------------------------- tasks

// One task after the other, in the memory of one thread. A row of a matrix has a number for each feature, or two.
template <class S, class U>
class Task {
 public:
  explicit Task(const TableProblem& problem)
      : p(problem), block_(p.causal ? std::min(BLOCK, p.length) : p.length),
        wide_(whole(std::min(p.features(), MOST_FEATURES))), stride_(2 * wide_), row_(whole(p.length)),
        m_(p.length * wide_), n_(m_), v_(m_), top_(wide_), center_(wide_), x_(p.length * stride_),
        sums_(block_ * stride_), query_(block_ * wide_) {
    if (PAIRS) pairs_.resize(units(p.length) * stride_);
    if (!p.is_backward()) return;
    gradient_.resize(query_.size()), of_x_.resize(x_.size()), of_v_.resize(m_.size()), of_key_.resize(m_.size());
    if (PAIRS) pairs_of_sums_.resize(units(block_) * stride_);
    if (!p.bias_gradient) return;
    of_weights_.resize(p.length * row_), transposed_.resize(stride_ / TERMS * row_);
    if (PAIRS) rounded_.resize(p.length * stride_);
  }

  void forward(const Weights<U>& weights, int64_t head, int64_t batch, int64_t feature) {
    begin(head, batch, feature);
    for_each_block(weights, [&](int64_t first, int64_t last, int64_t) {
      for (int64_t f = 0; f < wide_; f += VL)
        for (int64_t t = first; t < last; ++t) {
          float* to = &query_[(t - first) * wide_ + f];
          Average y = average(t - first, f);
          if (y.lost) y = {all_sums(t, f).average(), splat(1.0f), false};
          if (p.query.data) y.denominator *= 1.0f + exp(min(splat(60.0f), -load(to)));  // 1 / sigmoid(q)
          store(to, y.numerator / y.denominator);
        }
      write(query_.data(), p.output, first, last);
    });
  }

  // With y = numerator / denominator and the gradient g of y, the gradients of the sums are
  //   of the numerator  a = g / denominator,    of the denominator  b = -a y,
  // and with A = (a, b), those of X and W are  W^T A  and  A X^T.
  void backward(const Weights<U>& weights, int64_t head, int64_t batch, int64_t feature) {
    begin(head, batch, feature);
    for (auto* x : {&of_x_, &of_v_, &of_key_}) std::fill(x->begin(), x->end(), 0.0f);
    find_center();
    for_each_block(weights, [&](int64_t first, int64_t last, int64_t end) {
      read(p.gradient, first, last, gradient_.data());
      for (int64_t f = 0; f < wide_; f += VL)
        for (int64_t t = first; t < last; ++t) {
          const Average sums = average(t - first, f);
          const int64_t place = (t - first) * wide_ + f;
          vf a = {}, y = {};
          const vf query = p.query.data ? load(&query_[place]) : vf{}, gradient = load(&gradient_[place]);
          if (sums.lost || any((query - query != 0.0f) | (gradient - gradient != 0.0f))) {
            add_careful_gradients(t, f, place);
          } else {
            y = sums.numerator / sums.denominator;
            a = gradient_of_average(place, y + load(&center_[f])) / sums.denominator;
          }
          float* of_sums = &sums_[(t - first) * stride_ + f];
          store(of_sums, a), store(of_sums + wide_, -a * y);
        }
      if (p.query.data) write(query_.data(), p.query_gradient, first, last);
      multiply_gradients(weights, first, last, end);
    });
    add_gradients();
    write(of_v_.data(), p.value_gradient, 0, p.length);
    write(of_key_.data(), p.key_gradient, 0, p.length);
  }

  // The gradient of w, (T, whole vectors of keys), of all tasks since the last call: W dW, with 0 where W = 0, which
  // hides a key from a query, and the part of lost queries.
  std::vector<float> take_gradient_of_biases(const Weights<U>& weights) {
    of_lost_.resize(of_weights_.size());
    for (size_t i = 0; i < of_weights_.size(); ++i) {
      const float weight = to_float(weights.rows[i]);
      of_lost_[i] += weight == 0.0f ? 0.0f : weight * of_weights_[i];
    }
    std::fill(of_weights_.begin(), of_weights_.end(), 0.0f);
    return std::exchange(of_lost_, {});
  }

 private:
  static constexpr bool PAIRS = Weights<U>::PAIRS;
  static constexpr int64_t TERMS = 1 + PAIRS;
  static int64_t units(int64_t count) { return (count + TERMS - 1) / TERMS; }

  // ----------------------------------------------------------------------------------------------- tensors in memory

  // Copies tokens to rows of floats, with 0 behind them.
  void read(Tensor x, int64_t first, int64_t last, float* to) const {
    for (int64_t t = first; t < last; ++t, to += wide_)
      for (int64_t f = 0; f < wide_; f += VL)
        store(to + f, f < count_ ? read_token<S>(x, batch_, t, feature_ + f, part(count_ - f)) : vf{});
  }

  // Copies rows of floats to tokens.
  void write(const float* from, void* x, int64_t first, int64_t last) const {
    for (int64_t t = first; t < last; ++t, from += wide_)
      for (int64_t f = 0; f < count_; f += VL)
        write_token<S>(p, x, p.place(batch_, t, feature_ + f), load(from + f), part(count_ - f));
  }

  // Reads the keys and values of a task.
  void begin(int64_t head, int64_t batch, int64_t feature) {
    head_ = head, batch_ = batch, feature_ = head * p.features() + feature;
    count_ = std::min(wide_, p.features() - feature);
    read(p.key, 0, p.length, m_.data());
    read(p.value, 0, p.length, v_.data());
    for (int64_t i = 0; i < p.length * wide_; i += VL) {
      const Scaled e = split_exp(load(&m_[i]));
      store(&m_[i], e.m), store(&n_[i], e.n);
    }
    std::fill(top_.begin(), top_.end(), NEVER);
    ready_ = 0;
  }

  void find_center() {
    for (int64_t f = 0; f < wide_; f += VL) {
      Center of_values;
      for (int64_t t = 0; t < p.length; ++t) of_values.see(load(&v_[t * wide_ + f]), load(&m_[t * wide_ + f]) != 0.0f);
      store(&center_[f], of_values.value());
    }
  }

  // ---------------------------------------------------------------------------------------------------------- sums

  // Calls use(first query, last + 1, keys) for each block of queries, with their sums and queries.
  template <class Use>
  void for_each_block(const Weights<U>& weights, const Use& use) {
    for (int64_t first = 0, last; first < p.length; first = last) {
      last = std::min(first + block_, p.length);
      if (p.causal && grows(first, last)) last = std::min(first + STEP, last);
      const int64_t end = p.causal ? last : p.length;
      see(end);
      const U* right = PAIRS ? pairs_.data() : (const U*)x_.data();
      const int64_t step = p.causal ? STEP : block_;
      for (int64_t t = first; t < last; t += step) {
        const int64_t count = std::min(step, last - t);
        product(weights.from(t), count, right, stride_, units(p.causal ? t + count : end), stride_,
                &sums_[(t - first) * stride_], stride_, false);
      }
      if (p.query.data) read(p.query, first, last, query_.data());
      use(first, last, end);
    }
  }

  // Whether N grows so much within a causal block that its first queries would be lost.
  bool grows(int64_t first, int64_t last) const {
    bool found = false;
    for (int64_t f = 0; f < wide_; f += VL) {
      const vf before = max(load(&n_[first * wide_ + f]), load(&top_[f]));
      vf top = before;
      for (int64_t t = first; t < last; ++t) top = max(load(&n_[t * wide_ + f]), top);
      found |= any(top - before > MOST_GROWTH);
    }
    return found;
  }

  // Makes X of the keys 0 .. end - 1. If a larger N is needed, all of X changes.
  void see(int64_t end) {
    if (end == ready_) return;
    bool changed = false;
    for (int64_t f = 0; f < wide_; f += VL) {
      const vf before = load(&top_[f]);
      vf top = before;
      for (int64_t t = ready_; t < end; ++t) top = max(load(&n_[t * wide_ + f]), top);
      store(&top_[f], top > before && p.causal ? top + MARGIN : top);
      changed |= any(top != before);
    }
    if (changed) add_gradients();
    const int64_t from = changed ? 0 : ready_;
    for (int64_t t = from; t < end; ++t)
      for (int64_t f = 0; f < wide_; f += VL) {
        vf e = scaled(load(&m_[t * wide_ + f]), load(&n_[t * wide_ + f]) - load(&top_[f]));
        if (PAIRS) e = (vf)(((vu)e + 0x8000) & 0xffff0000);  // bfloat16: both sums have the same weights
        const vf v = load(&v_[t * wide_ + f]) - load(&center_[f]);
        store(&x_[t * stride_ + wide_ + f], e);
        store(&x_[t * stride_ + f], load(&m_[t * wide_ + f]) == 0.0f ? vf{} : e * v);  // hidden values may be NaN
      }
    if (PAIRS) interleave_rows(x_.data(), from, end, (Pair*)pairs_.data());
    ready_ = end;
    if (!of_weights_.empty()) transpose(from, end);
  }

  // Pairs of rows first .. last - 1, where `first` is even.
  void interleave_rows(const float* rows, int64_t first, int64_t last, Pair* out) const {
    const std::vector<float> zeros(stride_);
    for (int64_t t = first; t < last; t += 2) {
      const float* odd = t + 1 < last ? rows + (t + 1) * stride_ : zeros.data();
      interleave(rows + t * stride_, odd, stride_, out + t / 2 * stride_);
    }
  }

  // Rows of X or of sums in units.
  const U* in_units(const float* rows, int64_t count) {
    if (!PAIRS) return (const U*)rows;
    for (int64_t i = 0; i < count * stride_; i += VL) store(&rounded_[i], load(rows + i));
    return (const U*)rounded_.data();
  }

  // The columns of X as rows of units, with 0 behind them.
  void transpose(int64_t from, int64_t end) {
    const int64_t width = stride_ / TERMS;
    const U* rows = in_units(x_.data(), end);
    for (int64_t t = from / VL * VL; t < whole(end); t += VL)
      for (int64_t f = 0; f < width; ++f)
        for (int64_t key = t; key < t + VL; ++key)
          memcpy((void*)&transposed_[f * row_ + key], rows + std::min(key, end - 1) * width + f, sizeof(U));
  }

  struct Average {
    vf numerator, denominator;
    bool lost;
  };

  // The sums of a query of the block.
  Average average(int64_t query, int64_t f) const {
    const float* sums = &sums_[query * stride_];
    const vf numerator = load(sums + f), denominator = load(sums + wide_ + f);
    const vi lost = are_lost(numerator, denominator);
    if (!any(lost)) return {numerator, denominator, false};
    const vi empty = (load(&top_[f]) <= NEVER) & (denominator == 0.0f);  // 0 is right where all keys are hidden
    return {numerator, empty ? splat(INFINITY) : denominator, any(lost & ~empty)};
  }

  // ------------------------------------------------------------------------------------------------- lost queries

  // Calls visit(exp(K + w), V', key) for all keys that are visible to a query, with its w in `w_m_` and `w_n_`.
  template <class Visit>
  void each_key(int64_t t, int64_t f, const Visit& visit) const {
    for (int64_t j = 0; j < p.seen(t); ++j) {
      const Scaled e = {load(&m_[j * wide_ + f]), load(&n_[j * wide_ + f])};
      visit(e * Scaled{splat(w_m_[j]), splat(w_n_[j])}, load(&v_[j * wide_ + f]) - load(&center_[f]), j);
    }
  }

  Sums all_sums(int64_t t, int64_t f) {
    for (auto* x : {&w_m_, &w_n_}) x->resize(row_);
    const float* w = p.bias + (head_ * p.length + t) * p.length;
    for (int64_t j = 0; j < p.seen(t); j += VL) {
      const Scaled e = split_exp(load(w + j, part(p.seen(t) - j)));
      store(&w_m_[j], e.m), store(&w_n_[j], e.n);
    }
    return careful_sums({}, [&](auto visit) { each_key(t, f, visit); });
  }

  // With p_t' = exp(K_t' + w_tt') / denominator:  dV_t' += p_t' g,    dK_t' and dw_tt' += p_t' g (V_t' - Y).
  void add_careful_gradients(int64_t t, int64_t f, int64_t place) {
    const Sums sums = all_sums(t, f);
    const vf y = sums.average(), offset = sums.denominator == 0.0f ? vf{} : load(&center_[f]);
    const vf a = sums.divided(gradient_of_average(place, y + offset));
    of_lost_.resize(of_weights_.size());
    each_key(t, f, [&](Scaled e, vf v, int64_t j) {
      const vf from_value = e.m == 0.0f ? vf{} : scaled(e.m, e.n - sums.n) * a;
      const vf from_key = e.m == 0.0f ? vf{} : from_value * (v - y);
      add(&of_v_[j * wide_ + f], from_value), add(&of_key_[j * wide_ + f], from_key);
      if (p.bias_gradient) of_lost_[t * row_ + j] += sum_of(from_key);
    });
  }

  // ----------------------------------------------------------------------------------------------------- gradients

  // Multiplies the gradient of an output by the gate, which is the gradient of its average y, and replaces the query by
  // its gradient.
  vf gradient_of_average(int64_t place, vf y) {
    const vf gradient = load(&gradient_[place]);
    if (!p.query.data) return gradient;
    const vf gate = sigmoid(load(&query_[place]));
    store(&query_[place], gradient * y * gate * (1.0f - gate));
    return gradient * gate;
  }

  // Adds the gradients of X and W from those of the sums of a block, which are in the place of the sums.
  void multiply_gradients(const Weights<U>& weights, int64_t first, int64_t last, int64_t end) {
    const int64_t keys_before = p.causal ? first : end;  // which all queries of the block see
    if (PAIRS) interleave_rows(sums_.data(), 0, last - first, (Pair*)pairs_of_sums_.data());
    const U* right = PAIRS ? pairs_of_sums_.data() : (const U*)sums_.data();
    auto add_to_x = [&](int64_t t, int64_t key, int64_t count) {
      product(weights.transposed(t, key), count, right + (t - first) / TERMS * stride_, stride_, units(last - t), stride_,
              &of_x_[key * stride_], stride_, true);
    };
    add_to_x(first, 0, keys_before);
    for (int64_t t = keys_before; t < end; t += STEP) add_to_x(t, t, std::min(STEP, end - t));
    if (!p.bias_gradient) return;
    const U* left = in_units(sums_.data(), last - first);
    const int64_t step = p.causal ? STEP : block_, width = stride_ / TERMS;
    for (int64_t t = first; t < last; t += step) {
      const int64_t count = std::min(step, last - t);
      product<U>({left + (t - first) * width, width, 1}, count, transposed_.data(), row_, width,
                 whole(p.causal ? t + count : end), &of_weights_[t * row_], row_, true);
    }
  }

  // Adds the gradients of V and K from those of X = (E V', E), and sets the latter to 0:
  //   dV = E dX_1,    dK = E V' dX_1 + E dX_2.
  void add_gradients() {
    for (int64_t t = 0; t < ready_ && !of_x_.empty(); ++t) {
      float* of_x = &of_x_[t * stride_];
      const float* x = &x_[t * stride_];
      for (int64_t f = 0; f < wide_; f += VL) {
        const vf e = load(x + wide_ + f), ev = load(x + f), of_product = load(of_x + f);
        const vi used = (e > 0.0f) & (ev - ev == 0.0f);  // by queries that are not lost
        add(&of_v_[t * wide_ + f], used ? e * of_product : vf{});
        add(&of_key_[t * wide_ + f], used ? ev * of_product + e * load(of_x + wide_ + f) : vf{});
      }
      std::fill(of_x, of_x + stride_, 0.0f);
    }
  }

  const TableProblem& p;
  const int64_t block_, wide_, stride_, row_;
  int64_t head_ = 0, batch_ = 0, feature_ = 0, count_ = 0;         // of the task: its row of the batch and its features
  int64_t ready_ = 0;                                              // keys in X
  std::vector<float> m_, n_, v_, top_, center_;                    // exp(K) = m 2^n, V, N, c
  std::vector<float> x_, sums_, query_, w_m_, w_n_;
  std::vector<float> gradient_, of_x_, of_v_, of_key_, of_weights_, of_lost_;
  std::vector<U> pairs_, pairs_of_sums_, transposed_;  // of X, of sums, and of X
  std::vector<bf16> rounded_;
};

// Computes all tasks, for as many heads at once as the cache holds W of.
template <class S, class U>
void run(const TableProblem& p) {
  if (p.numbers() == 0) return;
  const int64_t row = whole(p.length), of_row = (p.features() + MOST_FEATURES - 1) / MOST_FEATURES;
  const int64_t of_head = p.batch * of_row, numbers = p.numbers() * 8;
  const int64_t threads = num_threads(numbers), in_cache = CACHE / (p.length * row);
  const int64_t at_once = std::min(p.heads, std::max(in_cache / threads, int64_t(1)) * threads);
  WeightsOfHeads<U> weights(p, at_once);
  for (int64_t first = 0; first < p.heads; first += at_once) {
    const int64_t heads = std::min(at_once, p.heads - first), tasks = heads * of_head;
    const int64_t parts = std::min(tasks, threads);
    weights.compute(first, heads);
    std::vector<std::vector<float>> of_biases(heads * parts);  // added in a fixed order
    parallel_for(parts, numbers, [&](int64_t begin, int64_t end) {
      Task<S, U> task(p);
      for (int64_t part = begin; part < end; ++part)
        for (int64_t i = tasks * part / parts, last = tasks * (part + 1) / parts; i < last; ++i) {
          const int64_t head = i / of_head, batch = i % of_head / of_row, feature = i % of_row * MOST_FEATURES;
          p.is_backward() ? task.backward(weights[head], first + head, batch, feature)
                          : task.forward(weights[head], first + head, batch, feature);
          if (p.bias_gradient && (i + 1 == last || (i + 1) % of_head == 0))
            of_biases[head * parts + part] = task.take_gradient_of_biases(weights[head]);
        }
    });
    parallel_for(p.bias_gradient ? heads : 0, numbers, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * parts; i < end * parts; ++i)
        for (int64_t t = 0; t < p.length && !of_biases[i].empty(); ++t) {
          float* sum = p.bias_gradient + ((first + i / parts) * p.length + t) * p.length;
          for (int64_t j = 0; j < p.seen(t); ++j) sum[j] += of_biases[i][t * row + j];
        }
    });
  }
}

template <class S>
void table(const TableProblem& p) {
  p.is_bf16 && p.length >= FEWEST_KEYS && has_pairs() ? run<S, Pair>(p) : run<S, float>(p);
}

}  // namespace
}  // namespace aft

AFT_KERNEL(table, TableProblem, table)
AFT_KERNEL(table_backward, TableProblem, table)
