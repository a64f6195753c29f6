// Causal Eq. 2 with a window: what the forward and the backward pass share.
//
//   Y_t = sum_{t' <= t} exp(K_t' + w_tt') V_t' / sum_{t' <= t} exp(K_t' + w_tt'),    times sigmoid(Q_t)
//
// element-wise in the features. w_tt' is given for the last `window` keys, t' included. Keys before them ("far" keys)
// have w = 0, or are hidden; their sums are running sums. Slopes, w_tt' = -slope (t - t'), are the same as keys
// K_t' + slope t' without w, since exp(-slope t) cancels; t' counts from the start of a chunk.
//
// exp(K) is kept as m 2^n (`split_exp`). A chunk of tokens first takes one exponent `top` for all, from the largest n
// of a key that any of its queries may see. All terms are then scaled by 2^-top, and the sums are plain products. A tile
// with a denominator that is too small to be exact (SMALLEST) is "lost": its queries are computed again, each with an
// exponent of its own, which takes several times as long. All tiles are lost if a number is not finite.
#pragma once

#include <vector>

#include "problem.h"

namespace aft {

constexpr int CHUNK = 128;      // queries per chunk
constexpr int PAD = TILE - 1;   // zeros on both sides of a row of weights
constexpr int ROOM = 32;        // see `Weights`
constexpr unsigned ALL = ~0u;   // all tiles of a chunk, a bit each

struct CausalProblem : Problem {
  int64_t window;                 // s
  int64_t bias_batch, bias_rows;  // bias is (1 or B, 1 or more, h, s); its last key is the query's own; null for w = 0
  int64_t global_connectivity;    // whether keys before the window are visible, with w = 0
  const float* slopes;            // (h,) if w = -slope (t - t'); or null
  const int64_t* first;           // (B, T), the first token that each token sees, a later one for padding; or null
  // The state before the first token and after the last one; null pointers without one.
  float *keys, *values;           // (B, h, s - 1, 1 or c), (B, h, s - 1, c): the last tokens
  double *numerator, *denominator;  // (B, h, c), (B, h, 1 or c): far sums, divided by exp(maximum)
  float* maximum;                   // (B, h, 1 or c)

  bool has_table() const { return bias_rows > 1; }  // whether w depends on the position of the query
  // Whether vectors of features may have several heads: narrow ones, with the same w for all queries.
  bool mixes_heads() const { return !has_table() && heads > 1 && features() % VL != 0; }
  int64_t bias_row(int64_t row, int64_t head, int64_t position) const {  // index of a row of w
    int64_t first_row = bias_batch > 1 ? row * bias_rows : 0;
    return (first_row + std::min(position, bias_rows - 1)) * heads + head;
  }
};

inline std::vector<Column> columns_of(const CausalProblem& p) {
  std::vector<Column> columns;
  const int64_t run = p.mixes_heads() ? p.width : p.features();
  for (int64_t begin = 0; begin < p.width; begin += run)
    for (int64_t first = begin; first < begin + run; first += VL) {
      const int64_t last = std::min(first + VL, begin + run) - 1, head = first / p.features();
      columns.push_back({first, int(last + 1 - first), last / p.features() == head, head});
    }
  return columns;
}

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

// Updates the last tokens in the state of a head.
template <class S>
void keep_tokens(const CausalProblem& p, int64_t row, int64_t head) {
  const int64_t count = p.window - 1;
  if (count == 0) return;
  const auto keep = [&](const Tensor& x, int64_t features, float* kept) {
    kept += (row * p.heads + head) * count * features;
    for_each_document(p, row, [&](int64_t begin, int64_t end) {
      const int64_t stay = std::max<int64_t>(0, count - (end - begin));
      memmove(kept, kept + (count - stay) * features, stay * features * sizeof(float));
      for (int64_t i = stay; i < count; ++i) {
        const S* token = token_at<S>(x, row, end - count + i, head * features);
        for (int64_t f = 0; f < features; ++f) kept[i * features + f] = to_float(token[f]);
      }
    });
  };
  keep(p.key, p.key_width / p.heads, p.keys);
  keep(p.value, p.features(), p.values);
}

// exp(w - M) for each row of w, where M is a multiple of ln 2, so that the largest is about 2^room. An entry is a
// number, or a vector if columns mix heads. The largest exp(K) of a chunk is scaled to 2^room as well: fewer terms
// underflow with more room. The backward pass has none: it divides small gradients by sums of up to 2^(2 room).
class Weights {
 public:
  Weights(const CausalProblem& problem, int room)
      : p(problem), room(room), vectors(p.mixes_heads()), stride(p.window + 2 * PAD + 1),
        rows_(std::max<int64_t>(1, p.bias_batch * p.bias_rows) * p.heads), columns_((p.width + VL - 1) / VL),
        table_(rows_ * stride, 0.0f) {
    parallel_for(rows_, p.bias ? rows_ * p.window * 8 : 0, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) fill(r);
    });
    if (vectors) spread();
  }

  // A row: PAD zeros, the window, PAD zeros, and the weight of far keys, exp(-M).
  const float* row(int64_t row, const Column& at, int64_t position) const {
    if (vectors) return &table_[((p.bias_batch > 1 ? row : 0) * columns_ + at.first / VL) * stride * VL];
    return &table_[(p.bias ? p.bias_row(row, at.head, position) : at.head) * stride];
  }

  const CausalProblem& p;
  const int room;
  const bool vectors;    // whether entries are vectors
  const int64_t stride;  // entries of a row

 private:
  void fill(int64_t r) {
    const float none = 0.0f, *w = p.bias ? p.bias + r * p.window : &none;
    float top = p.global_connectivity ? 0.0f : -LARGEST;
    for (int64_t i = 0; i < p.window; ++i) top = std::max(top, std::min(w[i], LARGEST));
    const vf most = splat(std::nearbyint(top * LOG2_E) - room);
    float *weights = &table_[r * stride], *first = weights + PAD;
    for (int64_t i = 0; i < p.window; i += VL) {
      const int count = part(p.window - i);
      const Scaled e = split_exp(load(w + i, count));
      store(first + i, scaled(e.m, e.n - most), count);
    }
    weights[stride - 1] = p.global_connectivity ? scaled(splat(1.0f), -most)[0] : 0.0f;
  }

  void spread() {  // the numbers of heads to vectors of features
    std::vector<float> spread(table_.size() / p.heads * columns_ * VL);
    float* next = spread.data();
    for (const float* of_heads = table_.data(); next < spread.data() + spread.size(); of_heads += p.heads * stride)
      for (int64_t place = 0; place < columns_ * stride * VL; ++place) {
        const int64_t feature = place / (stride * VL) * VL + place % VL;
        *next++ = of_heads[std::min(feature / p.features(), p.heads - 1) * stride + place / VL % stride];
      }
    table_.swap(spread);
  }

  const int64_t rows_, columns_;
  std::vector<float> table_;
};

// One vector of features of one row: a buffer of keys and values, which holds the tokens of a chunk and, before them,
// the `reach` = window - 1 tokens that the first query of the chunk sees. Token i of the chunk is entry i + reach of
// the buffer; its window are the entries i .. i + reach; entry i - 1 is the last far one.
template <class S>
class CausalColumn {
 public:
  static int64_t entries(const CausalProblem& p) { return std::min<int64_t>(CHUNK, p.length) + p.window + 2 * TILE; }
  static int64_t vectors(const CausalProblem& p) { return 7 * entries(p) + 2 * p.window; }  // needed of the scratch memory

  CausalColumn(const CausalProblem& problem, const Weights& weights, int64_t row, Column column, Scratch scratch)
      : p(problem), at(column), row(row), reach(int(p.window) - 1), weights_(weights) {
    const int64_t size = entries(p);
    m = scratch.take(size), n = scratch.take(size), v = scratch.take(size);
    e = scratch.take(size), ev = scratch.take(size);
    growth_m_ = scratch.take(size), growth_n_ = scratch.take(size);
    w_m_ = scratch.take(p.window), w_n_ = scratch.take(p.window);
    if (!p.slopes) return;
    vf slope = {};
    for (int lane = 0; lane < at.count; ++lane) slope[lane] = p.slopes[head(lane)];
    while (chunk > TILE && any(slope * float(chunk) > 40.0f)) chunk /= 2;  // exponents of a chunk should differ little
    for (int i = 0; i <= std::min<int64_t>(chunk, p.length); ++i) {
      const Scaled growth = split_exp(slope * float(i));
      store(growth_m_ + i * VL, growth.m), store(growth_n_ + i * VL, growth.n);
    }
  }

  // exp(slope i), by which the sums of a chunk count more if its start is i tokens later.
  Scaled growth(int i) const {
    return p.slopes ? Scaled{load(growth_m_ + i * VL), load(growth_n_ + i * VL)} : Scaled{splat(1.0f), vf{}};
  }

  int64_t head(int lane) const { return at.one_head ? at.head : (at.first + lane) / p.features(); }

  // --------------------------------------------------------------------------------------------------- the buffer

  // Hides the entries from .. to - 1.
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
    for (int offset = 0; offset < count; ++offset) {
      Scaled key = split_exp(key_of(token + offset));
      if (p.slopes) key.m *= load(growth_m_ + offset * VL), key.n += load(growth_n_ + offset * VL);
      put(i + offset, key, of_token(p.value, token + offset));
    }
  }

  vf of_token(const Tensor& x, int64_t token) const { return read_token<S>(x, row, token, at.first, at.count); }
  void write(void* x, int64_t token, vf y) const { write_token<S>(p, x, p.place(row, token, at.first), y, at.count); }

  vf key_of(int64_t token) const {
    if (!p.key_per_head()) return of_token(p.key, token);
    const S* keys = token_at<S>(p.key, row, token, 0);
    vf x = splat(to_float(keys[at.head]));
    if (!at.one_head)
      for (int lane = 0; lane < at.count; ++lane) x[lane] = to_float(keys[head(lane)]);
    return x;
  }

  // Moves the last `reach` of the tokens to the front.
  void advance(int count) {
    for (float* x : {m, n, v}) memmove(x, x + count * VL, reach * VL * sizeof(float));
  }

  // ------------------------------------------------------------------------------------------------------------- sums

  // Calls emit(i, sums) for the queries of a chunk, whose first one has a position in its document, and sets the far
  // sums to those of the next chunk. Values count from `center`. Returns the lost tiles, a bit each, or ALL: if there
  // is one query, if top is above a `limit`, or if a sum or what `emit` returned is not finite. `emit` is called again for
  // their queries, which have exponents of their own; the sums of the others are divided by 2^top exp(M).
  template <class Emit>
  unsigned queries(int64_t position, int count, vf center, vf limit, const Emit& emit) {
    position_ = position, split_ = nullptr;  // columns of a group share the memory
    for (int i = 0; i < count + PAD; ++i) weights_of_[i] = weights_.row(row, at, position + i);
    unsigned lost = ALL;
    Sums later = far;
    if (count > 1) {
      scale(count, center);
      later.take_exponent(top);
      if (!any(top > limit))
        lost = weights_.vectors ? tiles<true>(count, later, emit) : tiles<false>(count, later, emit);
    }
    if (lost == 0 && !any(later.denominator < SMALLEST)) {
      far = later;
    } else {
      int known = 0;  // tokens of the chunk in the far sums
      for (int i = 0; i < count; ++i) {
        if (!is_lost(lost, i)) continue;
        split_weights(i);
        take_in(std::exchange(known, i), i, center);
        emit(i, careful_sums(far, [&](auto visit) {
          for (int j = 0; j <= reach; ++j) visit(careful_weight(i, j), load(v + (i + j) * VL) - center);
        }));
      }
      take_in(known, count, center);
    }
    finish(count);
    return lost;
  }

  static bool is_lost(unsigned tiles, int i) { return tiles >> i / TILE & 1; }

  // Prepares the far sums for the next chunk, after those of a chunk are complete.
  void finish(int count) {
    far.divide(growth(count));
    far.renormalize(far.denominator);
  }

  // exp(w - M) of query i of the chunk: its row of weights, and the entry of a key, -PAD <= j < window + PAD, or
  // j = window + PAD for far keys.
  const float* weights_of(int i) const { return weights_of_[i]; }
  template <bool VECTORS>
  static vf weight(const float* weights, int64_t j) {
    return VECTORS ? load(weights + (PAD + j) * VL) : splat(weights[PAD + j]);
  }

  // Prepares `careful_weight` of query i.
  void split_weights(int i) {
    if (std::exchange(split_, weights_of(i)) == weights_of(i)) return;
    for (int64_t j = 0; j < p.window; j += weights_.vectors ? 1 : VL) {
      const int count = weights_.vectors ? VL : part(p.window - j);
      vf w = {};
      if (p.bias && !weights_.vectors) w = load(p.bias + p.bias_row(row, at.head, position_ + i) * p.window + j, count);
      for (int lane = 0; lane < at.count && p.bias && weights_.vectors; ++lane)
        w[lane] = p.bias[p.bias_row(row, head(lane), 0) * p.window + j];
      const Scaled e = split_exp(w);
      const int64_t place = weights_.vectors ? j * VL : j;
      store(w_m_ + place, e.m, count), store(w_n_ + place, e.n, count);
    }
  }

  // exp(K + w) of entry i + j for query i.
  Scaled careful_weight(int i, int j) const {
    const Scaled key = {load(m + (i + j) * VL), load(n + (i + j) * VL)};
    return key * (weights_.vectors ? Scaled{load(w_m_ + j * VL), load(w_n_ + j * VL)}
                                   : Scaled{splat(w_m_[j]), splat(w_n_[j])});
  }

  // Adds the entries begin .. end - 1 to the far sums.
  void take_in(int begin, int end, vf center) {
    if (!p.global_connectivity || begin == end) return;
    far.add(careful_sums({}, [&](auto visit) {
      for (int i = begin; i < end; ++i) visit({load(m + i * VL), load(n + i * VL)}, load(v + i * VL) - center);
    }));
  }

  const CausalProblem& p;
  const Column at;
  const int64_t row;
  const int reach;
  int chunk = CHUNK;
  Sums far;          // of the keys before the window of the first query of the chunk
  vf top;            // the exponent of the chunk: the largest n, minus `room`
  float *m, *n, *v;  // exp(K) = m 2^n, and V
  float *e, *ev;     // exp(K) 2^-top, and its product with V

 private:
  // Gives the entries one exponent. Those after the chunk, up to a full tile, are hidden.
  void scale(int count, vf center) {
    const int end = reach + (count + PAD) / TILE * TILE;
    hide(reach + count, end);
    top = far.n;
    for (int i = 0; i < end; ++i) top = max(top, load(n + i * VL));
    top -= float(weights_.room);
    for (int i = 0; i < end; ++i) {
      const vf weight = scaled(load(m + i * VL), load(n + i * VL) - top);
      store(e + i * VL, weight);
      store(ev + i * VL, weight * (load(v + i * VL) - center));
    }
  }

  // `queries` the fast way, tile by tile. `later` are the far sums of the first query, then of that after the last.
  template <bool VECTORS, class Emit>
  unsigned tiles(int count, Sums& later, const Emit& emit) {
    unsigned lost = 0;
    bool all_lost = true;
    Sums own;  // of the chunk, not added to earlier chunks one by one: rounding errors grow with the chunks
    for (int i = 0; i < count; i += TILE) {
      const int rows = std::min(TILE, count - i);
      const float* weights[TILE];
      vf numerator[TILE], denominator[TILE];
      for (int u = 0; u < TILE; ++u) {
        weights[u] = weights_of(i + u);
        const vf of_far = weight<VECTORS>(weights[u], p.window + PAD);
        numerator[u] = (later.numerator + own.numerator) * of_far;
        denominator[u] = (later.denominator + own.denominator) * of_far;
        if (!p.global_connectivity || u >= rows) continue;
        own.numerator += load(ev + (i + u) * VL), own.denominator += load(e + (i + u) * VL);
      }
      if (reach == 0) {
        for (int u = 0; u < TILE; ++u) {
          const vf own = weight<VECTORS>(weights[u], 0);
          numerator[u] += own * load(ev + (i + u) * VL), denominator[u] += own * load(e + (i + u) * VL);
        }
      } else {
        for (int entry = i; entry < i + TILE + reach; ++entry) {
          const vf key = load(e + entry * VL), product = load(ev + entry * VL);
#pragma GCC unroll 8
          for (int u = 0; u < TILE; ++u) {
            const vf w = weight<VECTORS>(weights[u], entry - i - u);
            numerator[u] += w * product, denominator[u] += w * key;
          }
        }
      }
      vf smallest = denominator[0], sum = numerator[0];
      for (int u = 1; u < rows; ++u) smallest = min(smallest, denominator[u]), sum += numerator[u];
      if (any(sum * 0.0f != 0.0f)) return ALL;
      vf emitted = {};
      const bool is_lost = any(smallest < SMALLEST * (1ll << weights_.room));
      if (is_lost) lost |= 1u << i / TILE;
      for (int u = 0; u < rows && !is_lost; ++u) emitted += emit(i + u, Sums{numerator[u], denominator[u], top});
      all_lost = all_lost && is_lost;
      if (any(emitted - emitted != 0.0f)) return ALL;
    }
    later.add({own.numerator, own.denominator, top});
    return all_lost ? ALL : lost;
  }

  const Weights& weights_;
  const float* weights_of_[CHUNK + PAD];
  int64_t position_ = 0;         // of the first query of the chunk in its document
  float *growth_m_, *growth_n_;  // exp(slope i) = m 2^n
  float *w_m_, *w_n_;            // exp(w) = m 2^n of the query whose weights are `split_`
  const float* split_ = nullptr;
};

}  // namespace aft
