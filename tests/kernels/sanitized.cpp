// Runs the kernels on many shapes with buffers of the least size, for a build with sanitizers, or for another
// architecture in an emulator. Outputs are compared with Eq. 2 in double precision; gradients and states must be finite.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "causal.h"

extern "C" {
int aft_causal(const aft::CausalProblem*);
int aft_causal_backward(const aft::CausalProblem*);
int aft_causal_step(const aft::CausalProblem*);
int aft_grid(const aft::GridProblem*);
int aft_grid_backward(const aft::GridProblem*);
int aft_table(const aft::TableProblem*);
int aft_table_backward(const aft::TableProblem*);
int aft_band(const aft::BandProblem*);
int aft_band_backward(const aft::BandProblem*);
}

using aft::bf16;
static std::mt19937 generator(0);

static int64_t choose(std::initializer_list<int64_t> from) { return *(from.begin() + generator() % from.size()); }

static float number(float scale) { return std::normal_distribution<float>(0, scale)(generator); }

static void convert(float x, float& y) { y = x; }
static void convert(float x, bf16& y) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  y.bits = uint16_t(bits >> 16);
}

template <class S>
static std::vector<S> numbers(int64_t count, float scale) {
  std::vector<S> x(count);
  for (S& y : x) convert(number(scale), y);
  return x;
}

template <class S>
static void require_finite(const std::vector<S>& x, const char* what, const char* of = "") {
  for (S y : x)
    if (!std::isfinite(aft::to_float(y))) {
      printf("%s%s is not finite\n", what, of);
      exit(1);
    }
}

// The sizes, inputs and results of a problem, all contiguous, a quarter of the time without a query.
template <class S>
struct Tensors {
  std::vector<S> query, key, value, output, gradient, dquery, dkey, dvalue;
  std::vector<float> bias, dbias;

  Tensors(aft::Problem& p, bool is_bf16, int64_t batch, int64_t length, int64_t width, int64_t key_width, int64_t heads,
          float key_scale, int64_t biases)
      : query(numbers<S>(batch * length * width, 1)), key(numbers<S>(batch * length * key_width, key_scale)),
        value(numbers<S>(query.size(), 1)), output(query.size()), gradient(numbers<S>(query.size(), 1)),
        dquery(query.size()), dkey(key.size()), dvalue(query.size()),
        bias(numbers<float>(biases, float(choose({1, 300})))), dbias(biases) {
    p.is_bf16 = is_bf16, p.batch = batch, p.length = length, p.width = width, p.heads = heads, p.key_width = key_width;
    p.query = {generator() % 4 ? query.data() : nullptr, length * width, width};
    p.key = {key.data(), length * key_width, key_width}, p.value = {value.data(), length * width, width};
    p.bias = bias.data(), p.output = output.data();
  }

  // The backward pass, three quarters of the time with a gradient of w.
  template <class P>
  void require_finite_gradients(P p, int (*backward)(const P*), const char* of) {
    p.gradient = {gradient.data(), p.value.batch, p.value.row}, p.query_gradient = p.query.data ? dquery.data() : nullptr;
    p.key_gradient = dkey.data(), p.value_gradient = dvalue.data();
    p.bias_gradient = p.bias && generator() % 4 ? dbias.data() : nullptr;
    backward(&p);
    require_finite(dkey, "a gradient of a key", of);
    require_finite(dvalue, "a gradient of a value", of);
    require_finite(dbias, "a gradient of a bias", of);
  }
};

// Eq. 2 for one feature of one query, in double precision.
template <class S>
static double average(const aft::CausalProblem& p, int64_t row, int64_t t, int64_t feature) {
  const int64_t head = feature / (p.width / p.heads), key_feature = p.key_width == p.width ? feature : head;
  const int64_t first = p.first ? p.first[row * p.length + t] : 0;
  double numerator = 0, denominator = 0, top = -1e300;
  for (int pass = 0; pass < 2; ++pass)
    for (int64_t k = first; k <= t; ++k) {
      double logit = aft::to_float(*aft::token_at<S>(p.key, row, k, key_feature));
      if (p.slopes) logit -= p.slopes[head] * double(t - k);
      if (t - k < p.window && p.bias) logit += p.bias[(p.bias_row(row, head, t - first) + 1) * p.window - 1 - (t - k)];
      if (t - k >= p.window && !p.global_connectivity) continue;
      if (pass == 0) {
        top = std::max(top, logit);
        continue;
      }
      const double weight = std::exp(logit - top);
      numerator += weight * aft::to_float(*aft::token_at<S>(p.value, row, k, feature));
      denominator += weight;
    }
  if (denominator == 0) return 0;
  double gate = 1;
  if (p.query.data) gate = 1 / (1 + std::exp(-aft::to_float(*aft::token_at<S>(p.query, row, t, feature))));
  return gate * numerator / denominator;
}

template <class S>
static void require_exact(const aft::CausalProblem& p, float scale, double rounding) {
  for (int i = 0; i < 50 && p.batch > 0; ++i) {
    const int64_t row = generator() % p.batch, t = generator() % p.length, feature = generator() % p.width;
    const double found = aft::to_float(((const S*)p.output)[(row * p.length + t) * p.width + feature]);
    const double exact = average<S>(p, row, t, feature), allowed = (1e-5 + 1e-6 * scale + rounding) * 4;
    if (std::abs(found - exact) > allowed) {
      printf("an output is %g instead of %g\n", found, exact);
      exit(1);
    }
  }
}

template <class S>
static void run(bool is_bf16) {
  const int64_t B = choose({0, 1, 2, 3}), T = choose({1, 2, 3, 7, 31, 63, 64, 65, 129, 200}), h = choose({1, 2, 3, 8, 16});
  const int64_t c = choose({1, 2, 3, 8, 13, 16, 17, 32}), d = h * c, s = choose({1, 2, 5, 9, 40, 150});
  const bool with_bias = s > 1 || generator() % 2, slopes = !with_bias && generator() % 2;
  const int64_t heads = with_bias || slopes ? h : 1, key_width = with_bias && generator() % 2 ? h : d;
  const int64_t rows = with_bias ? choose({1, T}) : 0, batches = with_bias ? choose({1, B}) : 0;
  const float scale = float(choose({1, 30, 90, 10000}));
  std::vector<float> slope(heads, 0.3f);
  std::vector<int64_t> first(B * T);
  for (int64_t i = 0, begin = 0; i < B * T; ++i) {
    const int64_t t = i % T;
    if (t == 0 || generator() % 9 == 0) begin = generator() % 4 ? t : T;
    first[i] = begin == T ? t + 1 : begin;
  }
  aft::CausalProblem p = {};
  Tensors<S> x(p, is_bf16, B, T, d, key_width, heads, scale, batches * rows * h * s);
  p.window = s, p.bias_batch = batches, p.bias_rows = with_bias ? rows : 1, p.global_connectivity = !with_bias || generator() % 2;
  if (!with_bias) p.bias = nullptr;
  p.slopes = slopes ? slope.data() : nullptr, p.first = generator() % 2 ? first.data() : nullptr;
  aft_causal(&p);
  require_finite(x.output, "an output");
  require_exact<S>(p, scale, is_bf16 ? 4e-3 : 0);

  aft::CausalProblem b = p;
  b.output = nullptr;
  x.require_finite_gradients(b, aft_causal_backward, "");

  std::vector<float> keys(B * (s - 1) * key_width, -INFINITY), values(B * (s - 1) * d);
  std::vector<float> maximum(B * key_width, aft::NEVER);
  std::vector<double> numerator(B * d), denominator(B * key_width);
  p.keys = keys.data(), p.values = values.data();
  p.numerator = numerator.data(), p.denominator = denominator.data(), p.maximum = maximum.data();
  for (int64_t row = 0; row < B; ++row)  // one document per row
    for (int64_t t = 0, count = generator() % (T + 1); t < T; ++t) first[row * T + t] = t < count ? 0 : t + 1;
  aft_causal(&p);
  require_finite(x.output, "an output with a state");
  p.length = 1, p.first = nullptr, p.bias_rows = std::min<int64_t>(p.bias_rows, 1);
  aft_causal_step(&p);
  require_finite(x.output, "an output of a step");
}

template <class S>
static void run_grid(bool is_bf16) {
  const int64_t B = choose({0, 1, 2}), rows = choose({1, 2, 5, 9}), columns = choose({1, 3, 7, 10}), T = rows * columns;
  const int64_t h = choose({1, 3, 16, 20}), c = choose({1, 2, 5, 16}), d = h * c, key_width = choose({h, d});
  const int64_t kernel_rows = choose({1, 3, 11}), kernel_columns = choose({1, 3, 7, 15});
  aft::GridProblem p = {};
  Tensors<S> x(p, is_bf16, B, T, d, key_width, h, float(choose({1, 90, 10000})), h * kernel_rows * kernel_columns);
  p.rows = rows, p.columns = columns, p.kernel_rows = kernel_rows, p.kernel_columns = kernel_columns;
  p.global_connectivity = generator() % 2;
  aft_grid(&p);
  require_finite(x.output, "an output on a grid");
  x.require_finite_gradients(p, aft_grid_backward, " on a grid");
}

template <class S>
static void run_table(bool is_bf16) {
  const int64_t T = choose({1, 9, 150}), B = choose({0, 1, 2, 9});
  const int64_t h = choose({1, 3, 8}), d = h * choose({1, 2, 5, 16, 17, 40});
  aft::TableProblem p = {};
  Tensors<S> x(p, is_bf16, B, T, d, d, h, float(choose({1, 90, 10000})), h * T * T);
  p.causal = generator() % 2;
  aft_table(&p);
  require_finite(x.output, "an output of a table");
  x.require_finite_gradients(p, aft_table_backward, " of a table");
}

template <class S>
static void run_band(bool is_bf16) {
  const int64_t h = choose({1, 3}), P = choose({1, 2, 7, 64, 65, 200}), r = choose({1, 3, 16, 17, 64, 70});
  const int64_t start = generator() % P, T = choose({0, 1, P - start, P}), s = choose({1, 2, 9, 40});
  std::vector<S> u = numbers<S>(h * P * r, 1), v = numbers<S>(h * P * r, 1), du(u.size()), dv(v.size());
  std::vector<float> band(T * h * s, NAN);
  aft::BandProblem p = {is_bf16, h, P, r, start, T, s, {u.data(), P * r, r}, {v.data(), P * r, r}, band.data(), du.data(), dv.data()};
  aft_band(&p);
  require_finite(band, "w");
  aft_band_backward(&p);
  require_finite(du, "a gradient of u");
  require_finite(dv, "a gradient of v");
}

int main(int argc, char** argv) {
  for (int i = 0; i < (argc > 1 ? atoi(argv[1]) : 400); ++i) {
    run<float>(false);
    run<bf16>(true);
    run_grid<float>(false);
    run_grid<bf16>(true);
    run_table<float>(false);
    run_table<bf16>(true);
    run_band<float>(false);
    run_band<bf16>(true);
  }
  return 0;
}
