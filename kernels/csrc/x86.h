// x86 with AVX2 and FMA: vectors of 8 words, 16 registers; with AVX-512 (F, BW, VL) vectors of 16 words, 32 registers.
// VNNI and BF16 instructions are used where the target has them.
#pragma once

#include <immintrin.h>

namespace eagle {

#ifdef __AVX512F__
#define OP(name) _mm512_##name
typedef __m512i Register;
typedef __m512 FloatRegister;
typedef __m256i Half;
typedef __m128i Quarter;
inline Half load_half(const void* from) { return _mm256_loadu_si256((const Half*)from); }
inline Quarter load_quarter(const void* from) { return _mm_loadu_si128((const Quarter*)from); }
inline Words load_quarters(const void* from) { return (Words)_mm512_broadcast_i64x4(load_half(from)); }
constexpr int ROWS = 12;  // rows per load of the weights; their 24 sums stay in registers

inline Floats floats_of_e2m1(Words codes) {
  return (Floats)_mm512_permutexvar_epi32((Register)codes, _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_half(E2M1)), 16));
}
inline void store_shorts(void* to, Words x) { _mm256_storeu_si256((Half*)to, _mm512_cvtepi32_epi16((Register)x)); }
inline void store_bytes(void* to, Ints x) { _mm_storeu_si128((Quarter*)to, _mm512_cvtepi32_epi8((Register)x)); }
inline int32_t largest_lane(Ints x) { return _mm512_reduce_max_epi32((Register)x); }
inline int32_t sum_of_lanes(Ints x) { return _mm512_reduce_add_epi32((Register)x); }
#else
#define OP(name) _mm256_##name
typedef __m256i Register;
typedef __m256 FloatRegister;
typedef __m128i Half;
inline Half load_half(const void* from) { return _mm_loadu_si128((const Half*)from); }
inline Half load_quarter(const void* from) { return _mm_loadl_epi64((const Half*)from); }
inline Words load_quarters(const void* from) { return (Words)_mm256_broadcastsi128_si256(load_half(from)); }
constexpr int ROWS = 6;  // rows per load of the weights; their 12 sums stay in registers

inline Floats floats_of_e2m1(Words codes) {  // the sign is bit 3
  const Register sizes = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(E2M1)), 16);
  return (Floats)((Words)_mm256_permutevar8x32_epi32(sizes, (Register)codes) ^ ((codes & 8u) << 28));
}
// Pack the low halves of eight words. packus works on each half of the register.
inline Half low_halves(Register x) {
  x = _mm256_and_si256(x, _mm256_set1_epi32(0xFFFF));
  return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}
inline void store_shorts(void* to, Words x) { _mm_storeu_si128((Half*)to, low_halves((Register)x)); }
inline void store_bytes(void* to, Ints x) {
  const Half shorts = _mm_and_si128(low_halves((Register)x), _mm_set1_epi16(0xFF));
  _mm_storel_epi64((Half*)to, _mm_packus_epi16(shorts, shorts));
}
template <class Combine>
inline int32_t combined_lanes(Ints x, const Combine& combine) {
  Half y = combine(_mm256_castsi256_si128((Register)x), _mm256_extracti128_si256((Register)x, 1));
  y = combine(y, _mm_shuffle_epi32(y, 0x4E));
  return _mm_cvtsi128_si32(combine(y, _mm_shuffle_epi32(y, 0xB1)));
}
inline int32_t largest_lane(Ints x) {
  return combined_lanes(x, [](Half a, Half b) { return _mm_max_epi32(a, b); });
}
inline int32_t sum_of_lanes(Ints x) {
  return combined_lanes(x, [](Half a, Half b) { return _mm_add_epi32(a, b); });
}
#endif

constexpr int VECTORS = 2;  // of a block's columns

inline Floats fma(Floats a, Floats b, Floats c) {
  return (Floats)OP(fmadd_ps)((FloatRegister)a, (FloatRegister)b, (FloatRegister)c);
}
inline Ints ints_of_bytes(const void* from) { return (Ints)OP(cvtepi8_epi32)(load_quarter(from)); }
inline Floats floats_of_bytes(const void* from) { return to_floats(ints_of_bytes(from)); }
inline Words words_of_bytes(const void* from) { return (Words)OP(cvtepu8_epi32)(load_quarter(from)); }
inline Words words_of_shorts(const void* from) { return (Words)OP(cvtepu16_epi32)(load_half(from)); }

#ifdef __AVX512BF16__
#define BF16_DOT 1
inline Floats dot_bf16(Floats sum, Words a, Words b) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
// See vectors.h; flushes denormals to 0.
#define BF16_STORE 1
inline void store_bf16(void* to, Floats x) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
}
// 2 * LANES bytes -> pairs of bfloat16 (exact).
inline Words pairs_of_bytes(const char* from) {
  return (Words)_mm512_cvtne2ps_pbh((__m512)floats_of_bytes(from + LANES), (__m512)floats_of_bytes(from));
}
// 2 * LANES bytes of two e2m1 codes -> pairs of bfloat16 of the low codes and of the high ones.
inline void pairs_of_e2m1(const char* from, Words& low, Words& high) {
  const __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)E2M1));
  const __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from));
  low = (Words)_mm512_permutexvar_epi16(_mm512_and_si512(both, _mm512_set1_epi16(15)), table);
  high = (Words)_mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table);
}
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int BYTES_PER_WORD = 4, BYTE_OFFSET = 128;
inline Words load_weight_bytes(const void* from) { return load<Words>(from); }
inline Ints dot_bytes(Ints sum, Words weights, Words values) {
#ifdef __AVX512VNNI__
  return (Ints)_mm512_dpbusd_epi32((Register)sum, (Register)weights, (Register)values);
#else
  return (Ints)_mm256_dpbusd_avx_epi32((Register)sum, (Register)weights, (Register)values);
#endif
}
#else
// Without VNNI: pairs of 16-bit values, as products of bytes could overflow.
constexpr int BYTES_PER_WORD = 2, BYTE_OFFSET = 0;
inline Words load_weight_bytes(const void* from) { return (Words)OP(cvtepi8_epi16)(load_half(from)); }
inline Ints dot_bytes(Ints sum, Words weights, Words values) {
  return sum + (Ints)OP(madd_epi16)((Register)weights, (Register)values);
}
// Products of unsigned and signed bytes are added in pairs in 16 bits.
#define SUMS_IN_SHORTS
inline Words add_shorts(Words shorts, Words weights, Words values) {
  const Register products = OP(maddubs_epi16)((Register)weights, (Register)values);
  // With an operator, GCC would compute all products first and spill them.
  asm("vpaddw %1, %0, %0" : "+v"(shorts) : "v"(products));
  return shorts;
}
inline Ints dot_shorts(Words a, Ints b) { return (Ints)OP(madd_epi16)((Register)a, (Register)b); }
#endif
constexpr int NIBBLES_PER_WORD = 4;

#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && !defined(TILES)  // the second in Clang before 16
#define TILES "amx.h"  // a test emulates these instructions
#endif

}  // namespace eagle
