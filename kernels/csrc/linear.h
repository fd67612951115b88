// A linear layer: its blocks are distributed over threads; bias, gate and residual follow each product.
#pragma once

#include "amx_products.h"

namespace eagle {

template <class X, template <class> class Weights>
void block_rows(const uint32_t* x, int rows, const Weight& w, int64_t b, Prefetcher next, float* sums) {
#ifdef TILES
  if constexpr (std::is_same_v<X, Bf16>)
    (rows > TILE ? tiled_product<Weights, 2> : tiled_product<Weights, 1>)(x, rows, w, b, next, sums);
  else
#endif
    dispatch_rows(rows, [&](auto R) { block_product<X, Weights, R>(x, rows, w, b, next, sums); });
}

template <class Columns>
void rounded_rows(Rounded& x, int64_t tile, int tile_rows, int rows, const Weight& w, int64_t b, Prefetcher next,
                  float* sums) {
  dispatch_records<Columns>(w.records, [&]<class C, class S>() {
#ifdef TILES
    const auto product = rows > TILE ? tiled_rounded_product<C, 2, S> : tiled_rounded_product<C, 1, S>;
    product(x, tile, tile_rows, rows, w, b, next, sums);
#else
    dispatch_rows(tile_rows, [&](auto R) { rounded_product<C, R, S>(x, tile, w, b, next, sums); });
#endif
  });
}

// Return gate(gate) * up.
inline Floats gated(Gate gate, Floats x, Floats up) {
  return gate == Gate::SILU ? silu(x) * up : gate == Gate::GELU ? gelu(x) * up : clamped_swiglu(x, up);
}

// Multiply each portion of x [.., K] by its N columns of w, add bias and residual [.., N] -> the same rows of out
// [.., N]. residual may be `out`. `gate`: half of a block's columns are gate, half up, and out is gate(gate) * up.
// `rounded`: scratch for x in int8, if w rounds it. `after`: the weight that is read next, if any, for prefetching.
template <class X, class Out>
void linear_part(const Team& team, const Value<X>* x, const Portions& portions, const Weight& w,
                 const Value<Out>* residual, Gate gate, int64_t N, Rounded& rounded, const Weight* after,
                 Value<Out>* out) {
  const int64_t K = inputs_of<X>(w);
  if (w.rounds()) rounded.round<X>(team, x, portions, K, Rounding::of(w));
  const auto product = w.format == Weight::INT8 ? block_rows<X, Int8>
                       : w.format == Weight::MXFP4 ? block_rows<X, Mxfp4> : block_rows<X, Whole>;
  const bool tiled = TILE_ROWS && (w.rounds() || std::is_same_v<X, Bf16>);
  const int64_t width = gate != Gate::NONE ? BLOCK / 2 : BLOCK, max_rows = tiled ? TILE_ROWS : ROWS;
  const int64_t blocks = (N + width - 1) / width;  // of a portion
  alignas(64) float sums[std::max(TILE_ROWS, ROWS) * BLOCK];
  Tiles shapes;
  const Weight& next_weight = after ? *after : w;
  const char* next_block = next_weight.block(next_weight.blocks * team.thread / team.threads);
  const auto block = [&](int64_t item) { return portions[item / blocks].block + item % blocks; };
  team.parallel_for_stealing(portions.size() * blocks, [&](int64_t item, bool last) {
    const Portion& of = portions[item / blocks];
    const int64_t b = block(item), tile_rows = tile_size(of.rows, max_rows), tiles = tiles_of(of.rows, max_rows);
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t m = of.first + tile * tile_rows, int8_tile = of.first / Rounded::MAX_ROWS + tile;
      const int rows = std::min(tile_rows, of.rows - tile * tile_rows);
      const Prefetcher next(last ? next_block : w.block(block(item + 1)), w.size, tile, tiles);
      if (tiled) shapes.shape(rows);
      if (w.format == Weight::W8A8)
        rounded_rows<Bytes>(rounded, int8_tile, tile_rows, rows, w, b, next, sums);
      else if (w.format == Weight::W6A8)
        rounded_rows<Sixes>(rounded, int8_tile, tile_rows, rows, w, b, next, sums);
      else if (w.format == Weight::W4A8)
        rounded_rows<Nibbles>(rounded, int8_tile, tile_rows, rows, w, b, next, sums);
      else product(reinterpret_cast<const uint32_t*>(x + m * K), rows, w, b, next, sums);
      const int64_t first = item % blocks * width;
      for (int r = 0; r < rows; r++)
        for (int64_t c = 0; c < width; c += LANES) {
          const int64_t column = first + c, index = (m + r) * N + column;
          if (column >= N) break;
          const auto at = [&](int64_t c) {
            const Floats sum = load<Floats>(sums + r * BLOCK + c);
            return w.bias ? sum + load<Floats>(w.bias + b * BLOCK + c) : sum;
          };
          Floats sum = at(c);
          if (gate != Gate::NONE) sum = gated(gate, sum, at(width + c));
          if (residual) sum += Out::get(residual + index, N - column);
          Out::put(out + index, sum, N - column);
        }
    }
  });
}

}  // namespace eagle
