// Causal Eq. 2, forward, with or without a state that is continued (see causal.h).
#include "causal.h"

namespace aft {
namespace {

// The state of a row: its last tokens, and its far sums as seen from its last token. All columns of a head share its
// keys if there is one key per head, so they are read from a copy.
template <class S>
class State {
 public:
  State(const CausalProblem& before, const CausalColumn<S>& column, int64_t row)
      : before_(before), p(column.p), column_(column), row_(row), features_(p.width / p.heads),
        key_features_(p.key_width / p.heads) {}

  void read(CausalColumn<S>& into) const {
    alignas(64) float keys[VL] = {}, values[VL] = {};
    const int kept = into.reach;
    const Places at(*this, kept);
    for (int i = 0; i < kept; ++i) {
      for (int lane = 0; lane < into.at.count; ++lane) {
        keys[lane] = before_.keys[at.key[lane] + i * key_features_];
        values[lane] = before_.values[at.value[lane] + i * features_];
      }
      into.put(i, split_exp(load(keys)), load(values));
    }
    if (p.hides_outside) return;
    const Places sums(*this, 1);
    for (int lane = 0; lane < into.at.count; ++lane) {
      const float denominator = before_.denominator[sums.key[lane]];
      if (denominator == 0.0f) continue;
      const double shift = double(before_.maximum[sums.key[lane]]) - slope(lane), n = std::nearbyint(shift / LN_2);
      const double factor = std::exp(shift - n * LN_2);
      into.far.n[lane] = float(n);
      into.far.denominator[lane] = float(denominator * factor);
      into.far.numerator[lane] = float(before_.numerator[sums.value[lane]] * factor);
    }
  }

  // Writes the state after the tokens begin .. end - 1.
  void write(int64_t begin, int64_t end) const {
    const int64_t kept = column_.reach, added = end - begin;
    const S* new_keys = (const S*)p.key + row_ * p.key_batch;
    const S* new_values = (const S*)p.value + row_ * p.value_batch + column_.at.first;
    const Places at(*this, kept), sums(*this, 1);
    for (int64_t i = 0; i < kept; ++i) {
      const int64_t token = end - kept + i;  // if it is an earlier one, the state had it `added` places further back
      for (int lane = 0; lane < column_.at.count; ++lane) {
        const int64_t k = at.key[lane] + i * key_features_, v = at.value[lane] + i * features_;
        if (token >= begin) {
          if (at.owns_key[lane]) p.keys[k] = to_float(new_keys[token * p.key_row + at.key_feature[lane]]);
          p.values[v] = to_float(new_values[token * p.value_row + lane]);
        } else {
          if (at.owns_key[lane]) p.keys[k] = before_.keys[k + added * key_features_];
          p.values[v] = before_.values[v + added * features_];
        }
      }
    }
    if (p.hides_outside) return;
    for (int lane = 0; lane < column_.at.count; ++lane) {
      const bool empty = column_.far.denominator[lane] == 0.0f;
      const double shift = column_.far.n[lane] * LN_2 + slope(lane);
      const float maximum = empty ? NEVER : float(shift);
      const double factor = empty ? 1.0 : std::exp(shift - maximum);
      p.numerator[sums.value[lane]] = float(column_.far.numerator[lane] * factor);
      if (!sums.owns_key[lane]) continue;
      p.denominator[sums.key[lane]] = float(column_.far.denominator[lane] * factor);
      p.maximum[sums.key[lane]] = maximum;
    }
  }

 private:
  static constexpr double LN_2 = 0.6931471805599453;

  double slope(int lane) const { return p.slopes ? p.slopes[column_.head(lane)] : 0.0; }

  // Where the features of a column are in tensors of shape (B, h, count, c) and (B, h, count, 1 or c). The first feature
  // of a head owns its key if there is one key per head.
  struct Places {
    Places(const State& state, int64_t count) {
      const CausalColumn<S>& column = state.column_;
      const bool key_per_feature = state.key_features_ == state.features_;
      for (int lane = 0; lane < column.at.count; ++lane) {
        const int64_t head = column.head(lane), feature = column.at.first + lane - head * state.features_;
        const int64_t head_of_row = state.row_ * state.p.heads + head;
        value[lane] = head_of_row * count * state.features_ + feature;
        key[lane] = key_per_feature ? value[lane] : head_of_row * count;
        key_feature[lane] = key_per_feature ? column.at.first + lane : head;
        owns_key[lane] = key_per_feature || feature == 0;
      }
    }
    int64_t value[VL], key[VL], key_feature[VL];
    bool owns_key[VL];
  };

  const CausalProblem &before_, &p;
  const CausalColumn<S>& column_;
  const int64_t row_, features_, key_features_;
};

// A copy of the parts of a state that the columns of a head share.
class SharedState {
 public:
  explicit SharedState(const CausalProblem& p) : problem(p) {
    if (!p.numerator || p.key_width == p.width) return;
    const int64_t rows = p.batch * p.heads;
    copy(problem.keys, rows * (p.window - 1));
    copy(problem.denominator, rows);
    copy(problem.maximum, rows);
  }
  SharedState(const SharedState&) = delete;

  CausalProblem problem;  // before the tokens

 private:
  void copy(float*& x, int64_t count) {
    copies_.emplace_back(x, x + count);
    x = copies_.back().data();
  }
  std::vector<std::vector<float>> copies_;
};

template <class S>
class Forward : public CausalColumn<S> {
 public:
  Forward(const CausalProblem& p, const CausalProblem& before, const Weights& weights, int64_t row, Column at,
          const Scratch& scratch)
      : CausalColumn<S>(p, weights, row, at, scratch), before_(before), row_(row), has_state_(p.numerator) {}

  void run() {
    const CausalProblem& p = this->p;
    int64_t written = 0;
    for_each_document(p, row_, [&](int64_t begin, int64_t end) {
      no_output(written, begin);
      document(begin, end);
      written = end;
    });
    no_output(written, p.length);
  }

 private:
  void document(int64_t begin, int64_t end) {
    this->far = Sums();
    this->hide(0, this->reach);
    const State<S> state(before_, *this, row_);
    if (has_state_) state.read(*this);
    for (int64_t t = begin; t < end; t += CHUNK) {
      const int count = int(std::min<int64_t>(CHUNK, end - t));
      this->read(t, count, this->reach);
      this->use_weights(t - begin, count);
      const bool finite = this->take_one_exponent(count);
      int i = 0;
      for (; i + TILE <= count; i += TILE) queries<TILE>(t, i, finite);
      for (; i < count; ++i) queries<1>(t, i, finite);
      if (t + count < end || has_state_) this->end_chunk(count, finite);
      this->advance(count);
    }
    if (has_state_) state.write(begin, end);
  }

  template <int Q>
  void queries(int64_t t, int i, bool finite) {
    vf numerator[Q], denominator[Q];
    if (finite) {
      if (this->at.one_head)
        this->template plain_sums<Q, true>(i, numerator, denominator);
      else
        this->template plain_sums<Q, false>(i, numerator, denominator);
      vf smallest = denominator[0];
      for (int u = 1; u < Q; ++u) smallest = min(smallest, denominator[u]);
      if (!any(smallest < SMALLEST)) {
        for (int u = 0; u < Q; ++u) output(t + i + u, numerator[u] / denominator[u]);
        return;
      }
    }
    for (int u = 0; u < Q; ++u) output(t + i + u, this->careful_sums(i + u).average());
  }

  void output(int64_t token, vf average) {
    const CausalProblem& p = this->p;
    const Column& at = this->at;
    if (p.query) {
      const S* query = (const S*)p.query + row_ * p.query_batch + token * p.query_row + at.first;
      average *= sigmoid(load(query, at.count));
    }
    store((S*)p.output + (row_ * p.length + token) * p.width + at.first, average, at.count);
  }

  void no_output(int64_t from, int64_t to) {
    const CausalProblem& p = this->p;
    for (; from < to; ++from)
      store((S*)p.output + (row_ * p.length + from) * p.width + this->at.first, vf{}, this->at.count);
  }

  const CausalProblem& before_;  // with the state before the tokens
  const int64_t row_;
  const bool has_state_;
};

template <class S>
void forward(const CausalProblem& p) {
  const Weights weights(p);
  const Columns columns(p);
  const SharedState before(p);
  const int64_t count = columns.all.size();
  parallel_for(p.batch * count, p.numbers(), [&](int64_t begin, int64_t end) {
    const FlushSubnormals flush;
    const Scratch scratch(CausalColumn<S>::vectors(p));
    for (int64_t task = begin; task < end; ++task)
      Forward<S>(p, before.problem, weights, task / count, columns.all[task % count], scratch).run();
  });
}

}  // namespace
}  // namespace aft

AFT_EXPORT void aft_causal(const aft::CausalProblem* p) {
  if (p->is_bf16)
    aft::forward<aft::bf16>(*p);
  else
    aft::forward<float>(*p);
}
