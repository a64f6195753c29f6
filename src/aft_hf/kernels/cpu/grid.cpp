// Eq. 2 on a grid with a kernel for each head, forward and backward (see grid.h). The backward pass is that of
// causal_backward.cpp: with a and b of the queries as images, the sums for the keys are the transposed convolution.
#include "grid.h"

namespace aft {
namespace {

template <class S>
const S* features(const void* x, int64_t batch, int64_t row, int64_t batch_stride, int64_t row_stride, int64_t first) {
  return (const S*)x + batch * batch_stride + row * row_stride + first;
}

std::vector<Column> columns_of(const GridProblem& p) {
  std::vector<Column> columns;
  for (int64_t first = 0; first < p.width; first += VL)
    columns.push_back({first, int(std::min<int64_t>(VL, p.width - first)), false, 0});
  return columns;
}

template <class S>
void forward_column(const GridProblem& p, int64_t batch, Column at, Scratch scratch) {
  GridColumn column(p, at, scratch);
  ImagePair image(p, scratch);
  column.read<S>(batch);
  column.products(image);
  column.sums(image, false, [&](int64_t query, vf numerator, vf denominator) {
    vf average = numerator / denominator;
    if (any(denominator < SMALLEST)) {
      const GridColumn::Sums sums = column.careful_sums(query);
      average = sums.denominator == 0.0f ? vf{} : sums.numerator / sums.denominator;
    }
    if (p.query)
      average *= sigmoid(load(features<S>(p.query, batch, query, p.query_batch, p.query_row, at.first), at.count));
    store((S*)p.output + (batch * p.length() + query) * p.width + at.first, average, at.count);
  });
}

// The gradients of one vector of features.
template <class S>
class BackwardColumn {
 public:
  static int64_t vectors(const GridProblem& p) {
    return GridColumn::vectors(p) + 2 * ImagePair::vectors(p) + 2 * p.length() + p.taps();
  }

  BackwardColumn(const GridProblem& problem, int64_t batch, Column at, Scratch scratch)
      : p(problem), at_(at), batch_(batch), column_(p, at, scratch), keys_(p, scratch), queries_(p, scratch) {
    dkey_ = scratch.take(p.length()), dvalue_ = scratch.take(p.length()), dkernel_ = scratch.take(p.taps());
    memset(dkey_, 0, p.length() * VL * sizeof(float));
    memset(dvalue_, 0, p.length() * VL * sizeof(float));
    memset(dkernel_, 0, p.taps() * VL * sizeof(float));
  }

  // `key_gradient` (T, h) is used if there is one key per head, `kernel_gradient` (h, taps) if it is not null.
  void run(float* key_gradient, float* kernel_gradient) {
    column_.template read<S>(batch_);
    set_center();
    column_.products(keys_, center_);
    column_.sums(keys_, false, [&](int64_t query, vf numerator, vf denominator) {
      if (any(denominator < SMALLEST)) return careful_query(query);
      const vf inverse = 1.0f / denominator, average = numerator * inverse;
      const vf a = gradient_of_average(query, average + center_) * inverse;
      store(queries_.x + queries_.at(query), a), store(queries_.y + queries_.at(query), -a * average);
    });
    column_.sums(queries_, true, [&](int64_t key, vf a, vf b) {
      const vf weight = load(keys_.y + keys_.at(key)), value = load(column_.v + key * VL) - center_;
      write(key, load(dkey_ + key * VL) + weight * (a * value + b), load(dvalue_ + key * VL) + weight * a, key_gradient);
    });
    if (!kernel_gradient) return;
    for (int64_t tap_row = 0; tap_row < p.kernel_rows; ++tap_row) {
      int64_t tap = 0;
      for (; tap + 7 <= p.kernel_columns; tap += 7) gradients_of_taps<7>(tap_row, tap);
      for (; tap + 3 <= p.kernel_columns; tap += 3) gradients_of_taps<3>(tap_row, tap);
      for (; tap < p.kernel_columns; ++tap) gradients_of_taps<1>(tap_row, tap);
    }
    for (int64_t tap = 0; tap < p.taps(); ++tap) {
      const vf gradient = load(dkernel_ + tap * VL);
      for (int lane = 0; lane < at_.count; ++lane)
        kernel_gradient[column_.head(lane) * p.taps() + tap] += gradient[lane];
    }
  }

 private:
  // The mean of the values that are finite, so that nothing spreads to queries that do not see it.
  void set_center() {
    vf sum = {};
    for (int64_t i = 0; i < p.length(); ++i) {
      const vf value = load(column_.v + i * VL);
      sum += value - value == 0.0f ? value : vf{};
    }
    center_ = sum / float(p.length());
  }

  vf gradient_of_average(int64_t query, vf average) const {
    const vf gradient = load(features<S>(p.gradient, batch_, query, p.gradient_batch, p.gradient_row, at_.first), at_.count);
    if (!p.query) return gradient;
    const vf gate = sigmoid(load(features<S>(p.query, batch_, query, p.query_batch, p.query_row, at_.first), at_.count));
    S* of_query = (S*)p.query_gradient + (batch_ * p.length() + query) * p.width + at_.first;
    store(of_query, gradient * average * gate * (1.0f - gate), at_.count);
    return gradient * gate;
  }

  void careful_query(int64_t query) {
    const GridColumn::Sums sums = column_.careful_sums(query, center_);
    const vi empty = sums.denominator == 0.0f;
    const vf average = empty ? vf{} : sums.numerator / sums.denominator;
    const vf gradient = gradient_of_average(query, empty ? vf{} : average + center_);
    const vf a = empty ? vf{} : gradient / sums.denominator;
    column_.each_key(query, [&](int64_t key, int64_t tap, Scaled e) {
      const vf weight = scaled(e.m, e.n - sums.n);
      const vf of_logit = weight * a * (load(column_.v + key * VL) - center_ - average);
      store(dvalue_ + key * VL, load(dvalue_ + key * VL) + weight * a);
      store(dkey_ + key * VL, load(dkey_ + key * VL) + of_logit);
      if (tap >= 0) store(dkernel_ + tap * VL, load(dkernel_ + tap * VL) + of_logit);
    });
  }

  void write(int64_t key, vf of_key, vf of_value, float* key_gradient) const {
    const int64_t place = (batch_ * p.length() + key) * p.width + at_.first;
    store((S*)p.value_gradient + place, of_value, at_.count);
    if (p.key_width == p.width)
      store((S*)p.key_gradient + place, of_key, at_.count);
    else
      for (int lane = 0; lane < at_.count; ++lane) key_gradient[key * p.heads + column_.head(lane)] += of_key[lane];
  }

  // Q neighbouring taps: the sum of exp(w) (a exp(K) V + b exp(K)) over all queries and the keys at that offset.
  template <int Q>
  void gradients_of_taps(int64_t tap_row, int64_t first) {
    vf sums[Q] = {};
    for (int64_t row = 0; row < p.rows; ++row) {
      const int64_t row_of_keys = row + tap_row - p.kernel_rows / 2;
      if (row_of_keys < 0 || row_of_keys >= p.rows) continue;
      const int64_t query = queries_.at(row, 0), key = keys_.at(row_of_keys, first - p.kernel_columns / 2);
      for (int64_t column = 0; column < p.columns; ++column) {
        const vf a = load(queries_.x + query + column * VL), b = load(queries_.y + query + column * VL);
#pragma GCC unroll 8
        for (int u = 0; u < Q; ++u) {
          const int64_t place = key + (column + u) * VL;
          sums[u] += a * load(keys_.x + place) + b * load(keys_.y + place);
        }
      }
    }
    for (int u = 0; u < Q; ++u) {
      const int64_t tap = tap_row * p.kernel_columns + first + u;
      store(dkernel_ + tap * VL, load(dkernel_ + tap * VL) + sums[u] * column_.weight(tap));
    }
  }

  const GridProblem& p;
  const Column at_;
  const int64_t batch_;
  GridColumn column_;
  ImagePair keys_, queries_;  // exp(K) V and exp(K); a and b
  vf center_;
  float *dkey_, *dvalue_, *dkernel_;
};

template <class S>
void forward(const GridProblem& p) {
  const std::vector<Column> columns = columns_of(p);
  const int64_t count = columns.size();
  parallel_for(p.batch * count, p.numbers() * p.taps(), [&](int64_t begin, int64_t end) {
    const FlushSubnormals flush;
    const Scratch scratch(GridColumn::vectors(p) + ImagePair::vectors(p));
    for (int64_t task = begin; task < end; ++task)
      forward_column<S>(p, task / count, columns[task % count], scratch);
  });
}

template <class S>
void backward(const GridProblem& p) {
  const std::vector<Column> columns = columns_of(p);
  const bool key_per_head = p.key_width != p.width;  // then a thread computes whole images
  const int64_t per_unit = key_per_head ? columns.size() : 1, units = p.batch * columns.size() / per_unit;
  const int64_t parts = std::min(units, num_threads(p.numbers() * p.taps()));
  std::vector<std::vector<float>> partial(p.kernel_gradient ? parts : 0);
  parallel_for(parts, p.numbers() * p.taps(), [&](int64_t begin, int64_t end) {
    const FlushSubnormals flush;
    const Scratch scratch(BackwardColumn<S>::vectors(p));
    std::vector<float> keys(key_per_head ? p.length() * p.heads : 0);
    for (int64_t part = begin; part < end; ++part) {
      float* kernel_gradient = p.kernel_gradient;
      if (kernel_gradient && part > 0) {
        partial[part].assign(p.heads * p.taps(), 0.0f);
        kernel_gradient = partial[part].data();
      }
      for (int64_t unit = units * part / parts; unit < units * (part + 1) / parts; ++unit) {
        std::fill(keys.begin(), keys.end(), 0.0f);
        for (int64_t i = unit * per_unit; i < (unit + 1) * per_unit; ++i) {
          const int64_t count = columns.size();
          BackwardColumn<S>(p, i / count, columns[i % count], scratch).run(keys.data(), kernel_gradient);
        }
        S* of_keys = (S*)p.key_gradient + unit * p.length() * p.heads;
        for (int64_t i = 0; i < int64_t(keys.size()); i += VL) {
          const int count = int(std::min<int64_t>(VL, keys.size() - i));
          store(of_keys + i, load(keys.data() + i, count), count);
        }
      }
    }
  });
  for (const std::vector<float>& part : partial)
    for (size_t i = 0; i < part.size(); ++i) p.kernel_gradient[i] += part[i];
}

}  // namespace
}  // namespace aft

AFT_EXPORT void aft_grid(const aft::GridProblem* p) {
  if (p->is_bf16)
    aft::forward<aft::bf16>(*p);
  else
    aft::forward<float>(*p);
}

AFT_EXPORT void aft_grid_backward(const aft::GridProblem* p) {
  if (p->is_bf16)
    aft::backward<aft::bf16>(*p);
  else
    aft::backward<float>(*p);
}
