// What products have in common: blocks of columns, tiles of rows, and fetching what is read next.
#pragma once

#include "vectors.h"

namespace eagle {

constexpr int BLOCK = VECTORS * LANES;  // output columns of one packed block

#ifdef TILES
constexpr int TILE_ROWS = 32;  // that share one load of the weights where AMX' tiles multiply them
#else
constexpr int TILE_ROWS = 0;
#endif
constexpr int64_t TILE_WORDS = 16;  // of one of their rows
constexpr int64_t whole_tiles(int64_t words) { return (words + TILE_WORDS - 1) / TILE_WORDS * TILE_WORDS; }
constexpr int WEIGHT_OFFSET = TILE_ROWS ? 0 : BYTE_OFFSET;  // added to the bytes of a weight: tiles take them with a sign

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
  const auto run = [&](auto R) {
    if constexpr (R > 0 && loop_rows(R) == R)
      if (loop_rows(rows) == R) product(R);
  };
  [&]<int... R>(std::integer_sequence<int, R...>) {
    (run(std::integral_constant<int, R>()), ...);
  }(std::make_integer_sequence<int, ROWS + 1>());
}

// How the columns of a block are stored: PER_LANE bytes of each at every step, unpacked a vector at a time, or, where a
// byte has one of the block's first half and one of its second, two.
template <int PER_LANE, auto ONE>
struct Vectors {
  static constexpr int64_t BYTES = BLOCK * PER_LANE;
  static constexpr int STEP = 1;
  static void unpack(const char* p, int, Words* columns) {
    for (int v = 0; v < VECTORS; v++) columns[v] = (Words)ONE(p + v * LANES * PER_LANE);
  }
};
template <int PER_LANE, auto TWO>
struct Halves {
  static constexpr int64_t BYTES = BLOCK / 2 * PER_LANE;
  static constexpr int STEP = 1;
  static void unpack(const char* p, int, Words* columns) {
    for (int v = 0; v < VECTORS / 2; v++) TWO(p + v * LANES * PER_LANE, columns[v], columns[v + VECTORS / 2]);
  }
};

// To the sums of R rows, products of columns with each row's word.
template <int R, class Sum, class Word, class Dot>
[[gnu::always_inline]] inline void multiply(Sum (&sum)[R][VECTORS], const Words* columns, const Word& word, const Dot& dot) {
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    const Words value = broadcast(word(r));
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) sum[r][v] = dot(sum[r][v], columns[v], value);
  }
}

// Up to so many rows a loop that does nothing but load and multiply waits for memory whatever it does. What helps it
// differs by maker. Zen 4 fetches by itself up to a fifth faster than if it is told what to fetch. Emerald Rapids
// takes a quarter longer by itself, and a tenth less if lines come to the first cache too, NEAR bytes ahead.
#if defined(MAKER_AMD)
constexpr int LIGHT_ROWS = LANES >= 16 ? 4 : 0;
constexpr bool FETCHES_ITSELF = true;
#elif defined(MAKER_INTEL)
constexpr int LIGHT_ROWS = LANES >= 16 ? 8 : 4;
constexpr bool FETCHES_ITSELF = false;
#else
constexpr int LIGHT_ROWS = 0;
constexpr bool FETCHES_ITSELF = false;
#endif
constexpr int64_t NEAR = 2048;

// The block that is read next. Each of all `tiles` of rows fetches its share, some of it in every step: much at once
// would keep the loads of the block at hand waiting.
class Next {
 public:
  Next(const char* block, int64_t size, int64_t tile, int64_t tiles)
      : at(block + size / tiles * tile), part(64 / tiles) {}
  template <uint64_t BYTES, bool LIGHT = false>  // that a step reads; whether the loop, from p on, is of few rows
  void step(const char* p = nullptr) {
    if constexpr (LIGHT && FETCHES_ITSELF) return;
    if constexpr (LIGHT) fetch<BYTES, 3>(p + NEAR);
    fetch<BYTES, 2>(at);
    at += BYTES * part / 64;
  }

 private:
  template <uint64_t BYTES, int CLOSE>  // 3: into all caches, 2: into all but the first
  static void fetch(const char* from) {
    __builtin_prefetch(from, 0, CLOSE);
    if constexpr (BYTES > 64) __builtin_prefetch(from + 64, 0, CLOSE);
  }

  const char* at;
  uint64_t part;  // of 64 bytes
};

}  // namespace eagle
