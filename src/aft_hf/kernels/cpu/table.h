// Eq. 2 with a table of all pairs: the problem.
#pragma once

#include "problem.h"

namespace aft {

struct TableProblem : Problem {
  int64_t columns;  // of a grid, whose biases are (h, 2 rows - 1, 2 columns - 1) by the offset from query to key; or 0
  int64_t causal;   // whether a query sees only t' <= t

  int64_t seen(int64_t t) const { return causal ? t + 1 : length; }
  int64_t biases_of_head() const { return columns ? (2 * (length / columns) - 1) * (2 * columns - 1) : queries * length; }

  // Visits the biases of a query: run(first key, biases, count) for each contiguous run.
  template <class T, class Run>
  void for_each_run(T* of_head, int64_t t, const Run& run) const {
    if (!columns) return run(int64_t(0), of_head + t * length, seen(t));
    const int64_t rows = length / columns, across = 2 * columns - 1;
    T* first = of_head + (rows - 1 - t / columns) * across + columns - 1 - t % columns;
    for (int64_t i = 0; i < rows; ++i) run(i * columns, first + i * across, columns);
  }
};

}  // namespace aft
