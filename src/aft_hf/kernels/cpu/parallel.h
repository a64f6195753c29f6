// Threads: PyTorch's own pool, by the C functions `torch_parallel_for` and `torch_get_num_threads` of libtorch_cpu.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define AFT_EXPORT extern "C" __attribute__((visibility("default")))

// Defines what Python calls: aft_NAME(problem) calls run<float> or run<bf16>, and returns whether it failed.
#define AFT_KERNEL(NAME, Problem, run) \
  AFT_EXPORT int aft_##NAME(const aft::Problem* p) { return aft::failed(p, aft::run<float>, aft::run<aft::bf16>); }

namespace aft {

typedef void (*Range)(int64_t begin, int64_t end, void* context);
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, Range range, void* context);
typedef int32_t (*GetNumThreads)(uint32_t* count);

inline ParallelFor torch_parallel_for = nullptr;  // null: one thread
inline GetNumThreads torch_get_num_threads = nullptr;

// Below this number of features times tokens, starting threads takes longer than the computation.
constexpr int64_t FEW_NUMBERS = 1 << 15;

static inline int64_t num_threads(int64_t numbers) {
  uint32_t count = 1;
  if (torch_get_num_threads && torch_parallel_for && numbers >= FEW_NUMBERS) torch_get_num_threads(&count);
  return std::max<int64_t>(count, 1);
}

// Products with subnormal numbers take many times longer, so they count as 0 as long as an object of this class lives.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | (1ull << 24)));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#endif
};

// Calls run(begin, end) for parts of the range 0 .. count - 1, on one thread each.
template <class Run>
void parallel_for(int64_t count, int64_t numbers, const Run& run) {
  const auto call = [](int64_t begin, int64_t end, void* context) {
    const FlushSubnormals flush;
    (*static_cast<const Run*>(context))(begin, end);
  };
  void* context = const_cast<void*>(static_cast<const void*>(&run));
  if (count <= 1 || num_threads(numbers) == 1) return call(0, count, context);
  if (torch_parallel_for(0, count, 1, call, context)) throw std::runtime_error("a thread failed");
}

// Runs a kernel, and returns whether it failed, for example for lack of memory: exceptions must not reach Python.
template <class Problem>
int failed(const Problem* p, void (*of_floats)(const Problem&), void (*of_bf16)(const Problem&)) {
  try {
    (p->is_bf16 ? of_bf16 : of_floats)(*p);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

}  // namespace aft
