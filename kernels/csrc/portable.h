// Any processor: vectors of 4 words in portable C++.
#pragma once

namespace eagle {

constexpr int VECTORS = 4;  // of a block's columns
constexpr int ROWS = 2;

inline Floats fma(Floats a, Floats b, Floats c) {  // fused or not, but always the same
#ifdef __FP_FAST_FMAF
  for (int l = 0; l < LANES; l++) c[l] = __builtin_fmaf(a[l], b[l], c[l]);
  return c;
#else
  return a * b + c;
#endif
}
template <class T> struct Lanes { typedef T Vector __attribute__((vector_size(sizeof(T) * LANES))); };
template <class To, class From>
inline To convert(const void* from) { return __builtin_convertvector(load<typename Lanes<From>::Vector>(from), To); }
template <class To, class From>
inline void convert_to(void* to, From x) { store(to, __builtin_convertvector(x, typename Lanes<To>::Vector)); }
inline Ints ints_of_bytes(const void* from) { return convert<Ints, int8_t>(from); }
inline Floats floats_of_bytes(const void* from) { return to_floats(ints_of_bytes(from)); }
inline Words words_of_bytes(const void* from) { return convert<Words, uint8_t>(from); }
inline Words words_of_shorts(const void* from) { return convert<Words, uint16_t>(from); }
inline Floats floats_of_e2m1(Words codes) {
  for (int l = 0; l < LANES; l++) codes[l] = uint32_t(E2M1[codes[l]]) << 16;
  return (Floats)codes;
}
inline void store_shorts(void* to, Words x) { convert_to<uint16_t>(to, x); }
inline void store_bytes(void* to, Ints x) { convert_to<int8_t>(to, x); }
inline int32_t largest_lane(Ints x) { return std::max(std::max(x[0], x[1]), std::max(x[2], x[3])); }
inline int32_t sum_of_lanes(Ints x) { return x[0] + x[1] + x[2] + x[3]; }

constexpr int BYTES_PER_WORD = 2, NIBBLES_PER_WORD = 2, BYTE_OFFSET = 0;
inline Words load_weight_bytes(const void* from) {  // bytes to pairs of 16-bit values
  int16_t values[2 * LANES];
  for (int i = 0; i < 2 * LANES; i++) values[i] = static_cast<const int8_t*>(from)[i];
  return load<Words>(values);
}
inline Words load_quarters(const void* from) { return load_weight_bytes(from); }
inline Ints dot_bytes(Ints sum, Words weights, Words values) {
  const Ints w = (Ints)weights, v = (Ints)values;
  return sum + (w << 16 >> 16) * (v << 16 >> 16) + (w >> 16) * (v >> 16);
}

}  // namespace eagle
