// Activations of gated feed-forwards.
#pragma once

#include "simd.h"

namespace headrace {

HR_INLINE V16 silu(V16 x) { return x / (splat(1.0f) + exp(min(zero() - x, splat(88.0f)))); }

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
HR_INLINE V16 gelu_tanh(V16 x) {
    V16 inner = x * fma(splat(0.044715f) * x, x, splat(1.0f)) * splat(0.7978845608f);
    return splat(0.5f) * x * (splat(1.0f) + tanh(inner));
}

}  // namespace headrace
