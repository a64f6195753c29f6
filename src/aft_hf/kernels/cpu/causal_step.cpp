// One token per row that continues a state: causal Eq. 2 for it, and the state after it, in place.
#include "causal.h"

namespace aft {
namespace {

// The tokens of the window move one place forward. The oldest one, or the new one if there is no window, joins the far
// sums, which then are relative to the larger of the two exponents.
template <class S>
void step(const CausalProblem& p, int64_t row, int64_t head) {
  const int64_t features = p.features(), kept = p.window - 1;
  const bool key_per_head = p.key_per_head();
  const int64_t key_features = key_per_head ? 1 : features, index = row * p.heads + head;
  const float* w = p.bias ? p.bias + p.bias_row(row, head, 0) * p.window : nullptr;
  const float slope = p.slopes ? p.slopes[head] : 0.0f;
  const S* new_key = token_at<S>(p.key, row, 0, head * key_features);
  const S* new_value = token_at<S>(p.value, row, 0, head * features);
  float* keys = p.keys + index * kept * key_features;
  float* values = p.values + index * kept * features;
  float *maximum = p.maximum + index * key_features, *denominator = p.denominator + index * key_features;
  float* numerator = p.numerator + index * features;

  for (int64_t f = 0; f < features; f += VL) {
    const int count = part(features - f);
    auto key_of = [&](const float* x) { return key_per_head ? splat(*x) : load(x + f, count); };
    const vf key = key_per_head ? splat(to_float(*new_key)) : load(new_key + f, count);
    const vf value = load(new_value + f, count);
    const vf far = key_of(maximum) - slope;  // NEVER if there are no far keys
    vf most = p.hides_outside ? splat(NEVER) : far;
    for (int64_t j = 0; j < kept; ++j) most = max(key_of(keys + j * key_features) + w[j], most);
    const vf own = key + (w ? w[kept] : 0.0f);
    most = max(own, most);

    vf weight = exp(own - most), sum = weight, product = weight == 0.0f ? vf{} : weight * value;
    for (int64_t j = 0; j < kept; ++j) {
      weight = exp(key_of(keys + j * key_features) + w[j] - most);
      sum += weight;
      product += weight == 0.0f ? vf{} : weight * load(values + j * features + f, count);
    }
    if (!p.hides_outside) {
      weight = exp(far - most);
      sum += weight * key_of(denominator);
      product += weight * load(numerator + f, count);
    }
    vf average = sum == 0.0f ? vf{} : product / sum;
    if (p.query.data) average *= sigmoid(load(token_at<S>(p.query, row, 0, head * features + f), count));
    store((S*)p.output + row * p.width + head * features + f, average, count);

    if (!p.hides_outside) {
      const vf leaving = kept ? key_of(keys) : key, value_of_leaving = kept ? load(values + f, count) : value;
      const vf larger = max(leaving, far), scale = exp(far - larger);
      weight = exp(leaving - larger);
      const vf added = weight == 0.0f ? vf{} : weight * value_of_leaving;
      store(numerator + f, load(numerator + f, count) * scale + added, count);
      if (!key_per_head || f + VL >= features) {  // the last vector of the head writes what they share
        const int lanes = key_per_head ? 1 : count;
        const int64_t at = key_per_head ? 0 : f;
        store(denominator + at, key_of(denominator) * scale + weight, lanes);
        store(maximum + at, larger, lanes);
      }
    }
  }
  keep_tokens<S>(p, row, head);
}

template <class S>
void steps(const CausalProblem& p) {
  parallel_for(p.batch * p.heads, p.numbers() * p.window, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) step<S>(p, i / p.heads, i % p.heads);
  });
}

}  // namespace
}  // namespace aft

AFT_KERNEL(causal_step, CausalProblem, steps)
