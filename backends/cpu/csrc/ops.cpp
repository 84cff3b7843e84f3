// Norms, activations and rotation: what is done to rows between products. Statistics in float, one rounding.

#include <algorithm>
#include <type_traits>

#include "activations.h"
#include "linear.h"
#include "words.h"

namespace headrace {
namespace {

// Call visit(at, whole, n) for each vector of a row of c numbers: all lanes first, then the rest by masks.
template <typename F>
HR_INLINE void each_vector(int64_t c, F&& visit) {
    int64_t i = 0;
    for (; i + kLanes <= c; i += kLanes) visit(i, std::true_type{}, kLanes);
    if (i < c) visit(i, std::false_type{}, int(c - i));
}

template <typename T, bool Whole>
HR_INLINE V16 take(const T* p, std::bool_constant<Whole>, int n) {
    if constexpr (Whole) return load(p);
    return load_first(p, n);
}

template <typename T, bool Whole>
HR_INLINE void put(T* p, V16 x, std::bool_constant<Whole>, int n) {
    if constexpr (Whole)
        store(p, x);
    else
        store_first(p, x, n);
}

// Round as storing would.
template <typename T>
HR_INLINE V16 rounded_as(V16 x) {
    return round_bf16(x);
}
template <>
HR_INLINE V16 rounded_as<float>(V16 x) {
    return x;
}

template <typename T>
HR_INLINE float inverse_rms(const T* x, int64_t c, float eps) {
    V16 sums[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 4 * kLanes <= c; i += 4 * kLanes)
        for (int s = 0; s < 4; ++s) {
            V16 value = load(x + i + s * kLanes);
            sums[s] = fma(value, value, sums[s]);
        }
    for (; i < c; i += kLanes) {
        V16 value = load_first(x + i, int(std::min<int64_t>(kLanes, c - i)));
        sums[0] = fma(value, value, sums[0]);
    }
    float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    return 1.0f / std::sqrt(sum / float(c) + eps);
}

// y = round(x * scale) * weight, as the models' definitions have it.
template <typename T>
HR_INLINE void normed(const T* x, const T* weight, float scale, int64_t c, T* y) {
    V16 factor = splat(scale);
    each_vector(c, [&](int64_t i, auto whole, int n) {
        V16 value = rounded_as<T>(take(x + i, whole, n) * factor) * take(weight + i, whole, n);
        put(y + i, value, whole, n);
    });
}

// x [m, groups, c], rows `stride` elements apart -> y, contiguous.
template <typename T>
void rms_norm(const T* x, int64_t stride, const T* weight, float eps, int64_t m, int64_t groups, int64_t c, T* y) {
#pragma omp for
    for (int64_t r = 0; r < m; ++r)
        for (int64_t g = 0; g < groups; ++g) {
            const T* row = x + r * stride + g * c;
            normed(row, weight, inverse_rms(row, c, eps), c, y + (r * groups + g) * c);
        }
}

template <typename T>
void add_rms_norm(const T* x, const T* residual, const T* weight, float eps, int64_t m, int64_t c, T* y, T* total) {
#pragma omp for
    for (int64_t r = 0; r < m; ++r) {
        int64_t row = r * c;
        each_vector(c, [&](int64_t i, auto whole, int n) {
            V16 sum = take(x + row + i, whole, n) + take(residual + row + i, whole, n);
            put(total + row + i, sum, whole, n);
        });
        normed(total + row, weight, inverse_rms(total + row, c, eps), c, y + row);
    }
}

template <typename T>
void add(const T* x, const T* y, int64_t m, int64_t c, T* total) {
#pragma omp for
    for (int64_t r = 0; r < m; ++r)
        each_vector(c, [&](int64_t i, auto whole, int n) {
            put(total + r * c + i, take(x + r * c + i, whole, n) + take(y + r * c + i, whole, n), whole, n);
        });
}

template <typename T>
void scale(const T* x, float factor, int64_t m, int64_t c, T* y) {
#pragma omp for
    for (int64_t r = 0; r < m; ++r)
        each_vector(c, [&](int64_t i, auto whole, int n) {
            put(y + r * c + i, take(x + r * c + i, whole, n) * splat(factor), whole, n);
        });
}

template <V16 (*F)(V16), typename T>
void gated(const T* x, int64_t m, int64_t c, T* y) {
#pragma omp for
    for (int64_t r = 0; r < m; ++r)
        each_vector(c, [&](int64_t i, auto whole, int n) {
            const T* gate = x + r * 2 * c + i;
            put(y + r * c + i, rounded_as<T>(F(take(gate, whole, n))) * take(gate + c, whole, n), whole, n);
        });
}

// Sums of a few rows are finished by who has them in its cache; those of many are in nobody's, and rows are read whole.
constexpr int64_t kFewRows = 64;

// Call visit(row, column, size) for this thread's part of m rows of sums; `width` results come from a panel.
template <typename F>
HR_INLINE void each_own(int64_t m, int64_t c, int64_t width, F&& visit) {
    const int64_t panels = (c + width - 1) / width;
    Span columns = {0, panels}, rows = {0, m};
    if (m <= kFewRows)
        columns = own_part(panels);
    else
        rows = own_part(m);
    const int64_t first = columns.low * width, size = std::min(columns.high * width, c) - first;
    for (int64_t r = rows.low; r < rows.high; ++r) visit(r, first, size);
#pragma omp barrier
}

template <typename T>
void narrow(const float* x, int64_t m, int64_t c, T* y) {
    each_own(m, c, kPanel, [&](int64_t r, int64_t first, int64_t size) {
        const int64_t begin = r * c + first;
        each_vector(size, [&](int64_t i, auto whole, int n) { put(y + begin + i, take(x + begin + i, whole, n), whole, n); });
    });
}

// What the products of linear.cpp make of the sums of a gate: in turns 16 of it and 16 of what is gated.
template <V16 (*F)(V16), typename T>
void gated_sums(const float* x, int64_t m, int64_t ldx, int64_t c, T* y) {
    each_own(m, c, kLanes, [&](int64_t r, int64_t first, int64_t size) {
        each_vector(size, [&](int64_t i, auto whole, int n) {
            const float* gate = x + r * ldx + 2 * (first + i);
            put(y + r * c + first + i, F(load(gate)) * load(gate + kLanes), whole, n);
        });
    });
}

// x [m, heads, d], rows `stride` elements apart, turned in place; table [., 2 * half]: cosines, then sines.
template <typename T>
void rotary(const int64_t* positions, T* x, int64_t m, int64_t heads, int64_t d, int64_t stride, const float* table,
            int64_t half) {
#pragma omp for
    for (int64_t r = 0; r < m; ++r) {
        const float* cosines = table + positions[r] * 2 * half;
        for (int64_t h = 0; h < heads; ++h) {
            T* head = x + r * stride + h * d;
            each_vector(half, [&](int64_t i, auto whole, int n) {
                V16 cosine = take(cosines + i, whole, n), sine = take(cosines + half + i, whole, n);
                V16 first = take(head + i, whole, n), second = take(head + half + i, whole, n);
                put(head + i, first * cosine - second * sine, whole, n);
                put(head + half + i, second * cosine + first * sine, whole, n);
            });
        }
    }
}

}  // namespace
}  // namespace headrace

#define HR_OPS(T, suffix)                                                        \
    HR_KERNEL(rms_norm_##suffix, headrace::rms_norm<T>)                          \
    HR_KERNEL(add_rms_norm_##suffix, headrace::add_rms_norm<T>)                  \
    HR_KERNEL(add_##suffix, headrace::add<T>)                                    \
    HR_KERNEL(scale_##suffix, headrace::scale<T>)                                \
    HR_KERNEL(silu_mul_##suffix, headrace::gated<headrace::silu, T>)             \
    HR_KERNEL(gelu_mul_##suffix, headrace::gated<headrace::gelu_tanh, T>)        \
    HR_KERNEL(narrow_##suffix, headrace::narrow<T>)                              \
    HR_KERNEL(silu_sums_##suffix, headrace::gated_sums<headrace::silu, T>)       \
    HR_KERNEL(gelu_sums_##suffix, headrace::gated_sums<headrace::gelu_tanh, T>)  \
    HR_KERNEL(rotary_##suffix, headrace::rotary<T>)

HR_OPS(headrace::bf16, bf16)
HR_OPS(float, f32)
