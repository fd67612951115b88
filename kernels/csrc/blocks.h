// Common parts of products: blocks of columns, tiles of rows, prefetching.
#pragma once

#include "vectors.h"

namespace eagle {

constexpr int BLOCK = VECTORS * LANES;  // output columns of one packed block

#ifdef TILES
constexpr int TILE_ROWS = 32;  // rows per load of the weights with AMX
#else
constexpr int TILE_ROWS = 0;
#endif
constexpr int64_t TILE_WORDS = 16;  // of a row of an AMX tile
constexpr int64_t whole_tiles(int64_t words) { return (words + TILE_WORDS - 1) / TILE_WORDS * TILE_WORDS; }
constexpr int WEIGHT_OFFSET = TILE_ROWS ? 0 : BYTE_OFFSET;  // zero point of int8 weights; AMX has signed bytes

// Rows are split into tiles of nearly equal size. The loops are compiled for a few numbers of rows; a tile runs the
// smallest that is large enough.
constexpr int64_t tiles_of(int64_t M, int64_t max_rows = ROWS) { return (M + max_rows - 1) / max_rows; }
constexpr int64_t tile_size(int64_t M, int64_t max_rows = ROWS) {
  return M ? (M + tiles_of(M, max_rows) - 1) / tiles_of(M, max_rows) : 0;
}
constexpr int loop_rows(int64_t rows) {
  return rows <= 2 || ROWS <= 6 ? rows : rows <= 8 ? (rows + 1) / 2 * 2 : ROWS;
}
template <class Product>
inline void dispatch_rows(int rows, const Product& product) {  // calls product(R); R: compile-time rows
  const auto run = [&](auto R) {
    if constexpr (R > 0 && loop_rows(R) == R)
      if (loop_rows(rows) == R) product(R);
  };
  [&]<int... R>(std::integer_sequence<int, R...>) {
    (run(std::integral_constant<int, R>()), ...);
  }(std::make_integer_sequence<int, ROWS + 1>());
}

// The storage of a block's columns: PER_LANE bytes per column and step. ONE unpacks a vector of columns. TWO unpacks
// two, where a byte holds a nibble of the block's first half and one of its second half.
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

// Add the products of columns with each of R rows' words to the sums.
template <int R, class Sum, class Word, class Dot>
[[gnu::always_inline]] inline void multiply(Sum (&sum)[R][VECTORS], const Words* columns, const Word& word, const Dot& dot) {
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    const Words value = broadcast(word(r));
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) sum[r][v] = dot(sum[r][v], columns[v], value);
  }
}

// Up to MEMORY_BOUND_ROWS rows, a loop that only loads and multiplies is memory bound, and the best prefetching
// depends on the processor. Zen 4's hardware prefetcher is up to 20 % faster than software prefetches. Emerald Rapids
// is 25 % slower without them, and 10 % faster if lines are also prefetched to L1, L1_PREFETCH_BYTES ahead.
#if defined(VENDOR_AMD)
constexpr int MEMORY_BOUND_ROWS = LANES >= 16 ? 4 : 0;
constexpr bool HARDWARE_PREFETCH = true;
#elif defined(VENDOR_INTEL)
constexpr int MEMORY_BOUND_ROWS = LANES >= 16 ? 8 : 4;
constexpr bool HARDWARE_PREFETCH = false;
#else
constexpr int MEMORY_BOUND_ROWS = 0;
constexpr bool HARDWARE_PREFETCH = false;
#endif
constexpr int64_t L1_PREFETCH_BYTES = 2048;

// Prefetches the block that is read next. Each of the `tiles` of rows fetches a part of it, a little in every step: more at
// once would delay the loads of the current block.
class Prefetcher {
 public:
  Prefetcher(const char* block, int64_t size, int64_t tile, int64_t tiles)
      : at(block + size / tiles * tile), part(64 / tiles) {}
  void share(int64_t count) { part /= count; }  // the current block is read `count` times
  template <uint64_t BYTES, bool MEMORY_BOUND = false>  // BYTES: read by a step from p on
  void step(const char* p = nullptr) {
    if constexpr (MEMORY_BOUND && HARDWARE_PREFETCH) return;
    if constexpr (MEMORY_BOUND) fetch<BYTES, 3>(p + L1_PREFETCH_BYTES);
    fetch<BYTES, 2>(at);
    at += BYTES * part / 64;
  }

 private:
  template <uint64_t BYTES, int LOCALITY>  // 3: to L1, 2: to L2
  static void fetch(const char* from) {
    __builtin_prefetch(from, 0, LOCALITY);
    if constexpr (BYTES > 64) __builtin_prefetch(from + 64, 0, LOCALITY);
  }

  const char* at;
  uint64_t part;  // of 64 bytes
};

}  // namespace eagle
