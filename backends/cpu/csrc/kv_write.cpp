// K and V of new tokens, into pages (pages.h).
#include "kv_int8.h"
#include "linear.h"
#include "pages.h"
#include "words.h"

namespace headrace {
namespace {

// k, v [tokens, heads, d], their rows some elements apart, go to slots of the cache.
template <typename T>
void kv_write(T* cache, const Step* now, const T* k, int64_t k_stride, const T* v, int64_t v_stride,
           int64_t heads, int64_t d, int64_t block_size) {
    constexpr int P = Traits<T>::kPair;
    const Step& step = *now;
    const int64_t head_stride = 2 * block_size * d;
#pragma omp for
    for (int64_t t = 0; t < step.tokens; ++t) {
        int64_t offset = step.slots[t] % block_size;
        T* page = cache + step.slots[t] / block_size * heads * head_stride;
        for (int64_t h = 0; h < heads; ++h) {
            T* keys = page + h * head_stride + offset / kLanes * kLanes * d + offset % kLanes * P;
            T* values = page + h * head_stride + block_size * d + offset / P * P * d + offset % P;
            const T* from_k = k + t * k_stride + h * d;
            const T* from_v = v + t * v_stride + h * d;
            for (int64_t j = 0; j < d; j += P) std::memcpy(keys + j * kLanes, from_k + j, P * sizeof(T));
            for (int64_t j = 0; j < d; ++j) values[j * P] = from_v[j];
        }
    }
}

// The same into pages of whole numbers.
template <typename T>
void kv_write_int8(int8_t* cache, const Step* now, const T* k, int64_t k_stride, const T* v, int64_t v_stride,
                   int64_t heads, int64_t d, int64_t block_size) {
    constexpr int P = Traits<T>::kPair;
    const Step& step = *now;
    const int64_t head_bytes = int8_head_bytes(block_size, d);
#pragma omp for
    for (int64_t t = 0; t < step.tokens; ++t) {
        const int64_t offset = step.slots[t] % block_size;
        for (int64_t h = 0; h < heads; ++h) {
            int8_t* page = cache + (step.slots[t] / block_size * heads + h) * head_bytes;
            int8_t* keys = page + offset / kLanes * kLanes * d + offset % kLanes * P;
            int8_t* values = page + block_size * d + offset / P * P * d + offset % P;
            float* scales = reinterpret_cast<float*>(page + 2 * block_size * d) + offset;
            scales[0] = round_row<P>(k + t * k_stride + h * d, d, keys, kLanes * P);
            scales[block_size] = round_row<1>(v + t * v_stride + h * d, d, values, P);
        }
    }
}

}  // namespace
}  // namespace headrace

HR_KERNEL(kv_write_bf16, headrace::kv_write<headrace::bf16>)
HR_KERNEL(kv_write_f32, headrace::kv_write<float>)
HR_KERNEL(kv_write_int8_bf16, headrace::kv_write_int8<headrace::bf16>)
HR_KERNEL(kv_write_int8_f32, headrace::kv_write_int8<float>)
