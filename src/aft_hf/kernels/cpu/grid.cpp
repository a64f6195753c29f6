// Eq. 2 on a grid (AFT-conv, Eq. 6), with a kernel for each head, forward and backward:
//
//   Y_q = sum_p exp(K_p + w(p - q)) V_p / sum_p exp(K_p + w(p - q)),    times sigmoid(Q_q)
//
// where q and p are positions on a grid, w is a kernel of `kernel_rows` x `kernel_columns` offsets around 0, and outside
// of the kernel w = 0, or keys are hidden. Vectors run over features; each lane has the kernel of its head. Positions
// in the kernel are a direct convolution with exp(w). Positions outside are sums of rows and of parts of rows: nothing
// is subtracted, so nothing cancels. With a and b the gradients of both sums, as images, the sums of the backward pass
// are the transposed convolution.
//
// Every query sees the largest key, so exp(K) takes its exponent for all. Where a denominator is nevertheless too small
// to be exact, since that key is hidden or its w is very negative, the query is computed again with its own exponent.
#include "grid.h"

#include <type_traits>
#include <vector>


namespace aft {
namespace {

// Calls use(size, first) for tiles of 0 .. count - 1, with sizes that are known at compile time.
template <class Use>
void for_tiles(int64_t count, const Use& use) {
  int64_t i = 0;
  for (; i + 7 <= count; i += 7) use(std::integral_constant<int, 7>(), i);
  for (; i + 3 <= count; i += 3) use(std::integral_constant<int, 3>(), i);
  for (; i < count; ++i) use(std::integral_constant<int, 1>(), i);
}

// The kernels of one vector of features.
struct Kernel {
  Kernel(const GridProblem& p, int64_t feature)
      : first(feature), count(int(std::min<int64_t>(VL, p.width - first))), weights(p.taps()), m(weights), n(weights) {
    for (int lane = 0; lane < count; ++lane) head[lane] = (first + lane) / (p.features());
    vf most = p.hides_outside ? splat(NEVER) : vf{};
    for (int64_t tap = 0; tap < p.taps(); ++tap) {
      vf w = {};
      for (int lane = 0; lane < count; ++lane) w[lane] = p.bias[head[lane] * p.taps() + tap];
      const Scaled e = split_exp(w);
      m[tap] = e.m, n[tap] = e.n, most = max(e.n, most);
    }
    for (int64_t tap = 0; tap < p.taps(); ++tap) weights[tap] = scaled(m[tap], n[tap] - most);
    outside = p.hides_outside ? vf{} : scaled(splat(1.0f), -most);
    flipped.assign(weights.rbegin(), weights.rend());
  }

  const int64_t first;  // feature
  const int count;
  int64_t head[VL] = {};                // of each feature
  vf outside;                           // exp(0), and exp(w), divided by one power of two for all
  std::vector<vf> weights, m, n;        // exp(w) = m 2^n
  std::vector<vf> flipped;              // the weights in reverse order
};

// Two images of which weighted sums are needed, with zeros beside them.
struct Images {
  std::vector<vf> x, y;
};

// One vector of features after the other, in the memory of one thread.
template <class S>
class Task {
 public:
  Task(const GridProblem& problem, bool backward)
      : p(problem), reach_(p.kernel_columns / 2), stride_(p.columns + 2 * reach_ + 1),
        m_(p.length), n_(m_), v_(m_), beside_x_(m_), beside_y_(m_), row_x_(p.rows), row_y_(p.rows) {
    make(keys_);
    if (!backward) return;
    make(queries_);
    dkey_.resize(p.length), dvalue_.resize(p.length);
  }

  void forward(int64_t batch, const Kernel& kernel) {
    begin(batch, kernel);
    products();
    sums(keys_, kernel.weights, [&](int64_t query, vf numerator, vf denominator) {
      if (any(denominator < SMALLEST)) numerator = all_sums(query).average(), denominator = splat(1.0f);
      if (p.query)  // 1 / sigmoid(q)
        denominator *= 1.0f + exp(min(splat(60.0f), -read(p.query, p.query_batch, p.query_row, query)));
      write(p.output, query, numerator / denominator);
    });
  }

  // Adds to `dkernel`, (taps), and, if there is one key per head, to `key_gradient`, (T, heads), from `first_head` on.
  void backward(int64_t batch, const Kernel& kernel, vf* dkernel, float* key_gradient, int64_t first_head, int64_t heads) {
    begin(batch, kernel);
    dkernel_ = dkernel;
    set_center();
    products();
    std::fill(dkey_.begin(), dkey_.end(), vf{}), std::fill(dvalue_.begin(), dvalue_.end(), vf{});
    sums(keys_, kernel.weights, [&](int64_t query, vf numerator, vf denominator) {
      vf a = {}, b = {};
      if (any(denominator < SMALLEST)) {
        add_careful_gradients(query);
      } else {
        const vf average = numerator / denominator;
        a = gradient_of_average(query, average + center_) / denominator, b = -a * average;
      }
      queries_.x[at(query)] = a, queries_.y[at(query)] = b;
    });
    sums(queries_, kernel.flipped, [&](int64_t key, vf a, vf b) {
      const vf weight = keys_.y[at(key)], of_key = dkey_[key] + weight * (a * (v_[key] - center_) + b);
      write(p.value_gradient, key, dvalue_[key] + weight * a);
      if (!p.key_per_head()) return write(p.key_gradient, key, of_key);
      for (int lane = 0; lane < kernel.count; ++lane)
        key_gradient[key * heads + kernel.head[lane] - first_head] += of_key[lane];
    });
    for (int64_t row = 0; row < p.kernel_rows && dkernel; ++row)
      for_tiles(p.kernel_columns, [&](auto size, int64_t column) { add_gradients_of_taps<size>(row, column); });
  }

 private:
  int64_t at(int64_t row, int64_t column) const { return row * stride_ + reach_ + 1 + column; }
  int64_t at(int64_t position) const { return at(position / p.columns, position % p.columns); }

  void make(Images& images) const { images.x.assign(p.rows * stride_ + 2, vf{}), images.y = images.x; }

  vf read(const void* x, int64_t batch_stride, int64_t row_stride, int64_t position) const {
    const S* from = (const S*)x + batch_ * batch_stride + position * row_stride + kernel_->first;
    __builtin_prefetch(from + AHEAD * row_stride);
    return load(from, kernel_->count);
  }
  void write(void* x, int64_t position, vf y) const {
    store((S*)x + (batch_ * p.length + position) * p.width + kernel_->first, y, kernel_->count);
  }

  // Reads keys and values.
  void begin(int64_t batch, const Kernel& kernel) {
    batch_ = batch, kernel_ = &kernel;
    top_ = splat(NEVER), center_ = vf{};
    for (int64_t i = 0; i < p.length; ++i) {
      vf key = {};
      if (!p.key_per_head())
        key = read(p.key, p.key_batch, p.key_row, i);
      else
        for (int lane = 0; lane < kernel.count; ++lane)
          key[lane] = to_float(((const S*)p.key)[batch * p.key_batch + i * p.key_row + kernel.head[lane]]);
      const Scaled e = split_exp(key);
      m_[i] = e.m, n_[i] = e.n, top_ = max(e.n, top_);
      v_[i] = e.m == 0.0f ? vf{} : read(p.value, p.value_batch, p.value_row, i);  // hidden values may be NaN
    }
  }

  // The center from which values count in the backward pass, where terms cancel otherwise: the mean of the values that
  // are finite, so that nothing spreads to queries that do not see it.
  void set_center() {
    for (vf value : v_) center_ += value - value == 0.0f ? value : vf{};
    center_ /= float(p.length);
  }

  // Sets x to exp(K) V and y to exp(K), divided by 2^top.
  void products() {
    for (int64_t i = 0; i < p.length; ++i) {
      const vf weight = scaled(m_[i], n_[i] - top_);
      keys_.x[at(i)] = weight * (v_[i] - center_), keys_.y[at(i)] = weight;
    }
  }

  // Calls emit(position, sum of w x, sum of w y) for all positions.
  template <class Emit>
  void sums(const Images& images, const std::vector<vf>& kernel, const Emit& emit) {
    if (!p.hides_outside) sum_outside(images.x, beside_x_, row_x_), sum_outside(images.y, beside_y_, row_y_);
    const int64_t reach = p.kernel_rows / 2;
    for (int64_t row = 0; row < p.rows; ++row) {
      const int64_t first = std::max<int64_t>(0, row - reach), last = std::min(p.rows - 1, row + reach);
      vf x = {}, y = {};  // of the rows outside of the kernel
      for (int64_t r = 0; r < p.rows && !p.hides_outside; ++r)
        if (r < first || r > last) x += row_x_[r], y += row_y_[r];
      for_tiles(p.columns, [&](auto size, int64_t column) {
        tile<size>(images, kernel, row, column, first, last, x, y, emit);
      });
    }
  }

  // The sums over the columns outside of the kernel, for each position of a row, and over whole rows.
  void sum_outside(const std::vector<vf>& image, std::vector<vf>& beside, std::vector<vf>& rows) const {
    for (int64_t row = 0; row < p.rows; ++row) {
      vf left = {}, right = {}, all = {};
      for (int64_t column = 0; column < p.columns; ++column) {
        beside[row * p.columns + column] = left += image[at(row, column - reach_ - 1)];
        all += image[at(row, column)];
      }
      for (int64_t column = p.columns - 1; column >= 0; --column)
        beside[row * p.columns + column] += right += image[at(row, column + reach_ + 1)];
      rows[row] = all;
    }
  }

  template <int Q, class Emit>
  void tile(const Images& images, const std::vector<vf>& kernel, int64_t row, int64_t column, int64_t first,
            int64_t last, vf rows_x, vf rows_y, const Emit& emit) const {
    vf x[Q], y[Q];
    for (int u = 0; u < Q; ++u) x[u] = rows_x, y[u] = rows_y;
    for (int64_t r = first; r <= last && !p.hides_outside; ++r)
      for (int u = 0; u < Q; ++u) {
        const int64_t place = r * p.columns + column + u;
        x[u] += beside_x_[place], y[u] += beside_y_[place];
      }
    for (int u = 0; u < Q; ++u) x[u] *= kernel_->outside, y[u] *= kernel_->outside;
    for (int64_t r = first; r <= last; ++r) {
      const vf* weights = &kernel[(r - row + p.kernel_rows / 2) * p.kernel_columns];
      const vf *xs = &images.x[at(r, column - reach_)], *ys = &images.y[at(r, column - reach_)];
      for (int64_t i = 0; i < p.kernel_columns; ++i, ++xs, ++ys) {
        const vf w = weights[i];
#pragma GCC unroll 8
        for (int u = 0; u < Q; ++u) x[u] += w * xs[u], y[u] += w * ys[u];
      }
    }
    for (int u = 0; u < Q; ++u) emit(row * p.columns + column + u, x[u], y[u]);
  }

  // ------------------------------------------------------------------------------------ queries with an own exponent

  // Calls visit(exp(K + w), V, key, tap) for all keys that a query sees; tap is -1 outside of the kernel.
  template <class Visit>
  void each_key(int64_t query, const Visit& visit) const {
    const int64_t row = query / p.columns, column = query % p.columns;
    const int64_t reach = p.hides_outside ? p.kernel_rows / 2 : p.rows;  // rows of keys that the query may see
    const int64_t first = std::max<int64_t>(0, row - reach), last = std::min(p.rows, row + reach + 1);
    for (int64_t key = first * p.columns; key < last * p.columns; ++key) {
      const int64_t tap_row = key / p.columns - row + p.kernel_rows / 2;
      const int64_t tap_column = key % p.columns - column + p.kernel_columns / 2;
      const bool inside = std::min(tap_row, tap_column) >= 0 && tap_row < p.kernel_rows && tap_column < p.kernel_columns;
      const int64_t tap = tap_row * p.kernel_columns + tap_column;
      if (inside)
        visit(Scaled{m_[key] * kernel_->m[tap], n_[key] + kernel_->n[tap]}, v_[key] - center_, key, tap);
      else if (!p.hides_outside)
        visit(Scaled{m_[key], n_[key]}, v_[key] - center_, key, int64_t(-1));
    }
  }

  Sums all_sums(int64_t query) const {
    return careful_sums({}, [&](auto visit) { each_key(query, visit); });
  }

  void add_careful_gradients(int64_t query) {
    const Sums sums = all_sums(query);
    const vi empty = sums.denominator == 0.0f;
    const vf average = sums.average(), gradient = gradient_of_average(query, empty ? vf{} : average + center_);
    const vf a = empty ? vf{} : gradient / sums.denominator;
    each_key(query, [&](Scaled e, vf value, int64_t key, int64_t tap) {
      const vf weight = scaled(e.m, e.n - sums.n), of_logit = weight * a * (value - average);
      dvalue_[key] += weight * a, dkey_[key] += of_logit;
      if (tap >= 0 && dkernel_) dkernel_[tap] += of_logit;
    });
  }

  // ----------------------------------------------------------------------------------------------------- gradients

  // Multiplies the gradient of an output by the gate, and writes the gradient of the query.
  vf gradient_of_average(int64_t query, vf average) const {
    const vf gradient = read(p.gradient, p.gradient_batch, p.gradient_row, query);
    if (!p.query) return gradient;
    const vf gate = sigmoid(read(p.query, p.query_batch, p.query_row, query));
    write(p.query_gradient, query, gradient * average * gate * (1.0f - gate));
    return gradient * gate;
  }

  // Q neighbouring taps: the sum of exp(w) (a exp(K) V + b exp(K)) over all queries and the keys at that offset.
  template <int Q>
  void add_gradients_of_taps(int64_t tap_row, int64_t first) {
    vf sums[Q] = {};
    for (int64_t row = 0; row < p.rows; ++row) {
      const int64_t row_of_keys = row + tap_row - p.kernel_rows / 2;
      if (row_of_keys < 0 || row_of_keys >= p.rows) continue;
      const int64_t query = at(row, 0), key = at(row_of_keys, first - reach_);
      for (int64_t column = 0; column < p.columns; ++column) {
        const vf a = queries_.x[query + column], b = queries_.y[query + column];
        const vf *xs = &keys_.x[key + column], *ys = &keys_.y[key + column];
#pragma GCC unroll 8
        for (int u = 0; u < Q; ++u) sums[u] += b * ys[u] + a * xs[u];
      }
    }
    for (int u = 0; u < Q; ++u) {
      const int64_t tap = tap_row * p.kernel_columns + first + u;
      dkernel_[tap] += sums[u] * kernel_->weights[tap];
    }
  }

  const GridProblem& p;
  const int64_t reach_, stride_;
  int64_t batch_ = 0;
  const Kernel* kernel_ = nullptr;
  vf* dkernel_ = nullptr;
  vf top_, center_;
  std::vector<vf> m_, n_, v_;                                         // exp(K) = m 2^n, and V
  std::vector<vf> beside_x_, beside_y_, row_x_, row_y_, dkey_, dvalue_;
  Images keys_, queries_;  // exp(K) V and exp(K); a and b
};

template <class S>
void run(const GridProblem& p, bool backward) {
  const bool key_per_head = p.key_per_head();
  const int64_t numbers = p.batch * p.length * p.width * p.taps(), of_head = p.features();
  std::vector<Kernel> kernels;
  std::vector<int64_t> groups;  // the first vector of features of each group; keys are not shared with other groups
  for (int64_t column = 0; column * VL < p.width; ++column) {
    kernels.emplace_back(p, column * VL);
    if (!backward || !key_per_head || column * VL % of_head == 0) groups.push_back(column);
  }
  const int64_t count = groups.size(), tasks = p.batch * count, parts = std::min(tasks, num_threads(numbers));
  groups.push_back(kernels.size());
  std::vector<std::vector<vf>> dkernels(p.bias_gradient ? parts : 0);
  parallel_for(parts, numbers, [&](int64_t begin, int64_t end) {
    const FlushSubnormals flush;
    Task<S> task(p, backward);
    for (int64_t part = begin; part < end; ++part) {
      if (p.bias_gradient) dkernels[part].resize(kernels.size() * p.taps());
      for (int64_t i = tasks * part / parts; i < tasks * (part + 1) / parts; ++i) {
        const int64_t batch = i / count, from = groups[i % count], to = groups[i % count + 1];
        if (!backward) {
          task.forward(batch, kernels[from]);
          continue;
        }
        const Kernel& last = kernels[to - 1];
        const int64_t head = kernels[from].head[0], heads = last.head[last.count - 1] + 1 - head;
        std::vector<float> of_keys(key_per_head ? p.length * heads : 0);
        for (int64_t j = from; j < to; ++j)
          task.backward(batch, kernels[j], p.bias_gradient ? &dkernels[part][j * p.taps()] : nullptr, of_keys.data(),
                        head, heads);
        for (int64_t j = 0; j < int64_t(of_keys.size()); ++j)
          store((S*)p.key_gradient + (batch * p.length + j / heads) * p.heads + head + j % heads, splat(of_keys[j]), 1);
      }
    }
  });
  for (const std::vector<vf>& part : dkernels)
    for (int64_t i = 0; i < int64_t(part.size()); ++i) {
      const Kernel& kernel = kernels[i / p.taps()];
      for (int lane = 0; lane < kernel.count; ++lane)
        p.bias_gradient[kernel.head[lane] * p.taps() + i % p.taps()] += part[i][lane];
    }
}

template <class S>
void grid_forward(const GridProblem& p) { run<S>(p, false); }

template <class S>
void grid_backward(const GridProblem& p) { run<S>(p, true); }

}  // namespace
}  // namespace aft

AFT_KERNEL(grid, GridProblem, grid_forward)
AFT_KERNEL(grid_backward, GridProblem, grid_backward)
