// Lanes of 64 bits, for hashes and long sums: vectors of the compiler, as wide as the tier's registers.
#pragma once

#include "simd.h"

namespace headrace {

#if defined(HEADRACE_AVX512)
constexpr int kWideBytes = 64;
#elif defined(HEADRACE_TIER_AVX2)
constexpr int kWideBytes = 32;
#else
constexpr int kWideBytes = 16;
#endif
constexpr int kWide = kWideBytes / 8;
constexpr int kParts = kLanes / kWide;

typedef uint64_t Words64 __attribute__((vector_size(kWideBytes)));
typedef double Doubles __attribute__((vector_size(kWideBytes)));
typedef float HalfFloats __attribute__((vector_size(kWideBytes / 2)));
typedef float WideFloats __attribute__((vector_size(kWideBytes)));
typedef int32_t WideInts __attribute__((vector_size(kWideBytes)));
typedef uint32_t WideBits __attribute__((vector_size(kWideBytes)));

// A sum of many floats, lane by lane, in double.
class LaneSums {
  public:
    HR_INLINE void add(V16 x) {
        float lanes[kLanes];
        store(lanes, x);
        HR_UNROLL
        for (int p = 0; p < kParts; ++p) {
            HalfFloats part;
            std::memcpy(&part, lanes + p * kWide, sizeof part);
            parts_[p] += __builtin_convertvector(part, Doubles);
        }
    }

    // Lane after lane: the same order on every tier.
    double total() const {
        double lanes[kLanes], sum = 0;
        std::memcpy(lanes, parts_, sizeof lanes);
        for (double lane : lanes) sum += lane;
        return sum;
    }

  private:
    Doubles parts_[kParts] = {};
};

}  // namespace headrace
