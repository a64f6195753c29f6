// Eq. 2 on a grid (AFT-conv, Eq. 6), with a kernel for each head: what the forward and the backward pass share.
//
//   Y_q = sum_p exp(K_p + w(p - q)) V_p / sum_p exp(K_p + w(p - q)),    times sigmoid(Q_q)
//
// where q and p are positions on a grid, w is a kernel of `kernel_rows` x `kernel_columns` offsets around 0, and outside
// of the kernel w = 0, or keys are hidden. Vectors run over features; each lane has the kernel of its head. Positions
// in the kernel are a direct convolution with exp(w). Positions outside are sums of rows and of parts of rows: nothing
// is subtracted, so nothing cancels.
//
// Every query sees the largest key, so exp(K) takes its exponent for all. Where a denominator is nevertheless too small
// to be exact, since that key is hidden or its w is very negative, the query is computed again with its own exponent.
#pragma once

#include <vector>

#include "columns.h"

namespace aft {

// All fields have 64 bits, so that Python can pack them. Rows of features are contiguous, other strides are free.
struct GridProblem {
  int64_t is_bf16;
  int64_t batch, rows, columns, width, heads;
  int64_t key_width;                           // width, or heads for one key per head
  int64_t kernel_rows, kernel_columns;         // odd
  int64_t hides_outside;
  const void *query, *key, *value;             // (B, T, d), (B, T, d or h), (B, T, d); query may be null
  int64_t query_batch, query_row, key_batch, key_row, value_batch, value_row;  // strides
  const float* kernels;                        // w: (h, kernel_rows, kernel_columns), contiguous
  void* output;                                // (B, T, d), contiguous
  const void* gradient;                        // (B, T, d) of the output
  int64_t gradient_batch, gradient_row;
  void *query_gradient, *key_gradient, *value_gradient;  // contiguous
  float* kernel_gradient;                      // filled with 0 by the caller; null if it is not needed

  int64_t length() const { return rows * columns; }
  int64_t numbers() const { return batch * length() * width; }
  int64_t taps() const { return kernel_rows * kernel_columns; }
};

// Two images of vectors, of which weighted sums are needed, with `reach` columns of zeros on both sides.
class ImagePair {
 public:
  ImagePair(const GridProblem& p, Scratch& scratch)
      : reach_(p.kernel_columns / 2), stride_(p.columns + 2 * reach_), columns_(p.columns) {
    const int64_t size = p.rows * stride_;
    x = scratch.take(size), y = scratch.take(size);
    memset(x, 0, size * VL * sizeof(float));
    memset(y, 0, size * VL * sizeof(float));
  }
  static int64_t vectors(const GridProblem& p) { return 2 * p.rows * (p.columns + p.kernel_columns); }

  int64_t at(int64_t position) const { return at(position / columns_, position % columns_); }
  int64_t at(int64_t row, int64_t column) const { return (row * stride_ + reach_ + column) * VL; }

  float *x, *y;

 private:
  const int64_t reach_, stride_, columns_;
};

// One vector of features.
class GridColumn {
 public:
  static int64_t vectors(const GridProblem& p) {
    return 4 * p.taps() + 3 * p.length() + 2 * (p.length() + p.rows);
  }

  GridColumn(const GridProblem& problem, Column column, Scratch& scratch) : p(problem), at(column) {
    kernel_ = scratch.take(p.taps()), flipped_ = scratch.take(p.taps());
    kernel_m_ = scratch.take(p.taps()), kernel_n_ = scratch.take(p.taps());
    m = scratch.take(p.length()), n = scratch.take(p.length()), v = scratch.take(p.length());
    beside_x_ = scratch.take(p.length()), beside_y_ = scratch.take(p.length());
    row_x_ = scratch.take(p.rows), row_y_ = scratch.take(p.rows);
    vf most = p.hides_outside ? splat(NEVER) : vf{};
    for (int64_t tap = 0; tap < p.taps(); ++tap) {
      const Scaled weight = split_exp(bias(tap));
      store(kernel_m_ + tap * VL, weight.m), store(kernel_n_ + tap * VL, weight.n);
      most = max(most, weight.n);
    }
    for (int64_t tap = 0; tap < p.taps(); ++tap) {
      const Scaled weight = {load(kernel_m_ + tap * VL), load(kernel_n_ + tap * VL)};
      store(kernel_ + tap * VL, scaled(weight.m, weight.n - most));
      store(flipped_ + (p.taps() - 1 - tap) * VL, scaled(weight.m, weight.n - most));
    }
    outside_ = p.hides_outside ? vf{} : scaled(splat(1.0f), -most);
  }

  int64_t head(int lane) const { return (at.first + lane) / (p.width / p.heads); }

  vf bias(int64_t tap) const {
    vf w = {};
    for (int lane = 0; lane < at.count; ++lane) w[lane] = p.kernels[head(lane) * p.taps() + tap];
    return w;
  }

  // exp(w), divided by the same power of two for all.
  vf weight(int64_t tap) const { return load(kernel_ + tap * VL); }

  // Reads the keys and values of a row of the batch.
  template <class S>
  void read(int64_t row) {
    const S* keys = (const S*)p.key + row * p.key_batch;
    const S* values = (const S*)p.value + row * p.value_batch + at.first;
    top = splat(NEVER);
    for (int64_t i = 0; i < p.length(); ++i, keys += p.key_row, values += p.value_row) {
      vf key = {};
      if (p.key_width == p.width)
        key = load(keys + at.first, at.count);
      else
        for (int lane = 0; lane < at.count; ++lane) key[lane] = to_float(keys[head(lane)]);
      const Scaled e = split_exp(key);
      top = max(top, e.n);
      store(m + i * VL, e.m), store(n + i * VL, e.n);
      store(v + i * VL, e.m == 0.0f ? vf{} : load(values, at.count));  // hidden values may be NaN
    }
  }

  // Sets x to exp(K) V and y to exp(K), divided by 2^top. Values count from `center`.
  void products(ImagePair& image, vf center = vf{}) const {
    for (int64_t i = 0; i < p.length(); ++i) {
      const vf weight = scaled(load(m + i * VL), load(n + i * VL) - top);
      store(image.x + image.at(i), weight * (load(v + i * VL) - center));
      store(image.y + image.at(i), weight);
    }
  }

  // Calls emit(position, sum of w x, sum of w y) for all positions; `transposed` swaps queries and keys.
  template <class Emit>
  void sums(const ImagePair& image, bool transposed, const Emit& emit) const {
    const float* kernel = transposed ? flipped_ : kernel_;
    if (!p.hides_outside) sum_outside(image);
    const int64_t reach = p.kernel_rows / 2;
    for (int64_t row = 0; row < p.rows; ++row) {
      const int64_t first = std::max<int64_t>(0, row - reach), last = std::min(p.rows - 1, row + reach);
      vf x = {}, y = {};  // of the rows outside of the kernel
      if (!p.hides_outside)
        for (int64_t r = 0; r < p.rows; ++r)
          if (r < first || r > last) x += load(row_x_ + r * VL), y += load(row_y_ + r * VL);
      int64_t column = 0;
      for (; column + 7 <= p.columns; column += 7) tile<7>(image, kernel, row, column, first, last, x, y, emit);
      for (; column + 3 <= p.columns; column += 3) tile<3>(image, kernel, row, column, first, last, x, y, emit);
      for (; column < p.columns; ++column) tile<1>(image, kernel, row, column, first, last, x, y, emit);
    }
  }

  // Calls visit(key, tap, exp(K + w)) for all keys that a query sees; tap is -1 outside of the kernel.
  template <class Visit>
  void each_key(int64_t query, const Visit& visit) const {
    const int64_t row = query / p.columns, column = query % p.columns;
    const int64_t reach = p.hides_outside ? p.kernel_rows / 2 : p.rows;  // rows of keys that the query may see
    const int64_t first = std::max<int64_t>(0, row - reach), last = std::min(p.rows, row + reach + 1);
    for (int64_t key = first * p.columns; key < last * p.columns; ++key) {
      const int64_t tap_row = key / p.columns - row + p.kernel_rows / 2;
      const int64_t tap_column = key % p.columns - column + p.kernel_columns / 2;
      const bool inside = std::min(tap_row, tap_column) >= 0 && tap_row < p.kernel_rows && tap_column < p.kernel_columns;
      const Scaled e = {load(m + key * VL), load(n + key * VL)};
      const int64_t tap = tap_row * p.kernel_columns + tap_column;
      if (inside)
        visit(key, tap, Scaled{e.m * load(kernel_m_ + tap * VL), e.n + load(kernel_n_ + tap * VL)});
      else if (!p.hides_outside)
        visit(key, int64_t(-1), e);
    }
  }

  // The sums of one query with an exponent of its own.
  struct Sums {
    vf numerator = vf{}, denominator = vf{}, n = splat(NEVER);
  };
  Sums careful_sums(int64_t query, vf center = vf{}) const {
    Sums sums;
    each_key(query, [&](int64_t, int64_t, Scaled e) { sums.n = max(sums.n, e.n); });
    each_key(query, [&](int64_t key, int64_t, Scaled e) {
      const vf weight = scaled(e.m, e.n - sums.n);
      sums.numerator += weight * (load(v + key * VL) - center);
      sums.denominator += weight;
    });
    return sums;
  }

  const GridProblem& p;
  const Column at;
  vf top;             // the largest exponent of a key
  float *m, *n, *v;   // exp(K) = m 2^n, and V

 private:
  // The sums over the columns outside of the kernel, for each position of a row, and over whole rows.
  void sum_outside(const ImagePair& image) const {
    const int64_t reach = p.kernel_columns / 2;
    for (int64_t row = 0; row < p.rows; ++row) {
      auto add = [&](vf& x, vf& y, int64_t column) {
        if (column < 0 || column >= p.columns) return;
        x += load(image.x + image.at(row, column)), y += load(image.y + image.at(row, column));
      };
      vf x = {}, y = {};
      for (int64_t column = 0; column < p.columns; ++column) {
        add(x, y, column - reach - 1);
        const int64_t place = (row * p.columns + column) * VL;
        store(beside_x_ + place, x), store(beside_y_ + place, y);
      }
      x = vf{}, y = vf{};
      for (int64_t column = p.columns - 1; column >= 0; --column) {
        add(x, y, column + reach + 1);
        const int64_t place = (row * p.columns + column) * VL;
        store(beside_x_ + place, load(beside_x_ + place) + x), store(beside_y_ + place, load(beside_y_ + place) + y);
      }
      x = vf{}, y = vf{};
      for (int64_t column = 0; column < p.columns; ++column) add(x, y, column);
      store(row_x_ + row * VL, x), store(row_y_ + row * VL, y);
    }
  }

  template <int Q, class Emit>
  void tile(const ImagePair& image, const float* kernel, int64_t row, int64_t column, int64_t first, int64_t last,
            vf rows_x, vf rows_y, const Emit& emit) const {
    vf x[Q], y[Q];
    for (int u = 0; u < Q; ++u) x[u] = rows_x, y[u] = rows_y;
    if (!p.hides_outside)
      for (int64_t r = first; r <= last; ++r)
        for (int u = 0; u < Q; ++u) {
          const int64_t place = (r * p.columns + column + u) * VL;
          x[u] += load(beside_x_ + place), y[u] += load(beside_y_ + place);
        }
    for (int u = 0; u < Q; ++u) x[u] *= outside_, y[u] *= outside_;
    for (int64_t r = first; r <= last; ++r) {
      const float* weights = kernel + (r - row + p.kernel_rows / 2) * p.kernel_columns * VL;
      const int64_t start = image.at(r, column - p.kernel_columns / 2);
      const float *xs = image.x + start, *ys = image.y + start;
      for (int64_t tap = 0; tap < p.kernel_columns; ++tap) {
        const vf w = load(weights + tap * VL);
#pragma GCC unroll 8
        for (int u = 0; u < Q; ++u) {
          x[u] += w * load(xs + (tap + u) * VL);
          y[u] += w * load(ys + (tap + u) * VL);
        }
      }
    }
    for (int u = 0; u < Q; ++u) emit(row * p.columns + column + u, x[u], y[u]);
  }

  vf outside_;
  float *kernel_, *flipped_;       // exp(w), divided by one power of two
  float *kernel_m_, *kernel_n_;    // exp(w) = m 2^n
  float *beside_x_, *beside_y_, *row_x_, *row_y_;
};

}  // namespace aft
