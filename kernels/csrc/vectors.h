// Vectors of sixteen 32-bit words and their arithmetic, and what a dtype is to the loops over them.
//
// A word is one float, or a pair of bfloat16 that one instruction of AVX512-BF16 multiplies and adds in
// float32; two fmas do without it. The compiler splits the vectors for AVX2; we do where it does so badly.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {  // in every file here, as operators.cpp alone is compiled

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

template <class Vector>
inline Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}
inline void store(void* to, Floats vector) { std::memcpy(to, &vector, sizeof vector); }
inline Floats broadcast(float x) { return x - Floats{}; }  // not Floats{} + x, which would turn -0 into 0
inline Words broadcast(uint32_t x) { return Words{} + x; }

// One rounding where the processor can, and then always: the compiler may not choose (-ffp-contract=off), or
// two instantiations of one loop would differ.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  __m256 x[2], y[2], z[2];
  std::memcpy(x, &a, sizeof x), std::memcpy(y, &b, sizeof y), std::memcpy(z, &c, sizeof z);
  z[0] = _mm256_fmadd_ps(x[0], y[0], z[0]), z[1] = _mm256_fmadd_ps(x[1], y[1], z[1]);
  return load<Floats>(z);
#elif defined(__FP_FAST_FMAF)
  for (int l = 0; l < LANES; l++) c[l] = __builtin_fmaf(a[l], b[l], c[l]);
  return c;
#else
  return a * b + c;
#endif
}

// Four products of a byte 0..255 and one -128..127 in each lane, added to sums: exact.
inline Ints dot_bytes(Ints sum, Words weights, Words values) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)values);
#elif defined(__AVXVNNI__)
  __m256i s[2], w[2], v[2];
  std::memcpy(s, &sum, sizeof s), std::memcpy(w, &weights, sizeof w), std::memcpy(v, &values, sizeof v);
  for (int i = 0; i < 2; i++) s[i] = _mm256_dpbusd_avx_epi32(s[i], w[i], v[i]);
  return load<Ints>(s);
#else
  for (int shift = 0; shift < 32; shift += 8)
    sum += (Ints)((weights >> shift) & 255u) * ((Ints)(values << (24 - shift)) >> 24);
  return sum;
#endif
}

inline int32_t largest_lane(Ints x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)x);
#else
  int32_t largest = x[0];
  for (int l = 1; l < LANES; l++) largest = std::max(largest, x[l]);
  return largest;
#endif
}
inline int32_t sum_of_lanes(Ints x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t sum = 0;
  for (int l = 0; l < LANES; l++) sum += x[l];
  return sum;
#endif
}

// Written out: GCC takes conversions of bytes apart, value by value, ten times slower.
inline Floats to_floats(Bytes bytes) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif defined(__AVX2__)
  __m256 x[2] = {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)bytes)),
                 _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)bytes, 8)))};
  return load<Floats>(x);
#else
  return __builtin_convertvector(bytes, Floats);
#endif
}
inline Floats to_floats(const char* bytes) { return to_floats(load<Bytes>(bytes)); }
inline Bytes to_bytes(Ints x) {
#if defined(__AVX512F__)
  return (Bytes)_mm512_cvtepi32_epi8((__m512i)x);
#else
  return __builtin_convertvector(x, Bytes);
#endif
}

// The even and the odd bfloat16 of each pair, and pairs of floats that are exact in bfloat16.
inline Floats even(Words pairs) { return (Floats)(pairs << 16); }
inline Floats odd(Words pairs) { return (Floats)(pairs & 0xFFFF0000u); }
inline Words pairs_of(Floats even, Floats odd) { return ((Words)even >> 16) | ((Words)odd & 0xFFFF0000u); }

// What a dtype is to the loops. `dot` multiplies words and adds them to float sums; `get` and `put` move up
// to 16 values to floats and back, rounding to nearest, ties to even.
struct Bf16 {
  using Value = uint16_t;
  static constexpr int PER_WORD = 2;
  static Floats dot(Floats sum, Words a, Words b) {
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return fma(odd(a), odd(b), fma(even(a), even(b), sum));
#endif
  }
  static Floats get(const Value* from, int64_t count = LANES) {
    Shorts values = {};
    if (count >= LANES) values = load<Shorts>(from);
    else std::memcpy(&values, from, count * sizeof(Value));
    return (Floats)(__builtin_convertvector(values, Words) << 16);
  }
  static void put(Value* to, Floats x, int64_t count = LANES) {
    const Words bits = (Words)x, nan = broadcast(0x7FC0u);
    const Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const Shorts values = __builtin_convertvector(x == x ? rounded : nan, Shorts);
    if (count >= LANES) std::memcpy(to, &values, sizeof values);  // a copy of variable size is a call
    else std::memcpy(to, &values, count * sizeof(Value));
  }
};
struct Fp32 {
  using Value = float;
  static constexpr int PER_WORD = 1;
  static Floats dot(Floats sum, Words a, Words b) { return fma((Floats)a, (Floats)b, sum); }
  static Floats get(const Value* from, int64_t count = LANES) {
    if (count >= LANES) return load<Floats>(from);
    Floats x = {};
    std::memcpy(&x, from, count * sizeof(Value));
    return x;
  }
  static void put(Value* to, Floats x, int64_t count = LANES) {
    if (count >= LANES) store(to, x);
    else std::memcpy(to, &x, count * sizeof(Value));
  }
};
template <class E> using Value = typename E::Value;

// e^x for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2], to a relative 2e-7; 0 below -87.
inline Floats exponential(Floats x) {
  const Ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);  // truncated: to nearest if x <= 0
  const Floats n_rounded = __builtin_convertvector(n, Floats);
  Floats r = fma(n_rounded, broadcast(-0.693359375f), x);
  r = fma(n_rounded, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, broadcast(c));
  const Floats scaled = p * (Floats)((n + 127) << 23);
  return x < -87.0f ? Floats{} : scaled;
}
inline Floats silu(Floats x) {
  const Floats e = exponential(x < 0.0f ? x : -x);
  return x * (x < 0.0f ? e : broadcast(1.0f)) / (e + 1.0f);
}

}  // namespace
