// Attention over pages (pages.h): any mix of chunks and decodes, K and V read from the cache only.
//
// A row is one query head of one token. Rows go over keys in tiles at absolute multiples of kTile with a running
// maximum; what a row computes depends on its own query, its position and the keys it sees, never on the rows beside it.
// Slots a row does not see are masked by select; slots that no row of the task sees are not read at all.

#include <algorithm>
#include <vector>

#include "kv_int8.h"
#include "linear.h"
#include "pages.h"
#include "words.h"

namespace headrace {
namespace {

#if defined(HEADRACE_AVX512)
constexpr int kRows = 8, kSums = 16;  // sums in registers at once
#else
constexpr int kRows = 2, kSums = 4;
#endif
constexpr int kTile = 128;
constexpr int kTokens = 32;   // query tokens of a task at most
constexpr int kManyTasks = 16;
constexpr float kMinusInfinity = -__builtin_inff();

struct Shape {
    int64_t num_heads, num_kv_heads, head_dim, block_size, window;  // window: 0 is none
    float scale, soft_cap;                                           // soft_cap: 0 is none
    const float* sinks;
    bool causal;
};

// Few rows wait for memory, and pages are scattered: a processor does not guess where the next one lies. So each line
// that is read asks for the line that is read a tile later; a burst of such requests would hold up the reading itself.
template <int R>
constexpr bool kAsks = 4 * R <= kSums;

// sums[r][w] += x[r] . from[w], n steps; x[r] begins at x + r * Row and goes on by Step. ahead: what is read later.
template <typename T, int R, int W, int Row, int Step>
HR_INLINE void multiply(const T* x, const T* const (&from)[W], const T* const (&ahead)[W], int64_t step, int n,
                        V16 (&sums)[R][W]) {
    for (int i = 0; i < n; ++i) {
        typename Traits<T>::Wide values[W];
        HR_UNROLL
        for (int w = 0; w < W; ++w) {
            values[w] = Traits<T>::load(from[w] + i * step);
            if constexpr (kAsks<R>) __builtin_prefetch(ahead[w] + i * step, 0, 3);
        }
        HR_UNROLL
        for (int r = 0; r < R; ++r) {
            auto element = Traits<T>::broadcast(x + r * Row + i * Step);
            HR_UNROLL
            for (int w = 0; w < W; ++w) sums[r][w] = Traits<T>::dot(sums[r][w], values[w], element);
        }
    }
}

// Where the tile lies that is read next: keys from `begin` on stand for this tile's from its first on.
template <typename T>
struct Ahead {
    Pages<T> pages;
    int64_t offset, end;  // position there = position here + offset; nothing from end on

    const T* keys(int64_t key, const T* otherwise) const {
        return key + offset < end ? pages.keys(key + offset) : otherwise;
    }
};

HR_INLINE P16 only(P16 pair, bool first, bool second) {
    if (!second) pair = first_of_pairs(pair);
    if (!first) pair = second_of_pairs(pair);
    return pair;
}
HR_INLINE V16 only(V16 value, bool, bool) { return value; }

// One step of keys of which not all are seen: those below begin and from end on may hold anything.
template <typename T, int R, int W>
HR_INLINE void multiply_partly(const T* x, const T* const (&from)[W], int64_t key, int64_t begin, int64_t end,
                               V16 (&sums)[R][W]) {
    const bool low = key >= begin, high = key + Traits<T>::kPair <= end;
    HR_UNROLL
    for (int w = 0; w < W; ++w) {
        auto value = only(Traits<T>::load(from[w]), low, high);
        HR_UNROLL
        for (int r = 0; r < R; ++r)
            sums[r][w] = Traits<T>::dot(sums[r][w], value, Traits<T>::broadcast(x + r * kTile));
    }
}

// Add p (probabilities [R][kTile] of keys from k0 on) times V to sums of W vectors of the head, for keys [begin, end).
// columns: where in a row of V the vectors lie.
template <typename T, int R, int W>
HR_INLINE void weigh(const Pages<T>& pages, const T* p, int64_t k0, int64_t begin, int64_t end,
                     const int64_t (&columns)[W], const Ahead<T>& ahead, V16 (&sums)[R][W]) {
    constexpr int P = Traits<T>::kPair;
    const int64_t step = pages.head_dim * P;
    const T *from[W], *later[W];
    for (int64_t key = begin / P * P; key < end;) {
        const int64_t stop = std::min(pages.block_end(key), end);
        const T *k = pages.keys(key), *then = ahead.keys(key, k);
        HR_UNROLL
        for (int w = 0; w < W; ++w) {
            from[w] = k + (pages.head_dim << pages.shift) + columns[w] * P;
            later[w] = then + (pages.head_dim << pages.shift) + columns[w] * P;
        }
        if (key < begin || key + P > stop) {
            multiply_partly<T, R, W>(p + (key - k0), from, key, begin, end, sums);
            key += P;
            continue;
        }
        const int whole = int((stop - key) / P);
        multiply<T, R, W, kTile, P>(p + (key - k0), from, later, step, whole, sums);
        key += whole * P;
    }
}

struct Row {
    int64_t begin, end;  // keys it sees
    float max, sum;
};

// R rows over the keys [k0, k1) of one tile; begin and end bound what all rows of the task see. scales [2][kTile]: of its
// keys and values, where these are whole numbers; else null.
template <typename T, int R>
void tile(const Shape& shape, const Pages<T>& pages, const float* scales, const T* q, Row* rows, float* out, int64_t k0,
          int64_t begin, int64_t end, const Ahead<T>& ahead) {
    constexpr int P = Traits<T>::kPair, W = 4 * R <= kSums ? 4 : 2;
    const int64_t d = shape.head_dim;
    alignas(64) float scores[R][kTile];
    alignas(64) T weights[R * kTile];
    const int64_t first = begin / kLanes * kLanes, last = (end + kLanes - 1) / kLanes * kLanes;
    V16 scale = splat(shape.scale), nothing = splat(kMinusInfinity);
    V16 largest[R];
    HR_UNROLL
    for (int r = 0; r < R; ++r) largest[r] = nothing;
    for (int64_t key = first; key < last; key += W * kLanes) {
        V16 sums[R][W];
        const T *from[W], *later[W];
        HR_UNROLL
        for (int w = 0; w < W; ++w) {
            from[w] = key + w * kLanes < last ? pages.keys(key + w * kLanes) : from[0];
            later[w] = ahead.keys(key + w * kLanes, from[w]);
            HR_UNROLL
            for (int r = 0; r < R; ++r) sums[r][w] = zero();
        }
        multiply<T, R, W, P, R * P>(q, from, later, kLanes * P, int(d / P), sums);
        HR_UNROLL
        for (int w = 0; w < W; ++w) {
            const int64_t at = key + w * kLanes;
            if (at >= last) break;
            const bool whole = at >= rows[R - 1].begin && at + kLanes <= rows[0].end;
            HR_UNROLL
            for (int r = 0; r < R; ++r) {
                V16 score = sums[r][w] * scale;
                if (scales) score = score * load(scales + (at - k0));
                if (shape.soft_cap != 0)
                    score = splat(shape.soft_cap) * tanh(score * splat(1.0f / shape.soft_cap));
                if (!whole)
                    score = keep(score, int(std::clamp<int64_t>(rows[r].begin - at, 0, kLanes)),
                                 int(std::clamp<int64_t>(rows[r].end - at, 0, kLanes)), nothing);
                store(scores[r] + (at - k0), score);
                largest[r] = max(largest[r], score);
            }
        }
    }
    V16 factors[R];
    HR_UNROLL
    for (int r = 0; r < R; ++r) {
        float high = std::max(rows[r].max, max_lanes(largest[r]));
        // A row that has seen nothing yet has no maximum; any finite number gives e^-inf = 0.
        V16 base = splat(high == kMinusInfinity ? 0.0f : high);
        V16 sum = zero();
        for (int64_t at = first - k0; at < last - k0; at += kLanes) {
            V16 p = exp(load(scores[r] + at) - base);
            sum = sum + p;
            // What is not seen has the probability 0; its scale may be anything.
            if (scales) p = zero_below(p * load(scales + kTile + at), p, 1e-38f);
            store(weights + r * kTile + at, p);
        }
        factors[r] = exp(splat(rows[r].max) - base);
        float factor[kLanes];
        store(factor, factors[r]);
        rows[r].sum = rows[r].sum * factor[0] + sum_lanes(sum);
        rows[r].max = high;
    }
    for (int64_t column = 0; column < d; column += W * kLanes) {
        int64_t columns[W];
        V16 sums[R][W];
        HR_UNROLL
        for (int w = 0; w < W; ++w) {
            columns[w] = column + w * kLanes < d ? column + w * kLanes : column;
            HR_UNROLL
            for (int r = 0; r < R; ++r) sums[r][w] = load(out + r * d + columns[w]) * factors[r];
        }
        weigh<T, R, W>(pages, weights, k0, begin, end, columns, ahead, sums);
        HR_UNROLL
        for (int w = 0; w < W; ++w) {
            if (column + w * kLanes >= d) break;
            HR_UNROLL
            for (int r = 0; r < R; ++r) store(out + r * d + columns[w], sums[r][w]);
        }
    }
}

template <typename T, int R = kRows>
HR_INLINE void tile(int count, const Shape& shape, const Pages<T>& pages, const float* scales, const T* q, Row* rows,
                    float* out, int64_t k0, int64_t begin, int64_t end, const Ahead<T>& ahead) {
    if constexpr (R > 0) {
        if (count == R)
            tile<T, R>(shape, pages, scales, q, rows, out, k0, begin, end, ahead);
        else
            tile<T, R - 1>(count, shape, pages, scales, q, rows, out, k0, begin, end, ahead);
    }
}

// The keys [begin, end) of the tile at k0, widened; return pages that lie there.
template <typename T>
Pages<T> widened(const Pages<int8_t>& pages, int64_t k0, int64_t begin, int64_t end, Widened<T>& to) {
    const int64_t d = pages.head_dim, block = int64_t(1) << pages.shift, tile = k0 / kTile;
    const Numbers known(8, 0);
    to.numbers.resize(size_t(2 * kTile * d));
    to.scales.resize(2 * kTile);
    if (int64_t(to.table.size()) <= tile) to.table.resize(size_t(tile) + 1);
    for (int64_t key = begin / kLanes * kLanes; key < end; key += kLanes) {
        const int8_t *keys = pages.keys(key), *values = pages.values(key);
        const int64_t at = key - k0, offset = key & (block - 1);
        widen(keys, to.numbers.data() + at * d, kLanes * d, known);
        widen(values, to.numbers.data() + (kTile + at) * d, kLanes * d, known);
        const float* scales = reinterpret_cast<const float*>(keys - offset * d + 2 * block * d) + offset;
        std::memcpy(to.scales.data() + at, scales, kLanes * sizeof(float));
        std::memcpy(to.scales.data() + kTile + at, scales + block, kLanes * sizeof(float));
    }
    int64_t shift = 0;
    while ((int64_t(1) << shift) < kTile) ++shift;
    return {to.numbers.data(), to.table.data(), shift, d, 0, 0};
}

// Query tokens [token, token + count) of one request and one KV head. q and out: the first token's row of the head.
template <typename T, typename C>
void attend(const Shape& shape, const Pages<C>& pages, const T* q, int64_t q_stride, int64_t head, int64_t position,
            int64_t count, int64_t length, bool more_heads, T* out, int64_t out_stride, float* lse, std::vector<float>& scratch) {
    constexpr int P = Traits<T>::kPair;
    const int64_t d = shape.head_dim, group = shape.num_heads / shape.num_kv_heads, total = count * group;
    std::vector<Row> rows(total);
    scratch.assign(size_t(total * d), 0.0f);
    std::vector<T> packed(size_t(total * d));
    for (int64_t i = 0; i < total; ++i) {
        int64_t own = position + i / group;
        int64_t end = shape.causal ? own + 1 : length;
        rows[i] = {shape.window ? std::max<int64_t>(0, own - shape.window + 1) : 0, end, kMinusInfinity, 0.0f};
        int64_t block = i / kRows * kRows, width = std::min<int64_t>(kRows, total - block);
        const T* from = q + (i / group) * q_stride + (i % group) * d;
        T* to = packed.data() + block * d + (i - block) * P;
        for (int64_t j = 0; j < d; j += P) std::memcpy(to + j * width, from + j, P * sizeof(T));
    }
    const int64_t start = rows[0].begin / kLanes * kLanes, stop = rows[total - 1].end;
    for (int64_t k0 = start / kTile * kTile; k0 < stop; k0 += kTile) {
        constexpr bool kScaled = !std::is_same_v<T, C>;
        static thread_local Widened<T> wide;
        Pages<T> here;
        Ahead<T> ahead{};
        if constexpr (kScaled) {
            here = widened(pages, k0, std::max(k0, start), std::min(k0 + kTile, stop), wide);
        } else {
            here = pages;
            ahead = {pages, kTile, stop};
            if (k0 + kTile >= stop) {  // the next head's first tile, if there is one
                ahead.offset = start / kTile * kTile - k0;
                ahead.pages.cache += pages.head_stride;
                if (!more_heads) ahead.end = 0;
            }
        }
        for (int64_t i = 0; i < total; i += kRows) {
            int width = int(std::min<int64_t>(kRows, total - i));
            int64_t begin = std::max(k0, rows[i].begin), end = std::min(k0 + kTile, rows[i + width - 1].end);
            if (begin < end)
                tile<T>(width, shape, here, kScaled ? wide.scales.data() : nullptr, packed.data() + i * d,
                        rows.data() + i, scratch.data() + i * d, k0, begin, end, ahead);
        }
    }
    for (int64_t i = 0; i < total; ++i) {
        Row row = rows[i];
        float factor = 1.0f;
        if (shape.sinks) {
            float sink = shape.sinks[head * group + i % group], high = std::max(row.max, sink);
            float terms[kLanes];
            store(terms, exp(splat(row.max) - splat(high)));
            factor = terms[0];
            store(terms, exp(splat(sink) - splat(high)));
            row = {row.begin, row.end, high, row.sum * factor + terms[0]};
        }
        V16 scale = splat(factor / row.sum);
        T* to = out + (i / group) * out_stride + (i % group) * d;
        for (int64_t j = 0; j < d; j += kLanes) store(to + j, load(scratch.data() + i * d + j) * scale);
        if (lse) lse[(i / group) * shape.num_heads + i % group] = row.max + std::log(row.sum);
    }
}

template <typename T, typename C>
void attention(const C* cache, const Step* now, const T* q, int64_t q_stride, T* out, float* lse, int64_t num_heads,
               int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int64_t window, float scale, float soft_cap,
               const float* sinks, int64_t causal) {
    const Shape shape{num_heads, num_kv_heads, head_dim, block_size, window, scale, soft_cap, sinks, causal != 0};
    const Step& step = *now;
    const int32_t* query_start = step.query_start;
    struct Task {
        int64_t request, token, count;
    };
    static thread_local std::vector<Task> tasks;
    tasks.clear();
    for (int64_t r = 0; r < step.requests; ++r)
        for (int64_t t = query_start[r]; t < query_start[r + 1]; t += kTokens)
            tasks.push_back({r, t, std::min<int64_t>(kTokens, query_start[r + 1] - t)});
    const int64_t d = shape.head_dim, group = shape.num_heads / shape.num_kv_heads;
    int64_t shift = 0;
    while ((int64_t(1) << shift) < shape.block_size) ++shift;
    const int64_t head_stride = std::is_same_v<T, C> ? 2 * shape.block_size * d : int8_head_bytes(shape.block_size, d);
    const int64_t page_stride = shape.num_kv_heads * head_stride;
    // Heads of a block lie together: one thread reads them in turn where there is work enough for all threads.
    const int64_t together = int64_t(tasks.size()) >= kManyTasks ? shape.num_kv_heads : 1;
    const int64_t count = int64_t(tasks.size()) * shape.num_kv_heads / together;
    const Task* list = tasks.data();  // every thread makes the same list for itself
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < count; ++i) {
        static thread_local std::vector<float> scratch;
        const int64_t first = i * together;
        const Task& task = list[first / shape.num_kv_heads];
        const int64_t r = task.request, position = step.lengths[r] - (query_start[r + 1] - task.token);
        for (int64_t head = first % shape.num_kv_heads, left = together; left > 0; ++head, --left) {
            Pages<C> pages{cache + head * head_stride, step.tables + r * step.table_stride, shift, d,
                           head_stride, page_stride};
            const int64_t column = head * group;
            attend<T, C>(shape, pages, q + task.token * q_stride + column * d, q_stride, head, position, task.count,
                      step.lengths[r], left > 1, out + (task.token * shape.num_heads + column) * d, shape.num_heads * d,
                      lse ? lse + task.token * shape.num_heads + column : nullptr, scratch);
        }
    }
}

}  // namespace
}  // namespace headrace

HR_KERNEL(attention_int8_bf16, headrace::attention<headrace::bf16, int8_t>)
HR_KERNEL(attention_int8_f32, headrace::attention<float, int8_t>)
HR_KERNEL(attention_bf16, headrace::attention<headrace::bf16, headrace::bf16>)
HR_KERNEL(attention_f32, headrace::attention<float, float>)
