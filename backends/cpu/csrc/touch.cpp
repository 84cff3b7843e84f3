// Memory is taken from the system when it is first written: this does so by all threads at once, and changes nothing.

#include "simd.h"

HR_API void hr_touch(char* const* begins, int64_t count, int64_t bytes) {
    constexpr int64_t kPage = 4096;
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < count; ++i)
        for (int64_t at = 0; at < bytes; at += kPage) {
            // A byte that is not 0 was written already.
            char nothing = 0;
            __atomic_compare_exchange_n(begins[i] + at, &nothing, char(0), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
        }
}
