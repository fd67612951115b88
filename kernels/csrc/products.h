// The loops of linear layers: rows of x times a block of a packed weight, which is whole, int8, int4 or w8a8 (int8
// times x rounded to bytes).
//
// A row's sums run over the inputs in ascending order, whatever rows and threads there are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "team.h"
#include "vectors.h"

namespace eagle {

constexpr int BLOCK = VECTORS * LANES;  // output columns of one packed block

// How the columns of a block are stored: in BYTES for each step over the inputs, which is STEP words of x, and
// unpacked to vectors for the i-th of these words. X is what x is read as.
template <class X> struct Whole {
  static constexpr int64_t BYTES = VECTORS * sizeof(Words);
  static constexpr int STEP = 1;
  static void unpack(const char* p, int, Words* columns) {
    for (int v = 0; v < VECTORS; v++) columns[v] = load<Words>(p + v * sizeof(Words));
  }
};
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

template <class X> struct Int8 {
  static constexpr int64_t BYTES = BLOCK;
  static constexpr int STEP = 1;
  static void unpack(const char* p, int, Words* columns) {
    for (int v = 0; v < VECTORS; v++) columns[v] = (Words)floats_of_bytes(p + v * LANES);
  }
};
template <class X> struct Int4 {  // four bits each, 8 more than the value: a byte has columns c and c + BLOCK / 2
  static constexpr int64_t BYTES = BLOCK / 2;
  static constexpr int STEP = 1;
  static void unpack(const char* p, int, Words* columns) {
    for (int v = 0; v < VECTORS / 2; v++) {
      const Words both = words_of_bytes(p + v * LANES);
      columns[v] = (Words)(to_floats((Ints)(both & 15u)) - 8.0f);
      columns[v + VECTORS / 2] = (Words)(to_floats((Ints)(both >> 4)) - 8.0f);
    }
  }
};
#ifdef BF16_DOT
template <> struct Int8<Bf16> {  // pairs
  static constexpr int64_t BYTES = 2 * BLOCK;
  static constexpr int STEP = 1;
  static void unpack(const char* p, int, Words* columns) {
    for (int v = 0; v < VECTORS; v++) columns[v] = pairs_of_bytes(p + v * 2 * LANES);
  }
};
template <> struct Int4<Bf16> {
  static constexpr int64_t BYTES = BLOCK;
  static constexpr int STEP = 1;
  static void unpack(const char* p, int, Words* columns) {
    for (int v = 0; v < VECTORS / 2; v++)
      pairs_of_nibbles(p + v * 2 * LANES, columns[v], columns[v + VECTORS / 2]);
  }
};
#endif

// The values of a row of x, which is read as X, that w is multiplied by.
template <class X> inline int64_t inputs_of(const Weight& w) {
  if (w.format == Weight::W8A8) return w.steps * BYTES_PER_WORD;
  return w.steps * (w.format == Weight::WHOLE ? Whole<X>::STEP : 1) * X::PER_WORD;
}

#ifdef TILES
constexpr int TILE_ROWS = 32;  // that share one load of the weights where AMX' tiles multiply them
#else
constexpr int TILE_ROWS = 0;
#endif

// Rows are taken in tiles of nearly equal size, at most `most`. The loops are compiled for a few counts of rows:
// the smallest that is large enough serves a tile.
constexpr int64_t tiles_of(int64_t M, int64_t most = ROWS) { return (M + most - 1) / most; }
constexpr int64_t tile_size(int64_t M, int64_t most = ROWS) {
  return M ? (M + tiles_of(M, most) - 1) / tiles_of(M, most) : 0;
}
constexpr int loop_rows(int64_t rows) {
  return rows <= 2 || ROWS <= 6 ? rows : rows <= 8 ? (rows + 1) / 2 * 2 : ROWS;
}
template <class Product>
inline void by_rows(int rows, const Product& product) {  // product(R) with the loop for so many rows
  constexpr auto run = [](auto R, const Product& product) {
    if constexpr (R <= ROWS && loop_rows(R) == R) product(R);
  };
  switch (loop_rows(rows)) {
    case 1: return run(std::integral_constant<int, 1>(), product);
    case 2: return run(std::integral_constant<int, 2>(), product);
    case 3: return run(std::integral_constant<int, 3>(), product);
    case 4: return run(std::integral_constant<int, 4>(), product);
    case 5: return run(std::integral_constant<int, 5>(), product);
    case 6: return run(std::integral_constant<int, 6>(), product);
    case 8: return run(std::integral_constant<int, 8>(), product);
    default: return run(std::integral_constant<int, ROWS>(), product);
  }
}

// Rows of x rounded to bytes, by tiles: words [words of K, loop rows], so that one address serves all rows; for
// AMX [groups, rows, words of a group], zero at the end. A word has BYTES_PER_WORD values. Every GROUP inputs,
// fewer at the end, have a scale and an offset [groups, loop rows]. An offset is -BYTE_OFFSET times their sum: it
// takes back what was added to the weights.
struct Rounded {
  static constexpr int64_t GROUP = 64;  // as in quantized.py
  static constexpr int64_t MOST = TILE_ROWS ? TILE_ROWS : ROWS;
  std::vector<uint32_t> words;
  std::vector<float> scales;
  std::vector<int32_t> offsets;
  static int64_t groups(int64_t K) { return (K + GROUP - 1) / GROUP; }

  // Room for M rows of at most K values.
  Rounded(int64_t M, int64_t K)
      : words(tiles_of(M, MOST) * MOST * room(K) / BYTES_PER_WORD), scales(tiles_of(M, MOST) * MOST * groups(K)),
        offsets(scales.size()) {}

  static int64_t room(int64_t K) { return TILE_ROWS ? groups(K) * GROUP : K; }  // of a row
  uint32_t* words_of(int64_t tile, int64_t K) { return &words[tile * MOST * room(K) / BYTES_PER_WORD]; }
  int64_t group_of(int64_t tile, int64_t K) const { return tile * MOST * groups(K); }

  // Each thread its share of x [M, K], whole groups of a tile: what threads write lies apart. Then all meet.
  template <class X>
  void round(const Team& team, const Value<X>* x, int64_t M, int64_t K) {
    const int64_t tall = tile_size(M, MOST), all = TILE_ROWS ? tall : loop_rows(tall);
    team.share(tiles_of(M, MOST) * groups(K), [&](int64_t item) {
      const int64_t tile = item / groups(K), g = item % groups(K), from = g * GROUP;
      const int64_t rows = std::min(tall, M - tile * tall), size = std::min(GROUP, K - from);
      for (int64_t r = 0; r < rows; r++) {
        const int64_t place = group_of(tile, K) + g * all + r;
        alignas(64) char q[4 * GROUP];
        group<X>(x + (tile * tall + r) * K + from, size, q, scales[place], offsets[place]);
        uint32_t* to = words_of(tile, K) + from / BYTES_PER_WORD * all;
        if constexpr (TILE_ROWS) std::memcpy(to + r * GROUP / BYTES_PER_WORD, q, GROUP);
        else for (int64_t k = 0; k < size / BYTES_PER_WORD; k++) std::memcpy(to + r + k * all, q + 4 * k, 4);
      }
    });
    team.meet();
  }

  // `size` values, at most GROUP -> as many integers q, the nearest to x in steps of the largest / 127.
  template <class X>
  static void group(const Value<X>* x, int64_t size, char* q, float& scale, int32_t& offset) {
    const Floats nearest = broadcast(ROUND);
    Floats values[GROUP / LANES];
    Ints most = {}, sum = {};
#pragma GCC unroll 16
    for (int64_t i = 0; i < GROUP; i += LANES) {
      Floats& value = values[i / LANES];
      value = i + LANES <= size ? X::get(x + i) : i < size ? X::get(x + i, size - i) : Floats{};
      const Ints bits = (Ints)value & 0x7FFFFFFF;  // ordered as magnitudes are, and a NaN is above all
      most = bits > most ? bits : most;
    }
    const int32_t largest = largest_lane(most);
    std::memcpy(&scale, &largest, sizeof scale);
    scale /= 127.0f;
    const Floats inverse = broadcast(scale > 1e-30f ? 1.0f / scale : 0.0f);
#pragma GCC unroll 16
    for (int64_t i = 0; i < GROUP; i += LANES) {
      const Ints rounded = (Ints)(values[i / LANES] * inverse + nearest) - (Ints)nearest;
      sum += rounded;
      if constexpr (BYTES_PER_WORD == 4) store_bytes(q + i, rounded);
      else store_shorts(q + 2 * i, (Words)rounded);
    }
    offset = -BYTE_OFFSET * sum_of_lanes(sum);
  }
};

// Fetch the BYTES at `next`, and go on.
template <int64_t BYTES>
inline void fetch(const char*& next) {
  __builtin_prefetch(next, 0, 2);
  if constexpr (BYTES > 64) __builtin_prefetch(next + 64, 0, 2);
  next += BYTES;
}

// Up to R rows of x [rows, inputs] against block b of w: sums [R, BLOCK]. Fetches what lies at `next` meanwhile.
template <class X, template <class> class Weights, int R>
[[gnu::noinline]] void block_product(const uint32_t* x, int rows, const Weight& w, int64_t b,
                                     const char* next, float* sums) {
  using W = Weights<X>;
  const char* p = w.block(b);
  const int64_t words = w.steps * W::STEP, group = w.steps / w.groups;
  const uint32_t* row[R];
  for (int r = 0; r < R; r++) row[r] = x + std::min(r, rows - 1) * words;
  int64_t k = 0;
  for (int64_t g = 0; g < w.groups; g++) {
    Floats sum[R][VECTORS] = {};
    for (const char* end = p + group * W::BYTES; p < end; p += W::BYTES, k += W::STEP) {
      fetch<W::BYTES>(next);
#pragma GCC unroll 2
      for (int i = 0; i < W::STEP; i++) {
        Words columns[VECTORS];
        W::unpack(p, i, columns);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          const Words value = broadcast(row[r][k + i]);
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; v++) sum[r][v] = X::dot(sum[r][v], columns[v], value);
        }
      }
    }
#pragma GCC unroll 4  // Clang keeps sums in memory if it does not know every index
    for (int v = 0; v < VECTORS; v++) {
      Floats scale = {};
      if (w.format == Weight::INT8)
        scale = load<Floats>(static_cast<const float*>(w.scales) + b * BLOCK + v * LANES);
      else if (w.format == Weight::INT4)
        scale = Bf16::get(static_cast<const uint16_t*>(w.scales) + (b * w.groups + g) * BLOCK + v * LANES);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        float* to = sums + r * BLOCK + v * LANES;
        if (w.format == Weight::INT8) sum[r][v] *= scale;
        else if (w.format == Weight::INT4) sum[r][v] = fma(sum[r][v], scale, g ? load<Floats>(to) : Floats{});
        store(to, sum[r][v]);
      }
    }
  }
}

#ifdef BYTES_BY_TWOS
// The sums of R rounded rows over the steps from p to `end`, but for the last one if their number is odd: two
// rows, columns and steps at a time. They are exact, so it is all one in which order they are added.
template <int R>
inline void sum_by_twos(const char*& p, const char* end, const uint32_t*& value, const char*& next,
                        Ints (&sum)[R][VECTORS]) {
  constexpr int64_t BYTES = VECTORS * sizeof(Words);
  constexpr auto first = [](int two) { return std::min(2 * two, R - 2); };  // the last two may overlap others
  constexpr int TWOS = (R + 1) / 2;
  static_assert(BYTES_PER_WORD == 4 && BYTE_OFFSET == 0);
  Ints sums[TWOS][VECTORS][2] = {};
  for (; end - p >= 2 * BYTES; p += 2 * BYTES, value += 2 * R) {
    fetch<2 * BYTES>(next);
    Words rows[TWOS];
#pragma GCC unroll 3
    for (int i = 0; i < TWOS; i++) rows[i] = two_rows(value + first(i), value + R + first(i));
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      const Words words = load<Words>(p + v * sizeof(Words)), more = load<Words>(p + BYTES + v * sizeof(Words));
      const Words columns[2] = {first_two(words, more), last_two(words, more)};
#pragma GCC unroll 3
      for (int i = 0; i < TWOS; i++)
        for (int c = 0; c < 2; c++) sums[i][v][c] = dot_twos(sums[i][v][c], rows[i], columns[c]);
    }
  }
#pragma GCC unroll 3
  for (int i = 0; i < TWOS; i++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++)
      for (int r = 0; r < 2; r++) sum[first(i) + r][v] = sums_of_row(r, sums[i][v][0], sums[i][v][1]);
}
#endif

// The same as `block_product` of a tile of rounded rows. A group is summed in integers, exactly; groups in order.
template <int R>
[[gnu::noinline]] void rounded_product(Rounded& x, int64_t tile, const Weight& w, int64_t b,
                                       const char* next, float* sums) {
  constexpr int64_t WIDTH = LANES * BYTES_PER_WORD, BYTES = VECTORS * WIDTH;
  constexpr int64_t PER_GROUP = Rounded::GROUP / BYTES_PER_WORD;
  const char* p = w.block(b);
  const int64_t K = w.steps * BYTES_PER_WORD, groups = Rounded::groups(K);
  const uint32_t* value = x.words_of(tile, K);
  const float* scales = &x.scales[x.group_of(tile, K)];
  const int32_t* offsets = &x.offsets[x.group_of(tile, K)];
  for (int64_t g = 0; g < groups; g++) {
    Ints sum[R][VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
      for (int v = 0; v < VECTORS; v++) sum[r][v] = Ints{} + offsets[g * R + r];
    const char* end = p + std::min(PER_GROUP, w.steps - g * PER_GROUP) * BYTES;
#ifdef BYTES_BY_TWOS
    if constexpr (R > 1) sum_by_twos<R>(p, end, value, next, sum);
#endif
    for (; p < end; p += BYTES) {
      fetch<BYTES>(next);
      Words columns[VECTORS];
      for (int v = 0; v < VECTORS; v++) columns[v] = load_weight_bytes(p + v * WIDTH);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const Words one = broadcast(value[r]);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sum[r][v] = dot_bytes(sum[r][v], columns[v], one);
      }
      value += R;
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Floats scale = broadcast(scales[g * R + r]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
        float* to = sums + r * BLOCK + v * LANES;
        store(to, fma(to_floats(sum[r][v]), scale, g ? load<Floats>(to) : Floats{}));
      }
    }
  }
  const float* scale = static_cast<const float*>(w.scales) + b * BLOCK;
  for (int i = 0; i < R * BLOCK; i += LANES)
    store(sums + i, load<Floats>(sums + i) * load<Floats>(scale + i % BLOCK));
}

}  // namespace eagle
