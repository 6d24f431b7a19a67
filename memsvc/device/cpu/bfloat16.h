// Sixteen bfloat16 numbers at a time, as float32 in one register.
#pragma once

#include <immintrin.h>

#include <cstdint>

using bf16 = uint16_t;

inline __mmask16 first_lanes(int64_t num) {
    return num >= 16 ? 0xffff : static_cast<__mmask16>((1u << num) - 1);
}

inline __m512 widen(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

inline __m512 load(const bf16 *at, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, at)); }

// The bits of x with the upper half rounded: ties to even and tiny values kept, as torch does; the instruction for it
// takes tiny values for zero. NaN stays NaN: made from bfloat16, it has nothing below to carry over.
inline __m512i rounded(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}

inline __m512 through_bf16(__m512 x) {
    return _mm512_castsi512_ps(_mm512_and_si512(rounded(x), _mm512_set1_epi32(0xffff0000)));
}

inline void store(bf16 *at, __mmask16 mask, __m512 x) {
    _mm256_mask_storeu_epi16(at, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(x), 16)));
}
