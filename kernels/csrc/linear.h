// A linear layer: its blocks dealt out to threads, and what follows the product of one.
#pragma once

#include "amx_products.h"

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

// gate(gate) * up.
inline Floats gated(Gate gate, Floats x, Floats up) {
  return gate == Gate::SILU ? silu(x) * up : gate == Gate::GELU ? gelu(x) * up : clamped_swiglu(x, up);
}

// Portions of x [.., K], each times its N columns of w -> the same rows of out [.., N], plus its bias, plus residual
// [.., N], which may be `out` itself. `gate`: if any, a block holds as many gate as up columns, and gate(gate) * up
// comes out. `rounded`: room for x as bytes, if w rounds it. `after`: the weight that is read next, if any.
template <class X, class Out>
void linear_part(const Team& team, const Value<X>* x, const Portions& portions, const Weight& w,
                 const Value<Out>* residual, Gate gate, int64_t N, Rounded& rounded, const Weight* after,
                 Value<Out>* out) {
  const int64_t K = inputs_of<X>(w);
  if (w.rounds()) rounded.round<X>(team, x, portions, K, Rounding::of(w));
  const auto product = w.format == Weight::INT8 ? block_rows<X, Int8>
                       : w.format == Weight::INT4 ? block_rows<X, Int4>
                       : w.format == Weight::MXFP4 ? block_rows<X, Mxfp4> : block_rows<X, Whole>;
  const bool tiled = TILE_ROWS && (w.rounds() || std::is_same_v<X, Bf16>);
  const int64_t width = gate != Gate::NONE ? BLOCK / 2 : BLOCK, most = tiled ? TILE_ROWS : ROWS;
  const int64_t blocks = (N + width - 1) / width;  // of a portion
  alignas(64) float sums[std::max(TILE_ROWS, ROWS) * BLOCK];
  Tiles shapes;
  const Weight& then = after ? *after : w;
  const char* first_after = then.block(then.blocks * team.me / team.all);
  const auto block = [&](int64_t item) { return portions[item / blocks].block + item % blocks; };
  team.deal(portions.size() * blocks, [&](int64_t item, bool last) {
    const Portion& of = portions[item / blocks];
    const int64_t b = block(item), tall = tile_size(of.rows, most), tiles = tiles_of(of.rows, most);
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t m = of.first + tile * tall, in_bytes = of.first / Rounded::TALL + tile;
      const int rows = std::min(tall, of.rows - tile * tall);
      const Next next(last ? first_after : w.block(block(item + 1)), w.size, tile, tiles);
      if (tiled) shapes.shape(rows);
      if (w.format == Weight::W8A8)
        rounded_rows<Bytes>(rounded, in_bytes, tall, rows, w, b, next, sums);
      else if (w.format == Weight::W4A8)
        rounded_rows<Nibbles>(rounded, in_bytes, tall, rows, w, b, next, sums);
      else product(reinterpret_cast<const uint32_t*>(x + m * K), rows, w, b, next, sums);
      const int64_t first = item % blocks * width;
      for (int r = 0; r < rows; r++)
        for (int64_t c = 0; c < width; c += LANES) {
          const int64_t column = first + c, place = (m + r) * N + column;
          if (column >= N) break;
          const auto at = [&](int64_t c) {
            const Floats sum = load<Floats>(sums + r * BLOCK + c);
            return w.bias ? sum + load<Floats>(w.bias + b * BLOCK + c) : sum;
          };
          Floats sum = at(c);
          if (gate != Gate::NONE) sum = gated(gate, sum, at(width + c));
          if (residual) sum += Out::get(residual + place, N - column);
          Out::put(out + place, sum, N - column);
        }
    }
  });
}

}  // namespace eagle
