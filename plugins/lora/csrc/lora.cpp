// Low-rank additions to products, grouped by adapter: sums += (x A^T) B, for the rows that have an adapter.
//
// Weights of adapters lie wherever they were loaded. A table at a fixed address, with a line for each slot, tells where:
// of each product first (address of A, rank) for each name stacked in it, then the address of B for each piece of its
// outputs. A is packed as [ranks / 16][inputs / P][16][P] with P as in linear.h, B as [outputs of the piece / 32][rank][32]:
// both are read from end to end. The rows of a step are told as `starts` [slots + 1] and `rows`: those of slot s are
// rows[starts[s]] and following.
//
// A row's result is a function of the row and its adapter. Rows worked on together share what is loaded, never a sum:
// x A^T is two chains over the inputs, in turns of P, and their sum; (...) B is one chain over the ranks.

#include <algorithm>

#include "linear.h"
#include "simd.h"
#include "words.h"

namespace headrace {
namespace {

constexpr int kRows = 6;              // rows that share what is loaded
constexpr int kColumns = 2 * kLanes;  // of B that lie together

struct Piece {
    int64_t name;   // whose A goes with it
    int64_t first;  // column of its first sum
    int64_t step;   // from one block of 16 to the next
    int64_t size;
};

template <int R, typename T>
HR_INLINE void shrink_tile(const T* const* x, const T* a, int64_t inputs, float* const* h) {
    constexpr int P = Traits<T>::kPair;
    V16 sums[R][2];
    HR_UNROLL
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = zero();
    int64_t i = 0;
    for (; i + 2 * P <= inputs; i += 2 * P) {
        prefetch(a + i * kLanes + kAhead / sizeof(T));
        prefetch(a + (i + P) * kLanes + kAhead / sizeof(T));
        auto first = Traits<T>::load(a + i * kLanes), second = Traits<T>::load(a + (i + P) * kLanes);
        HR_UNROLL
        for (int r = 0; r < R; ++r) {
            sums[r][0] = Traits<T>::dot(sums[r][0], first, Traits<T>::broadcast(x[r] + i));
            sums[r][1] = Traits<T>::dot(sums[r][1], second, Traits<T>::broadcast(x[r] + i + P));
        }
    }
    for (; i < inputs; i += P) {
        auto weights = Traits<T>::load(a + i * kLanes);
        for (int r = 0; r < R; ++r) {
            T last[P] = {};
            std::memcpy(last, x[r] + i, size_t(std::min<int64_t>(P, inputs - i)) * sizeof(T));
            sums[r][0] = Traits<T>::dot(sums[r][0], weights, Traits<T>::broadcast(last));
        }
    }
    HR_UNROLL
    for (int r = 0; r < R; ++r) store(h[r], sums[r][0] + sums[r][1]);
}

template <int R = kRows, typename T>
HR_INLINE void shrink_rows(int n, const T* const* x, const T* a, int64_t inputs, float* const* h) {
    if constexpr (R > 0) {
        if (n == R)
            shrink_tile<R>(x, a, inputs, h);
        else
            shrink_rows<R - 1>(n, x, a, inputs, h);
    }
}

// h[row, name * most ..] = x[row] A^T, for each name of each slot that has rows. There is no barrier at its end: in a
// recorded pass the product whose sums are added to comes next, and has one.
template <typename T>
void shrink(const T* x, int64_t ldx, int64_t inputs, const int32_t* starts, const int32_t* rows, int64_t slots,
            const int64_t* table, int64_t line, int64_t names, int64_t most, float* h) {
    constexpr int P = Traits<T>::kPair;
    const int64_t panel = (inputs + P - 1) / P * P * kLanes, ldh = names * most;
    auto panels_of = [&](int64_t slot, int64_t name) {
        return (table[slot * line + 2 * name + 1] + kLanes - 1) / kLanes;
    };
    auto groups_of = [&](int64_t slot) { return (starts[slot + 1] - starts[slot] + kRows - 1) / kRows; };
    int64_t total = 0;
    for (int64_t slot = 0; slot < slots; ++slot)
        for (int64_t name = 0; name < names; ++name) total += groups_of(slot) * panels_of(slot, name);
#pragma omp for nowait
    for (int64_t task = 0; task < total; ++task) {
        int64_t rest = task, slot = 0, name = 0;
        for (;; ++name) {
            if (name == names) ++slot, name = 0;
            const int64_t count = groups_of(slot) * panels_of(slot, name);
            if (rest < count) break;
            rest -= count;
        }
        const int64_t panels = panels_of(slot, name), group = rest / panels, at = rest % panels;
        const int64_t begin = starts[slot] + group * kRows;
        const int n = int(std::min<int64_t>(kRows, starts[slot + 1] - begin));
        const T* from[kRows];
        float* to[kRows];
        for (int r = 0; r < n; ++r) {
            from[r] = x + rows[begin + r] * ldx;
            to[r] = h + rows[begin + r] * ldh + name * most + at * kLanes;
        }
        const T* a = reinterpret_cast<const T*>(table[slot * line + 2 * name]);
        shrink_rows(n, from, a + at * panel, inputs, to);
    }
}

template <int R, typename T>
HR_INLINE void expand_tile(const float* const* h, const T* b, int64_t rank, float* const* sums, int64_t step, int columns) {
    V16 added[R][2];
    HR_UNROLL
    for (int r = 0; r < R; ++r) added[r][0] = added[r][1] = zero();
    for (int64_t k = 0; k < rank; ++k) {
        prefetch(b + k * kColumns + kAhead / sizeof(T));
        V16 one = load(b + k * kColumns), other = load(b + k * kColumns + kLanes);
        HR_UNROLL
        for (int r = 0; r < R; ++r) {
            V16 factor = splat(h[r][k]);
            added[r][0] = fma(factor, one, added[r][0]);
            added[r][1] = fma(factor, other, added[r][1]);
        }
    }
    HR_UNROLL
    for (int r = 0; r < R; ++r) {
        if (columns >= kLanes)
            store(sums[r], load(sums[r]) + added[r][0]);
        else
            store_first(sums[r], load_first(sums[r], columns) + added[r][0], columns);
        float* next = sums[r] + step;
        if (columns == kColumns)
            store(next, load(next) + added[r][1]);
        else if (columns > kLanes)
            store_first(next, load_first(next, columns - kLanes) + added[r][1], columns - kLanes);
    }
}

template <int R = kRows, typename T>
HR_INLINE void expand_rows(int n, const float* const* h, const T* b, int64_t rank, float* const* sums, int64_t step,
                           int columns) {
    if constexpr (R > 0) {
        if (n == R)
            expand_tile<R>(h, b, rank, sums, step, columns);
        else
            expand_rows<R - 1>(n, h, b, rank, sums, step, columns);
    }
}

// sums[row] += h[row] B, in one block of columns of a piece, for rows[0 .. count).
template <typename T>
HR_INLINE void expand_block(const Piece& piece, int64_t block, const T* b, int64_t rank, const int32_t* rows, int64_t count,
                            const float* h, int64_t ldh, float* sums, int64_t lds) {
    const int columns = int(std::min<int64_t>(kColumns, piece.size - block * kColumns));
    for (int64_t begin = 0; begin < count; begin += kRows) {
        const int n = int(std::min<int64_t>(kRows, count - begin));
        const float* from[kRows];
        float* to[kRows];
        for (int r = 0; r < n; ++r) {
            from[r] = h + rows[begin + r] * ldh;
            to[r] = sums + rows[begin + r] * lds + piece.first + block * 2 * piece.step;
        }
        expand_rows(n, from, b + block * rank * kColumns, rank, to, piece.step, columns);
    }
}

// sums[row] += h[row] B, for each piece of each slot that has rows; other rows are not touched.
//
// A thread adds to the panels that it has summed, which are in its cache.
template <typename T>
void expand(const float* h, float* sums, int64_t lds, const int32_t* starts, const int32_t* rows, int64_t slots,
            const int64_t* table, int64_t line, int64_t names, int64_t most, const int64_t* pieces, int64_t num_pieces) {
    const int64_t ldh = names * most, panels = (lds + kPanel - 1) / kPanel;
    const Piece* all = reinterpret_cast<const Piece*>(pieces);
    const Span own = own_part(panels);
    for (int64_t slot = 0; slot < slots; ++slot) {
        const int64_t count = starts[slot + 1] - starts[slot];
        if (count == 0) continue;
        const int64_t* entries = table + slot * line;
        for (int64_t p = 0; p < num_pieces; ++p) {
            const Piece& piece = all[p];
            const int64_t rank = entries[2 * piece.name + 1];
            if (rank == 0) continue;
            const T* b = reinterpret_cast<const T*>(entries[2 * names + p]);
            // Blocks that begin in its panels.
            auto first_from = [&](int64_t panel) {
                const int64_t step = 2 * piece.step, behind = panel * kPanel - piece.first;
                return std::clamp<int64_t>((behind + step - 1) / step, 0, (piece.size + kColumns - 1) / kColumns);
            };
            for (int64_t block = first_from(own.low), last = first_from(own.high); block < last; ++block)
                expand_block(piece, block, b, rank, rows + starts[slot], count, h + piece.name * most, ldh, sums, lds);
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
