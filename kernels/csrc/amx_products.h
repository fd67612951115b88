// The loops of a linear layer and of attention with tiles (amx.h). 16 steps of a block, LANES columns of them, are one.
//
// A product of tiles adds in an order of its own: even and odd values of a row apart, then both together to the
// sum. A row's bits do not depend on how many rows its tile has, but they are not those of `Bf16::dot`. So
// bfloat16 goes through tiles for any number of rows, not from some number on.
#pragma once

#include "products.h"

#ifdef TILES
namespace eagle {
enum class Dot { PAIRS, BYTES, UNSIGNED_A, UNSIGNED_B };  // what a product of tiles multiplies, see amx.h
// As LDTILECFG reads them.
struct TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);
}
#include TILES

namespace eagle {

constexpr int TILE = 16;  // rows of a tile, and words of a row
static_assert(LANES == TILE && BLOCK == 2 * TILE && TILE_ROWS == 2 * TILE);
constexpr int64_t SIDE = BLOCK * sizeof(uint32_t);  // bytes from one row to the next, of a block and of sums

// The tiles of this thread, while this lives: 0..3 are sums (two of rows, two of columns), 4 and 5 rows of x,
// 6 and 7 columns of a block.
class Tiles {
 public:
  ~Tiles() {
    if (rows) release_tiles();
  }
  void shape(int for_rows) {
    if (rows == for_rows) return;  // it takes as long as some products
    rows = for_rows;
    TileShapes shapes;
    for (int t = 0; t < 8; t++) {
      const int first = t < 6 ? (t < 4 ? t / 2 : t - 4) * TILE : 0, all = t < 6 ? rows : TILE;
      shapes.rows[t] = std::clamp(all - first, 0, TILE);
      shapes.row_bytes[t] = shapes.rows[t] ? 64 : 0;
    }
    shape_tiles(shapes);
  }

 private:
  int rows = 0;
};

template <int HALVES>  // of 16 rows each
inline void zero_sums() {
  zero_tile<0>(), zero_tile<1>();
  if constexpr (HALVES == 2) zero_tile<2>(), zero_tile<3>();
}
template <int HALVES>
inline void store_sums(void* to) {  // [rows, BLOCK]
  char* p = static_cast<char*>(to);
  store_tile<0>(p, SIDE), store_tile<1>(p + 64, SIDE);
  if constexpr (HALVES == 2) store_tile<2>(p + TILE * SIDE, SIDE), store_tile<3>(p + TILE * SIDE + 64, SIDE);
}
// To the sums, rows of 16 words, so many bytes apart, times 16 steps of a block. fetch_part(), between the tiles' loads,
// fetches a quarter of what is to be fetched meanwhile.
template <int HALVES, Dot DOT, class Fetch>
inline void add_products(const uint32_t* rows, int64_t apart, const void* steps, const Fetch& fetch_part) {
  const char *a = reinterpret_cast<const char*>(rows), *b = static_cast<const char*>(steps);
  load_tile<6>(b, SIDE), fetch_part();
  load_tile<7>(b + 64, SIDE), fetch_part();
  load_tile<4>(a, apart), fetch_part();
  dot_tiles<DOT, 0, 4, 6>(), dot_tiles<DOT, 1, 4, 7>(), fetch_part();
  if constexpr (HALVES == 2) {
    load_tile<5>(a + TILE * apart, apart);
    dot_tiles<DOT, 2, 5, 6>(), dot_tiles<DOT, 3, 5, 7>();
  }
}

// Rows of a, so many words apart, times b [words, BLOCK], whole tiles of it -> sums, `stride` apart, or added to them, which
// are floats or, of bytes, integers. The rows are as many as tiles are shaped for, up to 16. Fetches some of `ahead` for every word.
template <Dot DOT, class Ahead>
void tiled_rows(const uint32_t* a, int64_t apart, const char* b, int64_t words, bool add, float* sums, int64_t stride,
                Ahead& ahead) {
  const auto fetch_part = [&] {
    for (int i = 0; i < TILE / 4; i++) ahead.step();
  };
  apart *= sizeof(uint32_t), stride *= sizeof(float);
  if (add) load_tile<0>(sums, stride), load_tile<1>(sums + TILE, stride);
  else zero_sums<1>();
  for (int64_t k = 0; k < words; k += TILE, b += TILE * SIDE) add_products<1, DOT>(a + k, apart, b, fetch_part);
  store_tile<0>(sums, stride), store_tile<1>(sums + TILE, stride);
}

// As `Columns::unpack`, bytes with a sign.
template <class Columns>
inline void load_signed(const char* p, Words* columns) {
  typedef int8_t Values __attribute__((vector_size(sizeof(Words))));
  Columns::unpack(p, 0, columns);
  for (int v = 0; v < VECTORS && std::is_same_v<Columns, Nibbles>; v++) columns[v] = (Words)((Values)columns[v] - 8);
}

// `add_products` of `count` steps of a block, which p moves over: as they lie, or unpacked, with
// zeros where there are fewer than 16.
template <int HALVES, Dot DOT, class W>
inline void add_steps(const uint32_t* rows, int64_t apart, const char*& p, int count, Next& next) {
  if (W::BYTES == SIDE && count == TILE) {
    add_products<HALVES, DOT>(rows, apart, p, [&] {
      for (int64_t i = 0; i < TILE * SIDE / 4; i += 64) next.step<64>();
    });
  } else {
    Words unpacked[TILE * VECTORS];
    for (int i = 0; i < count; i++) next.step<W::BYTES>(), load_signed<W>(p + i * W::BYTES, unpacked + i * VECTORS);
    std::fill_n(unpacked + count * VECTORS, (TILE - count) * VECTORS, Words{});
    add_products<HALVES, DOT>(rows, apart, unpacked, [] {});
  }
  p += count * W::BYTES;
}

// As `block_product`: up to TILE_ROWS rows of x [rows, inputs] against block b of w, for which tiles are shaped.
template <template <class> class Weights, int HALVES>
[[gnu::noinline]] void tiled_product(const uint32_t* x, int rows, const Weight& w, int64_t b, Next next,
                                     float* sums) {
  using W = Weights<Bf16>;
  static_assert(W::STEP == 1);
  alignas(64) uint32_t few[TILE_ROWS][TILE];  // the last words of x, and zeros where there are fewer than 16
  alignas(64) float of_group[TILE_ROWS * BLOCK];
  const char* p = w.block(b);
  const int64_t group = w.steps / w.groups;
  for (int64_t g = 0; g < w.groups; g++) {
    zero_sums<HALVES>();
    for (int64_t k = 0; k < group; k += TILE) {
      const int count = std::min<int64_t>(TILE, group - k);
      const uint32_t* from = x + g * group + k;
      int64_t apart = w.steps * sizeof(uint32_t);
      if (count < TILE) {
        std::memset(few, 0, sizeof few);
        for (int r = 0; r < rows; r++) std::memcpy(few[r], from + r * w.steps, count * sizeof(uint32_t));
        from = few[0], apart = sizeof few[0];
      }
      add_steps<HALVES, Dot::PAIRS, W>(from, apart, p, count, next);
    }
    if constexpr (!SCALED<W>) {
      return store_sums<HALVES>(sums);
    } else {
      store_sums<HALVES>(of_group);
      for (int v = 0; v < VECTORS; v++) {
        const Floats scale = W::scale(w, b, g, v);
        for (int i = v * LANES; i < rows * BLOCK; i += BLOCK)
          store(sums + i, fma(load<Floats>(of_group + i), scale, g ? load<Floats>(sums + i) : Floats{}));
      }
    }
  }
}

// As `rounded_product`, with the same bits, as integers are summed exactly.
template <class Columns, int HALVES>
[[gnu::noinline]] void tiled_rounded_product(Rounded& x, int64_t tile, int tall, int rows, const Weight& w, int64_t b,
                                             Next next, float* sums) {
  constexpr bool FOUR_BITS = std::is_same_v<Columns, Nibbles>;
  constexpr int ALL = HALVES * TILE * BLOCK;
  static_assert(TILE_WORDS == TILE && BYTES_PER_WORD == NIBBLES_PER_WORD);
  alignas(64) int32_t of_group[2 * ALL];
  const Rounding how = Rounding::of(w);
  const int64_t K = w.steps * how.per_word, groups = how.groups(K), at = x.group_of(tile, K, how);
  const int64_t steps = how.group / how.per_word, apart = how.tile_words();
  const uint32_t* from = x.words_of(tile, K, how);
  const char* p = w.block(b);
  const auto scale_group = [&](int64_t g) {
    const int32_t* summed = of_group + g % 2 * ALL;
    const float* of_rows = &x.scales[at + g * tall];
    Floats of_columns[VECTORS];
    for (int v = 0; FOUR_BITS && v < VECTORS; v++)
      of_columns[v] = Bf16::get(static_cast<const uint16_t*>(w.scales) + (b * groups + g) * BLOCK + v * LANES);
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < VECTORS; v++) {
        const int i = r * BLOCK + v * LANES;
        const Floats of_row = broadcast(of_rows[r]), scale = FOUR_BITS ? of_row * of_columns[v] : of_row;
        store(sums + i, fma(to_floats(load<Ints>(summed + i)), scale, g ? load<Floats>(sums + i) : Floats{}));
      }
  };
  for (int64_t g = 0; g < groups; g++, from += (tall - 1) * apart) {
    const char* end = p + std::min(steps, w.steps - g * steps) * Columns::BYTES;
    zero_sums<HALVES>();
    for (; p < end; from += TILE) {
      const int count = std::min<int64_t>(TILE, (end - p) / Columns::BYTES);
      add_steps<HALVES, Dot::BYTES, Columns>(from, apart * sizeof(uint32_t), p, count, next);
    }
    // Sums are scaled while the next ones are made: they come out of a tile long after it is stored.
    store_sums<HALVES>(of_group + g % 2 * ALL);
    if (g) scale_group(g - 1);
  }
  scale_group(groups - 1);
  if constexpr (!FOUR_BITS) scale_columns(w, b, rows, sums);
}

}  // namespace eagle
#else
namespace eagle {
struct Tiles {
  void shape(int) {}
};
}  // namespace eagle
#endif
