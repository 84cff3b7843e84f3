// Low-rank additions to products, grouped by adapter: sums += (x A^T) B, for the rows that have an adapter.
//
// Weights of adapters lie wherever they were loaded. A table at a fixed address, with a line for each slot, tells where:
// of each product first (address of A, rank) for each name stacked in it, then the address of B for each piece of its
// outputs. A is [ranks padded to 4][inputs padded to 16], B is [rank][outputs of the piece padded to 16].
// The rows of a step are told as `starts` [slots + 1] and `rows`: those of slot s are rows[starts[s]] and following.
//
// A row's result is a function of the row and its adapter. Rows worked on together share what is loaded, never a sum:
// x A^T is one sum over the inputs in 16 lanes, (…) B one chain over the ranks.

#include <algorithm>

#include "simd.h"
#include "words.h"

namespace headrace {
namespace {

constexpr int kRanks = 4;  // of A at a time
constexpr int kRows = 4;   // rows that share what is loaded

struct Piece {
    int64_t name;   // whose A goes with it
    int64_t first;  // column of its first sum
    int64_t step;   // from one block of 16 to the next
    int64_t size;
};

template <int R, typename T>
HR_INLINE void shrink_tile(const T* const* x, const T* a, int64_t inputs, int64_t padded, float* const* h) {
    V16 sums[R][kRanks];
    HR_UNROLL
    for (int r = 0; r < R; ++r) {
        HR_UNROLL
        for (int k = 0; k < kRanks; ++k) sums[r][k] = zero();
    }
    int64_t i = 0;
    for (; i + kLanes <= inputs; i += kLanes) {
        V16 weights[kRanks];
        HR_UNROLL
        for (int k = 0; k < kRanks; ++k) weights[k] = load(a + k * padded + i);
        HR_UNROLL
        for (int r = 0; r < R; ++r) {
            V16 value = load(x[r] + i);
            HR_UNROLL
            for (int k = 0; k < kRanks; ++k) sums[r][k] = fma(value, weights[k], sums[r][k]);
        }
    }
    if (i < inputs)
        for (int r = 0; r < R; ++r) {
            V16 value = load_first(x[r] + i, int(inputs - i));
            HR_UNROLL
            for (int k = 0; k < kRanks; ++k) sums[r][k] = fma(value, load(a + k * padded + i), sums[r][k]);
        }
    HR_UNROLL
    for (int r = 0; r < R; ++r) {
        HR_UNROLL
        for (int k = 0; k < kRanks; ++k) h[r][k] = sum_lanes(sums[r][k]);
    }
}

// h[row, name * most ..] = x[row] A^T, for each name of each slot that has rows.
template <typename T>
void shrink(const T* x, int64_t ldx, int64_t inputs, const int32_t* starts, const int32_t* rows, int64_t slots,
            const int64_t* table, int64_t line, int64_t names, int64_t most, float* h) {
    const int64_t padded = (inputs + kLanes - 1) / kLanes * kLanes, ldh = names * most;
    for (int64_t slot = 0; slot < slots; ++slot) {
        const int64_t first = starts[slot], count = starts[slot + 1] - first;
        if (count == 0) continue;
        const int64_t groups = (count + kRows - 1) / kRows;
        for (int64_t name = 0; name < names; ++name) {
            const int64_t* entry = table + slot * line + 2 * name;
            const T* a = reinterpret_cast<const T*>(entry[0]);
            const int64_t tiles = (entry[1] + kRanks - 1) / kRanks;
#pragma omp for nowait
            for (int64_t task = 0; task < tiles * groups; ++task) {
                const int64_t tile = task % tiles, group = task / tiles;
                const int64_t n = std::min<int64_t>(kRows, count - group * kRows);
                const T* from[kRows];
                float* to[kRows];
                for (int64_t r = 0; r < n; ++r) {
                    const int64_t row = rows[first + group * kRows + r];
                    from[r] = x + row * ldx;
                    to[r] = h + row * ldh + name * most + tile * kRanks;
                }
                const T* weights = a + tile * kRanks * padded;
                if (n == kRows)
                    shrink_tile<kRows>(from, weights, inputs, padded, to);
                else
                    for (int64_t r = 0; r < n; ++r) shrink_tile<1>(from + r, weights, inputs, padded, to + r);
            }
        }
    }
#pragma omp barrier
}

template <int R, typename T>
HR_INLINE void expand_tile(const float* const* h, const T* b, int64_t rank, int64_t padded, float* const* sums, int lanes) {
    V16 added[R];
    HR_UNROLL
    for (int r = 0; r < R; ++r) added[r] = zero();
    for (int64_t k = 0; k < rank; ++k) {
        V16 weights = load(b + k * padded);
        HR_UNROLL
        for (int r = 0; r < R; ++r) added[r] = fma(splat(h[r][k]), weights, added[r]);
    }
    HR_UNROLL
    for (int r = 0; r < R; ++r) {
        if (lanes == kLanes)
            store(sums[r], load(sums[r]) + added[r]);
        else
            store_first(sums[r], load_first(sums[r], lanes) + added[r], lanes);
    }
}

// sums[row] += h[row] B, for each piece of each slot that has rows; other rows are not touched.
template <typename T>
void expand(const float* h, float* sums, int64_t lds, const int32_t* starts, const int32_t* rows, int64_t slots,
            const int64_t* table, int64_t line, int64_t names, int64_t most, const int64_t* pieces, int64_t num_pieces) {
    const int64_t ldh = names * most;
    const Piece* all = reinterpret_cast<const Piece*>(pieces);
    for (int64_t slot = 0; slot < slots; ++slot) {
        const int64_t first = starts[slot], count = starts[slot + 1] - first;
        if (count == 0) continue;
        const int64_t* entries = table + slot * line;
        for (int64_t p = 0; p < num_pieces; ++p) {
            const Piece& piece = all[p];
            const int64_t rank = entries[2 * piece.name + 1];
            if (rank == 0) continue;
            const T* b = reinterpret_cast<const T*>(entries[2 * names + p]);
            const int64_t blocks = (piece.size + kLanes - 1) / kLanes, padded = blocks * kLanes;
#pragma omp for nowait
            for (int64_t block = 0; block < blocks; ++block) {
                const int lanes = int(std::min<int64_t>(kLanes, piece.size - block * kLanes));
                for (int64_t begin = 0; begin < count; begin += kRows) {
                    const int64_t n = std::min<int64_t>(kRows, count - begin);
                    const float* from[kRows];
                    float* to[kRows];
                    for (int64_t r = 0; r < n; ++r) {
                        const int64_t row = rows[first + begin + r];
                        from[r] = h + row * ldh + piece.name * most;
                        to[r] = sums + row * lds + piece.first + block * piece.step;
                    }
                    if (n == kRows)
                        expand_tile<kRows>(from, b + block * kLanes, rank, padded, to, lanes);
                    else
                        for (int64_t r = 0; r < n; ++r)
                            expand_tile<1>(from + r, b + block * kLanes, rank, padded, to + r, lanes);
                }
            }
        }
    }
#pragma omp barrier
}

}  // namespace
}  // namespace headrace

#define HR_LORA(T, suffix)                          \
    HR_KERNEL(lora_shrink_##suffix, headrace::shrink<T>) \
    HR_KERNEL(lora_expand_##suffix, headrace::expand<T>)

HR_LORA(headrace::bf16, bf16)
HR_LORA(float, f32)
