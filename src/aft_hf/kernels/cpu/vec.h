// Vectors of VL float32 numbers and the few primitives that differ between instruction sets: AVX-512, AVX2, NEON.
//
// Arithmetic, comparisons and `condition ? a : b` are those of the vector extensions of GCC and Clang. -ffast-math must
// not be used: it removes `rounded` and the tests for NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace aft {

struct bf16 {
  uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int VL = 16;
constexpr int TILE = 8;  // rows of a register tile: two accumulators each
#elif defined(__AVX2__)
constexpr int VL = 8;
constexpr int TILE = 4;
#else
constexpr int VL = 4;
constexpr int TILE = 8;
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef double vd __attribute__((vector_size(VL * 8)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));

// ------------------------------------------------------------------------------- primitives of an instruction set

// widen, narrow: 16 bits to 32 bits, in memory on one side.
// max, min: b where a or b is NaN.
// rounded: the nearest integer.
// scaled: x 2^n for integers n <= 127; 0 where 2^n is less than the smallest normal number.
#if defined(__AVX512F__)

static inline vu widen(const void* p) { return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
static inline void narrow(void* p, vu x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)x)); }
static inline vf max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
static inline vf min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
static inline vf rounded(vf x) {
  return (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline vf scaled(vf x, vf n) { return (vf)_mm512_scalef_ps((__m512)x, (__m512)n); }
static inline bool any(vi condition) { return _mm512_test_epi32_mask((__m512i)condition, (__m512i)condition) != 0; }

#elif defined(__AVX2__)

static inline vu widen(const void* p) { return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
static inline void narrow(void* p, vu x) {
  __m256i pairs = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x, (__m256i)x), 8);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(pairs));
}
static inline vf max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
static inline vf min(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
static inline vf rounded(vf x) {
  return (vf)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline bool any(vi condition) { return _mm256_movemask_ps((__m256)condition) != 0; }

#elif defined(__ARM_NEON)

static inline vu widen(const void* p) { return (vu)vmovl_u16(vld1_u16((const uint16_t*)p)); }
static inline void narrow(void* p, vu x) { vst1_u16((uint16_t*)p, vmovn_u32((uint32x4_t)x)); }
static inline vf max(vf a, vf b) { return a > b ? a : b; }
static inline vf min(vf a, vf b) { return a < b ? a : b; }
static inline vf rounded(vf x) { return (vf)vrndnq_f32((float32x4_t)x); }
static inline bool any(vi condition) { return vmaxvq_u32((uint32x4_t)condition) != 0; }

#else
#error "no vector primitives for this instruction set"
#endif

#if !defined(__AVX512F__)
static inline vf scaled(vf x, vf n) {
  n = min(max(n, vf{} - 127.0f), vf{} + 127.0f);
  return x * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
}
#endif

// ------------------------------------------------------------------------------------------------- loads and stores

static inline vf splat(float x) { return x - vf{}; }  // not 0 + x, which is an addition: it turns -0 into 0

static inline vf load(const float* p) {
  vf x;
  memcpy(&x, p, sizeof x);
  return x;
}

static inline vf load(const bf16* p) { return (vf)(widen(p) << 16); }

static inline void store(float* p, vf x) { memcpy(p, &x, sizeof x); }

// Rounds to the nearest bfloat16, ties to even.
static inline void store(bf16* p, vf x) {
  vu u = (vu)x;
  u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  narrow(p, x == x ? u : vu{} + 0x7fc0);
}

// The first `count` entries; the others are 0 when loaded, and not stored.
template <class S>
static inline vf load_part(const S* p, int count) {
  S padded[VL] = {};
  for (int i = 0; i < count; ++i) padded[i] = p[i];
  return load(padded);
}

template <class S>
static inline void store_part(S* p, vf x, int count) {
  S padded[VL];
  store(padded, x);
  for (int i = 0; i < count; ++i) p[i] = padded[i];
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)
static inline __mmask16 first_lanes(int count) { return __mmask16((1u << count) - 1); }
static inline vf load_part(const float* p, int count) { return (vf)_mm512_maskz_loadu_ps(first_lanes(count), p); }
static inline vf load_part(const bf16* p, int count) {
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count), p)), 16);
}
static inline void store_part(float* p, vf x, int count) { _mm512_mask_storeu_ps(p, first_lanes(count), (__m512)x); }
static inline void store_part(bf16* p, vf x, int count) {
  bf16 all[VL];
  store(all, x);
  _mm256_mask_storeu_epi16(p, first_lanes(count), _mm256_loadu_si256((const __m256i*)all));
}
#elif defined(__AVX2__)
static inline __m256i first_lanes(int count) { return (__m256i)(vi{0, 1, 2, 3, 4, 5, 6, 7} < vi{} + count); }
static inline vf load_part(const float* p, int count) { return (vf)_mm256_maskload_ps(p, first_lanes(count)); }
static inline void store_part(float* p, vf x, int count) { _mm256_maskstore_ps(p, first_lanes(count), (__m256)x); }
#endif

template <class S>
static inline vf load(const S* p, int count) { return count == VL ? load(p) : load_part(p, count); }

template <class S>
static inline void store(S* p, vf x, int count) { count == VL ? store(p, x) : store_part(p, x, count); }

static inline vd load(const double* p, int count) {
  vd x = {};
  memcpy(&x, p, count * sizeof *p);
  return x;
}
static inline void store(double* p, vd x, int count) { memcpy(p, &x, count * sizeof *p); }
static inline vd widened(vf x) { return __builtin_convertvector(x, vd); }
static inline vf narrowed(vd x) { return __builtin_convertvector(x, vf); }

static inline void add(float* p, vf x) { store(p, load(p) + x); }

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) { return __builtin_bit_cast(float, (uint32_t)x.bits << 16); }

static inline int part(int64_t count) { return int(count < VL ? count : VL); }  // in the next vector

// ------------------------------------------------------------------------------------------------------------- sums

// The sums of neighbouring lanes, those of x, then those of y.
template <int... LANES>
static inline vf add_neighbours(vf x, vf y, std::integer_sequence<int, LANES...>) {
  return __builtin_shufflevector(x, y, 2 * LANES...) + __builtin_shufflevector(x, y, (2 * LANES + 1)...);
}
static inline vf add_neighbours(vf x, vf y) { return add_neighbours(x, y, std::make_integer_sequence<int, VL>()); }

// Lane i of the result is lane lanes[i] of x.
static inline vf permuted(vf x, vi lanes) {
#if defined(__AVX512F__)
  return (vf)_mm512_permutexvar_ps((__m512i)lanes, (__m512)x);
#elif defined(__AVX2__)
  return (vf)_mm256_permutevar8x32_ps((__m256)x, (__m256i)lanes);
#else
  vf y;
  for (int i = 0; i < VL; ++i) y[i] = x[lanes[i]];
  return y;
#endif
}

static inline float sum_of(vf x) {
  for (int count = VL; count > 1; count /= 2) x = add_neighbours(x, x);
  return x[0];
}

// The sums of VL vectors that follow each other in memory.
static inline vf sums_of_rows(const float* rows) {
  vf x[VL];
  for (int i = 0; i < VL; ++i) x[i] = load(rows + i * VL);
#pragma GCC unroll 4
  for (int count = VL; count > 1; count /= 2)
#pragma GCC unroll 16
    for (int i = 0; i < count / 2; ++i) x[i] = add_neighbours(x[2 * i], x[2 * i + 1]);
  return x[0];
}

// ----------------------------------------------------------------------------------------------------- exponentials

constexpr float LOG2_E = 1.44269504088896340736f;
constexpr float LN_2_HIGH = 0.693145751953125f;  // ln 2 = LN_2_HIGH + LN_2_LOW
constexpr float LN_2_LOW = 1.428606820309417e-6f;

// exp(x) for |x| <= ln(2) / 2, with a relative error of 1e-7.
static inline vf exp_near_0(vf x) {
  vf y = splat(1.9875691500e-4f);
  y = y * x + 1.3981999507e-3f;
  y = y * x + 8.3334519073e-3f;
  y = y * x + 4.1665795894e-2f;
  y = y * x + 1.6666665459e-1f;
  y = y * x + 5.0000001201e-1f;
  return y * x * x + x + 1.0f;
}

// The exponent of x: n with 2^n <= |x| < 2^(n + 1).
static inline vf exponent_of(vf x) { return __builtin_convertvector((((vi)x >> 23) & 255) - 127, vf); }

// A number m 2^n. m is 0, or of the order of 1; n is an integer.
struct Scaled {
  vf m, n;
};

constexpr float NEVER = -1e30f;  // the exponent n of 0
constexpr float LARGEST = 1e7f;  // larger arguments of exponentials are clamped, so that their exponents are integers

// exp(x) as m 2^n, which neither overflows nor underflows. m is 0 for -inf, which hides a key, and NaN for inf and NaN;
// their exponent NEVER changes no maximum.
static inline Scaled split_exp(vf x) {
  const vi hidden = x < -1e30f, unknown = x - x != 0.0f;
  x = max(splat(-LARGEST), min(splat(LARGEST), x));
  const vf n = rounded(x * LOG2_E), m = exp_near_0((x - n * LN_2_HIGH) - n * LN_2_LOW);
  return {hidden ? vf{} : unknown ? splat(NAN) : m, hidden | unknown ? splat(NEVER) : n};
}

// The product; 0 if one of them hides a key, whatever the other one is.
static inline Scaled operator*(Scaled x, Scaled y) {
  return {(x.m == 0.0f) | (y.m == 0.0f) ? vf{} : x.m * y.m, x.n + y.n};
}

// exp(x) for x <= 88.
static inline vf exp(vf x) {
  x = max(splat(-104.0f), x);
  vf n = rounded(x * LOG2_E);
  return scaled(exp_near_0((x - n * LN_2_HIGH) - n * LN_2_LOW), n);
}

static inline vf sigmoid(vf x) { return 1.0f / (1.0f + exp(min(splat(88.0f), -x))); }

// The number from which values count in a backward pass, where terms cancel otherwise: the nearest to 0 between the
// smallest and the largest value. With a mean or an outlier as center, all other values would lose digits.
struct Center {
  vf low = splat(INFINITY), high = splat(-INFINITY);

  // Takes in a value, unless it is not finite, which would spread to queries that do not see it.
  void see(vf value, vi visible) {
    const vi counts = visible & (value - value == 0.0f);
    low = counts ? min(low, value) : low, high = counts ? max(high, value) : high;
  }
  vf value() const { return low <= high ? min(max(low, vf{}), high) : vf{}; }
};

// ------------------------------------------------------------------------------------------------- pairs of bfloat16

// Products of pairs of bfloat16 numbers with AVX512-BF16: each 32-bit lane of a vector holds two of them, and a product
// adds both products of a lane to a float32 sum. Functions with AFT_PAIRS may only run if `has_pairs()`.
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

}  // namespace aft
