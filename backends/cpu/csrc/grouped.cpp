// Products with weights of few bits, see grouped.h.
#include "grouped.h"

#include <algorithm>
#include <utility>

#include "activations.h"
#include "words.h"

namespace headrace {
namespace {

// Rows that are multiplied together: 24 sums, 2 weights and an element of x fit into 32 registers.
template <typename T>
constexpr int kMostRows =
#if defined(HEADRACE_AVX512)
    sizeof(T) == 2 ? 12 : 6;
#else
    2;
#endif
constexpr int kRowsAtOnce = 96;   // whose sums stay in the first-level cache, beside
constexpr int kInputsAtOnce = 128;  // numbers of a panel, decoded

// Numbers of bf16 pairs times two elements of a row of x.
HR_INLINE V16 times(V16 sum, P16 pairs, const bf16* x) { return dot(sum, pairs, splat_pair(x)); }

#if defined(HEADRACE_AVX512)
HR_INLINE V16 firsts(P16 a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
HR_INLINE V16 seconds(P16 a) { return {_mm512_castsi512_ps(second_of_pairs(a).v)}; }
#else
HR_INLINE V16 firsts(P16 a) {
    uint32_t words[kLanes];
    std::memcpy(words, &a, sizeof words);
    for (uint32_t& word : words) word <<= 16;
    float lanes[kLanes];
    std::memcpy(lanes, words, sizeof lanes);
    return load(lanes);
}
HR_INLINE V16 seconds(P16 a) {
    P16 kept = second_of_pairs(a);
    float lanes[kLanes];
    std::memcpy(lanes, &kept, sizeof lanes);
    return load(lanes);
}
#endif

HR_INLINE V16 times(V16 sum, P16 pairs, const float* x) {
    return fma(seconds(pairs), splat(x[1]), fma(firsts(pairs), splat(x[0]), sum));
}

template <int Bits, size_t... I>
HR_INLINE void decode_unit(std::index_sequence<I...>, const uint8_t* unit, const Numbers& known, bf16* out) {
    (store_pairs(out + 2 * kLanes * I, numbers<Bits, int(I)>(unit, known)), ...);
}

// Some units of a panel as the numbers they stand for: [inputs / 2][32][2], as dense weights lie.
template <int Bits>
void decode(const uint8_t* units, int64_t inputs, const Numbers& known, bf16* out) {
    for (int64_t i = 0; i < inputs; i += kUnit, units += unit_bytes(Bits), out += kUnit * kPanel) {
        for (int line = 0; line < Bits; ++line) prefetch(units + kAhead + 64 * line);
        decode_unit<Bits>(std::make_index_sequence<kUnit>{}, units, known, out);
    }
}

// What is known of a group of a panel.
struct alignas(64) Group {
    float scale[kPanel], minimum[kPanel];
    const float* row_sums;  // of x in this group; null where there is no minimum
    int64_t ld_sums;
    bool begins, ends;  // whether the inputs at hand are its first, its last
};

// R rows times decoded inputs: into `part`, and with the scale into `total` where the group ends. Both [rows, 32].
template <typename T, int R>
HR_NOINLINE void exactly(const T* x, int64_t ldx, const bf16* w, int64_t inputs, const Group& group, float* part, float* total) {
    V16 sums[R][2];
    HR_UNROLL
    for (int r = 0; r < R; ++r) {
        sums[r][0] = group.begins ? zero() : load(part + r * kPanel);
        sums[r][1] = group.begins ? zero() : load(part + r * kPanel + kLanes);
    }
    // Three rows a pointer: twelve pointers do not fit into registers.
    const T* third[(R + 2) / 3];
    HR_UNROLL
    for (int r = 0; r < (R + 2) / 3; ++r) third[r] = x + 3 * r * ldx;
    for (int64_t i = 0; i < inputs; i += 2) {
        P16 first = load_pairs(w + i * kPanel), second = load_pairs(w + i * kPanel + kPanel);
        HR_UNROLL
        for (int r = 0; r < R; ++r) {
            const T* element = third[r / 3] + r % 3 * ldx + i;
            sums[r][0] = times(sums[r][0], first, element);
            sums[r][1] = times(sums[r][1], second, element);
        }
    }
    if (!group.ends) {
        HR_UNROLL
        for (int r = 0; r < R; ++r) store(part + r * kPanel, sums[r][0]), store(part + r * kPanel + kLanes, sums[r][1]);
        return;
    }
    HR_UNROLL
    for (int half = 0; half < 2; ++half) {
        V16 scale = load(group.scale + half * kLanes), minimum = load(group.minimum + half * kLanes);
        HR_UNROLL
        for (int r = 0; r < R; ++r) {
            float* own = total + r * kPanel + half * kLanes;
            V16 value = fma(sums[r][half], scale, load(own));
            if (group.row_sums) value = fma(minimum, splat(group.row_sums[r * group.ld_sums]), value);
            store(own, value);
        }
    }
}

// The largest number of rows there is code for below `rows`.
constexpr int fewer(int rows) { return rows > 8 ? 8 : rows > 6 ? 6 : rows > 4 ? 4 : rows - 1; }

template <typename T, int R = kMostRows<T>>
HR_INLINE void multiply(int64_t rows, const T* x, int64_t ldx, const bf16* w, int64_t inputs, Group group, float* part,
                        float* total) {
    if constexpr (R > 0) {
        for (; rows >= R; rows -= R, x += R * ldx, part += R * kPanel, total += R * kPanel) {
            exactly<T, R>(x, ldx, w, inputs, group, part, total);
            if (group.row_sums) group.row_sums += R * group.ld_sums;
        }
        if (rows > 0) multiply<T, fewer(R)>(rows, x, ldx, w, inputs, group, part, total);
    }
}

// Some rows of one panel: 32 sums each, in `total`.
template <typename T>
void panel_sums(const Grouped& w, const Numbers& known, const uint8_t* at, int64_t rows, const T* x, int64_t ldx,
                const float* row_sums, float* part, float* total) {
    alignas(64) bf16 decoded[kInputsAtOnce * kPanel];
    Group group;
    group.ld_sums = w.inputs / w.group;
    std::memset(total, 0, size_t(rows * kPanel) * sizeof(float));
    for (int64_t block = 0; block < w.inputs / (w.group * w.groups); ++block) {
        const uint8_t* header = at;
        at += w.header_bytes;
        for (int64_t g = 0; g < w.groups; ++g) {
            for (int half = 0; half < 2; ++half) {
                store(group.scale + half * kLanes, scale_of(w, header, g, half));
                if (w.has_minimum) store(group.minimum + half * kLanes, minimum_of(w, header, g, half));
            }
            group.row_sums = row_sums ? row_sums + block * w.groups + g : nullptr;
            for (int64_t begin = 0; begin < w.group; begin += kInputsAtOnce) {
                const int64_t inputs = std::min<int64_t>(kInputsAtOnce, w.group - begin);
                switch (w.bits) {
                    case 4: decode<4>(at, inputs, known, decoded); break;
                    case 5: decode<5>(at, inputs, known, decoded); break;
                    case 6: decode<6>(at, inputs, known, decoded); break;
                    default: decode<8>(at, inputs, known, decoded);
                }
                group.begins = begin == 0;
                group.ends = begin + inputs == w.group;
                multiply<T>(rows, x, ldx, decoded, inputs, group, part, total);
                at += inputs / kUnit * unit_bytes(w.bits);
                x += inputs;
            }
        }
    }
}

// The same sums for a few rows, whose numbers are multiplied as they are decoded: at one row, reading is all there is.
constexpr int kFewRows = 4;

template <int Bits, int R, size_t... Pair>
HR_INLINE void add_unit(std::index_sequence<Pair...>, const uint8_t* unit, const Numbers& known, const bf16* x, int64_t ldx,
                        V16 (&sums)[R][2]) {
    auto add = [&](P16 first, P16 second, int pair) __attribute__((always_inline)) {
        HR_UNROLL
        for (int r = 0; r < R; ++r) {
            sums[r][0] = times(sums[r][0], first, x + r * ldx + 2 * pair);
            sums[r][1] = times(sums[r][1], second, x + r * ldx + 2 * pair);
        }
    };
    (add(numbers<Bits, int(2 * Pair)>(unit, known), numbers<Bits, int(2 * Pair + 1)>(unit, known), int(Pair)), ...);
}

template <int Bits, int R>
HR_NOINLINE void few_rows(const Grouped& w, const Numbers& table, const uint8_t* at, const bf16* x, int64_t ldx,
                          const float* row_sums, float* sums) {
    const Numbers known = table;
    V16 total[R][2];
    HR_UNROLL
    for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = zero();
    const int64_t blocks = w.inputs / (w.group * w.groups), units = w.group / kUnit, groups = w.groups;
    for (int64_t block = 0; block < blocks; ++block) {
        const uint8_t* header = at;
        at += w.header_bytes;
        for (int64_t g = 0; g < groups; ++g) {
            V16 part[R][2];
            HR_UNROLL
            for (int r = 0; r < R; ++r) part[r][0] = part[r][1] = zero();
            for (int64_t u = 0; u < units; ++u, at += unit_bytes(Bits), x += kUnit) {
                HR_UNROLL
                for (int line = 0; line < Bits; ++line) prefetch(at + kAhead + 64 * line);
                add_unit<Bits, R>(std::make_index_sequence<kUnit / 2>{}, at, known, x, ldx, part);
            }
            HR_UNROLL
            for (int half = 0; half < 2; ++half) {
                const V16 scale = scale_of(w, header, g, half);
                HR_UNROLL
                for (int r = 0; r < R; ++r) total[r][half] = fma(part[r][half], scale, total[r][half]);
                if (!w.has_minimum) continue;
                const V16 minimum = minimum_of(w, header, g, half);
                HR_UNROLL
                for (int r = 0; r < R; ++r)
                    total[r][half] = fma(minimum, splat(row_sums[r * blocks * groups + block * groups + g]), total[r][half]);
            }
        }
    }
    HR_UNROLL
    for (int r = 0; r < R; ++r) {
        store(sums + r * kPanel, total[r][0]);
        store(sums + r * kPanel + kLanes, total[r][1]);
    }
}

template <int Bits>
void few_rows(int64_t rows, const Grouped& w, const Numbers& known, const uint8_t* at, const bf16* x, int64_t ldx,
              const float* row_sums, float* sums) {
    switch (rows) {
        case 1: return few_rows<Bits, 1>(w, known, at, x, ldx, row_sums, sums);
        case 2: return few_rows<Bits, 2>(w, known, at, x, ldx, row_sums, sums);
        case 3: return few_rows<Bits, 3>(w, known, at, x, ldx, row_sums, sums);
        default: return few_rows<Bits, 4>(w, known, at, x, ldx, row_sums, sums);
    }
}

HR_INLINE bool done_as_few(int64_t rows, const Grouped& w, const Numbers& known, const uint8_t* at, const bf16* x,
                           int64_t ldx, const float* row_sums, float* sums) {
    if (rows > kFewRows) return false;
    switch (w.bits) {
        case 4: few_rows<4>(rows, w, known, at, x, ldx, row_sums, sums); break;
        case 5: few_rows<5>(rows, w, known, at, x, ldx, row_sums, sums); break;
        case 6: few_rows<6>(rows, w, known, at, x, ldx, row_sums, sums); break;
        default: few_rows<8>(rows, w, known, at, x, ldx, row_sums, sums);
    }
    return true;
}

HR_INLINE bool done_as_few(int64_t, const Grouped&, const Numbers&, const uint8_t*, const float*, int64_t, const float*,
                           float*) {
    return false;
}

// row_sums [m, groups]: of x by group, where the weight has minimums. n counts outputs, of a gated product half.
template <typename Finish, typename T, typename Y>
void grouped(const T* x, int64_t m, int64_t ldx, const float* row_sums, const Grouped* weight, const uint8_t* packed,
             int64_t n, const float* bias, Y* y, int64_t ldy) {
    const Grouped& w = *weight;
    const Numbers known(w.bits, w.zero);
    const int64_t panels = (n + Finish::kColumns - 1) / Finish::kColumns, ld_sums = w.inputs / w.group;
    alignas(64) float part[kRowsAtOnce * kPanel], total[kRowsAtOnce * kPanel];
    for (int64_t begin = 0; begin < m; begin += kRowsAtOnce) {
        const int64_t rows = std::min<int64_t>(kRowsAtOnce, m - begin);
        const float* own = row_sums ? row_sums + begin * ld_sums : nullptr;
#pragma omp for nowait
        for (int64_t p = 0; p < panels; ++p) {
            const uint8_t* panel = packed + p * w.panel_bytes;
            if (!done_as_few(rows, w, known, panel, x + begin * ldx, ldx, own, total))
                panel_sums<T>(w, known, panel, rows, x + begin * ldx, ldx, own, part, total);
            const int columns = int(std::min<int64_t>(Finish::kColumns, n - p * Finish::kColumns));
            for (int64_t r = 0; r < rows; ++r)
                Finish::finish(load(total + r * kPanel), load(total + r * kPanel + kLanes),
                               bias ? bias + p * kPanel : nullptr, y + (begin + r) * ldy + p * Finish::kColumns, columns);
        }
    }
#pragma omp barrier
}

// Sums of x [m, k] over every `group` columns.
template <typename T>
void group_sums(const T* x, int64_t m, int64_t ldx, int64_t k, int64_t group, float* sums) {
#pragma omp for
    for (int64_t r = 0; r < m; ++r)
        for (int64_t g = 0; g < k / group; ++g) {
            V16 total = zero();
            for (int64_t i = 0; i < group; i += kLanes) total = total + load(x + r * ldx + g * group + i);
            sums[r * (k / group) + g] = sum_lanes(total);
        }
}

// y [m, n]: columns `order` of x.
template <typename T>
void columns(const T* x, int64_t m, int64_t ldx, const int64_t* order, int64_t n, T* y) {
#pragma omp for
    for (int64_t r = 0; r < m; ++r)
        for (int64_t i = 0; i < n; ++i) y[r * n + i] = x[r * ldx + order[i]];
}

}  // namespace
}  // namespace headrace

#define HR_GROUPED(T, suffix)                                                                            \
    HR_KERNEL(grouped_##suffix, headrace::grouped<headrace::Plain, T, T>)                                \
    HR_KERNEL(grouped_logits_##suffix, headrace::grouped<headrace::Plain, T, float>)                     \
    HR_KERNEL(grouped_silu_##suffix, headrace::grouped<headrace::Gated<headrace::silu>, T, T>)           \
    HR_KERNEL(grouped_gelu_##suffix, headrace::grouped<headrace::Gated<headrace::gelu_tanh>, T, T>)      \
    HR_KERNEL(group_sums_##suffix, headrace::group_sums<T>)                                              \
    HR_KERNEL(columns_##suffix, headrace::columns<T>)

HR_GROUPED(headrace::bf16, bf16)
HR_GROUPED(float, f32)
