// Weights of few bits: from the planes they are packed in to pairs of bf16, which hold such numbers exactly.
//
// A unit is 16 inputs of a panel's 32 outputs: 16 vectors of pairs, two for each pair of inputs (outputs 0 to 15, then
// 16 to 31). A line is 64 bytes, 32 words of 16 bits, one for each number of a vector. The lower four bits of vector i
// are bits 4 (i % 4) and up of line i / 4; a fifth bit is bit i of the line behind them; a fifth and a sixth are bits
// 2 (i % 8) and up of line i / 8 behind them. Numbers of 8 bits lie in order, signed, 32 bytes a vector.
#pragma once

#include "simd.h"

namespace headrace {

constexpr int kUnit = 16;

constexpr int64_t unit_bytes(int bits) { return 64 * bits; }

#if defined(HEADRACE_AVX512)

// What each code stands for, as bf16.
struct Numbers {
    __m512i low, high;

    explicit Numbers(int bits, int zero) {
        uint16_t table[64];
        for (int i = 0; i < 64; ++i) table[i] = to_bf16(float((bits == 4 ? i & 15 : i) - zero));
        low = _mm512_loadu_si512(table);
        high = _mm512_loadu_si512(table + 32);
    }
};

template <int Shift>
HR_INLINE __m512i shifted(__m512i x) {
    if constexpr (Shift > 0) return _mm512_srli_epi16(x, Shift);
    if constexpr (Shift < 0) return _mm512_slli_epi16(x, -Shift);
    return x;
}

// Bits of `upper` where the mask has them, of `lower` elsewhere.
HR_INLINE __m512i merged(__m512i mask, __m512i upper, __m512i lower) {
    return _mm512_ternarylogic_epi32(mask, upper, lower, 0xca);
}

template <int Bits, int I>
HR_INLINE P16 numbers(const uint8_t* unit, const Numbers& known) {
    if constexpr (Bits == 8) {
        const __m128i* at = reinterpret_cast<const __m128i*>(unit + 32 * I);
        __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
        __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at + 1)));
        return {(__m512i)_mm512_cvtne2ps_pbh(second, first)};
    } else {
        __m512i lower = shifted<4 * (I % 4)>(_mm512_loadu_si512(unit + 64 * (I / 4)));
        if constexpr (Bits == 4) return {_mm512_permutexvar_epi16(lower, known.low)};
        if constexpr (Bits == 5) {
            __m512i fifth = shifted<I - 4>(_mm512_loadu_si512(unit + 256));
            return {_mm512_permutexvar_epi16(merged(_mm512_set1_epi16(16), fifth, lower), known.low)};
        }
        if constexpr (Bits == 6) {
            __m512i upper = shifted<2 * (I % 8) - 4>(_mm512_loadu_si512(unit + 256 + 64 * (I / 8)));
            return {_mm512_permutex2var_epi16(known.low, merged(_mm512_set1_epi16(48), upper, lower), known.high)};
        }
    }
}

HR_INLINE V16 load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

#else

struct Numbers {
    int zero;

    explicit Numbers(int, int zero) : zero(zero) {}
};

template <int Bits, int I>
HR_INLINE P16 numbers(const uint8_t* unit, const Numbers& known) {
    uint16_t pairs[2 * kLanes];
    if constexpr (Bits == 8) {
        for (int j = 0; j < 2 * kLanes; ++j) pairs[j] = to_bf16(float(int8_t(unit[32 * I + j])));
    } else {
        uint16_t lower[2 * kLanes], upper[2 * kLanes];
        std::memcpy(lower, unit + 64 * (I / 4), 64);
        if constexpr (Bits > 4) std::memcpy(upper, unit + 256 + (Bits == 6 ? 64 * (I / 8) : 0), 64);
        for (int j = 0; j < 2 * kLanes; ++j) {
            int code = lower[j] >> 4 * (I % 4) & 15;
            if constexpr (Bits == 5) code |= (upper[j] >> I & 1) << 4;
            if constexpr (Bits == 6) code |= (upper[j] >> 2 * (I % 8) & 3) << 4;
            float number = float(code - known.zero);
            uint32_t bits;
            std::memcpy(&bits, &number, 4);
            pairs[j] = uint16_t(bits >> 16);
        }
    }
    return load_pairs(pairs);
}

#if defined(HEADRACE_TIER_AVX2)
HR_INLINE V16 load_half(const uint16_t* p) {
    const __m128i* at = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
#endif

#endif

// A float16 as float: sign, exponent and mantissa moved to their places, numbers below 2^-14 made normal.
HR_INLINE float half_to_float(uint16_t half) {
    uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fffu, bits;
    if (magnitude >= 0x7c00) {
        bits = 0x7f800000u | (magnitude & 0x3ff) << 13;
    } else if (magnitude >= 0x400) {
        bits = (magnitude << 13) + (112u << 23);
    } else {
        float small = float(magnitude) * 5.9604644775390625e-8f;
        std::memcpy(&bits, &small, 4);
    }
    bits |= sign;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

#if !defined(HEADRACE_AVX512) && !defined(HEADRACE_TIER_AVX2)
HR_INLINE V16 load_half(const uint16_t* p) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = half_to_float(p[i]);
    return load(lanes);
}
#endif

// Sixteen bytes as floats.
template <typename Byte>
HR_INLINE V16 load_bytes(const uint8_t* p) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = float(Byte(p[i]));
    return load(lanes);
}

}  // namespace headrace
