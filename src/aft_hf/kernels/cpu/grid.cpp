// Eq. 2 on a grid (AFT-conv, Eq. 6), with a kernel for each head, forward and backward:
//
//   Y_q = sum_p exp(K_p + w(p - q)) V_p / sum_p exp(K_p + w(p - q)),    times sigmoid(Q_q)
//
// where q and p are positions on a grid, w is a kernel of `kernel_rows` x `kernel_columns` offsets around 0, and
// outside of the kernel w = 0, or keys are hidden. Vectors run over keys or features; each lane has its head's kernel.
// Denominators are computed once for all features that share a key. Positions in the kernel are a direct convolution
// with exp(w). Positions outside are sums of rows and of parts of rows: nothing is subtracted, so nothing cancels. With
// a and b the gradients of both sums, as images, the sums of the backward pass are the transposed convolution.
//
// Every query sees the largest key, so exp(K) takes its exponent for all. Where a denominator is nevertheless too small
// to be exact, since that key is hidden or its w is very negative, the query is computed again with its own exponent.
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "problem.h"

namespace aft {
namespace {

typedef std::vector<vf> Vectors;

constexpr int MOST = 14;  // sums in registers

// Calls use(size, first) for tiles of about equal size of 0 .. count - 1, with sizes that are known at compile time.
template <int SIZE = MOST, class Use>
void for_tile(int64_t size, int64_t first, const Use& use) {
  if (size == SIZE) return use(std::integral_constant<int, SIZE>(), first);
  if constexpr (SIZE > 1) for_tile<SIZE - 1>(size, first, use);
}

template <class Use>
void for_tiles(int64_t count, const Use& use) {
  const int64_t tiles = (count + MOST - 1) / MOST;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t first = count * i / tiles;
    for_tile(count * (i + 1) / tiles - first, first, use);
  }
}

// A sum whose rounding error does not grow with the number of terms.
class RunningSum {
 public:
  vf add(vf x) {
    block_ += x;
    const vf sum = total_ + block_;
    if (++count_ % BLOCK) return sum;
    add_exactly(total_, error_, block_);
    block_ = vf{};
    return sum;
  }

 private:
  static constexpr int BLOCK = 32;
  vf total_ = {}, block_ = {}, error_ = {};
  int64_t count_ = 0;
};

// A vector of features, and the lane of the key of each.
struct Features {
  vf of_keys(vf keys) const { return permuted(keys, lanes); }

  int64_t first;
  int count;
  vi lanes = {};
};

// A vector of keys, the vectors of features that use them, and their kernels.
struct Group {
  Group(const GridProblem& p, int64_t first_key, int keys)
      : first(first_key), count(keys), weights(p.taps()), m(weights), n(weights) {
    const int64_t per_key = p.width / p.key_width, begin = first * per_key, end = (first + count) * per_key;
    for (int64_t f = begin; f < end; f += VL) {
      Features& next = features.emplace_back(Features{f, part(end - f)});
      for (int lane = 0; lane < next.count; ++lane) next.lanes[lane] = int((f + lane) / per_key - first);
    }
    vf most = p.global_connectivity ? vf{} : splat(NEVER);
    for (int64_t tap = 0; tap < p.taps(); ++tap) {
      vf w = {};
      for (int lane = 0; lane < count; ++lane) w[lane] = p.bias[head(p, lane) * p.taps() + tap];
      const int64_t down = tap / p.kernel_columns - p.kernel_rows / 2;
      const int64_t right = tap % p.kernel_columns - p.kernel_columns / 2;
      const bool on_grid = std::abs(down) < p.rows && std::abs(right) < p.columns;  // for any query
      const Scaled e = on_grid ? split_exp(w) : Scaled{vf{}, splat(NEVER)};
      m[tap] = e.m, n[tap] = e.n, most = max(e.n, most);
    }
    for (int64_t tap = 0; tap < p.taps(); ++tap) weights[tap] = scaled(m[tap], n[tap] - most);
    outside = p.global_connectivity ? scaled(splat(1.0f), -most) : vf{};
  }

  int64_t head(const GridProblem& p, int lane) const { return (first + lane) * p.heads / p.key_width; }

  int64_t first;  // key
  int count;
  Vectors weights, m, n;  // exp(w) divided by one power of two for all; exp(w) = m 2^n
  vf outside;             // exp(0), divided by the same
  std::vector<Features> features;
};

// One group after the other, in the memory of one thread. An image has zeros beside it.
template <class S>
class Task {
 public:
  explicit Task(const GridProblem& problem)
      : p(problem), reach_(p.kernel_columns / 2), stride_(p.columns + 2 * reach_ + 1), m_(p.length), n_(m_), v_(m_),
        denominators_(m_), numerators_(m_), beside_(m_), above_(p.rows), below_(p.rows), weights_(p.taps()),
        e_(p.rows * stride_ + 2), ev_(e_) {
    if (p.is_backward()) a_ = b_ = e_, dkey_ = dvalue_ = m_;
  }

  void forward(int64_t batch, const Group& group) {
    begin(batch, group);
    for (const Features& features : group.features) {
      read_values(features);
      multiply();
      convolve(ev_, weights_, features.of_keys(group.outside), numerators_);
      for (int64_t query = 0; query < p.length; ++query) {
        vf numerator = numerators_[query], denominator = features.of_keys(denominators_[query]);
        if (any(are_lost(numerator, denominator))) numerator = all_sums(query).average(), denominator = splat(1.0f);
        if (p.query.data) denominator *= 1.0f + exp(min(splat(60.0f), -read(p.query, query)));  // 1 / sigmoid(q)
        write(p.output, query, numerator / denominator);
      }
    }
  }

  // Adds the gradients of w to `dkernel`, (1 + vectors of features, taps), unless it is null.
  void backward(int64_t batch, const Group& group, vf* dkernel) {
    begin(batch, group);
    std::fill(b_.begin(), b_.end(), vf{}), std::fill(dkey_.begin(), dkey_.end(), vf{});
    for (const Features& features : group.features) {
      dkernel_ = dkernel ? dkernel + (1 + (&features - group.features.data())) * p.taps() : nullptr;
      read_values(features);
      set_center();
      multiply();
      convolve(ev_, weights_, features.of_keys(group.outside), numerators_);
      std::fill(dvalue_.begin(), dvalue_.end(), vf{});
      for (int64_t query = 0; query < p.length; ++query) {
        const vf denominator = features.of_keys(denominators_[query]), average = numerators_[query] / denominator;
        vf a = gradient_of_average(query, average + center_) / denominator;
        if (any(are_lost(numerators_[query], denominator) | (a - a != 0.0f)))
          add_careful_gradients(query), a = vf{};
        else
          add_to_keys(b_[at(query)], -a * average);
        a_[at(query)] = a;
      }
      if (dkernel_) add_gradients_of_taps(a_, ev_, weights_, dkernel_);
      std::reverse(weights_.begin(), weights_.end());
      convolve(a_, weights_, features.of_keys(group.outside), numerators_);
      for (int64_t key = 0; key < p.length; ++key) {
        const vf e = features.of_keys(e_[at(key)]), grad_value = e == 0.0f ? vf{} : e * numerators_[key];
        write(p.value_gradient, key, dvalue_[key] + grad_value);
        add_to_keys(dkey_[key], e == 0.0f ? vf{} : grad_value * (v_[key] - center_));
      }
    }
    if (dkernel) add_gradients_of_taps(b_, e_, group.weights, dkernel);
    weights_.assign(group.weights.rbegin(), group.weights.rend());
    convolve(b_, weights_, group.outside, numerators_);
    for (int64_t key = 0; key < p.length; ++key) {
      const vf e = e_[at(key)], grad_key = dkey_[key] + (e == 0.0f ? vf{} : e * numerators_[key]);
      store((S*)p.key_gradient + (batch_ * p.length + key) * p.key_width + group.first, grad_key, group.count);
    }
  }

 private:
  int64_t at(int64_t row, int64_t column) const { return row * stride_ + reach_ + 1 + column; }
  int64_t at(int64_t position) const { return at(position / p.columns, position % p.columns); }

  vf read(const Tensor& x, int64_t position) const {
    return read_token<S>(x, batch_, position, features_->first, features_->count);
  }
  void write(void* x, int64_t position, vf y) const {
    write_token<S>(p, x, p.place(batch_, position, features_->first), y, features_->count);
  }

  // Reads keys, and computes their denominators.
  void begin(int64_t batch, const Group& group) {
    batch_ = batch, group_ = &group;
    vf top = splat(NEVER);
    for (int64_t i = 0; i < p.length; ++i) {
      const Scaled e = split_exp(load(token_at<S>(p.key, batch, i, group.first), group.count));
      m_[i] = e.m, n_[i] = e.n, top = max(e.n, top);
    }
    for (int64_t i = 0; i < p.length; ++i) e_[at(i)] = scaled(m_[i], n_[i] - top);
    convolve(e_, group.weights, group.outside, denominators_);
    const vi empty = top <= NEVER;  // results are 0 if all keys are hidden
    for (vf& sum : denominators_) sum = empty & (sum == 0.0f) ? splat(1.0f) : sum;
  }

  void read_values(const Features& features) {
    features_ = &features, center_ = vf{};
    for (int64_t i = 0; i < p.length; ++i) {
      const vf value = read(p.value, i);
      v_[i] = features.of_keys(m_[i]) == 0.0f ? vf{} : value;  // hidden values may be NaN
    }
    for (int64_t tap = 0; tap < p.taps(); ++tap) weights_[tap] = features.of_keys(group_->weights[tap]);
  }

  void set_center() {
    Center of_values;
    for (int64_t i = 0; i < p.length; ++i) of_values.see(v_[i], features_->of_keys(m_[i]) != 0.0f);
    center_ = of_values.value();
  }

  void multiply() {
    for (int64_t i = 0; i < p.length; ++i) ev_[at(i)] = features_->of_keys(e_[at(i)]) * (v_[i] - center_);
  }

  // Sums vectors of features that share a key.
  void add_to_keys(vf& keys, vf x) const {
    if (!p.key_per_head()) return (void)(keys += x);
    for (int lane = 0; lane < features_->count; ++lane) keys[features_->lanes[lane]] += x[lane];
  }

  // The weighted sums of an image for all positions.
  void convolve(const Vectors& image, const Vectors& kernel, vf of_outside, Vectors& sums) {
    if (p.global_connectivity) sum_outside(image);
    const int64_t reach = p.kernel_rows / 2;
    for (int64_t row = 0; row < p.rows; ++row) {
      const int64_t first = std::max<int64_t>(0, row - reach), last = std::min(p.rows - 1, row + reach);
      const vf rows = p.global_connectivity ? above_[first] + below_[last] : vf{};  // outside of the kernel
      for_tiles(p.columns, [&](auto size, int64_t column) {
        constexpr int Q = size;
        vf x[Q];
        for (int u = 0; u < Q; ++u) x[u] = rows;
        for (int64_t r = first; r <= last && p.global_connectivity; ++r)
          for (int u = 0; u < Q; ++u) x[u] += beside_[r * p.columns + column + u];
        for (int u = 0; u < Q; ++u) x[u] *= of_outside;
        for (int64_t r = first; r <= last; ++r) {
          const vf* weights = &kernel[(r - row + reach) * p.kernel_columns];
          const vf* xs = &image[at(r, column - reach_)];
          for (int64_t i = 0; i < p.kernel_columns; ++i, ++xs)
#pragma GCC unroll 16
            for (int u = 0; u < Q; ++u) x[u] += weights[i] * xs[u];
        }
        for (int u = 0; u < Q; ++u) sums[row * p.columns + column + u] = x[u];
      });
    }
  }

  // The sums over the columns outside of the kernel, for each position of a row, and over the rows above and below.
  void sum_outside(const Vectors& image) {
    RunningSum above, below;
    for (int64_t row = 0; row < p.rows; ++row) {
      RunningSum left, right, all;
      vf sum = {};
      for (int64_t column = 0; column < p.columns; ++column) {
        beside_[row * p.columns + column] = left.add(image[at(row, column - reach_ - 1)]);
        sum = all.add(image[at(row, column)]);
      }
      for (int64_t column = p.columns - 1; column >= 0; --column)
        beside_[row * p.columns + column] += right.add(image[at(row, column + reach_ + 1)]);
      if (row + 1 < p.rows) above_[row + 1] = above.add(sum);
      below_[row] = sum;
    }
    vf sum = {};
    for (int64_t row = p.rows - 1; row >= 0; --row) sum = below.add(std::exchange(below_[row], sum));
  }

  // ------------------------------------------------------------------------------------ queries with an own exponent

  // Calls visit(exp(K + w), V, key, tap) for all keys that a query sees; tap is -1 outside of the kernel.
  template <class Visit>
  void each_key(int64_t query, const Visit& visit) const {
    const int64_t row = query / p.columns - p.kernel_rows / 2, column = query % p.columns - p.kernel_columns / 2;
    const auto inside = [](int64_t i, int64_t count) { return i >= 0 && i < count; };
    const auto first = [&](int64_t start) { return p.global_connectivity ? start : std::max<int64_t>(start, 0); };
    const auto last = [&](int64_t end, int64_t size) { return p.global_connectivity ? end : std::min(end, size); };
    for (int64_t i = first(-row); i < last(p.rows - row, p.kernel_rows); ++i)
      for (int64_t j = first(-column); j < last(p.columns - column, p.kernel_columns); ++j) {
        const bool near = inside(i, p.kernel_rows) && inside(j, p.kernel_columns);
        const int64_t key = (row + i) * p.columns + column + j, tap = near ? i * p.kernel_columns + j : -1;
        Scaled e = {m_[key], n_[key]};
        if (near) e = e * Scaled{group_->m[tap], group_->n[tap]};
        visit(Scaled{features_->of_keys(e.m), features_->of_keys(e.n)}, v_[key] - center_, key, tap);
      }
  }

  Sums all_sums(int64_t query) const {
    return careful_sums({}, [&](auto visit) { each_key(query, visit); });
  }

  void add_careful_gradients(int64_t query) {
    const Sums sums = all_sums(query);
    const vf average = sums.average(), offset = sums.denominator == 0.0f ? vf{} : center_;
    const vf a = sums.divided(gradient_of_average(query, average + offset));
    each_key(query, [&](Scaled e, vf value, int64_t key, int64_t tap) {
      const vf grad_value = e.m == 0.0f ? vf{} : scaled(e.m, e.n - sums.n) * a;
      const vf grad_logit = e.m == 0.0f ? vf{} : grad_value * (value - average);
      dvalue_[key] += grad_value;
      add_to_keys(dkey_[key], grad_logit);
      if (tap >= 0 && dkernel_) dkernel_[tap] += grad_logit;
    });
  }

  // ----------------------------------------------------------------------------------------------------- gradients

  // Multiplies the gradient of an output by the gate, and writes the gradient of the query.
  vf gradient_of_average(int64_t query, vf average) const {
    const vf gradient = read(p.gradient, query);
    if (!p.query.data) return gradient;
    const vf gate = sigmoid(read(p.query, query));
    write(p.query_gradient, query, gradient * average * gate * (1.0f - gate));
    return gradient * gate;
  }

  // Adds to each tap the sum over all queries of exp(w) times an image of queries and the image of keys at that offset.
  void add_gradients_of_taps(const Vectors& queries, const Vectors& keys, const Vectors& kernel, vf* dkernel) const {
    for (int64_t tap_row = 0; tap_row < p.kernel_rows; ++tap_row)
      for_tiles(p.kernel_columns, [&](auto size, int64_t first) {
        constexpr int Q = size;
        vf sums[Q] = {};
        for (int64_t row = 0; row < p.rows; ++row) {
          const int64_t row_of_keys = row + tap_row - p.kernel_rows / 2;
          if (row_of_keys < 0 || row_of_keys >= p.rows) continue;
          const vf *query = &queries[at(row, 0)], *xs = &keys[at(row_of_keys, first - reach_)];
          for (int64_t column = 0; column < p.columns; ++column, ++xs)
#pragma GCC unroll 16
            for (int u = 0; u < Q; ++u) sums[u] += query[column] * xs[u];
        }
        const int64_t tap = tap_row * p.kernel_columns + first;
        for (int u = 0; u < Q; ++u) dkernel[tap + u] += sums[u] * kernel[tap + u];
      });
  }

  const GridProblem& p;
  const int64_t reach_, stride_;
  int64_t batch_ = 0;
  const Group* group_ = nullptr;
  const Features* features_ = nullptr;
  vf* dkernel_ = nullptr;
  vf center_;
  Vectors m_, n_, v_, denominators_, numerators_;  // exp(K) = m 2^n, V, and sums
  Vectors beside_, above_, below_, weights_, dkey_, dvalue_;
  Vectors e_, ev_, a_, b_;  // images: exp(K), exp(K) V, and the gradients of both sums
};

template <class S>
void run(const GridProblem& p) {
  if (p.numbers() == 0) return;
  const int64_t numbers = p.batch * p.length * p.width * p.taps(), threads = num_threads(numbers);
  const int64_t keys = std::clamp<int64_t>(p.batch * p.key_width / threads, 1, VL);  // of a group
  std::vector<Group> groups;
  std::vector<int64_t> first;  // vectors of gradients of w before those of a group
  int64_t vectors = 0;
  for (int64_t key = 0; key < p.key_width; key += keys) {
    groups.emplace_back(p, key, int(std::min(keys, p.key_width - key)));
    first.push_back(vectors), vectors += 1 + groups.back().features.size();
  }
  const int64_t count = groups.size(), tasks = p.batch * count, parts = std::min(tasks, threads);
  std::vector<Vectors> dkernels(p.bias_gradient ? parts : 0);
  parallel_for(parts, numbers, [&](int64_t begin, int64_t end) {
    Task<S> task(p);
    for (int64_t part = begin; part < end; ++part) {
      if (p.bias_gradient) dkernels[part].resize(vectors * p.taps());
      for (int64_t i = tasks * part / parts; i < tasks * (part + 1) / parts; ++i) {
        const Group& group = groups[i % count];
        vf* dkernel = p.bias_gradient ? &dkernels[part][first[i % count] * p.taps()] : nullptr;
        p.is_backward() ? task.backward(i / count, group, dkernel) : task.forward(i / count, group);
      }
    }
  });
  for (const Vectors& part : dkernels)
    for (int64_t g = 0; g < count; ++g)
      for (int64_t i = 0; i <= int64_t(groups[g].features.size()); ++i) {  // first those of the keys
        const Features* features = i ? &groups[g].features[i - 1] : nullptr;
        for (int lane = 0; lane < (features ? features->count : groups[g].count); ++lane) {
          const int64_t head = groups[g].head(p, features ? features->lanes[lane] : lane);
          for (int64_t tap = 0; tap < p.taps(); ++tap)
            p.bias_gradient[head * p.taps() + tap] += part[(first[g] + i) * p.taps() + tap][lane];
        }
      }
}

}  // namespace
}  // namespace aft

AFT_KERNEL(grid, GridProblem, run)
AFT_KERNEL(grid_backward, GridProblem, run)
