// The backward pass of causal Eq. 2 (see causal.h). It computes the sums again, from the end of each document to its
// start. With G = dL/dY sigmoid(Q), D the denominator, and Y the average of a query t,
//
//   a_t = G_t / D_t,   b_t = -a_t Y_t,   P_tt' = exp(K_t' + w_tt')
//   dL/dV_t' = sum_t P_tt' a_t                  dL/dK_t' = sum_t P_tt' (a_t V_t' + b_t)
//   dL/dw_tt' = sum over the features of P_tt' (a_t V_t' + b_t)
//
// A V + B cancels where values have a common offset, so values and averages count from a `center` near Y.
#include "causal.h"

namespace aft {
namespace {

constexpr int GROUP = 16;          // columns of a head that share one pass over the gradients of w
constexpr float NOTHING = 1e30f;   // the exponent of a sum without terms, when exponents are those of reciprocals

// Sums over later queries, for keys that are far from all of them: of a and b, times 2^n.
struct LaterSums {
  vf a = vf{}, b = vf{}, n = splat(NOTHING);

  void lower(vf exponent) {  // to at most n
    a = scaled(a, exponent - n);
    b = scaled(b, exponent - n);
    n = exponent;
  }
  void add(vf a_of_query, vf b_of_query, vf n_of_query) {
    n_of_query = a_of_query == 0.0f ? splat(NOTHING) : n_of_query;
    b_of_query = a_of_query == 0.0f ? vf{} : b_of_query;
    lower(min(n, n_of_query));
    a += scaled(a_of_query, n - n_of_query);
    b += scaled(b_of_query, n - n_of_query);
  }
  void renormalize() {
    const vf exponent = exponent_of(max(max(a, -a), max(b, -b)));
    lower(n - exponent);
    const vi empty = (a == 0.0f) & (b == 0.0f);
    n = empty ? splat(NOTHING) : n;
  }
};

// One column of a group.
template <class S>
struct BackwardColumn {
  CausalColumn<S> sums;
  float *a, *b;                        // of the queries of the chunk that were computed the fast way; else 0
  float *key_carry, *value_carry;      // gradients of the `reach` tokens before the chunk, from later queries
  LaterSums later;
  vf center = vf{};
};

template <class S>
class Backward {
 public:
  Backward(const CausalProblem& p, const Weights& weights, float* bias_gradient)
      : p(p), weights_(weights), window_(int(p.window)), reach_(window_ - 1), size_(CHUNK + window_),
        bias_gradient_(bias_gradient), scratch_(vectors(p)) {}

  // Computes the gradients of the columns first .. last - 1 of a row, which are one column, or columns of one head.
  void run(int64_t row, const Column* first, const Column* last, float* key_gradient) {
    row_ = row;
    key_gradient_ = key_gradient;
    Scratch scratch = scratch_;
    dkey_ = scratch.take(size_), dvalue_ = scratch.take(size_);
    a_of_key_ = scratch.take(size_), b_of_key_ = scratch.take(size_);
    careful_a_ = scratch.take(CHUNK), careful_b_ = scratch.take(CHUNK), careful_n_ = scratch.take(CHUNK);
    careful_w_ = scratch.take(int64_t(CHUNK) * window_ + VL);  // rows are read in blocks of VL
    w_tile_ = scratch.take(TILE * weights_.stride + VL);
    float* shared = scratch.take(CausalColumn<S>::vectors(p));
    columns_.clear();
    for (; first < last; ++first) {
      columns_.push_back({CausalColumn<S>(p, weights_, row, *first, Scratch(shared)), nullptr, nullptr, nullptr, nullptr, {}});
      BackwardColumn<S>& column = columns_.back();
      column.sums.e = scratch.take(size_), column.sums.ev = scratch.take(size_);
      column.a = scratch.take(CHUNK), column.b = scratch.take(CHUNK);
      column.key_carry = scratch.take(window_), column.value_carry = scratch.take(window_);
    }
    for_each_document(p, row, [&](int64_t begin, int64_t end) { document(begin, end); });
  }

 private:
  static int64_t vectors(const CausalProblem& p) {
    const int64_t size = CHUNK + p.window;
    const int64_t shared = 4 * size + CHUNK * (3 + p.window) + TILE * (p.window + 2 * PAD) + 2 * VL;
    return shared + CausalColumn<S>::vectors(p) + GROUP * (2 * size + 2 * CHUNK + 2 * p.window);
  }

  void document(int64_t begin, int64_t end) {
    const int64_t chunks = (end - begin + CHUNK - 1) / CHUNK, count = columns_.size();
    states_.resize(chunks * count);
    for (int64_t c = 0; c < count; ++c) {
      BackwardColumn<S>& column = columns_[c];
      save_states(column.sums, begin, end, c);
      column.later = LaterSums();
      memset(column.key_carry, 0, window_ * VL * sizeof(float));
      memset(column.value_carry, 0, window_ * VL * sizeof(float));
    }
    for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
      const int64_t t = begin + chunk * CHUNK;
      const int length = int(std::min<int64_t>(CHUNK, end - t));
      any_careful_w_ = false;
      for (int64_t c = 0; c < count; ++c) {
        columns_[c].sums.far = states_[chunk * count + c];
        backward_chunk(columns_[c], begin, t, length);
      }
      if (bias_gradient_) add_gradients_of_w(t - begin, length);
    }
  }

  // Computes the far sums at the start of each chunk.
  void save_states(CausalColumn<S>& sums, int64_t begin, int64_t end, int64_t index) {
    sums.far = Sums();
    const int64_t count = columns_.size();
    for (int64_t t = begin, i = index; t < end; t += CHUNK, i += count) {
      states_[i] = sums.far;
      if (p.hides_outside || t + CHUNK >= end) continue;
      const int64_t first = std::max(begin, t - reach_), last = std::max(begin, t + CHUNK - reach_);
      sums.read(first, int(last - first), 0);
      sums.take_in(int(last - first));
      sums.finish_far(CHUNK);
    }
  }

  void backward_chunk(BackwardColumn<S>& column, int64_t begin, int64_t t, int count) {
    CausalColumn<S>& sums = column.sums;
    const int missing = int(std::max<int64_t>(0, reach_ - (t - begin)));
    sums.hide(0, missing);
    sums.read(t - reach_ + missing, reach_ - missing + count, missing);
    sums.use_weights(t - begin, count);

    // Later queries count from the center of the chunk after this one.
    const vf first_value = load(sums.v + reach_ * VL);
    const vf center = sums.far.denominator == 0.0f ? first_value : sums.far.numerator / sums.far.denominator;
    column.later.b += column.later.a * (center - column.center);
    column.center = center;
    sums.far.numerator -= center * sums.far.denominator;

    const bool finite = sums.take_one_exponent(count, center);
    any_careful_ = false;
    adds_to_entries_ = false;
    if (!finite) {
      memset(sums.e, 0, (reach_ + count) * VL * sizeof(float));
      memset(sums.ev, 0, (reach_ + count) * VL * sizeof(float));
    }
    int i = 0;
    for (; i + TILE <= count; i += TILE) queries<TILE>(column, t, i, finite);
    for (; i < count; ++i) queries<1>(column, t, i, finite);
    gradients_of_far(column, count);
    if (sums.at.one_head)
      gradients_of_keys<true>(column, t, count);
    else
      gradients_of_keys<false>(column, t, count);
  }

  // -------------------------------------------------------------------------------------------------------- queries

  template <int Q>
  void queries(BackwardColumn<S>& column, int64_t t, int i, bool finite) {
    CausalColumn<S>& sums = column.sums;
    vf numerator[Q], denominator[Q];
    bool careful = !finite;
    if (finite) {
      if (sums.at.one_head)
        sums.template plain_sums<Q, true>(i, numerator, denominator);
      else
        sums.template plain_sums<Q, false>(i, numerator, denominator);
      vf smallest = denominator[0];
      for (int u = 1; u < Q; ++u) smallest = min(smallest, denominator[u]);
      careful = any(smallest < SMALLEST);
    }
    for (int u = 0; u < Q; ++u) {
      if (careful) {
        careful_query(column, t, i + u);
        continue;
      }
      const vf inverse = 1.0f / denominator[u], average = numerator[u] * inverse;
      const vf a = gradient_of_average(column, t + i + u, average + column.center) * inverse;
      store(column.a + (i + u) * VL, a);
      store(column.b + (i + u) * VL, -a * average);
    }
  }

  // The gradient of the average of a query; writes that of the query itself.
  vf gradient_of_average(const BackwardColumn<S>& column, int64_t token, vf average) const {
    const Column& at = column.sums.at;
    const S* gradients = (const S*)p.gradient + row_ * p.gradient_batch + token * p.gradient_row + at.first;
    const vf gradient = load(gradients, at.count);
    if (!p.query) return gradient;
    const vf gate = sigmoid(load((const S*)p.query + row_ * p.query_batch + token * p.query_row + at.first, at.count));
    S* of_query = (S*)p.query_gradient + (row_ * p.length + token) * p.width + at.first;
    store(of_query, gradient * average * gate * (1.0f - gate), at.count);
    return gradient * gate;
  }

  // A query with an exponent of its own: the gradients of the keys in its window are complete afterwards, and its a, b
  // and n are kept for the far ones.
  void careful_query(BackwardColumn<S>& column, int64_t t, int i) {
    CausalColumn<S>& sums = column.sums;
    add_to_entries();
    if (!any_careful_) {
      any_careful_ = true;
      memset(careful_a_, 0, CHUNK * VL * sizeof(float));
    }
    const Sums own = sums.careful_sums(i, column.center);
    const vi empty = own.denominator == 0.0f;
    const vf average = own.average();
    const vf gradient = gradient_of_average(column, t + i, empty ? vf{} : average + column.center);
    const vf a = empty ? vf{} : gradient / own.denominator, b = -a * average;
    store(careful_a_ + i * VL, a), store(careful_b_ + i * VL, b), store(careful_n_ + i * VL, own.n);
    store(column.a + i * VL, vf{}), store(column.b + i * VL, vf{});
    if (bias_gradient_ && !any_careful_w_) {
      any_careful_w_ = true;
      memset(careful_w_, 0, int64_t(CHUNK) * window_ * VL * sizeof(float));
    }
    for (int j = 0; j < window_; ++j) {
      const int64_t at = (i + j) * VL;
      const vf weight = sums.careful_weight(i, j, own.n);
      const vf of_logit = weight * (a * (load(sums.v + at) - column.center) + b);
      store(dvalue_ + at, load(dvalue_ + at) + weight * a);
      store(dkey_ + at, load(dkey_ + at) + of_logit);
      if (bias_gradient_) {
        float* w = careful_w_ + (int64_t(i) * window_ + j) * VL;
        store(w, load(w) + of_logit);
      }
    }
  }

  // Prepares the gradients that the careful way adds to.
  void add_to_entries() {
    if (adds_to_entries_) return;
    adds_to_entries_ = true;
    memset(dkey_, 0, size_ * VL * sizeof(float));
    memset(dvalue_, 0, size_ * VL * sizeof(float));
  }

  // ----------------------------------------------------------------------------------------------------------- keys

  // Entry i of the buffer is far from the queries i + 1, i + 2, ... of the chunk and from all later ones. Sums their a
  // and b, or adds the gradients to those of the keys where the exponents differ too much.
  void gradients_of_far(BackwardColumn<S>& column, int count) {
    CausalColumn<S>& sums = column.sums;
    LaterSums& later = column.later;
    const int first = p.hides_outside ? 0 : count;  // entries from here on are not far from any query
    memset(a_of_key_ + first * VL, 0, (reach_ + count - first) * VL * sizeof(float));
    memset(b_of_key_ + first * VL, 0, (reach_ + count - first) * VL * sizeof(float));
    if (p.hides_outside) return;
    if (count == CHUNK) later.a *= sums.correction(), later.b *= sums.correction();
    const vi large = (sums.top - later.n > 60.0f) & (later.n < NOTHING);
    if (!any_careful_ && !any(large)) {
      later.a = scaled(later.a, sums.top - later.n);
      later.b = scaled(later.b, sums.top - later.n);
      later.n = sums.top;
      for (int i = count - 1; i >= 0; --i) {
        store(a_of_key_ + i * VL, later.a);
        store(b_of_key_ + i * VL, later.b);
        const vf own = sums.far_weight(i);
        later.a = (later.a + load(column.a + i * VL) * own) * sums.decay;
        later.b = (later.b + load(column.b + i * VL) * own) * sums.decay;
      }
    } else {
      add_to_entries();
      memset(a_of_key_, 0, count * VL * sizeof(float));
      memset(b_of_key_, 0, count * VL * sizeof(float));
      for (int i = count - 1; i >= 0; --i) {
        const int64_t at = i * VL;
        const vf key = load(sums.m + at), n = load(sums.n + at) - later.n;
        const vf a = scaled(key * later.a, n), b = scaled(key * later.b, n);
        store(dvalue_ + at, load(dvalue_ + at) + a);
        store(dkey_ + at, load(dkey_ + at) + (a * (load(sums.v + at) - column.center) + b));
        const vf own = sums.far_weight(i);
        later.add(load(column.a + at) * own, load(column.b + at) * own, sums.top);
        if (any_careful_) later.add(load(careful_a_ + at), load(careful_b_ + at), load(careful_n_ + at));
        later.a *= sums.decay, later.b *= sums.decay;
      }
    }
    later.renormalize();
  }

  // Adds the gradients from the windows, and writes those of the tokens of the chunk.
  template <bool ONE_HEAD>
  void gradients_of_keys(BackwardColumn<S>& column, int64_t t, int count) {
    int entry = 0;
    for (; entry + TILE <= reach_ + count; entry += TILE) keys<TILE, ONE_HEAD>(column, t, entry, count);
    for (; entry < reach_ + count; ++entry) keys<1, ONE_HEAD>(column, t, entry, count);
    // What the chunk before this one adds to.
    memcpy(column.key_carry, dkey_, reach_ * VL * sizeof(float));
    memcpy(column.value_carry, dvalue_, reach_ * VL * sizeof(float));
  }

  template <int Q, bool ONE_HEAD>
  void keys(BackwardColumn<S>& column, int64_t t, int entry, int count) {
    CausalColumn<S>& sums = column.sums;
    vf a[Q], b[Q];
    for (int u = 0; u < Q; ++u) a[u] = load(a_of_key_ + (entry + u) * VL), b[u] = load(b_of_key_ + (entry + u) * VL);
    if (reach_ == 0) {
      for (int u = 0; u < Q; ++u) {
        const vf w = sums.template weight<ONE_HEAD>(sums.weights_of(entry + u), 0);
        a[u] += w * load(column.a + (entry + u) * VL);
        b[u] += w * load(column.b + (entry + u) * VL);
      }
    } else for (int i = std::max(0, entry - reach_); i < std::min(count, entry + Q); ++i) {
      const vf a_of_query = load(column.a + i * VL), b_of_query = load(column.b + i * VL);
      const float* row = sums.weights_of(i);
#pragma GCC unroll 8
      for (int u = 0; u < Q; ++u) {
        const vf w = sums.template weight<ONE_HEAD>(row, entry + u - i);
        a[u] += w * a_of_query;
        b[u] += w * b_of_query;
      }
    }
    for (int u = 0; u < Q; ++u) {
      const int64_t at = (entry + u) * VL;
      const vf key = load(sums.e + at), value = load(sums.v + at) - column.center;
      vf of_value = key * a[u], of_key = key * (a[u] * value + b[u]);
      if (adds_to_entries_) of_value += load(dvalue_ + at), of_key += load(dkey_ + at);
      if (entry + u >= count) {
        of_value += load(column.value_carry + (entry + u - count) * VL);
        of_key += load(column.key_carry + (entry + u - count) * VL);
      }
      if (entry + u < reach_)
        store(dvalue_ + at, of_value), store(dkey_ + at, of_key);
      else
        write(column, t + entry + u - reach_, of_key, of_value);
    }
  }

  void write(const BackwardColumn<S>& column, int64_t token, vf of_key, vf of_value) const {
    const Column& at = column.sums.at;
    const int64_t place = (row_ * p.length + token) * p.width + at.first;
    store((S*)p.value_gradient + place, of_value, at.count);
    if (p.key_width == p.width)
      store((S*)p.key_gradient + place, of_key, at.count);
    else if (at.one_head)
      key_gradient_[token * p.heads + at.head] += sum_of(of_key);
    else
      for (int lane = 0; lane < at.count; ++lane) key_gradient_[token * p.heads + column.sums.head(lane)] += of_key[lane];
  }

  // ----------------------------------------------------------------------------------------------------- gradients of w

  void add_gradients_of_w(int64_t position, int count) {
    const CausalColumn<S>& sums = columns_[0].sums;
    const bool one_row = p.bias_rows == 1;  // of biases, for all queries
    const int64_t row_size = weights_.stride * VL;
    for (int i = 0; i < count; i += TILE) {
      if (i == 0 || !one_row) memset(w_tile_, 0, TILE * row_size * sizeof(float));
      const int rows = std::min(TILE, count - i);
      for (const BackwardColumn<S>& column : columns_) add_to_tile(column, i, rows);
      if (!one_row)
        for (int u = 0; u < rows; ++u)
          add_row(sums, position + i + u, w_tile_ + u * row_size + PAD * VL, sums.weights_of(i + u));
    }
    if (one_row) {
      for (int u = 1; u < TILE; ++u)
        for (int64_t j = 0; j < row_size; j += VL) store(w_tile_ + j, load(w_tile_ + j) + load(w_tile_ + u * row_size + j));
      add_row(sums, position, w_tile_ + PAD * VL, sums.weights_of(0));
    }
    if (any_careful_w_)
      for (int i = 0; i < count; ++i)
        add_row(sums, position + i, careful_w_ + int64_t(i) * window_ * VL, nullptr);
  }

  // Adds `window` vectors, summed over the features of each head and multiplied by weights, to the gradient of a row.
  void add_row(const CausalColumn<S>& sums, int64_t position, const float* rows, const float* weights) const {
    if (sums.at.one_head) {
      float* gradient = bias_gradient_ + p.bias_row(row_, sums.at.head, position) * window_;
      for (int j = 0; j < window_; j += VL) {
        const int count = std::min(VL, window_ - j);
        vf sum = sums_of_rows(rows + j * VL);
        if (weights) sum *= load(weights + PAD + j, count);
        store(gradient + j, load(gradient + j, count) + sum, count);
      }
      return;
    }
    for (int j = 0; j < window_; ++j) {
      vf products = load(rows + j * VL);
      if (weights) products *= load(weights + (PAD + j) * VL);
      for (int lane = 0; lane < sums.at.count; ++lane)
        bias_gradient_[p.bias_row(row_, sums.head(lane), position) * window_ + j] += products[lane];
    }
  }

  // Adds a V + b, times exp(K), of the queries i .. i + rows - 1 to a tile of (TILE, window), padded as weights are.
  void add_to_tile(const BackwardColumn<S>& column, int i, int rows) {
    vf a[TILE], b[TILE];
    for (int u = 0; u < TILE; ++u) {
      a[u] = u < rows ? load(column.a + (i + u) * VL) : vf{};
      b[u] = u < rows ? load(column.b + (i + u) * VL) : vf{};
    }
    for (int entry = i; entry < i + rows + reach_; ++entry) {
      const vf key = load(column.sums.e + entry * VL), product = load(column.sums.ev + entry * VL);
      float* tile = w_tile_ + (PAD + entry - i) * VL;
#pragma GCC unroll 8
      for (int u = 0; u < TILE; ++u) {
        float* sum = tile + u * (weights_.stride - 1) * VL;
        store(sum, load(sum) + (a[u] * product + b[u] * key));
      }
    }
  }

  const CausalProblem& p;
  const Weights& weights_;
  const int window_, reach_, size_;
  float* const bias_gradient_;
  const Scratch scratch_;
  int64_t row_ = 0;
  float* key_gradient_ = nullptr;  // (T, h), if there is one key per head
  std::vector<BackwardColumn<S>> columns_;
  std::vector<Sums> states_;  // the far sums of each chunk and column
  bool any_careful_ = false, any_careful_w_ = false, adds_to_entries_ = false;
  float *dkey_, *dvalue_;                          // gradients of the entries of the buffer
  float *a_of_key_, *b_of_key_;                    // sums of a and b over far queries
  float *careful_a_, *careful_b_, *careful_n_;     // of the queries that were computed the careful way
  float *careful_w_, *w_tile_;
};

// A row, or a part of its features, which can be computed independently of the others.
struct Task {
  int64_t row, first, last;
};

std::vector<Task> tasks_of(const CausalProblem& p, const Columns& columns) {
  std::vector<Task> tasks;
  const int64_t count = columns.all.size(), step = std::min<int64_t>(columns.per_head, GROUP);
  for (int64_t row = 0; row < p.batch; ++row)
    for (int64_t first = 0; first < count;) {
      // Groups end where a head ends.
      const int64_t head_end = (first / columns.per_head + 1) * columns.per_head;
      const int64_t last = std::min(std::min(first + step, head_end), count);
      tasks.push_back({row, first, last});
      first = last;
    }
  return tasks;
}

template <class S>
void store_keys(const CausalProblem& p, int64_t row, const float* gradients) {
  S* target = (S*)p.key_gradient + row * p.length * p.heads;
  for (int64_t i = 0; i < p.length * p.heads; i += VL) {
    const int count = int(std::min<int64_t>(VL, p.length * p.heads - i));
    store(target + i, load(gradients + i, count), count);
  }
}

template <class S>
void clear(const CausalProblem& p) {  // gradients of padding are 0
  memset(p.value_gradient, 0, p.numbers() * sizeof(S));
  memset(p.key_gradient, 0, p.batch * p.length * p.key_width * sizeof(S));
  if (p.query_gradient) memset(p.query_gradient, 0, p.numbers() * sizeof(S));
}

template <class S>
void backward(const CausalProblem& p) {
  if (p.first) clear<S>(p);
  const Weights weights(p);
  const Columns columns(p);
  const std::vector<Task> tasks = tasks_of(p, columns);
  const int64_t rows_of_bias = p.bias_batch * p.bias_rows * p.heads * p.window;
  const bool key_per_head = p.key_width != p.width;  // then a thread computes whole rows
  const int64_t tasks_per_row = p.batch ? int64_t(tasks.size()) / p.batch : 0;
  const int64_t units = key_per_head ? p.batch : int64_t(tasks.size());
  const int64_t parts = std::min(units, num_threads(p.numbers()));
  std::vector<std::vector<float>> partial(p.bias_gradient ? parts : 0);
  parallel_for(parts, p.numbers(), [&](int64_t begin, int64_t end) {
    const FlushSubnormals flush;
    std::vector<float> keys(key_per_head ? p.length * p.heads : 0);
    for (int64_t part = begin; part < end; ++part) {
      float* bias_gradient = p.bias_gradient;
      if (bias_gradient && part > 0) {
        partial[part].assign(rows_of_bias, 0.0f);
        bias_gradient = partial[part].data();
      }
      Backward<S> pass(p, weights, bias_gradient);
      for (int64_t unit = units * part / parts; unit < units * (part + 1) / parts; ++unit) {
        const int64_t from = key_per_head ? unit * tasks_per_row : unit;
        const int64_t to = key_per_head ? from + tasks_per_row : from + 1;
        std::fill(keys.begin(), keys.end(), 0.0f);
        for (int64_t i = from; i < to; ++i) {
          const Column* all = columns.all.data();
          pass.run(tasks[i].row, all + tasks[i].first, all + tasks[i].last, keys.data());
        }
        if (key_per_head) store_keys<S>(p, unit, keys.data());
      }
    }
  });
  for (const std::vector<float>& part : partial)
    for (size_t i = 0; i < part.size(); ++i) p.bias_gradient[i] += part[i];
}

}  // namespace
}  // namespace aft

AFT_EXPORT void aft_causal_backward(const aft::CausalProblem* p) {
  if (p->is_bf16)
    aft::backward<aft::bf16>(*p);
  else
    aft::backward<float>(*p);
}
