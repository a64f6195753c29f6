// One token per row that continues a state: causal Eq. 2 for it, and the state after it, in place.
#include "causal.h"

namespace aft {
namespace {

// The tokens of the window move one place forward. The oldest one, or the new one if there is no window, joins the far
// sums, which are only multiplied by powers of two besides, and by exp(-slope): in float64, steps do not add up errors.
template <class S>
void step(const CausalProblem& p, int64_t row, int64_t head, std::vector<vf>& exps) {
  const int64_t features = p.features(), kept = p.window - 1;
  const bool key_per_head = p.key_per_head();
  const int64_t key_features = key_per_head ? 1 : features, index = row * p.heads + head;
  const float* w = p.bias ? p.bias + p.bias_row(row, head, 0) * p.window : nullptr;
  const vd decay = vd{} + (p.slopes ? std::exp(-double(p.slopes[head])) : 1.0);
  const S* new_key = token_at<S>(p.key, row, 0, head * key_features);
  const S* new_value = token_at<S>(p.value, row, 0, head * features);
  const float* keys = p.keys + index * kept * key_features;
  const float* values = p.values + index * kept * features;
  double *numerator = p.numerator + index * features, *denominator = p.denominator + index * key_features;
  float* maximum = p.maximum + index * key_features;

  for (int64_t f = 0; f < features; f += VL) {
    const int count = part(features - f), key_count = key_per_head ? 1 : count;
    const int64_t key_f = key_per_head ? 0 : f;
    const auto of_keys = [&](auto x) { return key_per_head ? decltype(x){} + x[0] : x; };
    const vf key = of_keys(load(new_key + key_f, key_count)), value = load(new_value + f, count);
    for (int64_t j = 0; j < p.window && (f == 0 || !key_per_head); ++j) {
      const vf x = j < kept ? of_keys(load(keys + j * key_features + key_f, key_count)) : key;
      const Scaled e = split_exp(w ? x + w[j] : x);
      exps[2 * j] = e.m, exps[2 * j + 1] = e.n;
    }

    // The far sums, as seen from the new token, with an exponent for which the denominator is of the order of 1.
    const Scaled scale = split_exp(of_keys(load(maximum + key_f, key_count)));
    const vd growth = widened(scale.m) * decay;
    vd far_denominator = of_keys(load(denominator + key_f, key_count)) * growth;
    const vf size = narrowed(far_denominator), unit = scaled(splat(1.0f), -exponent_of(size));
    const vf far_n = size == 0.0f ? splat(NEVER) : scale.n + exponent_of(size);
    vd far_numerator = load(numerator + f, count) * growth * widened(unit);
    far_denominator *= widened(unit);

    Sums far;
    if (p.global_connectivity) far = {narrowed(far_numerator), narrowed(far_denominator), far_n};
    vf average = careful_sums(far, [&](auto visit) {
      for (int64_t j = 0; j < p.window; ++j)
        visit(Scaled{exps[2 * j], exps[2 * j + 1]}, j < kept ? load(values + j * features + f, count) : value);
    }).average();
    if (p.query.data) average *= sigmoid(load(token_at<S>(p.query, row, 0, head * features + f), count));
    store((S*)p.output + row * p.width + head * features + f, average, count);
    if (!p.global_connectivity) continue;

    const vf key_of_leaving = kept ? of_keys(load(keys + key_f, key_count)) : key;
    const vf value_of_leaving = kept ? load(values + f, count) : value;
    const Scaled leaving = w ? split_exp(key_of_leaving) : Scaled{exps[0], exps[1]};
    const vf n = max(leaving.n, far_n), weight = scaled(leaving.m, leaving.n - n);
    const vf added = leaving.m == 0.0f ? vf{} : weight * value_of_leaving;
    const vf most = n == NEVER ? n : n * LN_2_HIGH + n * LN_2_LOW;
    const Scaled rounded = split_exp(most);  // the sums make up for the rounding
    const vd stays = widened(scaled(splat(1.0f), far_n - n));
    const vd factor = widened(scaled(splat(1.0f), n - rounded.n)) / widened(rounded.m);
    store(numerator + f, (far_numerator * stays + widened(added)) * factor, count);
    if (key_per_head && f + VL < features) continue;  // the last vector of the head writes what they share
    store(denominator + key_f, (far_denominator * stays + widened(weight)) * factor, key_count);
    store(maximum + key_f, most, key_count);
  }
  keep_tokens<S>(p, row, head);
}

template <class S>
void steps(const CausalProblem& p) {
  parallel_for(p.batch * p.heads, p.numbers() * p.window, [&](int64_t begin, int64_t end) {
    std::vector<vf> exps(2 * p.window);
    for (int64_t i = begin; i < end; ++i) step<S>(p, i / p.heads, i % p.heads, exps);
  });
}

}  // namespace
}  // namespace aft

AFT_KERNEL(causal_step, CausalProblem, steps)
