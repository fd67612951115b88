// Linear layers: rows of x times a packed weight: whole, int8, int4 or w8a8 (int8 times x rounded to bytes).
//
// A row's sums run over the inputs in ascending order, whatever rows and threads there are.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "team.h"
#include "vectors.h"

namespace {

constexpr int BLOCK = 2 * LANES;  // output columns of one packed block
#ifdef __AVX512F__
constexpr int ROWS = 12;  // rows that share one load of the weights: their 24 sums stay in registers
#else
constexpr int ROWS = 4;  // half as many registers of half the size
#endif

// How the 32 columns of a block at one word of x are stored: in BYTES, unpacked to two vectors of E's words.
template <class E> struct Whole {
  static constexpr int64_t BYTES = 2 * sizeof(Words);
  static void unpack(const char* p, Words& low, Words& high) {
    low = load<Words>(p), high = load<Words>(p + sizeof(Words));
  }
};

template <class E> struct Int8;  // one byte each, in the order of E's values
template <> struct Int8<Fp32> {
  static constexpr int64_t BYTES = BLOCK;
  static void unpack(const char* p, Words& low, Words& high) {
    low = (Words)to_floats(p), high = (Words)to_floats(p + LANES);
  }
};
template <> struct Int8<Bf16> {
  static constexpr int64_t BYTES = 2 * BLOCK;
  static Words pairs(const char* p) {  // 32 bytes -> 16 pairs; a byte is exact in bfloat16
#ifdef __AVX512BF16__
    return (Words)_mm512_cvtne2ps_pbh((__m512)to_floats(p + LANES), (__m512)to_floats(p));
#else
    const Words both = __builtin_convertvector(load<Shorts>(p), Words);
    const auto value = [&](int left) { return __builtin_convertvector((Ints)(both << left) >> 24, Floats); };
    return pairs_of(value(24), value(16));
#endif
  }
  static void unpack(const char* p, Words& low, Words& high) { low = pairs(p), high = pairs(p + BLOCK); }
};

template <class E> struct Int4;  // four bits each, 8 more than the value: the low four of a byte are of `low`
template <> struct Int4<Fp32> {
  static constexpr int64_t BYTES = LANES;
  static void unpack(const char* p, Words& low, Words& high) {
    const Bytes both = load<Bytes>(p);
    low = (Words)(to_floats(both & 15) - 8.0f), high = (Words)(to_floats((both >> 4) & 15) - 8.0f);
  }
};
template <> struct Int4<Bf16> {
  static constexpr int64_t BYTES = BLOCK;
  static void unpack(const char* p, Words& low, Words& high) {
#ifdef __AVX512BW__
    static const uint16_t values[32] = {  // -8 ... 7 in bfloat16
        0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
        0,      0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};
    const __m512i table = _mm512_loadu_si512(values), both = _mm512_cvtepu8_epi16(load<__m256i>(p));
    low = (Words)_mm512_permutexvar_epi16(_mm512_and_si512(both, _mm512_set1_epi16(15)), table);
    high = (Words)_mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table);
#else
    const Words four = __builtin_convertvector(load<Shorts>(p), Words);  // of columns c and c + 16, two each
    const auto value = [&](int at) { return __builtin_convertvector((Ints)(four >> at & 15u) - 8, Floats); };
    low = pairs_of(value(0), value(8)), high = pairs_of(value(4), value(12));
#endif
  }
};

// A weight as kernels/cpu.py lays it out (pack, pack_int4, pack_bytes): [blocks, words of x, 32 columns], with scales [blocks, groups, 32]
// if it is quantised: float32 and one group (int8, w8a8), or bfloat16 and a group for every so many inputs
// (int4). A word of w8a8 is four bytes, 128 more than the values.
struct Packed {
  enum Format { WHOLE, INT8, INT4, W8A8 } format;
  const char* data;
  const void* scales;
  int64_t blocks, words, groups, size;  // size: bytes of a block

  Packed(const at::Tensor& t, const at::Tensor& scale)
      : format(t.scalar_type() == at::kChar ? INT8 : t.scalar_type() != at::kByte ? WHOLE
               : t.dim() == 4 ? W8A8 : INT4),
        data(static_cast<const char*>(t.const_data_ptr())),
        scales(format == WHOLE ? nullptr : scale.const_data_ptr()), blocks(t.size(0)), words(t.size(1)),
        groups(format == INT4 ? scale.size(1) : 1), size(t.stride(0) * t.element_size()) {}

  const char* block(int64_t b) const { return data + b * size; }
  // The values of a row of x.
  template <class E> int64_t inputs() const { return words * (format == W8A8 ? 4 : E::PER_WORD); }
};

// The loop for up to ROWS rows is compiled for a few counts: the smallest that is large enough.
inline int loop_rows(int64_t rows) {
  return rows <= 2 ? rows : rows <= 4 && ROWS > 4 ? 4 : rows <= 8 && ROWS > 8 ? 8 : ROWS;
}

// Rows of x rounded to bytes, in tiles of ROWS: words [K/4, loop rows], so that one address serves all rows.
// Every GROUP inputs, fewer at the end, have a scale and an offset [groups, loop rows]. An offset is -128
// times their sum: it takes back the 128 added to the weights.
struct Rounded {
  static constexpr int64_t GROUP = 64;  // as in quantized.py
  std::vector<uint32_t> words;
  std::vector<float> scales;
  std::vector<int32_t> offsets;
  static int64_t groups(int64_t K) { return (K + GROUP - 1) / GROUP; }
  static int64_t tiles(int64_t M) { return (M + ROWS - 1) / ROWS; }

  // Room for M rows of at most K values.
  Rounded(int64_t M, int64_t K)
      : words(tiles(M) * ROWS * K / 4), scales(tiles(M) * ROWS * groups(K)), offsets(scales.size()) {}

  // Each thread its share of x [M, K], whole groups of a tile: what threads write lies apart. Then all meet.
  template <class E>
  void round(const Team& team, const Value<E>* x, int64_t M, int64_t K) {
    team.share(tiles(M) * groups(K), [&](int64_t item) {
      const int64_t tile = item / groups(K) * ROWS, g = item % groups(K), from = g * GROUP;
      const int64_t rows = std::min<int64_t>(ROWS, M - tile), all = loop_rows(rows);
      const int64_t size = std::min(GROUP, K - from);
      for (int64_t r = 0; r < rows; r++) {
        const int64_t place = tile * groups(K) + g * all + r;
        uint32_t q[GROUP / 4];
        group<E>(x + (tile + r) * K + from, size, q, scales[place], offsets[place]);
        uint32_t* to = &words[tile * K / 4 + from / 4 * all + r];
        for (int64_t k = 0; k < size / 4; k++) to[k * all] = q[k];
      }
    });
    team.meet();
  }

  // `size` values, at most GROUP -> as many bytes q, the nearest to x in steps of the largest / 127.
  template <class E>
  static void group(const Value<E>* x, int64_t size, uint32_t* q, float& scale, int32_t& offset) {
    const Floats nearest = broadcast(12582912.0f);  // 1.5 * 2^23 has no fraction: adding it rounds to even
    Floats values[GROUP / LANES];
    Ints most = {}, sum = {};
#pragma GCC unroll 4
    for (int64_t i = 0; i < GROUP; i += LANES) {
      Floats& value = values[i / LANES];
      value = i + LANES <= size ? E::get(x + i) : i < size ? E::get(x + i, size - i) : Floats{};
      const Ints bits = (Ints)value & 0x7FFFFFFF;  // ordered as magnitudes are, and a NaN is above all
      most = bits > most ? bits : most;
    }
    const int32_t largest = largest_lane(most);
    std::memcpy(&scale, &largest, sizeof scale);
    scale /= 127.0f;
    const Floats inverse = broadcast(scale > 1e-30f ? 1.0f / scale : 0.0f);
#pragma GCC unroll 4
    for (int64_t i = 0; i < GROUP; i += LANES) {
      const Ints rounded = (Ints)(values[i / LANES] * inverse + nearest) - (Ints)nearest;
      sum += rounded;
      const Bytes bytes = to_bytes(rounded);
      std::memcpy(q + i / 4, &bytes, sizeof bytes);
    }
    offset = -128 * sum_of_lanes(sum);
  }
};

// Fetch the BYTES at `next`, and go on.
template <int64_t BYTES>
inline void fetch(const char*& next) {
  __builtin_prefetch(next, 0, 2);
  if constexpr (BYTES > 64) __builtin_prefetch(next + 64, 0, 2);
  next += BYTES;
}

// Up to R rows of x [rows, words] against block b of w: sums [R, 32]. Fetches what lies at `next` meanwhile.
template <class E, template <class> class Weights, int R>
[[gnu::noinline]] void block_product(const uint32_t* x, int rows, const Packed& w, int64_t b,
                                     const char* next, float* sums) {
  constexpr int64_t BYTES = Weights<E>::BYTES;
  const char* p = w.block(b);
  const uint32_t* row[R];
  for (int r = 0; r < R; r++) row[r] = x + std::min(r, rows - 1) * w.words;
  const int64_t group = w.words / w.groups;
  for (int64_t g = 0; g < w.groups; g++) {
    Floats low[R] = {}, high[R] = {};
    for (int64_t k = g * group; k < (g + 1) * group; k++, p += BYTES) {
      fetch<BYTES>(next);
      Words w0, w1;
      Weights<E>::unpack(p, w0, w1);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const Words value = broadcast(row[r][k]);
        low[r] = E::dot(low[r], w0, value);
        high[r] = E::dot(high[r], w1, value);
      }
    }
    if (w.format == Packed::INT8) {
      const float* scale = static_cast<const float*>(w.scales) + b * BLOCK;
      for (int r = 0; r < R; r++) low[r] *= load<Floats>(scale), high[r] *= load<Floats>(scale + LANES);
    } else if (w.format == Packed::INT4) {
      const uint16_t* scale = static_cast<const uint16_t*>(w.scales) + (b * w.groups + g) * BLOCK;
      const Floats s0 = Bf16::get(scale), s1 = Bf16::get(scale + LANES);
      for (int r = 0; r < R; r++) {
        low[r] = fma(low[r], s0, g ? load<Floats>(sums + r * BLOCK) : Floats{});
        high[r] = fma(high[r], s1, g ? load<Floats>(sums + r * BLOCK + LANES) : Floats{});
      }
    }
    for (int r = 0; r < R; r++) store(sums + r * BLOCK, low[r]), store(sums + r * BLOCK + LANES, high[r]);
  }
}

// The same of the tile of rounded rows from m on. A group is summed in integers, exactly; groups in order.
template <int R>
[[gnu::noinline]] void rounded_product(const Rounded& x, int64_t m, const Packed& w, int64_t b,
                                       const char* next, float* sums) {
  constexpr int64_t BYTES = 2 * sizeof(Words), PER_GROUP = Rounded::GROUP / 4;
  const char* p = w.block(b);
  const int64_t groups = Rounded::groups(4 * w.words);
  const uint32_t* value = &x.words[m * w.words];
  const float* scales = &x.scales[m * groups];
  const int32_t* offsets = &x.offsets[m * groups];
  for (int64_t g = 0; g < groups; g++) {
    Ints low[R], high[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) low[r] = high[r] = Ints{} + offsets[g * R + r];
    for (const char* end = p + std::min(PER_GROUP, w.words - g * PER_GROUP) * BYTES; p < end; p += BYTES) {
      fetch<BYTES>(next);
      const Words w0 = load<Words>(p), w1 = load<Words>(p + sizeof(Words));
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const Words one = broadcast(value[r]);
        low[r] = dot_bytes(low[r], w0, one);
        high[r] = dot_bytes(high[r], w1, one);
      }
      value += R;
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Floats scale = broadcast(scales[g * R + r]);
      float* sum = sums + r * BLOCK;
      store(sum, fma(__builtin_convertvector(low[r], Floats), scale, g ? load<Floats>(sum) : Floats{}));
      sum += LANES;
      store(sum, fma(__builtin_convertvector(high[r], Floats), scale, g ? load<Floats>(sum) : Floats{}));
    }
  }
  const float* scale = static_cast<const float*>(w.scales) + b * BLOCK;
  const Floats s0 = load<Floats>(scale), s1 = load<Floats>(scale + LANES);
  for (float* sum = sums; sum < sums + R * BLOCK; sum += BLOCK)
    store(sum, load<Floats>(sum) * s0), store(sum + LANES, load<Floats>(sum + LANES) * s1);
}

// product(R) with the loop for so many rows.
template <class Product>
inline void by_rows(int rows, const Product& product) {
  using std::integral_constant;
  switch (loop_rows(rows)) {
    case 1: return product(integral_constant<int, 1>());
    case 2: return product(integral_constant<int, 2>());
    case 4: return product(integral_constant<int, 4>());
    case 8: return product(integral_constant<int, ROWS < 8 ? ROWS : 8>());
    default: return product(integral_constant<int, ROWS>());
  }
}
template <class E, template <class> class Weights>
void block_rows(const uint32_t* x, int rows, const Packed& w, int64_t b, const char* next, float* sums) {
  by_rows(rows, [&](auto R) { block_product<E, Weights, R>(x, rows, w, b, next, sums); });
}

// x [M, K] times w -> out [M, N], plus bias [N], plus residual [M, N], which may be `out` itself. `gated`: a
// block holds 16 gate and 16 up columns; silu(gate) * up comes out. `rounded`: room for x as bytes, if w is
// W8A8. `after`: the weight that is read next, if any.
template <class E, class Out>
void linear_part(const Team& team, const void* x, int64_t M, const Packed& w, const float* bias,
                 const Value<Out>* residual, bool gated, int64_t N, Rounded& rounded, const Packed* after,
                 Value<Out>* out) {
  if (w.format == Packed::W8A8) rounded.round<E>(team, static_cast<const Value<E>*>(x), M, w.inputs<E>());
  const auto* input = static_cast<const uint32_t*>(x);
  const auto product = w.format == Packed::INT8 ? block_rows<E, Int8>
                       : w.format == Packed::INT4 ? block_rows<E, Int4> : block_rows<E, Whole>;
  const int64_t width = gated ? LANES : BLOCK;
  alignas(64) float sums[ROWS * BLOCK];
  const Packed& then = after ? *after : w;
  const char* first_after = then.block(then.blocks * team.me / team.all);
  team.deal(w.blocks, [&](int64_t b, bool last) {
    for (int64_t m = 0; m < M; m += ROWS) {
      const int rows = std::min<int64_t>(ROWS, M - m);
      const char* next = m ? w.block(b) : last ? first_after : w.block(b + 1);
      if (w.format == Packed::W8A8)
        by_rows(rows, [&](auto R) { rounded_product<R>(rounded, m, w, b, next, sums); });
      else product(input + m * w.words, rows, w, b, next, sums);
      for (int r = 0; r < rows; r++)
        for (int64_t c = 0; c < width; c += LANES) {
          const int64_t column = b * width + c, place = (m + r) * N + column;
          if (column >= N) break;
          Floats sum = load<Floats>(sums + r * BLOCK + c);
          if (gated) sum = silu(sum) * load<Floats>(sums + r * BLOCK + LANES);
          if (bias) sum += Fp32::get(bias + column, N - column);
          if (residual) sum += Out::get(residual + place, N - column);
          Out::put(out + place, sum, N - column);
        }
    }
  });
}

}  // namespace
