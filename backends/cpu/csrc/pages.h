// Where K and V of a step lie.
//
// A page holds one block of B tokens: for each KV head its K as [B / 16][D / P][16][P], then its V as [B / P][D][P]
// (P = 2 for bf16, 1 for float), so that one instruction serves 16 keys, or 16 numbers of a head, without a reduction.
#pragma once

#include <cstdint>

namespace headrace {

// A step of one KV group. Kernels read it when they run: a recorded pass is given the next step by changing it.
struct Step {
    const int32_t* query_start;  // [requests + 1]
    const int32_t* lengths;      // [requests]: tokens with K and V after this step
    const int32_t* tables;       // [requests, table_stride]
    const int64_t* slots;        // [tokens]
    int64_t table_stride, requests, tokens;
};

// One head's pages of one request. Blocks have a power of two of tokens: a division a page would cost as much as its keys.
template <typename T>
struct Pages {
    const T* cache;
    const int32_t* table;
    int64_t shift, head_dim, head_stride, page_stride;
    const T* keys(int64_t position) const {
        return cache + table[position >> shift] * page_stride + (position & ((int64_t(1) << shift) - 1)) * head_dim;
    }
    const T* values(int64_t position) const { return keys(position) + (head_dim << shift); }
    int64_t block_end(int64_t position) const { return ((position >> shift) + 1) << shift; }
};

}  // namespace headrace
