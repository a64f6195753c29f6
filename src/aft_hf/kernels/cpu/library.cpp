// What Python asks of the library first.
#include "parallel.h"

AFT_EXPORT void aft_use_threads_of_torch(aft::ParallelFor parallel_for, aft::GetNumThreads get_num_threads) {
  aft::torch_parallel_for = parallel_for;
  aft::torch_get_num_threads = get_num_threads;
}
