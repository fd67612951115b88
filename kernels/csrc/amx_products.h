// The loops of linear layers and attention on AMX. A tile holds 16 steps of LANES columns of a block.
//
// AMX adds even and odd values of a row separately, then both to the sum. A row's bits do not depend on the rows of its
// tile, but differ from `Bf16::dot`. So bfloat16 uses AMX for any number of rows.
#pragma once

#include "products.h"

#ifdef TILES
namespace eagle {
enum class Dot { PAIRS, BYTES, UNSIGNED_A, UNSIGNED_B };  // operands of a product of tiles, see amx.h
// The operand of LDTILECFG.
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
constexpr int64_t ROW_BYTES = BLOCK * sizeof(uint32_t);  // of a block, of sums

// The AMX tiles of this thread, released by the destructor: 0 ... 3 are sums (two of rows by two of columns), 4 and 5
// rows of x, 6 and 7 columns of a block.
class Tiles {
 public:
  ~Tiles() {
    if (rows) release_tiles();
  }
  void shape(int new_rows) {
    if (rows == new_rows) return;  // reconfiguring tiles takes as long as some products
    rows = new_rows;
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
  store_tile<0>(p, ROW_BYTES), store_tile<1>(p + 64, ROW_BYTES);
  p += TILE * ROW_BYTES;
  if constexpr (HALVES == 2) store_tile<2>(p, ROW_BYTES), store_tile<3>(p + 64, ROW_BYTES);
}
// Add the products of rows of 16 words, `row_stride` bytes apart, and 16 steps of a block to the sums. fetch_part(),
// called between the loads of tiles, issues a quarter of the prefetches.
template <int HALVES, Dot DOT, class Fetch>
inline void add_products(const uint32_t* rows, int64_t row_stride, const void* steps, const Fetch& fetch_part) {
  const char *a = reinterpret_cast<const char*>(rows), *b = static_cast<const char*>(steps);
  load_tile<6>(b, ROW_BYTES), fetch_part();
  load_tile<7>(b + 64, ROW_BYTES), fetch_part();
  load_tile<4>(a, row_stride), fetch_part();
  dot_tiles<DOT, 0, 4, 6>(), dot_tiles<DOT, 1, 4, 7>(), fetch_part();
  if constexpr (HALVES == 2) {
    load_tile<5>(a + TILE * row_stride, row_stride);
    dot_tiles<DOT, 2, 5, 6>(), dot_tiles<DOT, 3, 5, 7>();
  }
}

// Multiply rows of a, `row_stride` words apart, by b [words, BLOCK], whole tiles -> sums at `stride`: floats, or
// integers for bytes. add: add to sums. The number of rows is what tiles are shaped for, at most 16.
template <Dot DOT, class PrefetchRange>
void tiled_rows(const uint32_t* a, int64_t row_stride, const char* b, int64_t words, bool add, float* sums,
                int64_t stride, PrefetchRange& prefetch) {
  const auto fetch_part = [&] {
    for (int i = 0; i < TILE / 4; i++) prefetch.step();
  };
  row_stride *= sizeof(uint32_t), stride *= sizeof(float);
  if (add) load_tile<0>(sums, stride), load_tile<1>(sums + TILE, stride);
  else zero_sums<1>();
  for (int64_t k = 0; k < words; k += TILE, b += TILE * ROW_BYTES)
    add_products<1, DOT>(a + k, row_stride, b, fetch_part);
  store_tile<0>(sums, stride), store_tile<1>(sums + TILE, stride);
}

// Call `Columns::unpack` and convert to signed bytes.
template <class Columns>
inline void load_signed(const char* p, Words* columns) {
  typedef int8_t Values __attribute__((vector_size(sizeof(Words))));
  Columns::unpack(p, 0, columns);
  if constexpr (requires { Columns::ADDED; })
    for (int v = 0; v < VECTORS; v++) columns[v] = (Words)((Values)columns[v] - int8_t(Columns::ADDED));
}

// `add_products` for `count` steps of a block, and advance p. Reads them in place, or unpacked and padded with zeros
// to 16.
template <int HALVES, Dot DOT, class W>
inline void add_steps(const uint32_t* rows, int64_t row_stride, const char*& p, int count, Prefetcher& next) {
  if (W::BYTES == ROW_BYTES && count == TILE) {
    add_products<HALVES, DOT>(rows, row_stride, p, [&] {
      for (int64_t i = 0; i < TILE * ROW_BYTES / 4; i += 64) next.step<64>();
    });
  } else {
    Words unpacked[TILE * VECTORS];
    for (int i = 0; i < count; i++) next.step<W::BYTES>(), load_signed<W>(p + i * W::BYTES, unpacked + i * VECTORS);
    std::fill_n(unpacked + count * VECTORS, (TILE - count) * VECTORS, Words{});
    add_products<HALVES, DOT>(rows, row_stride, unpacked, [] {});
  }
  p += count * W::BYTES;
}

// `block_product` on AMX, for up to TILE_ROWS rows. Tiles are shaped for `rows`.
template <template <class> class Weights, int HALVES>
[[gnu::noinline]] void tiled_product(const uint32_t* x, int rows, const Weight& w, int64_t b, Prefetcher next,
                                     float* sums) {
  using W = Weights<Bf16>;
  static_assert(W::STEP == 1);
  alignas(64) uint32_t padded[TILE_ROWS][TILE];  // the last words of x, padded with zeros
  alignas(64) float of_group[TILE_ROWS * BLOCK];
  const char* p = w.block(b);
  const int64_t group = w.steps / w.groups;
  for (int64_t g = 0; g < w.groups; g++) {
    zero_sums<HALVES>();
    for (int64_t k = 0; k < group; k += TILE) {
      const int count = std::min<int64_t>(TILE, group - k);
      const uint32_t* from = x + g * group + k;
      int64_t row_stride = w.steps * sizeof(uint32_t);
      if (count < TILE) {
        std::memset(padded, 0, sizeof padded);
        for (int r = 0; r < rows; r++) std::memcpy(padded[r], from + r * w.steps, count * sizeof(uint32_t));
        from = padded[0], row_stride = sizeof padded[0];
      }
      add_steps<HALVES, Dot::PAIRS, W>(from, row_stride, p, count, next);
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

// `rounded_product` on AMX, with the same bits, as integer sums are exact.
template <class Columns, int HALVES, class S>
[[gnu::noinline]] void tiled_rounded_product(Rounded& x, int64_t tile, int tile_rows, int rows, const Weight& w,
                                             int64_t b, Prefetcher next, float* sums) {
  constexpr bool SCALED = !std::is_same_v<S, Unscaled>;
  constexpr int ALL = HALVES * TILE * BLOCK;
  static_assert(TILE_WORDS == TILE && BYTES_PER_WORD == NIBBLES_PER_WORD);
  alignas(64) int32_t of_part[2 * ALL];
  alignas(64) int32_t of_parts[S::CODED ? ALL : 1];
  alignas(64) float less[S::MINIMA ? ALL : 1];
  const Rounding how = Rounding::of(w);
  const int64_t K = w.steps * how.per_word, parts = how.parts(K), together = how.group / how.part;
  const int64_t steps = how.part / how.per_word, row_stride = how.tile_words();
  const uint32_t* from = x.words_of(tile, K, how);
  const char* p = w.block(b);
  S of_columns(w, b);
  const auto scale_part = [&](int64_t part) {
    const int32_t* summed = of_part + part % 2 * ALL;
    const int64_t group = part / together;
    const bool begins = part % together == 0, ends = part + 1 == parts || (part + 1) % together == 0;
    const float *of_rows = x.scales_of(tile, K, how) + group * tile_rows;
    const float* totals = x.totals_of(tile, K, how) + part * tile_rows;
    if constexpr (SCALED) of_columns.next();
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < VECTORS; v++) {
        const int i = r * BLOCK + v * LANES;
        Ints sum = load<Ints>(summed + i);
        Floats of_minima = {};
        if constexpr (S::CODED) sum = sum * of_columns.code[v] + (begins ? Ints{} : load<Ints>(of_parts + i));
        if constexpr (S::MINIMA)
          of_minima = fma(broadcast(totals[r]), of_columns.minimum_code[v], begins ? Floats{} : load<Floats>(less + i));
        if (ends) {
          const Floats before = group ? load<Floats>(sums + i) : Floats{};
          store(sums + i, of_columns.add(sum, of_minima, broadcast(of_rows[r]), v, before));
        } else {
          if constexpr (S::CODED) store(of_parts + i, sum);
          if constexpr (S::MINIMA) store(less + i, of_minima);
        }
      }
  };
  for (int64_t part = 0; part < parts; part++, from += (tile_rows - 1) * row_stride) {
    const char* end = p + std::min(steps, w.steps - part * steps) * Columns::BYTES;
    zero_sums<HALVES>();
    for (; p < end; from += TILE) {
      const int count = std::min<int64_t>(TILE, (end - p) / Columns::BYTES);
      add_steps<HALVES, Dot::BYTES, Columns>(from, row_stride * sizeof(uint32_t), p, count, next);
    }
    // Scale a part's sums during the next part's products: loads of a stored tile have a high latency.
    store_sums<HALVES>(of_part + part % 2 * ALL);
    if (part) scale_part(part - 1);
  }
  scale_part(parts - 1);
  if constexpr (!SCALED) scale_columns(w, b, rows, sums);
}

}  // namespace eagle
#else
namespace eagle {
struct Tiles {
  void shape(int) {}
};
}  // namespace eagle
#endif
