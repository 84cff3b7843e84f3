#include <algorithm>

#include "linear.h"
#include "words.h"

namespace headrace {
namespace {

constexpr int64_t kColumns = 128;

// w [n, k] -> packed, see linear.h; K is padded to `padded`.
template <typename T>
void pack(const T* w, int64_t n, int64_t k, int64_t padded, T* packed) {
    constexpr int P = Traits<T>::kPair;
    int64_t panels = (n + kPanel - 1) / kPanel;
#pragma omp for
    for (int64_t p = 0; p < panels; ++p) {
        T* out = packed + p * padded * kPanel;
        int64_t rows = std::min<int64_t>(kPanel, n - p * kPanel), whole = k / P * P;
        if (rows < kPanel || k < padded) std::memset(out, 0, size_t(padded * kPanel) * sizeof(T));
        // A few columns at a time: what is written then stays in the first-level cache until its lines are full.
        for (int64_t begin = 0; begin < k; begin += kColumns)
            for (int64_t o = 0; o < rows; ++o) {
                const T* row = w + (p * kPanel + o) * k;
                for (int64_t i = begin; i < std::min(begin + kColumns, whole); i += P)
                    std::memcpy(out + i * kPanel + o * P, row + i, P * sizeof(T));
                if (whole < k && begin + kColumns >= k) out[whole * kPanel + o * P] = row[whole];
            }
    }
}

// Rows `ids` of a packed weight -> out [count, k].
template <typename T>
void unpack_rows(const int64_t* ids, int64_t count, const T* packed, int64_t k, int64_t padded, T* out) {
    constexpr int P = Traits<T>::kPair;
#pragma omp for
    for (int64_t i = 0; i < count; ++i) {
        const T* row = packed + (ids[i] / kPanel) * padded * kPanel + (ids[i] % kPanel) * P;
        for (int64_t j = 0; j < k; ++j) out[i * k + j] = row[(j / P) * kPanel * P + j % P];
    }
}

}  // namespace
}  // namespace headrace

HR_KERNEL(pack_bf16, headrace::pack<headrace::bf16>)
HR_KERNEL(pack_f32, headrace::pack<float>)
HR_KERNEL(rows_bf16, headrace::unpack_rows<headrace::bf16>)
HR_KERNEL(rows_f32, headrace::unpack_rows<float>)
