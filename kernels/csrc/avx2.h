// AVX2 with FMA: vectors of 8 words in 16 registers; with AVX-VNNI where the processor has it.
#pragma once

#include <immintrin.h>

namespace eagle {

constexpr int VECTORS = 2;  // of a block's columns side by side
constexpr int ROWS = 6;     // that share one load of the weights: their 12 sums stay in registers

inline Floats fma(Floats a, Floats b, Floats c) {
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
inline __m128i load_half(const void* from) { return _mm_loadl_epi64((const __m128i*)from); }
inline Floats floats_of_bytes(const void* from) {
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_half(from)));
}
inline Words words_of_bytes(const void* from) { return (Words)_mm256_cvtepu8_epi32(load_half(from)); }
inline Words words_of_shorts(const void* from) {
  return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
}
inline Floats floats_of_e2m1(Words codes) {  // the sign is bit 3
  const __m256i sizes = (__m256i)(words_of_shorts(E2M1) << 16);
  return (Floats)((Words)_mm256_permutevar8x32_epi32(sizes, (__m256i)codes) ^ ((codes & 8u) << 28));
}
// The low halves of eight words, packed: packus takes each half of the register by itself.
inline __m128i low_halves(__m256i x) {
  x = _mm256_and_si256(x, _mm256_set1_epi32(0xFFFF));
  return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}
inline void store_shorts(void* to, Words x) { _mm_storeu_si128((__m128i*)to, low_halves((__m256i)x)); }
inline void store_bytes(void* to, Ints x) {
  const __m128i shorts = _mm_and_si128(low_halves((__m256i)x), _mm_set1_epi16(0xFF));
  _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(shorts, shorts));
}
inline int32_t largest_lane(Ints x) {
  __m128i y = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xB1)));
}
inline int32_t sum_of_lanes(Ints x) {
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xB1)));
}

#ifdef __AVXVNNI__
constexpr int BYTES_PER_WORD = 4, BYTE_OFFSET = 128;
inline Words load_weight_bytes(const void* from) { return load<Words>(from); }
inline Ints dot_bytes(Ints sum, Words weights, Words values) {
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)values);
}
#else
// Without a product of bytes: pairs of 16-bit values, which cannot overflow, as the product of bytes can.
constexpr int BYTES_PER_WORD = 2, BYTE_OFFSET = 0;
inline Words load_weight_bytes(const void* from) {
  return (Words)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
}
inline Ints dot_bytes(Ints sum, Words weights, Words values) {
  return sum + (Ints)_mm256_madd_epi16((__m256i)weights, (__m256i)values);
}
// Pairs of products of four bits with a byte are added up in 16 bits, as many as cannot overflow: 8 * 2 * 15 * 128.
#define SHORT_SUMS 8
inline Words add_nibbles(Words shorts, Words nibbles, Words values) {
  const __m256i products = _mm256_maddubs_epi16((__m256i)nibbles, (__m256i)values);
  // As an operator, GCC multiplies all before it adds any, and keeps the products in memory.
  asm("vpaddw %1, %0, %0" : "+x"(shorts) : "x"(products));
  return shorts;
}
inline Ints sums_of_pairs(Words shorts) {
  return (Ints)_mm256_madd_epi16((__m256i)shorts, _mm256_set1_epi16(1));
}
#endif
constexpr int NIBBLES_PER_WORD = 4;

}  // namespace eagle
