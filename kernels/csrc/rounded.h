// Activations rounded to int8, and their products: w8a8, w4a8.
#pragma once

#include "blocks.h"
#include "team.h"

namespace eagle {

// Quantize `size` values symmetrically: step = largest magnitude / max_value. Calls put(i, integers) for each LANES
// values, with zeros beyond the last. Returns the step.
template <class E, class Size, class Put>
inline float round_values(const Value<E>* x, Size size, float max_value, const Put& put) {
  Ints largest = {};
  for (int64_t i = 0; i < size; i += LANES) {
    const Ints bits = (Ints)E::get(x + i, size - i) & 0x7FFFFFFF;  // ordered by magnitude
    largest = bits > largest ? bits : largest;
  }
  const int32_t bits = largest_lane(largest);
  float step;
  std::memcpy(&step, &bits, sizeof step);
  step /= max_value;
  const Floats inverse = broadcast(step > 1e-30f ? 1.0f / step : 0.0f), nearest = broadcast(ROUND);
  for (int64_t i = 0; i < size; i += LANES)
    put(i, (Ints)(E::get(x + i, size - i) * inverse + nearest) - (Ints)nearest);
  return step;
}

template <int64_t N>
constexpr std::integral_constant<int64_t, N> constant;

// The rounding of x for a weight: `group` inputs share a scale, a word has `per_word` inputs, and `added` was added
// to the weight's values (0 on AMX).
struct Rounding {
  static constexpr int64_t MIN_GROUP = 16, MAX_GROUP = 128;  // of `group`, as in stored.py
  int64_t group, per_word;
  int32_t added;

  static Rounding of(const Weight& w) {
    if (w.format == Weight::W8A8) {
      const int64_t group = w.records.kind ? w.steps / w.groups * BYTES_PER_WORD : 64;
      return {group, BYTES_PER_WORD, WEIGHT_OFFSET};
    }
    return {w.steps / w.groups * NIBBLES_PER_WORD, NIBBLES_PER_WORD, TILE_ROWS ? 0 : 8};
  }
  int64_t groups(int64_t K) const { return (K + group - 1) / group; }
  int64_t tile_words() const { return whole_tiles(group / per_word); }
  int64_t words(int64_t K) const { return TILE_ROWS ? groups(K) * tile_words() : K / per_word; }  // of a row
};

// Rows of x that are multiplied by the blocks of a weight from `block` on. The first row starts a tile of `Rounded`.
struct Portion { int64_t first, rows, block; };
using Portions = std::vector<Portion>;

// Rows of x rounded to int8, in tiles: words [words of K, loop rows], so that one address serves all rows; for AMX
// [groups, rows, words of a group], padded with zeros. Every group of inputs has a scale, an offset and a total [groups,
// loop rows]. The offset, -sum(inputs) * `added`, cancels the value that was added to the weights. The total,
// sum(inputs) * scale, is multiplied by the weights' minima.
struct Rounded {
  static constexpr int64_t MAX_ROWS = TILE_ROWS ? TILE_ROWS : ROWS;  // of a tile
  std::vector<uint32_t> words;
  std::vector<float> scales, totals;
  std::vector<int32_t> offsets;

  // Allocate memory for M rows of at most K values.
  Rounded(int64_t M, int64_t K)
      : words(tiles_of(M, MAX_ROWS) * MAX_ROWS * std::max(Rounding{Rounding::MIN_GROUP, BYTES_PER_WORD, 0}.words(K),
                                                  Rounding{Rounding::MIN_GROUP, NIBBLES_PER_WORD, 0}.words(K))),
        scales(tiles_of(M, MAX_ROWS) * MAX_ROWS * ((K + Rounding::MIN_GROUP - 1) / Rounding::MIN_GROUP)),
        totals(scales.size()),
        offsets(scales.size()) {}

  uint32_t* words_of(int64_t tile, int64_t K, const Rounding& how) { return &words[tile * MAX_ROWS * how.words(K)]; }
  static int64_t group_of(int64_t tile, int64_t K, const Rounding& how) { return tile * MAX_ROWS * how.groups(K); }

  // Round x [M, K], distributed over threads by groups of a tile. Ends with a barrier.
  template <class X>
  void round(const Team& team, const Value<X>* x, const Portions& portions, int64_t K, const Rounding& how) {
    for (const Portion& portion : portions) round_rows<X>(team, x, portion, K, how);
    team.barrier();
  }
  template <class X>
  void round_rows(const Team& team, const Value<X>* x, const Portion& of, int64_t K, const Rounding& how) {
    const int64_t tile_rows = tile_size(of.rows, MAX_ROWS), groups = how.groups(K);
    const int64_t all = TILE_ROWS ? tile_rows : loop_rows(tile_rows);
    team.parallel_for(tiles_of(of.rows, MAX_ROWS) * groups, [&](int64_t item) {
      const int64_t tile = item / groups, g = item % groups, from = g * how.group;
      const int64_t rows = std::min(tile_rows, of.rows - tile * tile_rows), size = std::min(how.group, K - from);
      for (int64_t r = 0; r < rows; r++) {
        const int64_t here = of.first / MAX_ROWS + tile, index = group_of(here, K, how) + g * all + r;
        const Value<X>* row = x + (of.first + tile * tile_rows + r) * K;
        uint32_t* to = words_of(here, K, how);
        const auto round = [&](auto size, auto per_word) {
          alignas(64) char q[2 * Rounding::MAX_GROUP];
          if constexpr (TILE_ROWS) std::memset(q, 0, sizeof q);  // padding of a tile
          Ints sum = {};
          scales[index] = round_values<X>(row + from, size, 127, [&](int64_t i, Ints x) {
            sum += x;
            if (per_word == 4) store_bytes(q + i, x);
            else store_shorts(q + 2 * i, (Words)x);
          });
          const int32_t total = sum_of_lanes(sum);
          offsets[index] = -how.added * total, totals[index] = scales[index] * float(total);
          if constexpr (TILE_ROWS) {
            std::memcpy(to + (g * tile_rows + r) * how.tile_words(), q, how.tile_words() * sizeof(uint32_t));
          } else {
            uint32_t* first = to + from / per_word * all + r;
            for (int64_t k = 0; k < size / per_word; k++) std::memcpy(first + k * all, q + 4 * k, 4);
          }
        };
        // Three times as fast with sizes known at compile time.
        if (size == 64 && how.per_word == BYTES_PER_WORD) round(constant<64>, constant<BYTES_PER_WORD>);
        else if (size == 32 && how.per_word == NIBBLES_PER_WORD) round(constant<32>, constant<NIBBLES_PER_WORD>);
        else if (size == 16 && how.per_word == BYTES_PER_WORD) round(constant<16>, constant<BYTES_PER_WORD>);
        else round(size, how.per_word);
      }
    });
  }
};

// The columns of weights for rounded rows.
struct Bytes : Vectors<BYTES_PER_WORD, load_weight_bytes> {};
inline void words_of_nibbles(const void* from, Words& low, Words& high) {  // value + 8
  constexpr uint32_t LOW = NIBBLES_PER_WORD == 4 ? 0x0F0F0F0Fu : 0x000F000Fu;
  const Words both = NIBBLES_PER_WORD == 4 ? load<Words>(from) : load_weight_bytes(from);
  low = both & LOW, high = (both >> 4) & LOW;
}
struct Nibbles : Halves<NIBBLES_PER_WORD, words_of_nibbles> {};

// Sum R rounded rows over the steps from p to `end`. Integer sums are exact in any order.
template <class Columns, int R>
inline void sum_steps(const char*& p, const char* end, const uint32_t*& value, Prefetcher& next,
                      Ints (&sum)[R][VECTORS]) {
  constexpr bool MEMORY_BOUND = R <= MEMORY_BOUND_ROWS && std::is_same_v<Columns, Bytes> && BYTES_PER_WORD == 4;
  for (; p < end; p += Columns::BYTES, value += R) {
    Words columns[VECTORS];
    next.step<Columns::BYTES, MEMORY_BOUND>(p);
    Columns::unpack(p, 0, columns);
    multiply(sum, columns, [&](int r) { return value[r]; }, dot_bytes);
  }
}

#ifdef SHORT_SUMS
// `sum_steps` for nibbles, in 16 bits as long as they fit.
template <int R>
inline void sum_in_shorts(const char*& p, const char* end, const uint32_t*& value, Prefetcher& next,
                          Ints (&sum)[R][VECTORS]) {
  while (p < end) {
    Words shorts[R][VECTORS] = {};
#pragma GCC unroll 1  // unrolled it would need too many registers
    for (const char* part = p + SHORT_SUMS * Nibbles::BYTES; p < part; p += Nibbles::BYTES, value += R) {
      Words columns[VECTORS];
      next.step<Nibbles::BYTES>();
      Nibbles::unpack(p, 0, columns);
      multiply(shorts, columns, [&](int r) { return value[r]; }, add_nibbles);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) sum[r][v] += sums_of_pairs(shorts[r][v]);
  }
}
#endif

#ifdef BYTES_BY_TWOS
// `sum_steps` for pairs of rows, columns and steps; leaves the last step of an odd number.
template <class Columns, int R>
inline void sum_by_twos(const char*& p, const char* end, const uint32_t*& value, Prefetcher& next,
                        Ints (&sum)[R][VECTORS]) {
  constexpr auto first = [](int two) { return std::min(2 * two, R - 2); };  // the last two may overlap others
  constexpr int TWOS = (R + 1) / 2;
  static_assert(BYTES_PER_WORD == 4 && NIBBLES_PER_WORD == 4);
  Ints before[R][VECTORS], sums[TWOS][VECTORS][2] = {};
  std::memcpy(before, sum, sizeof before);
  for (; end - p >= 2 * Columns::BYTES; p += 2 * Columns::BYTES, value += 2 * R) {
    Words rows[TWOS], words[VECTORS], more[VECTORS];
    next.step<Columns::BYTES>(), next.step<Columns::BYTES>();
#pragma GCC unroll 3
    for (int i = 0; i < TWOS; i++) rows[i] = two_rows(value + first(i), value + R + first(i));
    Columns::unpack(p, 0, words), Columns::unpack(p + Columns::BYTES, 0, more);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      const Words columns[2] = {first_two(words[v], more[v]), last_two(words[v], more[v])};
#pragma GCC unroll 3
      for (int i = 0; i < TWOS; i++)
        for (int c = 0; c < 2; c++) sums[i][v][c] = dot_twos(sums[i][v][c], rows[i], columns[c]);
    }
  }
#pragma GCC unroll 3
  for (int i = 0; i < TWOS; i++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++)
      for (int r = 0; r < 2; r++) {
        const int row = first(i) + r;
        sum[row][v] = before[row][v] + sums_of_row(r, sums[i][v][0], sums[i][v][1]);
      }
}
#endif

// Reads the column scales of a block, group after group.
template <class Columns, Records::Kind KIND, bool MINIMA>
class Scales {
 public:
  Floats scale[VECTORS], minimum[VECTORS];

  Scales(const Weight& w, int64_t b) : unit(w.records.unit) {
    constexpr int64_t FLOAT = KIND == Records::BF16 ? 2 : 4;
    const int64_t of_unit = (1 + MINIMA) * BLOCK * (FLOAT + (KIND == Records::CODES ? unit : 0));
    at = static_cast<const char*>(w.scales) + b * (w.groups / unit) * of_unit;
  }
  void next() {
    if constexpr (KIND == Records::BF16) {
      for (int v = 0; v < VECTORS; v++, at += 2 * LANES) scale[v] = Bf16::get(reinterpret_cast<const uint16_t*>(at));
    } else if constexpr (KIND == Records::FLOATS) {
      read(scale);
      if constexpr (MINIMA) read(minimum);
    } else {
      if (left == 0) {
        read(units);
        if constexpr (MINIMA) read(of_minima);
        left = unit;
      }
      left--;
      multiply(units, scale);
      if constexpr (MINIMA) multiply(of_minima, minimum);
    }
    // Nibbles are 8 less than the integers that minima belong to.
    if constexpr (MINIMA && std::is_same_v<Columns, Nibbles>)
      for (int v = 0; v < VECTORS; v++) minimum[v] = fma(scale[v], broadcast(-8.0f), minimum[v]);
  }
  // `before` plus the integer sums of a group. of_row, total: the row's scale and total.
  Floats add(Ints sum, Floats of_row, float total, int v, Floats before) const {
    const Floats added = fma(to_floats(sum), of_row * scale[v], before);
    return MINIMA ? fma(broadcast(-total), minimum[v], added) : added;
  }

 private:
  void read(Floats* to) {
    for (int v = 0; v < VECTORS; v++, at += sizeof(Floats)) to[v] = load<Floats>(at);
  }
  void multiply(const Floats* by, Floats* to) {
    for (int v = 0; v < VECTORS; v++, at += LANES) to[v] = by[v] * floats_of_bytes(at);
  }

  const int64_t unit;
  const char* at;
  int64_t left = 0;
  Floats units[VECTORS], of_minima[VECTORS];
};

struct Unscaled {  // until the end
  Unscaled(const Weight&, int64_t) {}
  static Floats add(Ints sum, Floats of_row, float, int, Floats before) { return fma(to_floats(sum), of_row, before); }
};

// Call run with the `Scales` of a weight.
template <class Columns, class Run>
inline void dispatch_records(const Records& records, const Run& run) {
  if constexpr (std::is_same_v<Columns, Nibbles>)
    if (records.kind == Records::BF16) return run(std::type_identity<Scales<Columns, Records::BF16, false>>());
  if constexpr (!std::is_same_v<Columns, Nibbles>)
    if (records.kind == Records::NONE) return run(std::type_identity<Unscaled>());
  const bool codes = records.kind == Records::CODES;
  if (codes && records.minima) return run(std::type_identity<Scales<Columns, Records::CODES, true>>());
  if (codes) return run(std::type_identity<Scales<Columns, Records::CODES, false>>());
  if (records.minima) return run(std::type_identity<Scales<Columns, Records::FLOATS, true>>());
  return run(std::type_identity<Scales<Columns, Records::FLOATS, false>>());
}

// Multiply sums [rows, BLOCK] by the column scales of block b (one group).
inline void scale_columns(const Weight& w, int64_t b, int rows, float* sums) {
  const float* scale = static_cast<const float*>(w.scales) + b * BLOCK;
  for (int i = 0; i < rows * BLOCK; i += LANES)
    store(sums + i, load<Floats>(sums + i) * load<Floats>(scale + i % BLOCK));
}

// `block_product` for a tile of rounded rows. Sums within a group are exact; groups are added in order. S: `Scales`.
template <class Columns, int R, class S>
[[gnu::noinline]] void rounded_product(Rounded& x, int64_t tile, const Weight& w, int64_t b, Prefetcher next,
                                       float* sums) {
  constexpr bool SCALED = !std::is_same_v<S, Unscaled>;
  const Rounding how = Rounding::of(w);
  const char* p = w.block(b);
  const int64_t K = w.steps * how.per_word, groups = how.groups(K), steps = how.group / how.per_word;
  const uint32_t* value = x.words_of(tile, K, how);
  const int64_t at = x.group_of(tile, K, how);
  const float *scales = &x.scales[at], *totals = &x.totals[at];
  const int32_t* offsets = &x.offsets[at];
  S of_columns(w, b);
  for (int64_t g = 0; g < groups; g++) {
    Ints sum[R][VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
      for (int v = 0; v < VECTORS; v++) sum[r][v] = Ints{} + offsets[g * R + r];
    const char* end = p + std::min(steps, w.steps - g * steps) * Columns::BYTES;
#ifdef BYTES_BY_TWOS
    if constexpr (R > 1) sum_by_twos<Columns, R>(p, end, value, next, sum);
#endif
#ifdef SHORT_SUMS
    if constexpr (std::is_same_v<Columns, Nibbles>) sum_in_shorts<R>(p, end, value, next, sum);
#endif
    sum_steps<Columns, R>(p, end, value, next, sum);
    if constexpr (SCALED) of_columns.next();
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Floats of_row = broadcast(scales[g * R + r]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
        float* to = sums + r * BLOCK + v * LANES;
        store(to, of_columns.add(sum[r][v], of_row, totals[g * R + r], v, g ? load<Floats>(to) : Floats{}));
      }
    }
  }
  if constexpr (!SCALED) scale_columns(w, b, R, sums);
}

}  // namespace eagle
