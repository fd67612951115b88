// aarch64: vectors of 4 words, 32 registers. DotProd, BF16 and I8MM instructions are used where the target has them.
#pragma once

#include <arm_neon.h>

namespace eagle {

constexpr int VECTORS = 4;  // of a block's columns
constexpr int ROWS = 6;     // rows per load of the weights; their 24 sums stay in registers

inline Floats fma(Floats a, Floats b, Floats c) {
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
inline int8x8_t load_four(const void* from) {
  int32_t bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return vreinterpret_s8_s32(vdup_n_s32(bytes));
}
inline Ints ints_of_bytes(const void* from) { return (Ints)vmovl_s16(vget_low_s16(vmovl_s8(load_four(from)))); }
inline Floats floats_of_bytes(const void* from) { return to_floats(ints_of_bytes(from)); }
inline Words words_of_bytes(const void* from) {
  return (Words)vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_s8(load_four(from)))));
}
inline Words words_of_shorts(const void* from) {
  return (Words)vmovl_u16(vld1_u16(static_cast<const uint16_t*>(from)));
}
// Look up both bytes of a value in the upper half of its word; the lower half is 0.
inline Floats floats_of_e2m1(Words codes) {
  const auto* table = (const uint8_t*)E2M1;
  const uint8x16x2_t bytes = {{vld1q_u8(table), vld1q_u8(table + 16)}};
  return (Floats)vqtbl2q_u8(bytes, (uint8x16_t)(codes * 0x02020000u + 0x0100FFFFu));
}
inline void store_shorts(void* to, Words x) {
  vst1_u16(static_cast<uint16_t*>(to), vmovn_u32((uint32x4_t)x));
}
inline void store_bytes(void* to, Ints x) {
  const int16x4_t shorts = vmovn_s32((int32x4_t)x);
  const int32_t bytes = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(shorts, shorts))), 0);
  std::memcpy(to, &bytes, sizeof bytes);
}
inline int32_t largest_lane(Ints x) { return vmaxvq_s32((int32x4_t)x); }
inline int32_t sum_of_lanes(Ints x) { return vaddvq_s32((int32x4_t)x); }

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define BF16_DOT 1
inline Floats dot_bf16(Floats sum, Words a, Words b) {
  return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
// Bytes -> pairs of bfloat16 (exact): the upper halves of floats.
inline Words pairs_of(int8x8_t bytes) {
  const int16x8_t shorts = vmovl_s8(bytes);
  const float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(shorts)));
  const float32x4_t high = vcvtq_f32_s32(vmovl_high_s16(shorts));
  return (Words)vuzp2q_u16((uint16x8_t)low, (uint16x8_t)high);
}
// 2 * LANES bytes -> pairs.
inline Words pairs_of_bytes(const char* from) { return pairs_of(vld1_s8((const int8_t*)from)); }
// 2 * LANES bytes of two e2m1 codes -> pairs of bfloat16 of the low codes and of the high ones.
inline void pairs_of_e2m1(const char* from, Words& low, Words& high) {
  const uint8x16x2_t table = vld2q_u8((const uint8_t*)E2M1);  // low bytes, high bytes
  const auto pairs = [&](uint8x8_t codes) {
    const uint8x8x2_t both = vzip_u8(vqtbl1_u8(table.val[0], codes), vqtbl1_u8(table.val[1], codes));
    return (Words)vcombine_u8(both.val[0], both.val[1]);
  };
  const uint8x8_t both = vld1_u8((const uint8_t*)from);
  low = pairs(vand_u8(both, vdup_n_u8(15))), high = pairs(vshr_n_u8(both, 4));
}
#endif

constexpr int BYTE_OFFSET = 0;
#ifdef __ARM_FEATURE_DOTPROD
constexpr int BYTES_PER_WORD = 4;
inline Words load_weight_bytes(const void* from) { return load<Words>(from); }
inline Ints dot_bytes(Ints sum, Words weights, Words values) {
  return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, (int8x16_t)values);
}
#else
constexpr int BYTES_PER_WORD = 2;  // 16-bit values
inline Words load_weight_bytes(const void* from) { return (Words)vmovl_s8(vld1_s8((const int8_t*)from)); }
inline Ints dot_bytes(Ints sum, Words weights, Words values) {
  const int16x8_t w = (int16x8_t)weights, v = (int16x8_t)values;
  const int32x4_t low = vmull_s16(vget_low_s16(w), vget_low_s16(v)), high = vmull_high_s16(w, v);
  return sum + (Ints)vpaddq_s32(low, high);
}
#endif
constexpr int NIBBLES_PER_WORD = BYTES_PER_WORD;
inline Words load_quarters(const void* from) { return load_weight_bytes(from); }

#ifdef __ARM_FEATURE_MATMUL_INT8
#define BYTES_BY_TWOS 1
// The words and next words of two rows (or columns) -> two words of each.
inline Words two_rows(const uint32_t* words, const uint32_t* next) {
  return (Words)vcombine_u32(vzip1_u32(vld1_u32(words), vld1_u32(next)), vzip2_u32(vld1_u32(words), vld1_u32(next)));
}
inline Words first_two(Words words, Words next) { return (Words)vzip1q_u32((uint32x4_t)words, (uint32x4_t)next); }
inline Words last_two(Words words, Words next) { return (Words)vzip2q_u32((uint32x4_t)words, (uint32x4_t)next); }
// Two rows times two columns -> sums by row.
inline Ints dot_twos(Ints sum, Words rows, Words columns) {
  return (Ints)vmmlaq_s32((int32x4_t)sum, (int8x16_t)rows, (int8x16_t)columns);
}
// The sums of row 0 or 1, from those of the first two columns and of the last two.
inline Ints sums_of_row(int row, Ints first, Ints last) {
  const int64x2_t a = (int64x2_t)first, b = (int64x2_t)last;
  return (Ints)(row ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
}
#endif

}  // namespace eagle
