// w of a causal window by factors u and v (Eq. 7), from each token to the last s ones, and its gradients:
//
//   w_tj = u_t . v_t'  with t' = t - (s - 1) + j,    dL/du_t = sum_j g_tj v_t',    dL/dv_t' = sum_t g_tj u_t
#pragma once

#include "problem.h"

namespace aft {

constexpr int64_t SPAN = 64;  // positions of a task

// All fields have 64 bits, so that Python can pack them. Features are contiguous, other strides are free.
struct BandProblem {
  int64_t is_bf16;  // u and v are bfloat16, otherwise float32
  int64_t heads, positions, features;
  int64_t start, length, window;  // the first token, T, s
  const void *query, *key;        // u and v, (h, positions, features)
  int64_t query_head, query_row, key_head, key_row;  // strides
  float* band;                            // w or its gradient, (T, h, s)
  void *query_gradient, *key_gradient;    // contiguous

  bool holds(int64_t query, int64_t key) const {
    return start <= query && query < start + length && key <= query && query < key + window;
  }
  int64_t place(int64_t head, int64_t query, int64_t key) const {
    return ((query - start) * heads + head) * window + window - 1 + key - query;
  }

  // Calls run(head, first, last) for spans of the positions begin .. end - 1.
  template <class Run>
  void for_each_span(int64_t begin, int64_t end, const Run& run) const {
    const int64_t spans = (end - begin + SPAN - 1) / SPAN;
    parallel_for(heads * spans, heads * (end - begin) * features, [&](int64_t task, int64_t tasks) {
      const FlushSubnormals flush;
      for (; task < tasks; ++task) {
        const int64_t first = begin + task % spans * SPAN;
        run(task / spans, first, std::min(first + SPAN, end));
      }
    });
  }
};

}  // namespace aft
