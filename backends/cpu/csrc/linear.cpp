#include "linear.h"

#include <algorithm>

#include "activations.h"

#include "words.h"

#if defined(HEADRACE_TIER_AMX)
#include "linear_amx.h"
#endif

namespace headrace {
namespace {

// Rows and weights by vectors: kRows rows of one panel at a time.
template <typename T>
struct Vectors {
    static constexpr int P = Traits<T>::kPair;
#if defined(HEADRACE_AVX512)
    static constexpr int kRows = 12;  // 24 sums, 2 weights: 26 of 32 registers
#else
    static constexpr int kRows = 2;
#endif

    static void begin() {}
    static void end() {}

    template <typename Finish, typename Y, int R = kRows>
    static HR_INLINE void run(int rows, const T* x, int64_t ldx, const T* w, int64_t k, const float* bias, Y* y, int64_t ld,
                              int columns) {
        if constexpr (R > 0) {
            if (rows == R)
                exactly<Finish, R>(x, ldx, w, k, bias, y, ld, columns);
            else
                run<Finish, Y, R - 1>(rows, x, ldx, w, k, bias, y, ld, columns);
        }
    }

    template <typename Finish, int R, typename Y>
    static void exactly(const T* x, int64_t ldx, const T* w, int64_t k, const float* bias, Y* y, int64_t ld, int columns) {
        V16 sums[R][2];
        HR_UNROLL
        for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = zero();
        // Three rows a pointer: twelve pointers do not fit into registers.
        const T* third[(R + 2) / 3];
        HR_UNROLL
        for (int r = 0; r < (R + 2) / 3; ++r) third[r] = x + 3 * r * ldx;
        for (int64_t i = 0; i < k; i += P) {
            const T* at = w + i * kPanel;
            prefetch(at + kAhead / sizeof(T));
            prefetch(at + (kAhead + 64) / sizeof(T));
            auto first = Traits<T>::load(at), second = Traits<T>::load(at + kLanes * P);
            HR_UNROLL
            for (int r = 0; r < R; ++r) {
                auto element = Traits<T>::broadcast(third[r / 3] + r % 3 * ldx + i);
                sums[r][0] = Traits<T>::dot(sums[r][0], first, element);
                sums[r][1] = Traits<T>::dot(sums[r][1], second, element);
            }
        }
        HR_UNROLL
        for (int r = 0; r < R; ++r) Finish::finish(sums[r][0], sums[r][1], bias, y + r * ld, columns);
    }
};

// y = x W^T + bias, panels split among threads; rows in chunks that stay in the second-level cache meanwhile.
template <typename Block, typename Finish, typename T, typename Y>
void linear(const T* x, int64_t m, int64_t ldx, const T* packed, int64_t n, int64_t k, const float* bias, Y* y,
            int64_t ldy) {
    constexpr int kRows = Block::kRows;
    constexpr int64_t kChunk = 384 / kRows * kRows;
    const int64_t panels = (n + Finish::kColumns - 1) / Finish::kColumns;
    Block::begin();
    for (int64_t begin = 0; begin < m; begin += kChunk) {
        const int64_t end = std::min(m, begin + kChunk);
#pragma omp for nowait
        for (int64_t p = 0; p < panels; ++p)
            for (int64_t r = begin; r < end; r += kRows)
                Block::template run<Finish>(int(std::min<int64_t>(kRows, end - r)), x + r * ldx, ldx,
                                            packed + p * k * kPanel, k, bias ? bias + p * kPanel : nullptr,
                                            y + r * ldy + p * Finish::kColumns, ldy,
                                            int(std::min<int64_t>(Finish::kColumns, n - p * Finish::kColumns)));
    }
    Block::end();
#pragma omp barrier
}

#if defined(HEADRACE_TIER_AMX)
using Bf16Block = Tiles;
#else
using Bf16Block = Vectors<bf16>;
#endif

}  // namespace
}  // namespace headrace

// n counts outputs: of a gated product half of the weight's rows. Logits are float: what is sampled from is not rounded.
#define HR_LINEAR(T, suffix, ...)                                                                                 \
    HR_KERNEL(linear_##suffix, headrace::linear<__VA_ARGS__, headrace::Plain, T, T>)                              \
    HR_KERNEL(logits_##suffix, headrace::linear<__VA_ARGS__, headrace::Plain, T, float>)                          \
    HR_KERNEL(linear_silu_##suffix, headrace::linear<__VA_ARGS__, headrace::Gated<headrace::silu>, T, T>)         \
    HR_KERNEL(linear_gelu_##suffix, headrace::linear<__VA_ARGS__, headrace::Gated<headrace::gelu_tanh>, T, T>)

HR_LINEAR(headrace::bf16, bf16, headrace::Bf16Block)
HR_LINEAR(float, f32, headrace::Vectors<float>)
