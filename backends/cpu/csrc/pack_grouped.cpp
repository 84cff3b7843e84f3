// Codes and scales into panels, and rows out of them; see grouped.h.
#include <algorithm>

#include "grouped.h"
#include "words.h"

namespace headrace {
namespace {

// As they come: codes [n, k], one byte each; scales and minimums [n, groups]; those of blocks [n, blocks] or null.
struct Sources {
    const uint8_t* codes;
    const uint8_t* scales;
    const uint8_t* minimums;
    const uint8_t* block_scales;
    const uint8_t* block_minimums;
};

void put(uint8_t* unit, int bits, int zero, int i, int j, int code) {
    if (bits == 8) {
        unit[32 * i + j] = uint8_t(code - zero);
        return;
    }
    uint16_t* lower = reinterpret_cast<uint16_t*>(unit + 64 * (i / 4)) + j;
    *lower |= uint16_t((code & 15) << 4 * (i % 4));
    if (bits == 5) reinterpret_cast<uint16_t*>(unit + 256)[j] |= uint16_t((code >> 4 & 1) << i);
    if (bits == 6) reinterpret_cast<uint16_t*>(unit + 256 + 64 * (i / 8))[j] |= uint16_t((code >> 4 & 3) << 2 * (i % 8));
}

int got(const uint8_t* unit, int bits, int zero, int i, int j) {
    if (bits == 8) return int8_t(unit[32 * i + j]);
    int code = reinterpret_cast<const uint16_t*>(unit + 64 * (i / 4))[j] >> 4 * (i % 4) & 15;
    if (bits == 5) code |= (reinterpret_cast<const uint16_t*>(unit + 256)[j] >> i & 1) << 4;
    if (bits == 6) code |= (reinterpret_cast<const uint16_t*>(unit + 256 + 64 * (i / 8))[j] >> 2 * (i % 8) & 3) << 4;
    return code - zero;
}

// One output's scales of a block into its header.
void put_scales(const Grouped& w, const Sources& from, int64_t row, int64_t block, int o, uint8_t* header) {
    const int64_t blocks = w.inputs / (w.group * w.groups), at = row * blocks + block;
    const int64_t size = w.scale == kFloat ? 4 : 2;
    const bool nested = w.scale >= kK4;
    std::memcpy(header + o * size, (nested ? from.block_scales : from.scales) + at * size, size_t(size));
    if (w.has_minimum)
        std::memcpy(header + (kPanel + o) * size, (nested ? from.block_minimums : from.minimums) + at * size, size_t(size));
    if (!nested) return;
    for (int64_t g = 0; g < w.groups; ++g) {
        const int64_t own = at * w.groups + g;
        if (w.scale == kK4) {
            header[128 + 64 * g + o] = from.scales[own];
            header[160 + 64 * g + o] = from.minimums[own];
        } else {
            header[64 + 32 * g + o] = from.scales[own];
        }
    }
}

void pack_grouped(const Sources* sources, int64_t k, const Grouped* weight, uint8_t* packed) {
    const Grouped& w = *weight;
    const int64_t panels = (w.outputs + kPanel - 1) / kPanel, block_inputs = w.group * w.groups;
#pragma omp for
    for (int64_t p = 0; p < panels; ++p) {
        uint8_t* panel = packed + p * w.panel_bytes;
        std::memset(panel, 0, size_t(w.panel_bytes));
        const int rows = int(std::min<int64_t>(kPanel, w.outputs - p * kPanel));
        for (int64_t b = 0; b < w.inputs / block_inputs; ++b) {
            uint8_t* header = panel + b * w.block_bytes();
            uint8_t* unit = header + w.header_bytes;
            for (int o = 0; o < rows; ++o) put_scales(w, *sources, p * kPanel + o, b, o, header);
            for (int64_t begin = b * block_inputs; begin < (b + 1) * block_inputs; begin += kUnit, unit += unit_bytes(w.bits))
                for (int o = 0; o < rows; ++o) {
                    const uint8_t* codes = sources->codes + (p * kPanel + o) * k;
                    for (int i = 0; i < kUnit; ++i)
                        put(unit, w.bits, w.zero, i / 2 * 2 + o / kLanes, o % kLanes * 2 + i % 2,
                            begin + i < k ? codes[begin + i] : w.zero);
                }
        }
    }
}

float lane(V16 x, int i) {
    float lanes[kLanes];
    store(lanes, x);
    return lanes[i];
}

// Rows `ids` of a packed weight -> out [count, k]: what each number is, rounded once.
template <typename T>
void grouped_rows(const int64_t* ids, int64_t count, const Grouped* weight, const uint8_t* packed, int64_t k, T* out) {
    const Grouped& w = *weight;
#pragma omp for
    for (int64_t n = 0; n < count; ++n) {
        const uint8_t* panel = packed + ids[n] / kPanel * w.panel_bytes;
        const int o = int(ids[n] % kPanel), half = o / kLanes, column = o % kLanes;
        for (int64_t begin = 0; begin < k; begin += w.group) {
            const int64_t index = begin / w.group, block = index / w.groups, group = index % w.groups;
            const uint8_t* header = panel + block * w.block_bytes();
            const float scale = lane(scale_of(w, header, group, half), column);
            const float minimum = w.has_minimum ? lane(minimum_of(w, header, group, half), column) : 0.0f;
            const uint8_t* units = header + w.header_bytes + group * (w.group / kUnit) * unit_bytes(w.bits);
            for (int64_t i = 0; i < std::min(w.group, k - begin); ++i) {
                const int in_unit = int(i % kUnit);
                const int number = got(units + i / kUnit * unit_bytes(w.bits), w.bits, w.zero, in_unit / 2 * 2 + half,
                                       column * 2 + in_unit % 2);
                // The product is exact wherever there is a minimum, so that fused and unfused sums are one.
                float value = float(number) * scale;
                if (w.has_minimum) value = value + minimum;
                if constexpr (sizeof(T) == 2)
                    out[n * k + begin + i] = to_bf16(value);
                else
                    out[n * k + begin + i] = value;
            }
        }
    }
}

}  // namespace
}  // namespace headrace

HR_KERNEL(pack_grouped, headrace::pack_grouped)
HR_KERNEL(grouped_rows_bf16, headrace::grouped_rows<headrace::bf16>)
HR_KERNEL(grouped_rows_f32, headrace::grouped_rows<float>)
