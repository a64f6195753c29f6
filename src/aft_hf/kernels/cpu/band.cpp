// w of a causal window by factors u and v (Eq. 7), from each token to the last s ones, and its gradients:
//
//   w_tj = u_t . v_t'  with t' = t - (s - 1) + j,    dL/du_t = sum_j g_tj v_t',    dL/dv_t' = sum_t g_tj u_t
#include "problem.h"

namespace aft {
namespace {

constexpr int64_t SPAN = 64;               // positions of a task
constexpr int SIDE = 4, ROWS = VL / SIDE;  // a register tile has ROWS x SIDE vectors

// Calls run(head, first, last) for spans of the positions begin .. end - 1.
template <class Run>
void for_each_span(const BandProblem& p, int64_t begin, int64_t end, const Run& run) {
  const int64_t spans = (end - begin + SPAN - 1) / SPAN;
  parallel_for(p.heads * spans, p.heads * (end - begin) * p.features, [&](int64_t task, int64_t tasks) {
    for (; task < tasks; ++task) {
      const int64_t first = begin + task % spans * SPAN;
      run(task / spans, first, std::min(first + SPAN, end));
    }
  });
}

template <class S>
void forward(const BandProblem& p) {
  for_each_span(p, p.start, p.start + p.length, [&](int64_t head, int64_t begin, int64_t end) {
    // Tiles reach beyond both ends of u and v; what they read there is not used.
    const auto inside = [&](int64_t t) { return std::clamp<int64_t>(t, 0, p.positions - 1); };
    for (int64_t t = begin; t < end; t += ROWS)
      for (int64_t from = t - p.window + 1; from < t + ROWS; from += SIDE) {
        const S *queries[ROWS], *keys[SIDE];
        for (int i = 0; i < ROWS; ++i) queries[i] = token_at<S>(p.query, head, inside(t + i), 0);
        for (int j = 0; j < SIDE; ++j) keys[j] = token_at<S>(p.key, head, inside(from + j), 0);
        vf sums[VL] = {};
        const auto add = [&](int64_t f, int count) {
          vf of_keys[SIDE];
          for (int j = 0; j < SIDE; ++j) of_keys[j] = load(keys[j] + f, count);
#pragma GCC unroll 8
          for (int i = 0; i < ROWS; ++i) {
            const vf of_query = load(queries[i] + f, count);
#pragma GCC unroll 8
            for (int j = 0; j < SIDE; ++j) sums[i * SIDE + j] += of_query * of_keys[j];
          }
        };
        int64_t f = 0;
        for (; f + VL <= p.features; f += VL) add(f, VL);
        if (f < p.features) add(f, int(p.features - f));
        const vf products = sums_of_rows((const float*)sums);
        for (int64_t i = t; i < std::min(t + ROWS, end); ++i)
          for (int64_t j = from; j < from + SIDE; ++j)
            if (p.holds(i, j)) p.band[p.place(head, i, j)] = j < 0 || i >= p.positions ? 0.0f : products[(i - t) * SIDE + j - from];
      }
  });
}

// The gradient of u for positions begin .. end - 1, if x is v, or that of v, if x is u.
template <bool OF_QUERY, class S>
void gradient(const BandProblem& p, int64_t head, int64_t begin, int64_t end, Tensor x, S* output) {
  const int64_t reach = p.window - 1, next_row = p.heads * p.window - 1;  // from (t, t') to (t + 1, t')
  for (int64_t t = begin; t < end; t += ROWS) {
    const int64_t first = OF_QUERY ? std::max<int64_t>(t - reach, 0) : t;
    const int64_t last = std::min(OF_QUERY ? t + ROWS : t + ROWS + reach, p.positions);
    for (int64_t f = 0; f < p.features; f += SIDE * VL) {
      const bool is_full = f + SIDE * VL <= p.features;
      int counts[SIDE];
      for (int c = 0; c < SIDE; ++c) counts[c] = part(std::max<int64_t>(0, p.features - f - c * VL));
      vf sums[ROWS][SIDE] = {};
      int64_t place = OF_QUERY ? p.place(head, t, first) : p.place(head, first, t);
      for (int64_t other = first; other < last; ++other, place += OF_QUERY ? 1 : next_row) {
        const auto holds = [&](int i) { return OF_QUERY ? p.holds(t + i, other) : p.holds(other, t + i); };
        const S* next = token_at<S>(x, head, other, f);
        vf of_other[SIDE];
        for (int c = 0; c < SIDE; ++c) of_other[c] = is_full ? load(next + c * VL) : load(next + c * VL, counts[c]);
        const bool all = holds(0) && holds(ROWS - 1);  // others may be NaN, so they are not multiplied by 0
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
          if (all || holds(i)) {
            const vf g = splat(p.band[place + (OF_QUERY ? i * next_row : i)]);
#pragma GCC unroll 8
            for (int c = 0; c < SIDE; ++c) sums[i][c] += g * of_other[c];
          }
      }
      for (int i = 0; i < ROWS && t + i < end; ++i)
        for (int c = 0; c < SIDE; ++c)
          store(output + (head * p.positions + t + i) * p.features + f + c * VL, sums[i][c], counts[c]);
    }
  }
}

template <class S>
void backward(const BandProblem& p) {
  for_each_span(p, 0, p.positions, [&](int64_t head, int64_t begin, int64_t end) {
    gradient<true>(p, head, begin, end, p.key, (S*)p.query_gradient);
    gradient<false>(p, head, begin, end, p.query, (S*)p.key_gradient);
  });
}

}  // namespace
}  // namespace aft

AFT_KERNEL(band, BandProblem, forward)
AFT_KERNEL(band_backward, BandProblem, backward)
