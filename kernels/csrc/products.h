// The loops of linear layers: rows of x times a block of a packed weight, which is whole, int8, int4 or mxfp4. Where x
// is rounded to bytes, they are in rounded.h.
//
// A row's sums run over the inputs in ascending order, whatever rows and threads there are.
#pragma once

#include "rounded.h"

namespace eagle {

// How the columns of a block are stored: in BYTES for each step over the inputs, which is STEP words of x, and
// unpacked to vectors for the i-th of these words. X is what x is read as. Where weights have scales, the v-th vector of
// `scale` is that of a block's columns over a group of inputs.
struct OfColumns {
  static Floats scale(const Weight& w, int64_t b, int64_t, int v) {
    return load<Floats>(static_cast<const float*>(w.scales) + b * BLOCK + v * LANES);
  }
};
struct OfGroups {
  static Floats scale(const Weight& w, int64_t b, int64_t g, int v) {
    return Bf16::get(static_cast<const uint16_t*>(w.scales) + (b * w.groups + g) * BLOCK + v * LANES);
  }
};
struct PowersOfGroups {  // as the exponents of floats
  static Floats scale(const Weight& w, int64_t b, int64_t g, int v) {
    const auto* exponents = static_cast<const uint8_t*>(w.scales) + (b * w.groups + g) * BLOCK + v * LANES;
    return (Floats)(words_of_bytes(exponents) << 23);
  }
};

template <class X> struct Whole : Vectors<4, load<Words>> {};
template <> struct Whole<Widened> {  // pairs of bfloat16
  static constexpr int64_t BYTES = VECTORS * sizeof(Words);
  static constexpr int STEP = 2;
  static void unpack(const char* p, int i, Words* columns) {
    for (int v = 0; v < VECTORS; v++) {
      const Words pairs = load<Words>(p + v * sizeof(Words));
      columns[v] = (Words)(i ? odd(pairs) : even(pairs));
    }
  }
};
template <class X> struct Int8 : OfColumns, Vectors<1, floats_of_bytes> {};
// Four bits each: of int4 8 more than the value, of mxfp4 e2m1.
inline void floats_of_int4(const void* from, Words& low, Words& high) {
  const Words both = words_of_bytes(from);
  low = (Words)(to_floats((Ints)(both & 15u)) - 8.0f), high = (Words)(to_floats((Ints)(both >> 4)) - 8.0f);
}
inline void floats_of_mxfp4(const void* from, Words& low, Words& high) {
  const Words both = words_of_bytes(from);
  low = (Words)floats_of_e2m1(both & 15u), high = (Words)floats_of_e2m1(both >> 4);
}
template <class X> struct Int4 : OfGroups, Halves<1, floats_of_int4> {};
template <class X> struct Mxfp4 : PowersOfGroups, Halves<1, floats_of_mxfp4> {};
#ifdef BF16_DOT  // all in pairs
template <> struct Int8<Bf16> : OfColumns, Vectors<2, pairs_of_bytes> {};
template <> struct Int4<Bf16> : OfGroups, Halves<2, pairs_of_nibbles<INTEGERS>> {};
template <> struct Mxfp4<Bf16> : PowersOfGroups, Halves<2, pairs_of_nibbles<E2M1>> {};
#endif

template <class W> constexpr bool SCALED = requires { W::scale; };

// The values of a row of x, which is read as X, that w is multiplied by.
template <class X> inline int64_t inputs_of(const Weight& w) {
  if (w.rounds()) return w.steps * Rounding::of(w).per_word;
  return w.steps * (w.format == Weight::WHOLE ? Whole<X>::STEP : 1) * X::PER_WORD;
}

// Up to R rows of x [rows, inputs] against block b of w: sums [R, BLOCK]. Fetches of `next` meanwhile.
template <class X, template <class> class Weights, int R>
[[gnu::noinline]] void block_product(const uint32_t* x, int rows, const Weight& w, int64_t b, Next next,
                                     float* sums) {
  using W = Weights<X>;
  constexpr bool LIGHT = R <= LIGHT_ROWS && std::is_same_v<W, Whole<X>>;
  const char* p = w.block(b);
  const int64_t words = w.steps * W::STEP, group = w.steps / w.groups;
  const uint32_t* row[R];
  for (int r = 0; r < R; r++) row[r] = x + std::min(r, rows - 1) * words;
  int64_t k = 0;
  for (int64_t g = 0; g < w.groups; g++) {
    Floats sum[R][VECTORS] = {};
    for (const char* end = p + group * W::BYTES; p < end; p += W::BYTES, k += W::STEP) {
      next.step<W::BYTES, LIGHT>(p);
#pragma GCC unroll 2
      for (int i = 0; i < W::STEP; i++) {
        Words columns[VECTORS];
        W::unpack(p, i, columns);
        multiply(sum, columns, [&row, at = k + i](int r) { return row[r][at]; }, X::dot);
      }
    }
#pragma GCC unroll 4  // Clang keeps sums in memory if it does not know every index
    for (int v = 0; v < VECTORS; v++) {
      Floats scale = {};
      if constexpr (SCALED<W>) scale = W::scale(w, b, g, v);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        float* to = sums + r * BLOCK + v * LANES;
        if constexpr (SCALED<W>) sum[r][v] = fma(sum[r][v], scale, g ? load<Floats>(to) : Floats{});
        store(to, sum[r][v]);
      }
    }
  }
}

}  // namespace eagle
