// Sixteen float lanes, written once for each instruction tier. Everything above this file is the same for all.
//
// Rules that keep a row's bits its own: one exp, one order of sums, fused multiply-add where the tier has it and
// nowhere else, tails by masks and never by another path.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(HEADRACE_TIER_AVX512) || defined(HEADRACE_TIER_AMX)
#define HEADRACE_AVX512 1
#endif
#if defined(HEADRACE_AVX512) || defined(HEADRACE_TIER_AVX2)
#include <immintrin.h>
#endif

#define HR_API extern "C" __attribute__((visibility("default")))
// Before loops over a constant number of sums, which must stay in registers: an array that is indexed by a variable
// lies in memory.
#if defined(__clang__)
#define HR_UNROLL _Pragma("unroll")
#else
#define HR_UNROLL _Pragma("GCC unroll 16")
#endif
#define HR_INLINE inline __attribute__((always_inline))
// Of loops that need every register for themselves.
#define HR_NOINLINE __attribute__((noinline))

namespace headrace {

constexpr int kLanes = 16;

using bf16 = uint16_t;

HR_INLINE float to_float(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

HR_INLINE float to_float(float x) { return x; }

// Round to nearest, ties to even; NaN stays NaN.
HR_INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16((bits >> 16) | 0x40);
    return bf16((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// ---------------------------------------------------------------------------------------------------------------

#if defined(HEADRACE_AVX512)

struct V16 {
    __m512 v;
};

// Sixteen pairs of bf16: lane i holds elements 2i and 2i + 1.
struct P16 {
    __m512i v;
};

HR_INLINE V16 zero() { return {_mm512_setzero_ps()}; }
HR_INLINE V16 splat(float x) { return {_mm512_set1_ps(x)}; }
HR_INLINE V16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
HR_INLINE void store(float* p, V16 a) { _mm512_storeu_ps(p, a.v); }
HR_INLINE V16 load(const bf16* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
HR_INLINE __mmask16 first_lanes(int n) { return __mmask16(n >= 16 ? 0xffff : (1u << n) - 1); }
HR_INLINE V16 load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
HR_INLINE void store_first(float* p, V16 a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
HR_INLINE V16 load_first(const bf16* p, int n) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// The instruction takes numbers below 2^-126 for zero, which bf16 rows of a model do not tell apart.
HR_INLINE __m256i rounded(V16 a) { return (__m256i)_mm512_cvtneps_pbh(a.v); }
HR_INLINE V16 round_bf16(V16 a) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded(a)), 16))};
}
HR_INLINE void store(bf16* p, V16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), rounded(a)); }
HR_INLINE void store_first(bf16* p, V16 a, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), rounded(a)); }

HR_INLINE V16 operator+(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
HR_INLINE V16 operator-(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
HR_INLINE V16 operator*(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
HR_INLINE V16 operator/(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
HR_INLINE V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// b where a is NaN.
HR_INLINE V16 max(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
HR_INLINE V16 min(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }
HR_INLINE V16 round_even(V16 a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
HR_INLINE V16 times_power_of_two(V16 a, V16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// Lanes [first, end) of a, fill elsewhere.
HR_INLINE V16 keep(V16 a, int first, int end, V16 fill) {
    __mmask16 mask = __mmask16(first_lanes(end < 0 ? 0 : end) & ~first_lanes(first < 0 ? 0 : first));
    return {_mm512_mask_mov_ps(fill.v, mask, a.v)};
}

// a where x >= bound, 0 elsewhere.
HR_INLINE V16 zero_below(V16 a, V16 x, float bound) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(bound), _CMP_GE_OQ), a.v)};
}
// A bit for each lane where a >= b.
HR_INLINE uint32_t at_least(V16 a, V16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }

HR_INLINE P16 load_pairs(const bf16* p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE void store_pairs(bf16* p, P16 a) { _mm512_storeu_si512(p, a.v); }
HR_INLINE P16 splat_pair(const bf16* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    return {_mm512_set1_epi32(bits)};
}
// The first element of each pair, and zero.
HR_INLINE P16 first_of_pairs(P16 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(0xffff))}; }
HR_INLINE P16 second_of_pairs(P16 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(int32_t(0xffff0000u)))}; }
HR_INLINE V16 dot(V16 sum, P16 a, P16 b) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
}

#elif defined(HEADRACE_TIER_AVX2)

struct V16 {
    __m256 a, b;
};

struct P16 {
    __m256i a, b;
};

HR_INLINE V16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
HR_INLINE V16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
HR_INLINE V16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HR_INLINE void store(float* p, V16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
HR_INLINE __m256 widen(const bf16* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
HR_INLINE V16 load(const bf16* p) { return {widen(p), widen(p + 8)}; }
template <typename T>
HR_INLINE V16 load_first(const T* p, int n) {
    T lanes[kLanes] = {};
    std::memcpy(lanes, p, size_t(n < kLanes ? n : kLanes) * sizeof(T));
    return load(lanes);
}
HR_INLINE __m128i rounded(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    up = _mm256_blendv_epi8(up, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
    up = _mm256_srli_epi32(up, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(up), _mm256_extracti128_si256(up, 1));
}
HR_INLINE void store(bf16* p, V16 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), rounded(x.a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), rounded(x.b));
}
template <typename T>
HR_INLINE void store_first(T* p, V16 x, int n) {
    T lanes[kLanes];
    store(lanes, x);
    std::memcpy(p, lanes, size_t(n < kLanes ? n : kLanes) * sizeof(T));
}
HR_INLINE V16 round_bf16(V16 x) {
    bf16 lanes[kLanes];
    store(lanes, x);
    return load(lanes);
}

HR_INLINE V16 operator+(V16 x, V16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
HR_INLINE V16 operator-(V16 x, V16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
HR_INLINE V16 operator*(V16 x, V16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
HR_INLINE V16 operator/(V16 x, V16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
HR_INLINE V16 fma(V16 x, V16 y, V16 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
HR_INLINE V16 max(V16 x, V16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
HR_INLINE V16 min(V16 x, V16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
HR_INLINE V16 round_even(V16 x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
HR_INLINE __m256 power_of_two(__m256 n) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
HR_INLINE V16 times_power_of_two(V16 x, V16 n) {
    return {_mm256_mul_ps(x.a, power_of_two(n.a)), _mm256_mul_ps(x.b, power_of_two(n.b))};
}
HR_INLINE __m256 between(__m256i lane, int first, int end) {
    __m256i from = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(first - 1));
    __m256i to = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane);
    return _mm256_castsi256_ps(_mm256_and_si256(from, to));
}
HR_INLINE V16 keep(V16 x, int first, int end, V16 fill) {
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return {_mm256_blendv_ps(fill.a, x.a, between(lane, first, end)),
            _mm256_blendv_ps(fill.b, x.b, between(lane, first - 8, end - 8))};
}

HR_INLINE V16 zero_below(V16 y, V16 x, float bound) {
    __m256 least = _mm256_set1_ps(bound);
    return {_mm256_and_ps(y.a, _mm256_cmp_ps(x.a, least, _CMP_GE_OQ)),
            _mm256_and_ps(y.b, _mm256_cmp_ps(x.b, least, _CMP_GE_OQ))};
}
HR_INLINE uint32_t at_least(V16 x, V16 y) {
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ))) |
           uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ))) << 8;
}

HR_INLINE P16 load_pairs(const bf16* p) {
    const __m256i* at = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
HR_INLINE void store_pairs(bf16* p, P16 x) { std::memcpy(p, &x, sizeof x); }
HR_INLINE P16 splat_pair(const bf16* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    return {_mm256_set1_epi32(bits), _mm256_set1_epi32(bits)};
}
HR_INLINE P16 first_of_pairs(P16 x) {
    __m256i mask = _mm256_set1_epi32(0xffff);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
HR_INLINE P16 second_of_pairs(P16 x) {
    __m256i mask = _mm256_set1_epi32(int32_t(0xffff0000u));
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
HR_INLINE __m256 dot(__m256 sum, __m256i x, __m256i y) {
    __m256i high = _mm256_set1_epi32(int32_t(0xffff0000u));
    sum = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
                          _mm256_castsi256_ps(_mm256_slli_epi32(y, 16)), sum);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(x, high)),
                           _mm256_castsi256_ps(_mm256_and_si256(y, high)), sum);
}
HR_INLINE V16 dot(V16 sum, P16 x, P16 y) { return {dot(sum.a, x.a, y.a), dot(sum.b, x.b, y.b)}; }

#else  // portable: vectors of the compiler, which it lowers to what the target has

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

struct V16 {
    Floats v;
};

struct P16 {
    Words v;
};

HR_INLINE V16 splat(float x) { return {x - Floats{}}; }
HR_INLINE V16 zero() { return {Floats{}}; }
HR_INLINE V16 load(const float* p) {
    V16 x;
    std::memcpy(&x.v, p, sizeof x.v);
    return x;
}
HR_INLINE void store(float* p, V16 x) { std::memcpy(p, &x.v, sizeof x.v); }
HR_INLINE V16 load(const bf16* p) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = to_float(p[i]);
    return load(lanes);
}
HR_INLINE void store(bf16* p, V16 x) {
    for (int i = 0; i < kLanes; ++i) p[i] = to_bf16(x.v[i]);
}
template <typename T>
HR_INLINE V16 load_first(const T* p, int n) {
    T lanes[kLanes] = {};
    std::memcpy(lanes, p, size_t(n < kLanes ? n : kLanes) * sizeof(T));
    return load(lanes);
}
template <typename T>
HR_INLINE void store_first(T* p, V16 x, int n) {
    T lanes[kLanes];
    store(lanes, x);
    std::memcpy(p, lanes, size_t(n < kLanes ? n : kLanes) * sizeof(T));
}
HR_INLINE V16 round_bf16(V16 x) {
    bf16 lanes[kLanes];
    store(lanes, x);
    return load(lanes);
}
HR_INLINE V16 operator+(V16 x, V16 y) { return {x.v + y.v}; }
HR_INLINE V16 operator-(V16 x, V16 y) { return {x.v - y.v}; }
HR_INLINE V16 operator*(V16 x, V16 y) { return {x.v * y.v}; }
HR_INLINE V16 operator/(V16 x, V16 y) { return {x.v / y.v}; }
HR_INLINE V16 fma(V16 x, V16 y, V16 z) { return {x.v * y.v + z.v}; }
HR_INLINE V16 max(V16 x, V16 y) { return {x.v > y.v ? x.v : y.v}; }
HR_INLINE V16 min(V16 x, V16 y) { return {x.v < y.v ? x.v : y.v}; }
HR_INLINE V16 round_even(V16 x) {
    // Adding and taking away 1.5 * 2^23 rounds numbers below 2^22.
    Floats big = 12582912.0f - Floats{};
    return {(x.v + big) - big};
}
HR_INLINE V16 times_power_of_two(V16 x, V16 n) {
    Ints exponent = (__builtin_convertvector(n.v, Ints) + 127) << 23;
    Floats power;
    std::memcpy(&power, &exponent, sizeof power);
    return {x.v * power};
}
HR_INLINE V16 keep(V16 x, int first, int end, V16 fill) {
    Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return {((lane >= first) & (lane < end)) ? x.v : fill.v};
}
HR_INLINE V16 zero_below(V16 y, V16 x, float bound) { return {x.v >= bound ? y.v : Floats{}}; }
HR_INLINE uint32_t at_least(V16 x, V16 y) {
    Ints lanes = x.v >= y.v;
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= uint32_t(lanes[i] & 1) << i;
    return bits;
}
HR_INLINE P16 load_pairs(const bf16* p) {
    P16 x;
    std::memcpy(&x.v, p, sizeof x.v);
    return x;
}
HR_INLINE void store_pairs(bf16* p, P16 x) { std::memcpy(p, &x, sizeof x); }
HR_INLINE P16 splat_pair(const bf16* p) {
    uint32_t bits;
    std::memcpy(&bits, p, 4);
    return {bits - Words{}};
}
HR_INLINE P16 first_of_pairs(P16 x) { return {x.v & 0xffffu}; }
HR_INLINE P16 second_of_pairs(P16 x) { return {x.v & 0xffff0000u}; }
HR_INLINE Floats as_floats(Words x) {
    Floats value;
    std::memcpy(&value, &x, sizeof value);
    return value;
}
HR_INLINE V16 dot(V16 sum, P16 x, P16 y) {
    sum.v = as_floats(x.v << 16) * as_floats(y.v << 16) + sum.v;
    return {as_floats(x.v & 0xffff0000u) * as_floats(y.v & 0xffff0000u) + sum.v};
}

#endif

// ---------------------------------------------------------------------------------------------------------------

// Sum of all lanes, halves first.
#if defined(HEADRACE_AVX512)
HR_INLINE float sum_lanes(V16 x) { return _mm512_reduce_add_ps(x.v); }
HR_INLINE float max_lanes(V16 x) { return _mm512_reduce_max_ps(x.v); }
#else
HR_INLINE float sum_lanes(V16 x) {
    float lanes[kLanes];
    store(lanes, x);
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

HR_INLINE float max_lanes(V16 x) {
    float lanes[kLanes];
    store(lanes, x);
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}
#endif

// e^x, to about 1 unit in the last place; 0 below -87.3, so that masked scores (-inf) vanish; x at most 88.
// x = n ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite's reduction), e^r by a polynomial of degree 6.
HR_INLINE V16 exp(V16 x) {
    V16 clamped = min(max(x, splat(-87.33654f)), splat(88.0f));
    V16 n = round_even(clamped * splat(1.44269504f));
    V16 r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    V16 p = splat(1.0f / 720);
    p = fma(p, r, splat(1.0f / 120));
    p = fma(p, r, splat(1.0f / 24));
    p = fma(p, r, splat(1.0f / 6));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    return zero_below(times_power_of_two(p, n), x, -87.33654f);
}

// tanh(x) = 1 - 2 / (e^2x + 1).
HR_INLINE V16 tanh(V16 x) {
    V16 bounded = min(max(x, splat(-20.0f)), splat(20.0f));
    return splat(1.0f) - splat(2.0f) / (exp(bounded + bounded) + splat(1.0f));
}

}  // namespace headrace
