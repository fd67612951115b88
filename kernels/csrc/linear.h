// A linear layer: its blocks dealt out to threads, and what follows the product of one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "amx_products.h"
#include "kernels.h"
#include "products.h"
#include "team.h"
#include "vectors.h"

namespace eagle {

template <class X, template <class> class Weights>
void block_rows(const uint32_t* x, int rows, const Weight& w, int64_t b, Next next, float* sums) {
#ifdef TILES
  if constexpr (std::is_same_v<X, Bf16>)
    (rows > TILE ? tiled_product<Weights, 2> : tiled_product<Weights, 1>)(x, rows, w, b, next, sums);
  else
#endif
    by_rows(rows, [&](auto R) { block_product<X, Weights, R>(x, rows, w, b, next, sums); });
}

template <class Columns>
void rounded_rows(Rounded& x, int64_t tile, int tall, int rows, const Weight& w, int64_t b, Next next, float* sums) {
#ifdef TILES
  const auto product = rows > TILE ? tiled_rounded_product<Columns, 2> : tiled_rounded_product<Columns, 1>;
  product(x, tile, tall, rows, w, b, next, sums);
#else
  by_rows(tall, [&](auto R) { rounded_product<Columns, R>(x, tile, w, b, next, sums); });
#endif
}

// x [M, K] times w -> out [M, N], plus bias [N], plus residual [M, N], which may be `out` itself. `gate`: if any,
// a block holds as many gate as up columns; gate(gate) * up comes out. `rounded`: room for x as bytes, if w rounds
// it. `after`: the weight that is read next, if any.
template <class X, class Out>
void linear_part(const Team& team, const Value<X>* x, int64_t M, const Weight& w, const float* bias,
                 const Value<Out>* residual, Gate gate, int64_t N, Rounded& rounded, const Weight* after,
                 Value<Out>* out) {
  const int64_t K = inputs_of<X>(w);
  if (w.rounds()) rounded.round<X>(team, x, M, K, Rounding::of(w));
  const auto product = w.format == Weight::INT8 ? block_rows<X, Int8>
                       : w.format == Weight::INT4 ? block_rows<X, Int4> : block_rows<X, Whole>;
  const bool tiled = TILE_ROWS && (w.rounds() || std::is_same_v<X, Bf16>);
  const int64_t width = gate != Gate::NONE ? BLOCK / 2 : BLOCK, most = tiled ? TILE_ROWS : ROWS;
  const int64_t tall = tile_size(M, most), tiles = tiles_of(M, most);
  alignas(64) float sums[std::max(TILE_ROWS, ROWS) * BLOCK];
  Tiles shapes;
  const Weight& then = after ? *after : w;
  const char* first_after = then.block(then.blocks * team.me / team.all);
  team.deal(w.blocks, [&](int64_t b, bool last) {
    for (int64_t m = 0; m < M; m += tall) {
      const int rows = std::min(tall, M - m);
      const Next next(last ? first_after : w.block(b + 1), w.size, m / tall, tiles);
      if (tiled) shapes.shape(rows);
      if (w.format == Weight::W8A8)
        rounded_rows<Bytes>(rounded, m / tall, tall, rows, w, b, next, sums);
      else if (w.format == Weight::W4A8)
        rounded_rows<Nibbles>(rounded, m / tall, tall, rows, w, b, next, sums);
      else product(reinterpret_cast<const uint32_t*>(x + m * K), rows, w, b, next, sums);
      for (int r = 0; r < rows; r++)
        for (int64_t c = 0; c < width; c += LANES) {
          const int64_t column = b * width + c, place = (m + r) * N + column;
          if (column >= N) break;
          Floats sum = load<Floats>(sums + r * BLOCK + c);
          if (gate != Gate::NONE)
            sum = (gate == Gate::SILU ? silu(sum) : gelu(sum)) * load<Floats>(sums + r * BLOCK + width + c);
          if (bias) sum += Fp32::get(bias + column, N - column);
          if (residual) sum += Out::get(residual + place, N - column);
          Out::put(out + place, sum, N - column);
        }
    }
  });
}

}  // namespace eagle
