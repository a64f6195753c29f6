// Vectors of features: which heads they belong to, and memory for them.
#pragma once

#include <memory>
#include <utility>

#include "parallel.h"
#include "vec.h"

namespace aft {

// Sums with a smaller denominator are computed again: terms below 2^-126 are lost, so 2^-34 of such a denominator each.
constexpr float SMALLEST = 0x1p-92f;

// A vector of features.
struct Column {
  int64_t first;
  int count;
  bool one_head;  // whether all features belong to one position-bias head; otherwise each lane has its own weights
  int64_t head;
};

// Memory for vectors, aligned to a cache line. A copy hands out the same memory again from its start.
class Scratch {
 public:
  explicit Scratch(int64_t vectors)
      : memory_(new float[vectors * VL + 16]), next_((float*)(((uintptr_t)memory_.get() + 63) / 64 * 64)) {}
  explicit Scratch(float* memory) : next_(memory) {}
  float* take(int64_t vectors) { return std::exchange(next_, next_ + vectors * VL); }

 private:
  std::shared_ptr<float[]> memory_;
  float* next_;
};

}  // namespace aft
