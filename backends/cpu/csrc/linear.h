// Products with packed weights: y = x W^T (+ bias).
//
// A weight [N, K] is packed as [N / 32][K / P][32][P], P = 2 for bf16 and 1 for float: a panel of 32 outputs lies
// in the order it is read, and one instruction multiplies 16 outputs with P elements of a row of x. N is padded to 32
// and K to a multiple of 32 with zeros. Products are split over panels, never over K: an output is one chain of
// fused multiply-adds over k, whatever rows go with it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace headrace {

constexpr int kPanel = 32;

template <typename T>
struct Traits;

template <>
struct Traits<bf16> {
    static constexpr int kPair = 2;
    using Wide = P16;
    static HR_INLINE Wide load(const bf16* p) { return load_pairs(p); }
    static HR_INLINE Wide broadcast(const bf16* p) { return splat_pair(p); }
    static HR_INLINE V16 dot(V16 sum, Wide a, Wide b) { return headrace::dot(sum, a, b); }
};

template <>
struct Traits<float> {
    static constexpr int kPair = 1;
    using Wide = V16;
    static HR_INLINE Wide load(const float* p) { return headrace::load(p); }
    static HR_INLINE Wide broadcast(const float* p) { return splat(*p); }
    static HR_INLINE V16 dot(V16 sum, Wide a, Wide b) { return fma(a, b, sum); }
};

struct Span {
    int64_t low, high;
};

// What is this thread's of so many things: of panels, those whose products it computes, and has in its cache.
HR_INLINE Span own_part(int64_t count) {
    Span own = {count, 0};
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < count; ++i) own.low = std::min(own.low, i), own.high = i + 1;
    return own;
}

constexpr int64_t kAhead = 4096;  // bytes of weights asked for before they are read

HR_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// One row of a panel: add the bias, round once, store the `columns` that there are.
template <typename T>
HR_INLINE void finish(V16 first, V16 second, const float* bias, T* y, int columns) {
    V16 sums[2] = {first, second};
    for (int half = 0; half < 2; ++half) {
        int n = columns - half * kLanes;
        if (n <= 0) break;
        V16 value = sums[half];
        if (bias) value = value + load(bias + half * kLanes);
        if (n >= kLanes)
            store(y + half * kLanes, value);
        else
            store_first(y + half * kLanes, value, n);
    }
}

// What becomes of a row of a panel: its 32 outputs as they are.
struct Plain {
    static constexpr int kColumns = kPanel;

    template <typename T>
    static HR_INLINE void finish(V16 first, V16 second, const float* bias, T* y, int columns) {
        headrace::finish(first, second, bias, y, columns);
    }
};

// Or 16 of them: a panel holds 16 outputs of the gate, then the same 16 of what is gated.
template <V16 (*Activation)(V16)>
struct Gated {
    static constexpr int kColumns = kLanes;

    template <typename T>
    static HR_INLINE void finish(V16 gate, V16 up, const float* bias, T* y, int columns) {
        if (bias) gate = gate + load(bias), up = up + load(bias + kLanes);
        V16 value = Activation(gate) * up;
        if (columns >= kLanes)
            store(y, value);
        else
            store_first(y, value, columns);
    }
};

}  // namespace headrace
