// Products by AMX tiles: up to 32 rows and one panel of 32 outputs at a time, 32 inputs a step.
//
// Tiles: 0 to 3 hold sums (two of rows, two of outputs), 4 and 5 rows of x, 6 and 7 weights. A row's sums do not depend
// on how many rows its tile has.
#pragma once

#include <immintrin.h>

#include "linear.h"

namespace headrace {
namespace {

struct Tiles {
    static constexpr int kTileRows = 16, kRows = 32, kStep = 32;

    struct alignas(64) Configuration {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    };

    static void begin() { configured() = -1; }
    static void end() { _tile_release(); }

    template <typename Finish, typename Y>
    static void run(int rows, const bf16* x, int64_t ldx, const bf16* w, int64_t k, const float* bias, Y* y, int64_t ld,
                    int columns) {
        int upper = rows < kTileRows ? rows : kTileRows, lower = rows - upper;
        configure(upper, lower);
        alignas(64) float sums[kRows][kPanel];
        if (lower > 0)
            two(x, ldx, w, k, sums);
        else
            one(x, ldx, w, k, sums);
        for (int r = 0; r < rows; ++r)
            Finish::finish(load(sums[r]), load(sums[r] + kLanes), bias, y + r * ld, columns);
    }

    // Loading a configuration costs as much as several products: only where it changes.
    static void configure(int upper, int lower) {
        int& loaded = configured();
        if (loaded == upper * 64 + lower) return;
        Configuration next;
        for (int tile = 0; tile < 8; ++tile) next.bytes[tile] = 64;
        int low = lower > 0 ? lower : 1;
        uint8_t tile_rows[8] = {uint8_t(upper), uint8_t(upper), uint8_t(low), uint8_t(low),
                                uint8_t(upper), uint8_t(low),   16,           16};
        std::memcpy(next.rows, tile_rows, sizeof tile_rows);
        _tile_loadconfig(&next);
        loaded = upper * 64 + lower;
    }

    // What this thread's tiles are configured for; -1: nothing.
    static int& configured() {
        static thread_local int rows = -1;
        return rows;
    }

    static HR_INLINE void ask(const bf16* w) {
        for (int line = 0; line < 2 * kTileRows; ++line) prefetch(w + (kAhead + line * 64) / int64_t(sizeof(bf16)));
    }

    static void one(const bf16* x, int64_t ldx, const bf16* w, int64_t k, float (&sums)[kRows][kPanel]) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t i = 0; i < k; i += kStep) {
            ask(w + i * kPanel);
            _tile_loadd(4, x + i, ldx * int64_t(sizeof(bf16)));
            _tile_loadd(6, w + i * kPanel, 2 * 64);
            _tile_loadd(7, w + i * kPanel + 2 * kLanes, 2 * 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, sums[0], kPanel * sizeof(float));
        _tile_stored(1, sums[0] + kLanes, kPanel * sizeof(float));
    }

    static void two(const bf16* x, int64_t ldx, const bf16* w, int64_t k, float (&sums)[kRows][kPanel]) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < k; i += kStep) {
            ask(w + i * kPanel);
            _tile_loadd(6, w + i * kPanel, 2 * 64);
            _tile_loadd(7, w + i * kPanel + 2 * kLanes, 2 * 64);
            _tile_loadd(4, x + i, ldx * int64_t(sizeof(bf16)));
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, x + kTileRows * ldx + i, ldx * int64_t(sizeof(bf16)));
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums[0], kPanel * sizeof(float));
        _tile_stored(1, sums[0] + kLanes, kPanel * sizeof(float));
        _tile_stored(2, sums[kTileRows], kPanel * sizeof(float));
        _tile_stored(3, sums[kTileRows] + kLanes, kPanel * sizeof(float));
    }
};

}  // namespace
}  // namespace headrace
