// Tiles of the CPU (AMX): their shape, and turning a block of numbers around for them.
#pragma once

#include <immintrin.h>

#include <cstdint>

// Eight tiles of 16 rows x 64 bytes. torch's matrix library keeps its own shapes from call to call, so they come back.
class Tiles {
   public:
    Tiles() {
        _tile_storeconfig(before_);
        alignas(64) uint8_t config[64] = {1};
        for (int tile = 0; tile < 8; tile++) config[16 + 2 * tile] = 64, config[48 + tile] = 16;
        _tile_loadconfig(config);
    }
    ~Tiles() {
        if (before_[0])
            _tile_loadconfig(before_);
        else
            _tile_release();
    }

   private:
    alignas(64) uint8_t before_[64];
};

// Rows become columns: 16 x 16 words of 32 bits.
inline __attribute__((always_inline)) void transpose(__m512i (&x)[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88);
            y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        x[j] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0x88);
        x[j + 8] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0xdd);
    }
}
