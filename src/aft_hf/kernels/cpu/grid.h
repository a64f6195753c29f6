// Eq. 2 on a grid: the problem.
#pragma once

#include "problem.h"

namespace aft {

struct GridProblem : Problem {
  int64_t rows, columns;
  int64_t kernel_rows, kernel_columns;  // odd; `bias` is (h, kernel_rows, kernel_columns)
  int64_t hides_outside;

  int64_t taps() const { return kernel_rows * kernel_columns; }
};

}  // namespace aft
