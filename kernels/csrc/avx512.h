// AVX-512 (F, BW, VL): vectors of 16 words in 32 registers; with VNNI and BF16 where the processor has them.
#pragma once

#include <immintrin.h>

namespace eagle {

constexpr int VECTORS = 2;  // of a block's columns side by side
constexpr int ROWS = 12;    // that share one load of the weights: their 24 sums stay in registers

inline Floats fma(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
inline Floats floats_of_bytes(const void* from) {
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
inline Words words_of_bytes(const void* from) {
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
}
inline Words words_of_shorts(const void* from) {
  return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
}
inline Floats floats_of_e2m1(Words codes) {
  return (Floats)_mm512_permutexvar_epi32((__m512i)codes, (__m512i)(words_of_shorts(E2M1) << 16));
}
inline void store_shorts(void* to, Words x) {
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)x));
}
inline void store_bytes(void* to, Ints x) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x)); }
inline int32_t largest_lane(Ints x) { return _mm512_reduce_max_epi32((__m512i)x); }
inline int32_t sum_of_lanes(Ints x) { return _mm512_reduce_add_epi32((__m512i)x); }

#ifdef __AVX512BF16__
#define BF16_DOT 1
inline Floats dot_bf16(Floats sum, Words a, Words b) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
// As in vectors.h, but that numbers below the exponents of floats become 0.
#define BF16_STORE 1
inline void store_bf16(void* to, Floats x) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
}
// 2 * LANES bytes -> pairs of bfloat16, in which a byte is exact.
inline Words pairs_of_bytes(const char* from) {
  return (Words)_mm512_cvtne2ps_pbh((__m512)floats_of_bytes(from + LANES), (__m512)floats_of_bytes(from));
}
// 2 * LANES bytes of four and four bits -> pairs of the values [16] that the low ones and the high ones stand for.
inline void pairs_of_nibbles(const uint16_t* values, const char* from, Words& low, Words& high) {
  const __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)values));
  const __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from));
  low = (Words)_mm512_permutexvar_epi16(_mm512_and_si512(both, _mm512_set1_epi16(15)), table);
  high = (Words)_mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table);
}
#endif

#ifdef __AVX512VNNI__
constexpr int BYTES_PER_WORD = 4, BYTE_OFFSET = 128;
inline Words load_weight_bytes(const void* from) { return load<Words>(from); }
inline Ints dot_bytes(Ints sum, Words weights, Words values) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)values);
}
#else
constexpr int BYTES_PER_WORD = 2, BYTE_OFFSET = 0;
inline Words load_weight_bytes(const void* from) {
  return (Words)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
}
inline Ints dot_bytes(Ints sum, Words weights, Words values) {
  return sum + (Ints)_mm512_madd_epi16((__m512i)weights, (__m512i)values);
}
// Pairs of products of four bits with a byte are added up in 16 bits, as many as cannot overflow: 8 * 2 * 15 * 128.
#define SHORT_SUMS 8
inline Words add_nibbles(Words shorts, Words nibbles, Words values) {
  const __m512i products = _mm512_maddubs_epi16((__m512i)nibbles, (__m512i)values);
  // As an operator, GCC multiplies all before it adds any, and keeps the products in memory.
  asm("vpaddw %1, %0, %0" : "+v"(shorts) : "v"(products));
  return shorts;
}
inline Ints sums_of_pairs(Words shorts) {
  return (Ints)_mm512_madd_epi16((__m512i)shorts, _mm512_set1_epi16(1));
}
#endif
constexpr int NIBBLES_PER_WORD = 4;

#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && !defined(TILES)  // the second is Clang's until 15
#define TILES "amx.h"  // a test has these few instructions in software instead
#endif

}  // namespace eagle
