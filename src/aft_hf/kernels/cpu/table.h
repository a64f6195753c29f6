// Eq. 2 with a table of all pairs: the problem.
#pragma once

#include "problem.h"

namespace aft {

struct TableProblem : Problem {
  int64_t causal;  // whether a query sees only t' <= t

  int64_t seen(int64_t t) const { return causal ? t + 1 : length; }
};

}  // namespace aft
