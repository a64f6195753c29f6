// Eq. 2 with a table of all pairs:
//
//   Y_t = sum_t' exp(K_t' + w_tt') V_t' / sum_t' exp(K_t' + w_tt'),    times sigmoid(Q_t)
//
// element-wise in the features. exp(K) is kept as m 2^n (`split_exp`), and both sums are products of
//
//   W = exp(w - M_t)                              (queries, keys), for each head
//   X = (exp(K) 2^-N V', exp(K) 2^-N)             (keys, rows of the batch and their features), for each task
//
// N is the largest n of a feature of a row (a power of two, so rescaling is exact), M_t the largest bias of a query. A
// task is one head, and so few rows or features that X stays in the cache. A query whose denominator is too small to be
// exact (SMALLEST), or whose sums are not finite, is "lost": it is computed again from its own logits, with an exponent
// of its own, for this query and one vector of features only.
//
// Causal problems are computed block by block of queries: N is then the largest n up to the end of the block, so later
// keys do not matter. V' = V - c counts from a center c in the backward pass, where terms cancel otherwise.
#pragma once

#include "parallel.h"
#include "vec.h"

namespace aft {

// All fields have 64 bits, so that Python can pack them. Features are contiguous, other strides are free.
struct TableProblem {
  int64_t is_bf16;  // query, key, value, result and gradients are bfloat16, otherwise float32
  int64_t batch, queries, keys, heads, width;
  int64_t key_width;  // width, or heads for one key per head
  int64_t columns;    // of a grid, whose biases are (h, 2 rows - 1, 2 columns - 1) by the offset from query to key; or 0
  int64_t causal;
  const void *query, *key, *value;  // (B, T, d), (B, T', d or h), (B, T', d); query may be null
  int64_t query_batch, query_row, key_batch, key_row, value_batch, value_row;  // strides
  const float* bias;                                                           // (h, T, T'), contiguous, or of a grid
  void* output;                                                                // (B, T, d), contiguous
  // The backward pass.
  const void* gradient;  // (B, T, d) of the output
  int64_t gradient_batch, gradient_row;
  void *query_gradient, *key_gradient, *value_gradient;  // contiguous
  float* bias_gradient;                                  // filled with 0 by the caller; null if it is not needed
};

}  // namespace aft
