// The loops of linear layers: rows of x times a block of a packed weight (16- or 32-bit, int8, mxfp4).
// rounded.h has those for x rounded to int8. Sums run over the inputs in ascending order, for any number of rows and
// threads.
#pragma once

#include "rounded.h"

namespace eagle {

// The storage of a block's columns: BYTES per step over the inputs, a step being STEP words of x; `unpack` returns the
// columns of the i-th word. X: the type of x. `scale`: the v-th vector of the columns' scales for a group of inputs.
struct OfColumns {
  static Floats scale(const Weight& w, int64_t b, int64_t, int v) {
    return load<Floats>(static_cast<const float*>(w.scales) + b * BLOCK + v * LANES);
  }
};
struct PowersOfGroups {  // exponents of floats
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
inline void floats_of_mxfp4(const void* from, Words& low, Words& high) {
  const Words both = words_of_bytes(from);
  low = (Words)floats_of_e2m1(both & 15u), high = (Words)floats_of_e2m1(both >> 4);
}
template <class X> struct Mxfp4 : PowersOfGroups, Halves<1, floats_of_mxfp4> {};
#ifdef BF16_DOT  // pairs of bfloat16
template <> struct Int8<Bf16> : OfColumns, Vectors<2, pairs_of_bytes> {};
template <> struct Mxfp4<Bf16> : PowersOfGroups, Halves<2, pairs_of_e2m1> {};
#endif

template <class W> constexpr bool SCALED = requires { W::scale; };

// The number of inputs of w. X: the type of x.
template <class X> inline int64_t inputs_of(const Weight& w) {
  if (w.rounds()) return w.steps * Rounding::of(w).per_word;
  return w.steps * (w.format == Weight::WHOLE ? Whole<X>::STEP : 1) * X::PER_WORD;
}

// Multiply up to R rows of x [rows, inputs] by block b of w -> sums [R, BLOCK]. Prefetches `next`.
template <class X, template <class> class Weights, int R>
[[gnu::noinline]] void block_product(const uint32_t* x, int rows, const Weight& w, int64_t b, Prefetcher next,
                                     float* sums) {
  using W = Weights<X>;
  constexpr bool MEMORY_BOUND = R <= MEMORY_BOUND_ROWS && std::is_same_v<W, Whole<X>>;
  const char* p = w.block(b);
  const int64_t words = w.steps * W::STEP, group = w.steps / w.groups;
  const uint32_t* row[R];
  for (int r = 0; r < R; r++) row[r] = x + std::min(r, rows - 1) * words;
  int64_t k = 0;
  for (int64_t g = 0; g < w.groups; g++) {
    Floats sum[R][VECTORS] = {};
    for (const char* end = p + group * W::BYTES; p < end; p += W::BYTES, k += W::STEP) {
      next.step<W::BYTES, MEMORY_BOUND>(p);
#pragma GCC unroll 2
      for (int i = 0; i < W::STEP; i++) {
        Words columns[VECTORS];
        W::unpack(p, i, columns);
        multiply(sum, columns, [&row, at = k + i](int r) { return row[r][at]; }, X::dot);
      }
    }
#pragma GCC unroll 4  // Clang spills sums that it does not index by constants
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
