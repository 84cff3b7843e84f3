// w8a8: weights of 8 bits with a scale for each output, times rows of x that are rounded to 8 bits, each by its own scale.
//
// A row of x becomes numbers from 0 to 255: round(x / scale) + 128, scale = largest magnitude / 127. Weights lie as
// [panels][k / 4][32][4]; what 128 adds to a sum, 128 times the sum of the weights, is taken off at the end.
#include "whole.h"

#include <algorithm>

#include "activations.h"
#include "linear.h"
#include "words.h"

namespace headrace {
namespace {

#if defined(HEADRACE_AVX512)
constexpr int kMostRows = 12;
#else
constexpr int kMostRows = 2;
#endif
constexpr int kShift = 128;

// x [m, k] -> numbers [m, padded] and scales [m]. Behind k there is the number for 0.
template <typename T>
void round_rows(const T* x, int64_t m, int64_t ldx, int64_t k, int64_t padded, uint8_t* numbers, float* scales) {
#pragma omp for
    for (int64_t r = 0; r < m; ++r) {
        const T* row = x + r * ldx;
        V16 most = zero(), not_finite = zero();
        for (int64_t i = 0; i < k; i += kLanes) {
            V16 value = load_first(row + i, int(std::min<int64_t>(kLanes, k - i)));
            most = max(max(value, zero() - value), most);
            not_finite = fma(value, zero(), not_finite);
        }
        // A row with a NaN or an infinity gives NaN and nothing else.
        const float scale = max_lanes(most) / 127.0f + sum_lanes(not_finite);
        scales[r] = scale;
        const V16 inverse = splat(scale > 0 ? 1.0f / scale : 0.0f);
        uint8_t* out = numbers + r * padded;
        std::memset(out + k, kShift, size_t(padded - k));
        for (int64_t i = 0; i < k; i += kLanes) {
            const int count = int(std::min<int64_t>(kLanes, k - i));
            store_bytes(out + i, round_even(load_first(row + i, count) * inverse), kShift, count);
        }
    }
}

template <int R>
HR_NOINLINE void exactly(const uint8_t* x, int64_t ldx, const int8_t* w, int64_t k, I16 (*sums)[2]) {
    I16 own[R][2];
    HR_UNROLL
    for (int r = 0; r < R; ++r) own[r][0] = own[r][1] = no_sums();
    // Three rows a pointer: twelve pointers do not fit into registers.
    const uint8_t* third[(R + 2) / 3];
    HR_UNROLL
    for (int r = 0; r < (R + 2) / 3; ++r) third[r] = x + 3 * r * ldx;
    for (int64_t i = 0; i < k; i += 4) {
        const int8_t* at = w + i * kPanel;
        prefetch(at + kAhead);
        prefetch(at + kAhead + 64);
        const Quads first = load_quads(at), second = load_quads(at + 4 * kLanes);
        HR_UNROLL
        for (int r = 0; r < R; ++r) {
            const Quads element = splat_quad(third[r / 3] + r % 3 * ldx + i);
            own[r][0] = dot(own[r][0], element, first);
            own[r][1] = dot(own[r][1], element, second);
        }
    }
    HR_UNROLL
    for (int r = 0; r < R; ++r) sums[r][0] = own[r][0], sums[r][1] = own[r][1];
}

template <int R = kMostRows>
HR_INLINE void run(int rows, const uint8_t* x, int64_t ldx, const int8_t* w, int64_t k, I16 (*sums)[2]) {
    if constexpr (R > 0) {
        if (rows == R)
            exactly<R>(x, ldx, w, k, sums);
        else
            run<R - 1>(rows, x, ldx, w, k, sums);
    }
}

// scales, extra: of the weights' outputs, padded to panels: what each sum is multiplied with; 128 times their sum.
template <typename Finish, typename Y>
void whole(const uint8_t* x, int64_t m, int64_t k, const float* row_scales, const int8_t* packed, int64_t n,
           const float* scales, const int32_t* extra, const float* bias, Y* y, int64_t ldy) {
    constexpr int64_t kChunk = 384 / kMostRows * kMostRows;
    const int64_t panels = (n + Finish::kColumns - 1) / Finish::kColumns;
    for (int64_t begin = 0; begin < m; begin += kChunk) {
        const int64_t end = std::min(m, begin + kChunk);
#pragma omp for nowait
        for (int64_t p = 0; p < panels; ++p)
            for (int64_t r = begin; r < end; r += kMostRows) {
                const int rows = int(std::min<int64_t>(kMostRows, end - r));
                I16 sums[kMostRows][2];
                run(rows, x + r * k, k, packed + p * k * kPanel, k, sums);
                const float* own = scales + p * kPanel;
                const int columns = int(std::min<int64_t>(Finish::kColumns, n - p * Finish::kColumns));
                for (int i = 0; i < rows; ++i) {
                    V16 halves[2];
                    for (int half = 0; half < 2; ++half) {
                        const int64_t at = p * kPanel + half * kLanes;
                        halves[half] = to_floats(minus(sums[i][half], load_sums(extra + at))) *
                                       (load(own + half * kLanes) * splat(row_scales[r + i]));
                    }
                    Finish::finish(halves[0], halves[1], bias ? bias + p * kPanel : nullptr,
                                   y + (r + i) * ldy + p * Finish::kColumns, columns);
                }
            }
    }
#pragma omp barrier
}

// w [n, k] -> packed, and what the shift of x adds to each sum.
void pack_whole(const int8_t* w, int64_t n, int64_t k, int64_t padded, int8_t* packed, int32_t* extra) {
#pragma omp for
    for (int64_t p = 0; p < (n + kPanel - 1) / kPanel; ++p) {
        int8_t* out = packed + p * padded * kPanel;
        std::memset(out, 0, size_t(padded * kPanel));
        for (int64_t o = 0; o < kPanel; ++o) {
            const int64_t row = p * kPanel + o;
            int32_t sum = 0;
            for (int64_t i = 0; row < n && i < k; ++i) {
                sum += w[row * k + i];
                out[i / 4 * 4 * kPanel + o * 4 + i % 4] = w[row * k + i];
            }
            extra[row] = kShift * sum;
        }
    }
}

// Rows `ids` of a packed weight -> out [count, k].
template <typename T>
void whole_rows(const int64_t* ids, int64_t count, const int8_t* packed, const float* scales, int64_t k, int64_t padded,
                T* out) {
#pragma omp for
    for (int64_t n = 0; n < count; ++n) {
        const int8_t* row = packed + ids[n] / kPanel * padded * kPanel + ids[n] % kPanel * 4;
        for (int64_t i = 0; i < k; ++i) {
            const float value = float(row[i / 4 * 4 * kPanel + i % 4]) * scales[ids[n]];
            if constexpr (sizeof(T) == 2)
                out[n * k + i] = to_bf16(value);
            else
                out[n * k + i] = value;
        }
    }
}

}  // namespace
}  // namespace headrace

#define HR_WHOLE(T, suffix)                                                                  \
    HR_KERNEL(round_rows_##suffix, headrace::round_rows<T>)                                  \
    HR_KERNEL(whole_##suffix, headrace::whole<headrace::Plain, T>)                           \
    HR_KERNEL(whole_logits_##suffix, headrace::whole<headrace::Plain, float>)                \
    HR_KERNEL(whole_silu_##suffix, headrace::whole<headrace::Gated<headrace::silu>, T>)      \
    HR_KERNEL(whole_gelu_##suffix, headrace::whole<headrace::Gated<headrace::gelu_tanh>, T>) \
    HR_KERNEL(whole_rows_##suffix, headrace::whole_rows<T>)

HR_KERNEL(pack_whole, headrace::pack_whole)
HR_WHOLE(headrace::bf16, bf16)
HR_WHOLE(float, f32)
