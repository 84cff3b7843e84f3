// K and V of 8 bits: whole numbers, with a scale for each token and head that is fixed when the token is written.
//
// Of one KV head a block of B tokens holds K and V as attention.cpp has them, a byte a number, then B float scales of K
// and B of V. Numbers are turned into those of T, which holds them exactly, a tile at a time; scores are multiplied by
// the scales of keys, probabilities by those of values.
#pragma once

#include <algorithm>
#include <vector>

#include "codes.h"
#include "linear.h"

namespace headrace {

// Bytes of one KV head of a block.
constexpr int64_t int8_head_bytes(int64_t block_size, int64_t d) { return 2 * block_size * (d + int64_t(sizeof(float))); }

HR_INLINE void widen(const int8_t* from, bf16* to, int64_t n, const Numbers& known) {
    for (int64_t i = 0; i < n; i += 2 * kLanes)
        store_pairs(to + i, numbers<8, 0>(reinterpret_cast<const uint8_t*>(from) + i, known));
}
HR_INLINE void widen(const int8_t* from, float* to, int64_t n, const Numbers&) {
    for (int64_t i = 0; i < n; ++i) to[i] = float(from[i]);
}

// Some keys of one head: their numbers as T, one after the other, and their scales.
template <typename T>
struct Widened {
    std::vector<T> numbers;     // [2][tile][d]: K, then V
    std::vector<float> scales;  // [2][tile]
    std::vector<int32_t> table;  // of zeros: one block holds the tile at hand
};

// One row [d] -> whole numbers, `apart` numbers from each other by groups of P, and its scale.
template <int P, typename T>
HR_INLINE float round_row(const T* x, int64_t d, int8_t* to, int64_t apart) {
    V16 most = zero(), not_finite = zero();
    for (int64_t i = 0; i < d; i += kLanes) {
        V16 value = load(x + i);
        most = max(max(value, zero() - value), most);
        not_finite = fma(value, zero(), not_finite);
    }
    // A row with a NaN or an infinity keeps a scale that is NaN.
    const float scale = max_lanes(most) / 127.0f + sum_lanes(not_finite);
    const V16 inverse = splat(scale > 0 ? 1.0f / scale : 0.0f);
    for (int64_t i = 0; i < d; i += kLanes) {
        float lanes[kLanes];
        store(lanes, round_even(load(x + i) * inverse));
        for (int64_t j = 0; j < kLanes; ++j) to[(i + j) / P * apart + (i + j) % P] = int8_t(int32_t(lanes[j]));
    }
    return scale;
}

}  // namespace headrace
