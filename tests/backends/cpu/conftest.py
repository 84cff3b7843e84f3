"""A cache folder of the test's own, and a kernel small enough to compile in a tenth of a second."""

from __future__ import annotations

from pathlib import Path

import pytest

KERNEL = """
#include <cstdint>
#include "scale.h"
#if HEADRACE_TIER_AVX2 || HEADRACE_TIER_AVX512 || HEADRACE_TIER_AMX
#include <immintrin.h>
#endif

// Compiled for every tier with that tier's own registers.
extern "C" void scale_add(const float* x, float* y, int64_t n) {
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++) y[i] += SCALE * x[i];
}

#if HEADRACE_TIER_AVX512 || HEADRACE_TIER_AMX
extern "C" void dot(float* out, const void* x, const void* y) {
    __m512bh a = (__m512bh)_mm512_loadu_si512(x), b = (__m512bh)_mm512_loadu_si512(y);
    _mm512_storeu_ps(out, _mm512_dpbf16_ps(_mm512_setzero_ps(), a, b));
}
#endif
#if HEADRACE_TIER_AMX
extern "C" void tiles(void* out) {
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, out, 64);
}
#endif
#if HEADRACE_TIER_AVX2
extern "C" void halves(const float* x, void* y) {
    _mm_storeu_si128((__m128i*)y, _mm256_cvtps_ph(_mm256_loadu_ps(x), 0));
}
#endif
"""

THREADS = """
extern "C" int count_threads() {
    int n = 0;
#pragma omp parallel
    {
#pragma omp atomic
        n += 1;
    }
    return n;
}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; nothing else of the environment says how kernels are built."""
    for name in ("HEADRACE_CPU_ISA", "HEADRACE_KERNELS", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def kernel(tmp_path: Path, cache: Path) -> tuple[list[Path], list[Path]]:
    """Sources and headers, to be compiled into a cache folder of their own."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "scale.cpp").write_text(KERNEL)
    (folder / "threads.cpp").write_text(THREADS)
    (folder / "scale.h").write_text("#define SCALE 2.0f\n")
    return [folder / "scale.cpp", folder / "threads.cpp"], [folder / "scale.h"]
