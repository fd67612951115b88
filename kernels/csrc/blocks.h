// What products have in common: blocks of columns, tiles of rows, and fetching what is read next.
#pragma once

#include <cstdint>
#include <type_traits>

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
  template <uint64_t BYTES>  // that a step reads
  void step() {
    fetch<BYTES, 2>(at);
    at += BYTES * part / 64;
  }
  template <uint64_t BYTES, bool LIGHT>  // the same; whether the loop, which reads from p, is of few rows
  void step(const char* p) {
    if constexpr (LIGHT && FETCHES_ITSELF) return;
    if constexpr (LIGHT) fetch<BYTES, 3>(p + NEAR);
    step<BYTES>();
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
