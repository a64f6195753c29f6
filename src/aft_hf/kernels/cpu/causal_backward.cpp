// The backward pass of causal Eq. 2 (see causal.h). It computes the sums again, from the end of each document to its
// start. With G = dL/dY sigmoid(Q), D the denominator, and Y the average of a query t,
//
//   a_t = G_t / D_t,   b_t = -a_t Y_t,   P_tt' = exp(K_t' + w_tt')
//   dL/dV_t' = sum_t P_tt' a_t                  dL/dK_t' = sum_t P_tt' (a_t V_t' + b_t)
//   dL/dw_tt' = sum over the features of P_tt' (a_t V_t' + b_t)
//
// A V + B cancels where values have a common offset, so values and averages count from a `center` near V.
#include "causal.h"

namespace aft {
namespace {

constexpr int GROUP = 8;  // columns of a head that share one pass over the gradients of w

// One column of a group.
template <class S>
struct BackwardColumn {
  CausalColumn<S> sums;
  float *a, *b;                    // of the queries of the chunk
  float *key_carry, *value_carry;  // gradients of the `reach` tokens before the chunk, from later queries
  Sums later = {};                 // of b (the numerator) and of a over later queries that are far from the chunk
  vf center = vf{};
  bool is_fast = false;            // whether some sums of the chunk were computed the fast way
};

template <class S>
class Backward {
 public:
  Backward(const CausalProblem& p, const Weights& weights, float* bias_gradient)
      : p(p), weights_(weights), window_(int(p.window)), reach_(window_ - 1), size_(CausalColumn<S>::entries(p)),
        bias_gradient_(bias_gradient), scratch_(vectors(p)) {}

  // Computes the gradients of the columns first .. last - 1 of a row, which are one column, or columns of one head.
  // `key_gradient` is (T, h), if there is one key per head.
  void run(int64_t row, const Column* first, const Column* last, float* key_gradient) {
    row_ = row;
    key_gradient_ = key_gradient;
    Scratch scratch = scratch_;
    dkey_ = scratch.take(size_), dvalue_ = scratch.take(size_), n_ = scratch.take(CHUNK);
    lost_a_ = scratch.take(CHUNK), lost_b_ = scratch.take(CHUNK);
    products_ = scratch.take(window_ + VL), tile_ = scratch.take(TILE * weights_.stride + VL);
    float* shared = scratch.take(CausalColumn<S>::vectors(p));
    columns_.clear();
    for (; first < last; ++first) {
      columns_.push_back({CausalColumn<S>(p, weights_, row, *first, Scratch(shared)), scratch.take(size_),
                          scratch.take(size_), scratch.take(window_), scratch.take(window_)});
      columns_.back().sums.e = scratch.take(size_), columns_.back().sums.ev = scratch.take(size_);
    }
    clear(tile_, TILE * weights_.stride), clear(products_, window_);
    for_each_document(p, row, [&](int64_t begin, int64_t end) { document(begin, end); });
    if (bias_gradient_ && !p.has_table()) {  // of all queries together
      const int64_t row_size = weights_.stride * VL;
      for (int64_t i = row_size; i < TILE * row_size; ++i) tile_[i % row_size] += tile_[i];
      add_to_row(0, tile_ + PAD * VL, true);
      add_to_row(0, products_, false);
    }
  }

 private:
  static int64_t vectors(const CausalProblem& p) {
    const int64_t size = CausalColumn<S>::entries(p), column = 4 * size + 2 * p.window;
    const int64_t tile = TILE * (p.window + 2 * PAD + 1) + VL, products = p.window + VL;
    return 2 * size + 3 * CHUNK + products + tile + CausalColumn<S>::vectors(p) + GROUP * column;
  }

  static void clear(float* x, int64_t count) { memset(x, 0, count * VL * sizeof(float)); }

  void document(int64_t begin, int64_t end) {
    const int64_t length = columns_[0].sums.chunk, chunks = (end - begin + length - 1) / length;
    const int64_t count = columns_.size();
    states_.resize(chunks * count);
    for (int64_t c = 0; c < count; ++c) {
      BackwardColumn<S>& column = columns_[c];
      save_states(column.sums, begin, end, c);
      column.later = Sums();
      clear(column.key_carry, reach_), clear(column.value_carry, reach_);
    }
    for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
      const int64_t t = begin + chunk * length;
      for (int64_t c = 0; c < count; ++c) {
        columns_[c].sums.far = states_[chunk * count + c];
        backward_chunk(columns_[c], begin, t, int(std::min<int64_t>(length, end - t)));
      }
      if (bias_gradient_) gradients_of_w(t - begin, int(std::min<int64_t>(length, end - t)));
    }
  }

  // Computes the far sums at the start of each chunk.
  void save_states(CausalColumn<S>& sums, int64_t begin, int64_t end, int64_t index) {
    sums.far = Sums();
    for (int64_t t = begin; t < end; t += sums.chunk, index += columns_.size()) {
      states_[index] = sums.far;
      if (!p.global_connectivity || t + sums.chunk >= end) continue;
      const int64_t first = std::max(begin, t - reach_), last = std::max(begin, t + sums.chunk - reach_);
      sums.read(first, int(last - first), 0);
      sums.take_in(0, int(last - first), vf{});
      sums.finish(sums.chunk);
    }
  }

  void backward_chunk(BackwardColumn<S>& column, int64_t begin, int64_t t, int count) {
    CausalColumn<S>& sums = column.sums;
    const int missing = int(std::max<int64_t>(0, reach_ - (t - begin)));
    sums.hide(0, missing);
    sums.read(t - reach_ + missing, reach_ - missing + count, missing);

    // The sums over later queries count from the center and the start of the chunk after this one.
    Sums& later = column.later;
    Center of_chunk;
    for (int i : {0, count / 3, 2 * count / 3, count - 1})
      of_chunk.see(load(sums.v + (reach_ + i) * VL), load(sums.m + (reach_ + i) * VL) != 0.0f);
    const vf center = of_chunk.value();
    later.numerator += later.denominator * (center - column.center);
    column.center = center;
    sums.far.numerator -= center * sums.far.denominator;
    if (count == sums.chunk) later.divide(sums.growth(count));

    clear(column.a + count * VL, PAD), clear(column.b + count * VL, PAD);
    // With a larger exponent, the sums over later queries would overflow.
    const vi no_later = (later.numerator == 0.0f) & (later.denominator == 0.0f);
    const vf limit = no_later ? splat(INFINITY) : 60.0f - later.n;
    const unsigned lost = sums.queries(t - begin, count, center, limit, [&](int i, const Sums& of_query) {
      const vf average = of_query.average(), offset = of_query.denominator == 0.0f ? vf{} : center;
      const vf a = of_query.divided(gradient_of_average(column, t + i, average + offset));
      store(column.a + i * VL, a), store(column.b + i * VL, -a * average), store(n_ + i * VL, of_query.n);
      return a - a * average;
    });

    memcpy(dkey_ + count * VL, column.key_carry, reach_ * VL * sizeof(float));
    memcpy(dvalue_ + count * VL, column.value_carry, reach_ * VL * sizeof(float));
    for (int i = 0; i < count; ++i) {
      if (!sums.is_lost(lost, i)) continue;
      store(lost_a_ + i * VL, load(column.a + i * VL)), store(lost_b_ + i * VL, load(column.b + i * VL));
      clear(column.a + i * VL, 1), clear(column.b + i * VL, 1);
    }
    column.is_fast = lost != ALL;
    if (!column.is_fast) {
      clear(dkey_, count), clear(dvalue_, count);
      careful_gradients(column, t - begin, count, lost, later);
    } else {
      if (weights_.vectors)
        gradients_of_keys<true>(column, count);
      else
        gradients_of_keys<false>(column, count);
      Sums of_lost;
      if (lost) careful_gradients(column, t - begin, count, lost, of_lost);
      later.add(of_lost);
    }
    memcpy(column.key_carry, dkey_, reach_ * VL * sizeof(float));
    memcpy(column.value_carry, dvalue_, reach_ * VL * sizeof(float));
    const vf b = max(later.numerator, -later.numerator), a = max(later.denominator, -later.denominator);
    const vf size = b - b == 0.0f ? max(a, b) : a;  // b is infinite for infinite values, and both may be NaN
    later.renormalize(size - size == 0.0f ? size : splat(1.0f));
    for (int i = 0; i < count; ++i)
      write(column, t + i, load(dkey_ + (reach_ + i) * VL), load(dvalue_ + (reach_ + i) * VL));
  }

  // The gradient of the average of a query; writes that of the query itself.
  vf gradient_of_average(const BackwardColumn<S>& column, int64_t token, vf average) const {
    const CausalColumn<S>& sums = column.sums;
    const vf gradient = sums.of_token(p.gradient, token);
    if (!p.query.data) return gradient;
    const vf gate = sigmoid(sums.of_token(p.query, token));
    sums.write(p.query_gradient, token, gradient * average * gate * (1.0f - gate));
    return gradient * gate;
  }

  // The gradients of the keys and values of the buffer, tile by tile. Entry i is far from the queries i + 1, i + 2 and
  // so on of the chunk, and from all later ones.
  template <bool VECTORS>
  void gradients_of_keys(BackwardColumn<S>& column, int count) {
    CausalColumn<S>& sums = column.sums;
    Sums& later = column.later;
    later.take_exponent(-sums.top);
    Sums own;  // of the chunk, as in the forward pass
    for (int entry = (reach_ + count - 1) / TILE * TILE; entry >= 0; entry -= TILE) {
      vf a[TILE], b[TILE];
      for (int u = TILE - 1; u >= 0; --u) {
        const int i = entry + u;
        a[u] = b[u] = vf{};
        if (!p.global_connectivity || i >= count) continue;
        a[u] = later.denominator + own.denominator, b[u] = later.numerator + own.numerator;
        const vf weight = sums.template weight<VECTORS>(sums.weights_of(i), p.window + PAD);
        own.denominator += load(column.a + i * VL) * weight, own.numerator += load(column.b + i * VL) * weight;
      }
      const int first = std::max(0, entry - reach_), last = std::min(count, entry + TILE);
      if (reach_ == 0) {
        for (int u = 0; u < last - entry; ++u) {
          const vf w = sums.template weight<VECTORS>(sums.weights_of(entry + u), 0);
          a[u] += w * load(column.a + (entry + u) * VL), b[u] += w * load(column.b + (entry + u) * VL);
        }
      } else {
        for (int i = first; i < last; ++i) {
          const vf a_of_query = load(column.a + i * VL), b_of_query = load(column.b + i * VL);
          const float* weights = sums.weights_of(i);
#pragma GCC unroll 8
          for (int u = 0; u < TILE; ++u) {
            const vf w = sums.template weight<VECTORS>(weights, entry + u - i);
            a[u] += w * a_of_query, b[u] += w * b_of_query;
          }
        }
      }
      for (int u = 0; u < TILE; ++u) {
        const int64_t at = (entry + u) * VL;
        const vf key = load(sums.e + at), value = load(sums.v + at) - column.center;
        const vi from_later = splat(float(entry + u)) >= float(count);  // later chunks have added to these entries
        const vi hidden = key == 0.0f;  // from queries with NaN, too
        store(dvalue_ + at, (hidden ? vf{} : key * a[u]) + (from_later ? load(dvalue_ + at) : vf{}));
        store(dkey_ + at, (hidden ? vf{} : key * (a[u] * value + b[u])) + (from_later ? load(dkey_ + at) : vf{}));
      }
    }
    later.add({own.numerator, own.denominator, later.n});
  }

  // Adds the gradients of the keys and values of the buffer, and of w, from the lost queries, and from `later` ones.
  void careful_gradients(BackwardColumn<S>& column, int64_t position, int count, unsigned lost, Sums& later) {
    CausalColumn<S>& sums = column.sums;
    for (int i = 0; i < count; ++i) {
      if (!sums.is_lost(lost, i)) continue;
      sums.split_weights(i);
      const vf a = load(lost_a_ + i * VL), b = load(lost_b_ + i * VL), n = load(n_ + i * VL);
      for (int j = 0; j < window_; ++j) {
        const int64_t at = (i + j) * VL;
        const Scaled key = sums.careful_weight(i, j);
        const vi hidden = key.m == 0.0f;
        const vf weight = scaled(key.m, key.n - n);
        const vf of_logit = hidden ? vf{} : weight * (a * (load(sums.v + at) - column.center) + b);
        add(dvalue_ + at, hidden ? vf{} : weight * a);
        add(dkey_ + at, of_logit);
        add(products_ + j * VL, of_logit);
      }
      if (!p.has_table() || !bias_gradient_) continue;
      add_to_row(position + i, products_, false);
      clear(products_, window_);
    }
    for (int i = count - 1; i >= 0 && p.global_connectivity; --i) {
      const int64_t at = i * VL;
      const vf key = load(sums.m + at), n = load(sums.n + at) + later.n;
      const vf a = key == 0.0f ? vf{} : scaled(key * later.denominator, n);
      const vf b = key == 0.0f ? vf{} : scaled(key * later.numerator, n);
      add(dvalue_ + at, a);
      add(dkey_ + at, a * (load(sums.v + at) - column.center) + b);
      if (!sums.is_lost(lost, i)) continue;
      const vf a_of_query = load(lost_a_ + at), b_of_query = load(lost_b_ + at);
      const vf own = a_of_query == 0.0f ? splat(NEVER) : -load(n_ + at);
      later.take_exponent(max(later.n, own));
      later.denominator += scaled(a_of_query, own - later.n);
      later.numerator += scaled(b_of_query, own - later.n);
    }
  }

  void write(const BackwardColumn<S>& column, int64_t token, vf grad_key, vf grad_value) const {
    const Column& at = column.sums.at;
    const int64_t place = p.place(row_, token, at.first);
    write_token<S>(p, p.value_gradient, place, grad_value, at.count);
    if (!p.key_per_head())
      write_token<S>(p, p.key_gradient, place, grad_key, at.count);
    else if (at.one_head)
      key_gradient_[token * p.heads + at.head] += sum_of(grad_key);
    else
      for (int lane = 0; lane < at.count; ++lane)
        key_gradient_[token * p.heads + column.sums.head(lane)] += grad_key[lane];
  }

  // --------------------------------------------------------------------------------------------------- gradients of w

  // For each query of a tile and each key of its window, the sum of exp(K) (a V + b) over the columns, as vectors.
  void gradients_of_w(int64_t position, int count) {
    for (int i = 0; i < count; i += TILE) {
      for (int entry = i; entry < i + TILE + reach_; entry += 2) {
        vf sums[2 * TILE] = {};
        for (const BackwardColumn<S>& column : columns_) {
          if (!column.is_fast) continue;
          const float *key = column.sums.e + entry * VL, *product = column.sums.ev + entry * VL;
          const vf e[] = {load(key), load(key + VL)}, ev[] = {load(product), load(product + VL)};
#pragma GCC unroll 8
          for (int u = 0; u < TILE; ++u) {
            const vf a = load(column.a + (i + u) * VL), b = load(column.b + (i + u) * VL);
            sums[2 * u] += a * ev[0], sums[2 * u] += b * e[0];
            sums[2 * u + 1] += a * ev[1], sums[2 * u + 1] += b * e[1];
          }
        }
        float* tile = tile_ + (PAD + entry - i) * VL;
        for (int u = 0; u < TILE; ++u, tile += (weights_.stride - 1) * VL)
          add(tile, sums[2 * u]), add(tile + VL, sums[2 * u + 1]);
      }
      if (!p.has_table()) continue;
      for (int u = 0; u < std::min(TILE, count - i); ++u)
        add_to_row(position + i + u, tile_ + (u * weights_.stride + PAD) * VL, true);
      clear(tile_, TILE * weights_.stride);
    }
  }

  // Adds vectors for each key of the window to the gradient of a row of w: sums over the features of each head, times
  // exp(w - M) if they are `weighted`.
  void add_to_row(int64_t position, const float* vectors, bool weighted) const {
    const CausalColumn<S>& sums = columns_[0].sums;
    const float* weights = weights_.row(row_, sums.at, position) + PAD * (weights_.vectors ? VL : 1);
    if (weights_.vectors) {
      for (int lane = 0; lane < sums.at.count; ++lane) {
        float* gradient = bias_gradient_ + p.bias_row(row_, sums.head(lane), position) * window_;
        for (int j = lane; j < window_ * VL; j += VL)  // biases of pairs that there are not may be NaN
          gradient[j / VL] += vectors[j] == 0.0f ? 0.0f : vectors[j] * (weighted ? weights[j] : 1.0f);
      }
      return;
    }
    float* gradient = bias_gradient_ + p.bias_row(row_, sums.at.head, position) * window_;
    for (int j = 0; j < window_; j += VL) {
      const int count = std::min(VL, window_ - j);
      const vf sum = sums_of_rows(vectors + j * VL), weight = weighted ? load(weights + j, count) : splat(1.0f);
      store(gradient + j, load(gradient + j, count) + (sum == 0.0f ? sum : sum * weight), count);
    }
  }

  const CausalProblem& p;
  const Weights& weights_;
  const int window_, reach_, size_;
  float* const bias_gradient_;
  const Scratch scratch_;
  int64_t row_ = 0;
  float* key_gradient_ = nullptr;
  std::vector<BackwardColumn<S>> columns_;
  std::vector<Sums> states_;  // the far sums of each chunk and column
  float *dkey_, *dvalue_;     // gradients of the entries of the buffer
  float *n_, *lost_a_, *lost_b_;  // exponents of the queries of the chunk, and a and b of lost ones
  float *tile_, *products_;   // gradients of w as vectors of features, of sums with one exponent and of careful ones
};

template <class S>
void backward(const CausalProblem& p) {
  if (p.first) {  // gradients of padding are 0
    memset(p.value_gradient, 0, p.numbers() * sizeof(S));
    memset(p.key_gradient, 0, p.batch * p.length * p.key_width * sizeof(S));
    if (p.query_gradient) memset(p.query_gradient, 0, p.numbers() * sizeof(S));
  }
  if (p.numbers() == 0) return;
  const Weights weights(p, 0);
  const std::vector<Column> columns = columns_of(p);
  const int64_t threads = num_threads(p.numbers()), of_thread = p.batch * columns.size() / threads;
  const int64_t most = p.bias_gradient && !weights.vectors ? std::clamp<int64_t>(of_thread, 1, GROUP) : 1;
  std::vector<const Column*> groups;  // where each begins
  for (const Column& column : columns) {
    const bool joins = !groups.empty() && groups.back()->head == column.head && &column - groups.back() < most;
    if (!joins) groups.push_back(&column);
  }
  // If features share keys, a unit of work is a head, or a row if columns mix heads. All heads have as many groups.
  const bool key_per_head = p.key_per_head();
  const int64_t heads_of_unit = weights.vectors ? p.heads : 1, count = groups.size();
  const int64_t per_unit = key_per_head ? count * heads_of_unit / p.heads : 1, units = p.batch * count / per_unit;
  groups.push_back(columns.data() + columns.size());
  const int64_t parts = std::min(units, threads);
  std::vector<std::vector<float>> partial(p.bias_gradient ? parts : 0);
  parallel_for(parts, p.numbers(), [&](int64_t begin, int64_t end) {
    std::vector<float> keys(key_per_head ? p.length * p.heads : 0);
    for (int64_t part = begin; part < end; ++part) {
      float* bias_gradient = p.bias_gradient;
      if (bias_gradient && part > 0) {
        partial[part].assign(p.bias_batch * p.bias_rows * p.heads * p.window, 0.0f);
        bias_gradient = partial[part].data();
      }
      Backward<S> pass(p, weights, bias_gradient);
      for (int64_t unit = units * part / parts; unit < units * (part + 1) / parts; ++unit) {
        const int64_t row = unit * per_unit / count, first = unit * per_unit % count;
        for (int64_t i = first; i < first + per_unit; ++i) pass.run(row, groups[i], groups[i + 1], keys.data());
        const int64_t first_head = weights.vectors ? 0 : groups[first]->head;
        for (int64_t i = first_head; i < int64_t(keys.size()); i += p.heads)  // of each token
          for (int64_t j = i; j < i + heads_of_unit; ++j)
            store((S*)p.key_gradient + row * keys.size() + j, splat(std::exchange(keys[j], 0.0f)), 1);
      }
    }
  });
  for (const std::vector<float>& part : partial)
    for (size_t i = 0; i < part.size(); ++i) p.bias_gradient[i] += part[i];
}

}  // namespace
}  // namespace aft

AFT_KERNEL(causal_backward, CausalProblem, backward)
