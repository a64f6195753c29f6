// Eq. 2 with a table of all pairs: the problem.
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

  int64_t seen(int64_t t) const { return causal ? t + 1 : keys; }
  int64_t biases_of_head() const { return columns ? (2 * (keys / columns) - 1) * (2 * columns - 1) : queries * keys; }

  // Visits the biases of a query: run(first key, biases, count) for each contiguous run.
  template <class T, class Run>
  void for_each_run(T* of_head, int64_t t, const Run& run) const {
    if (!columns) return run(int64_t(0), of_head + t * keys, seen(t));
    const int64_t rows = keys / columns, across = 2 * columns - 1;
    T* first = of_head + (rows - 1 - t / columns) * across + columns - 1 - t % columns;
    for (int64_t i = 0; i < rows; ++i) run(i * columns, first + i * across, columns);
  }
};

}  // namespace aft
