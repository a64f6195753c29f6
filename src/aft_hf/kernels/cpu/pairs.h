// Products of pairs of bfloat16 numbers with AVX512-BF16: each 32-bit lane of a vector holds two of them, and a product
// adds both products of a lane to a float32 sum. Functions with AFT_PAIRS may only run if `has_pairs()`.
#pragma once

#include "vec.h"

namespace aft {

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define AFT_PAIRS __attribute__((target("avx512bf16")))
static inline bool has_pairs() { return __builtin_cpu_supports("avx512bf16"); }

AFT_PAIRS static inline vf pairs_of(vf first, vf second) {
  const vu lanes = {0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                    0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f};
  return (vf)_mm512_permutexvar_epi16((__m512i)lanes, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}

AFT_PAIRS static inline vf add_pairs(vf x, vf y, vf sum) {
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
}
#else
#define AFT_PAIRS
static inline bool has_pairs() { return false; }
static inline vf pairs_of(vf first, vf) { return first; }
static inline vf add_pairs(vf, vf, vf sum) { return sum; }
#endif

// x rounded to bfloat16.
static inline vf rounded_to_half(vf x) { return (vf)(((vu)x + 0x8000) & 0xffff0000); }

}  // namespace aft
