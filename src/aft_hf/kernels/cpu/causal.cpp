// Causal Eq. 2, forward, with or without a state that is continued (see causal.h).
#include "causal.h"

namespace aft {
namespace {

template <class S>
class Forward : public CausalColumn<S> {
 public:
  // `before` has the sums before the tokens that the columns of a head share.
  Forward(const CausalProblem& p, const CausalProblem& before, const Weights& weights, int64_t row, Column at,
          const Scratch& scratch)
      : CausalColumn<S>(p, weights, row, at, scratch), before_(before), has_state_(p.numerator),
        features_(p.features()), key_features_(p.key_width / p.heads) {}

  void document(int64_t begin, int64_t end) {
    far = Sums();
    this->hide(0, reach);
    if (has_state_) read_state();
    for (int64_t t = begin; t < end; t += this->chunk) {
      const int count = int(std::min<int64_t>(this->chunk, end - t));
      this->read(t, count, reach);
      this->queries(t - begin, count, vf{}, splat(INFINITY), [&](int i, const Sums& sums) {
        this->write(p.output, t + i, gated(t + i, sums.average()));
        return vf{};
      });
      this->advance(count);
    }
    if (has_state_ && p.global_connectivity) write_sums();
  }

 private:
  using CausalColumn<S>::p, CausalColumn<S>::at, CausalColumn<S>::row, CausalColumn<S>::reach, CausalColumn<S>::far,
      CausalColumn<S>::head;

  vf gated(int64_t token, vf average) const {
    return p.query.data ? average * sigmoid(this->of_token(p.query, token)) : average;
  }

  // -------------------------------------------------------------------------------------------------------- the state

  // The state of a row: its last tokens, and its far sums as seen from its last token.
  void read_state() {
    for (int i = 0; i < reach; ++i)
      this->put(i, split_exp(get(p.keys, reach, i, key_features_)), get(p.values, reach, i, features_));
    if (!p.global_connectivity) return;
    // exp(maximum) = m 2^n, as seen from the first new token
    const Scaled scale = split_exp(get(before_.maximum, 1, 0, key_features_)), step = this->growth(1);
    const vd factor = widened(scale.m) / widened(step.m);
    const vd denominator = get(before_.denominator, 1, 0, key_features_) * factor;
    const vd numerator = get(p.numerator, 1, 0, features_) * factor;
    far.denominator = narrowed(denominator), far.numerator = narrowed(numerator);
    far.denominator_error = narrowed(denominator - widened(far.denominator));
    far.numerator_error = narrowed(numerator - widened(far.numerator));
    far.n = far.denominator == 0.0f ? splat(NEVER) : scale.n - step.n;
  }

  void write_sums() {
    const Scaled step = this->growth(1);
    const vf n = far.n + step.n, maximum = far.denominator == 0.0f ? splat(NEVER) : n * LN_2_HIGH + n * LN_2_LOW;
    const Scaled rounded = split_exp(maximum);  // the sums make up for the rounding
    const vd factor = widened(scaled(step.m, n - rounded.n)) / widened(rounded.m);
    const vd numerator = (widened(far.numerator) + widened(far.numerator_error)) * factor;
    const vd denominator = (widened(far.denominator) + widened(far.denominator_error)) * factor;
    for (int lane = 0; lane < at.count; ++lane) {
      p.numerator[place(lane, 1, 0, features_)] = numerator[lane];
      if (key_features_ == 1 && at.first + lane != head(lane) * features_) continue;  // the first one writes for all
      const int64_t shared = place(lane, 1, 0, key_features_);
      p.denominator[shared] = denominator[lane], p.maximum[shared] = maximum[lane];
    }
  }

  // Entry i of a tensor of shape (B, h, count, c) or (B, h, count, 1).
  template <class T>
  auto get(const T* x, int64_t count, int64_t i, int64_t features) const {
    T lanes[VL] = {};
    for (int lane = 0; lane < at.count; ++lane) lanes[lane] = x[place(lane, count, i, features)];
    return load(lanes, VL);
  }

  int64_t place(int lane, int64_t count, int64_t i, int64_t features) const {
    const int64_t of_head = row * p.heads + head(lane);
    return (of_head * count + i) * features + (features > 1 ? at.first + lane - head(lane) * features_ : 0);
  }

  const CausalProblem& before_;
  const bool has_state_;
  const int64_t features_, key_features_;  // of a head
};

template <class S>
void forward(const CausalProblem& p) {
  if (p.numbers() == 0) return;
  for (int64_t t = 0; p.first && t < p.batch * p.length; ++t)
    if (p.first[t] > t % p.length) memset((S*)p.output + t * p.width, 0, p.width * sizeof(S));  // padding
  const Weights weights(p, ROOM);
  const std::vector<Column> columns = columns_of(p);
  CausalProblem before = p;
  std::vector<double> denominators;
  std::vector<float> maxima;
  if (p.numerator && p.key_per_head()) {  // the columns of a head read them, and one writes them
    denominators.assign(p.denominator, p.denominator + p.batch * p.heads);
    maxima.assign(p.maximum, p.maximum + p.batch * p.heads);
    before.denominator = denominators.data(), before.maximum = maxima.data();
  }
  const int64_t count = columns.size();
  parallel_for(p.batch * count, p.numbers(), [&](int64_t begin, int64_t end) {
    const Scratch scratch(CausalColumn<S>::vectors(p));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / count;
      Forward<S> column(p, before, weights, row, columns[task % count], scratch);
      for_each_document(p, row, [&](int64_t first, int64_t last) { column.document(first, last); });
    }
  });
  for (int64_t i = 0; p.numerator && i < p.batch * p.heads; ++i) keep_tokens<S>(p, i / p.heads, i % p.heads);
}

}  // namespace
}  // namespace aft

AFT_KERNEL(causal, CausalProblem, forward)
