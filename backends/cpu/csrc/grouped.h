// Weights as codes with a scale for every few inputs: w = (code - zero) * scale + minimum.
//
// A panel of 32 outputs is a row of blocks, each a header with scales and then its units (codes.h). A header holds
//     plain scales   32 scales of the block's one group, then 32 minimums where there are some
//     kK4            32 float16 scales and 32 minimums of the block, then for every group 32 bytes by which the scale
//                    is multiplied and 32 for the minimum, which is taken off
//     kK6            32 float16 scales of the block, then for every group 32 signed bytes
// The sum of a group, of numbers that are whole, is one chain of multiply-adds; scales join the sums of groups in the
// order of groups: an output depends on its own row of x alone.
#pragma once

#include "codes.h"
#include "linear.h"

namespace headrace {

enum ScaleKind : int32_t { kHalf, kBfloat, kFloat, kK4, kK6 };

struct Grouped {
    int64_t outputs;  // rows of the weight
    int64_t inputs;   // padded to whole groups
    int64_t group;    // inputs to a scale, a multiple of 16
    int64_t groups;   // to a block
    int64_t header_bytes;
    int64_t panel_bytes;
    int32_t bits;
    int32_t zero;
    int32_t scale;
    int32_t has_minimum;

    int64_t block_bytes() const { return header_bytes + group / kUnit * groups * unit_bytes(bits); }
};

// What the numbers of a group are multiplied with, and what is added; 16 outputs.
HR_INLINE V16 scale_of(const Grouped& w, const uint8_t* header, int64_t group, int half) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(header) + half * kLanes;
    switch (w.scale) {
        case kHalf: return load_half(halves);
        case kBfloat: return load(halves);
        case kFloat: return load(reinterpret_cast<const float*>(header) + half * kLanes);
        case kK4: return load_half(halves) * load_bytes<uint8_t>(header + 128 + 64 * group + half * kLanes);
        default: return load_half(halves) * load_bytes<int8_t>(header + 64 + 32 * group + half * kLanes);
    }
}

HR_INLINE V16 minimum_of(const Grouped& w, const uint8_t* header, int64_t group, int half) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(header + 64) + half * kLanes;
    switch (w.scale) {
        case kHalf: return load_half(halves);
        case kBfloat: return load(halves);
        case kFloat: return load(reinterpret_cast<const float*>(header + 128) + half * kLanes);
        default:
            return zero() - load_half(halves) * load_bytes<uint8_t>(header + 160 + 64 * group + half * kLanes);
    }
}

}  // namespace headrace
