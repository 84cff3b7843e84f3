// Products of whole numbers of 8 bits, which are exact: sums are the same in whatever order, on every tier.
#pragma once

#include "simd.h"

namespace headrace {

// Sixteen sums.
struct I16 {
#if defined(HEADRACE_AVX512)
    __m512i v;
#else
    int32_t v[kLanes];
#endif
};

#if defined(HEADRACE_AVX512)
HR_INLINE I16 no_sums() { return {_mm512_setzero_si512()}; }
HR_INLINE I16 load_sums(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE V16 to_floats(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
HR_INLINE I16 minus(I16 a, I16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
// The first n of sixteen whole numbers plus `added`, as bytes.
HR_INLINE void store_bytes(uint8_t* p, V16 whole, int added, int n) {
    __m512i numbers = _mm512_add_epi32(_mm512_cvtps_epi32(whole.v), _mm512_set1_epi32(added));
    _mm_mask_storeu_epi8(p, first_lanes(n), _mm512_cvtepi32_epi8(numbers));
}

// Sixteen times four: signed weights w [16][4] times four numbers from 0 to 255.
struct Quads {
    __m512i v;
};
HR_INLINE Quads load_quads(const int8_t* w) { return {_mm512_loadu_si512(w)}; }
HR_INLINE Quads splat_quad(const uint8_t* x) {
    int32_t bits;
    std::memcpy(&bits, x, 4);
    return {_mm512_set1_epi32(bits)};
}
HR_INLINE I16 dot(I16 sum, Quads x, Quads w) { return {_mm512_dpbusd_epi32(sum.v, x.v, w.v)}; }
#else
HR_INLINE I16 no_sums() { return {}; }
HR_INLINE I16 load_sums(const int32_t* p) {
    I16 a;
    std::memcpy(a.v, p, sizeof a.v);
    return a;
}
HR_INLINE V16 to_floats(I16 a) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = float(a.v[i]);
    return load(lanes);
}
HR_INLINE void store_bytes(uint8_t* p, V16 whole, int added, int n) {
    float lanes[kLanes];
    store(lanes, whole);
    for (int i = 0; i < n; ++i) p[i] = uint8_t(int32_t(lanes[i]) + added);
}
HR_INLINE I16 minus(I16 a, I16 b) {
    for (int i = 0; i < kLanes; ++i) a.v[i] -= b.v[i];
    return a;
}

struct Quads {
    const void* at;
};
HR_INLINE Quads load_quads(const int8_t* w) { return {w}; }
HR_INLINE Quads splat_quad(const uint8_t* x) { return {x}; }
HR_INLINE I16 dot(I16 sum, Quads x, Quads w) {
    const uint8_t* numbers = static_cast<const uint8_t*>(x.at);
    const int8_t* weights = static_cast<const int8_t*>(w.at);
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < 4; ++j) sum.v[i] += int32_t(numbers[j]) * weights[4 * i + j];
    return sum;
}
#endif

}  // namespace headrace
