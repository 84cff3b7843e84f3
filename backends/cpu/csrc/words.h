// How kernels are called: by themselves, or by a recorded pass, one after the other.
//
// A kernel's body is run by all threads of a team and shares its loops among them (`omp for`, whose end is a barrier).
// HR_KERNEL makes of a body
//     hr_NAME        a function with the body's arguments; it brings the team,
//     hr_NAME_words  one with an array of words; a team that is there already calls it.
// Both names are of pointers, so that arguments need not be spelled again.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "simd.h"

namespace headrace {

union Word {
    int64_t number;
    void* address;
    float real;
};

template <typename T>
HR_INLINE T read(const Word& word) {
    if constexpr (std::is_pointer_v<T>)
        return static_cast<T>(word.address);
    else if constexpr (std::is_floating_point_v<T>)
        return T(word.real);
    else
        return T(word.number);
}

template <auto Body>
struct Kernel;

template <typename... Arguments, void (*Body)(Arguments...)>
struct Kernel<Body> {
    static void run(Arguments... arguments) {
#pragma omp parallel
        Body(arguments...);
    }

    static void by_words(const Word* words) { by_words(words, std::index_sequence_for<Arguments...>{}); }

    template <size_t... Index>
    static HR_INLINE void by_words(const Word* words, std::index_sequence<Index...>) {
        Body(read<Arguments>(words[Index])...);
    }
};

}  // namespace headrace

#define HR_KERNEL(name, ...)                                                                    \
    HR_API void* const hr_##name = reinterpret_cast<void*>(&headrace::Kernel<&__VA_ARGS__>::run); \
    HR_API void* const hr_##name##_words =                                                      \
        reinterpret_cast<void*>(static_cast<void (*)(const headrace::Word*)>(&headrace::Kernel<&__VA_ARGS__>::by_words));
