// Eq. 2 on a grid: the problem.
#pragma once

#include "parallel.h"
#include "vec.h"

namespace aft {

// All fields have 64 bits, so that Python can pack them. Rows of features are contiguous, other strides are free.
struct GridProblem {
  int64_t is_bf16;
  int64_t batch, rows, columns, width, heads;
  int64_t key_width;                           // width, or heads for one key per head
  int64_t kernel_rows, kernel_columns;         // odd
  int64_t hides_outside;
  const void *query, *key, *value;             // (B, T, d), (B, T, d or h), (B, T, d); query may be null
  int64_t query_batch, query_row, key_batch, key_row, value_batch, value_row;  // strides
  const float* kernels;                        // w: (h, kernel_rows, kernel_columns), contiguous
  void* output;                                // (B, T, d), contiguous
  const void* gradient;                        // (B, T, d) of the output
  int64_t gradient_batch, gradient_row;
  void *query_gradient, *key_gradient, *value_gradient;  // contiguous
  float* kernel_gradient;                      // filled with 0 by the caller; null if it is not needed

  int64_t length() const { return rows * columns; }
  int64_t taps() const { return kernel_rows * kernel_columns; }
};

}  // namespace aft
