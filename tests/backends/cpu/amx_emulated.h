// AMX tiles in plain C++, so that the AMX kernels' own logic is tested on machines without them. Sums are in order
// of k, in float; the hardware's last bits may differ.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_zero
#undef _tile_loadconfig
#undef _tile_release

struct EmulatedTiles {
    uint16_t bytes[8];
    uint8_t rows[8];
    uint8_t data[8][1024];
};

inline EmulatedTiles& emulated_tiles() {
    static thread_local EmulatedTiles tiles = {};
    return tiles;
}

inline void emulated_loadconfig(const void* from) {
    const uint8_t* bytes = static_cast<const uint8_t*>(from);
    EmulatedTiles& tiles = emulated_tiles();
    std::memcpy(tiles.bytes, bytes + 16, sizeof tiles.bytes);
    std::memcpy(tiles.rows, bytes + 48, sizeof tiles.rows);
}
inline void emulated_release() { std::memset(&emulated_tiles(), 0, sizeof(EmulatedTiles)); }
inline void emulated_zero(int tile) { std::memset(emulated_tiles().data[tile], 0, 1024); }
inline void emulated_loadd(int tile, const void* from, int64_t stride) {
    EmulatedTiles& tiles = emulated_tiles();
    for (int r = 0; r < tiles.rows[tile]; ++r)
        std::memcpy(tiles.data[tile] + r * 64, static_cast<const char*>(from) + r * stride, tiles.bytes[tile]);
}
inline void emulated_stored(int tile, void* to, int64_t stride) {
    EmulatedTiles& tiles = emulated_tiles();
    for (int r = 0; r < tiles.rows[tile]; ++r)
        std::memcpy(static_cast<char*>(to) + r * stride, tiles.data[tile] + r * 64, tiles.bytes[tile]);
}
inline float emulated_bf16(const uint8_t* at) {
    uint16_t half;
    std::memcpy(&half, at, 2);
    uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline void emulated_dpbf16ps(int sums, int a, int b) {
    EmulatedTiles& tiles = emulated_tiles();
    for (int r = 0; r < tiles.rows[sums]; ++r)
        for (int k = 0; k < tiles.bytes[a] / 4; ++k)
            for (int n = 0; n < tiles.bytes[sums] / 4; ++n) {
                float value;
                std::memcpy(&value, tiles.data[sums] + r * 64 + n * 4, 4);
                for (int pair = 0; pair < 2; ++pair)
                    value += emulated_bf16(tiles.data[a] + r * 64 + k * 4 + pair * 2) *
                             emulated_bf16(tiles.data[b] + k * 64 + n * 4 + pair * 2);
                std::memcpy(tiles.data[sums] + r * 64 + n * 4, &value, 4);
            }
}

#define _tile_loadconfig(from) emulated_loadconfig(from)
#define _tile_release() emulated_release()
#define _tile_zero(tile) emulated_zero(tile)
#define _tile_loadd(tile, from, stride) emulated_loadd(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_stored(tile, to, stride)
#define _tile_dpbf16ps(sums, a, b) emulated_dpbf16ps(sums, a, b)
