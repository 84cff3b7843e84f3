// The noise of `headrace.executors.noise`, which says what is right: splitmix64, started at a draw's key and read at
// place token id.
#pragma once

#include "wide.h"

namespace headrace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

template <typename Word>
HR_INLINE Word mixed(Word word) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

// Gumbel noise of one token.
inline double gumbel(uint64_t key, int64_t id) {
    uint64_t word = mixed(key + (uint64_t(id) + 1) * kGolden);
    double uniform = (double(int64_t(word >> 12)) + 0.5) * 0x1p-52;
    return -std::log(-std::log(uniform));
}

constexpr float kRarityUnit = 0x1p23f;
constexpr double kRarityZero = 127 + 31;
constexpr double kRarest = 53;  // 1 - u is 2^-53 at least

// How near to 1 the uniform number u of each of sixteen tokens is: 2^23 (158 + log2(1 - u)), or up to 9 % of 2^23 less.
// A float's bits, taken for an integer, are its logarithm but for the bow between powers of two.
HR_INLINE V16 rarity(uint64_t key, int64_t first) {
    Words64 places;
    HR_UNROLL
    for (int i = 0; i < kWide; ++i) places[i] = uint64_t(2 * i + 1) * kGolden;
    places += key + uint64_t(first) * kGolden;
    float lanes[kLanes];
    HR_UNROLL
    for (int p = 0; p < kParts / 2; ++p) {
        // Tokens of even places in lower halves, of odd ones in upper halves: lanes of 32 bits, in order.
        Words64 halves = (mixed(places) >> 32) | (mixed(places + kGolden) & 0xffffffff00000000u);
        WideInts distance = WideInts(~WideBits(halves) >> 1);
        WideInts bits = WideInts(__builtin_convertvector(distance, WideFloats));
        WideFloats logarithm = __builtin_convertvector(bits, WideFloats);
        std::memcpy(lanes + p * 2 * kWide, &logarithm, sizeof logarithm);
        places += uint64_t(2 * kWide) * kGolden;
    }
    return load(lanes);
}

}  // namespace headrace
