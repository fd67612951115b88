// Activations rounded to int8, and their products: w8a8, w6a8, w4a8.
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

// The rounding of x for a weight: `group` inputs share a scale. Their products are summed in parts of `part` inputs,
// for which the weight has scales of its own. A word has `per_word` inputs.
struct Rounding {
  static constexpr int64_t CODED_GROUP = 128;  // activation group of weights with codes, as in stored.py
  static constexpr int64_t MIN_PART = 16, MAX_GROUP = CODED_GROUP;  // of group-quantized weights, see stored.py
  int64_t group, part, per_word;
  bool sixes = false;  // the weight has 6 bits

  static Rounding of(const Weight& w) {
    const int64_t per_word = w.format == Weight::W8A8 ? BYTES_PER_WORD : NIBBLES_PER_WORD;
    const int64_t part = w.records.kind == Records::NONE ? 64 : w.steps / w.groups * per_word;
    return {w.records.kind == Records::CODES ? CODED_GROUP : part, part, per_word, w.format == Weight::W6A8};
  }
  int64_t groups(int64_t K) const { return (K + group - 1) / group; }
  int64_t parts(int64_t K) const { return (K + part - 1) / part; }
  int64_t tile_words() const { return whole_tiles(part / per_word); }
  int64_t words(int64_t K) const { return TILE_ROWS ? parts(K) * tile_words() : K / per_word; }  // of a row
};

// Rows of x that are multiplied by the blocks of a weight from `block` on. The first row starts a tile of `Rounded`.
struct Portion { int64_t first, rows, block; };
using Portions = std::vector<Portion>;

// Rows of x rounded to int8, in tiles: words [words of K, loop rows], so that one address serves all rows; for AMX
// [parts, rows, words of a part], padded with zeros. scales [groups, loop rows], and the sum of a part's integers,
// exact in a float: totals [parts, loop rows]. For `sum_in_shorts` of 6-bit weights: starts [K / MIN_PART, loop rows].
struct Rounded {
  static constexpr int64_t MAX_ROWS = TILE_ROWS ? TILE_ROWS : ROWS;  // of a tile
  std::vector<uint32_t> words, starts;
  std::vector<float> scales, totals;

  // Allocate memory for M rows of at most K values.
  Rounded(int64_t M, int64_t K)
      : words(tiles_of(M, MAX_ROWS) * MAX_ROWS *
              std::max(smallest(BYTES_PER_WORD).words(K), smallest(NIBBLES_PER_WORD).words(K))),
        starts(tiles_of(M, MAX_ROWS) * MAX_ROWS * smallest(1).groups(K)),
        scales(starts.size()),
        totals(starts.size()) {}
  static Rounding smallest(int64_t per_word) { return {Rounding::MIN_PART, Rounding::MIN_PART, per_word}; }

  uint32_t* words_of(int64_t tile, int64_t K, const Rounding& how) { return &words[tile * MAX_ROWS * how.words(K)]; }
  float* scales_of(int64_t tile, int64_t K, const Rounding& how) { return &scales[tile * MAX_ROWS * how.groups(K)]; }
  uint32_t* starts_of(int64_t tile, int64_t K) { return &starts[tile * MAX_ROWS * smallest(1).groups(K)]; }
  float* totals_of(int64_t tile, int64_t K, const Rounding& how) { return &totals[tile * MAX_ROWS * how.parts(K)]; }

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
      const int64_t tile = item / groups, g = item % groups, from = g * how.group, size = std::min(how.group, K - from);
      const int64_t rows = std::min(tile_rows, of.rows - tile * tile_rows), here = of.first / MAX_ROWS + tile;
      float *scale = scales_of(here, K, how) + g * all, *total = totals_of(here, K, how) + from / how.part * all;
      uint32_t *to = words_of(here, K, how), *start = starts_of(here, K) + from / Rounding::MIN_PART * all;
      for (int64_t r = 0; r < rows; r++) {
        const Value<X>* row = x + (of.first + tile * tile_rows + r) * K;
        const auto round = [&](auto size, auto part, auto per_word) {
          constexpr int64_t MIN_PART = Rounding::MIN_PART;
          alignas(64) char q[2 * Rounding::MAX_GROUP];
          Ints sums[Rounding::MAX_GROUP / MIN_PART] = {};
          scale[r] = round_values<X>(row + from, size, 127, [&](int64_t i, Ints x) {
            sums[i / MIN_PART] += x;
            if (per_word == 4) store_bytes(q + i, x);
            else store_shorts(q + 2 * i, (Words)x);
          });
          for (int64_t s = 0; how.sixes && s * MIN_PART < size; s++) {
            int32_t pairs[2] = {};  // the sums of the first two bytes and of the last two of each word, times -32
            for (int l = 0; l < LANES; l++) pairs[l / 2 % 2] -= 32 * sums[s][l];
            start[s * all + r] = uint32_t(pairs[1]) << 16 | uint16_t(pairs[0]);
          }
          for (int64_t p = 0; p * part < size; p++) {
            Ints of_part = {};
            for (int64_t i = p * part; i < p * part + part; i += MIN_PART) of_part += sums[i / MIN_PART];
            total[p * all + r] = float(sum_of_lanes(of_part));
            if constexpr (TILE_ROWS) {
              uint32_t* words = to + ((from / part + p) * tile_rows + r) * how.tile_words();
              std::fill_n(words, how.tile_words(), 0);
              std::memcpy(words, q + p * part, std::min<int64_t>(part, size - p * part));
            }
          }
          if constexpr (!TILE_ROWS) {
            uint32_t* first = to + from / per_word * all + r;
            for (int64_t k = 0; k < size / per_word; k++) std::memcpy(first + k * all, q + 4 * k, 4);
          }
        };
        // Three times as fast with sizes known at compile time. Returns whether these are the sizes.
        const auto round_if = [&](auto inputs, auto part, auto per_word) {
          const bool is = size == inputs && how.part == part && how.per_word == per_word;
          if (is) round(inputs, part, per_word);
          return is;
        };
        constexpr auto coded = constant<Rounding::CODED_GROUP>;
        constexpr auto bytes = constant<BYTES_PER_WORD>;
        constexpr auto nibbles = constant<NIBBLES_PER_WORD>;
        if (!round_if(constant<64>, constant<64>, bytes) && !round_if(coded, constant<32>, nibbles) &&
            !round_if(coded, constant<16>, bytes) && !round_if(coded, constant<16>, nibbles) &&
            !round_if(constant<32>, constant<32>, nibbles))
          round(size, how.part, how.per_word);
      }
    });
  }
};

// The columns of weights for rounded rows. ADDED: zero point of their values.
struct Bytes : Vectors<BYTES_PER_WORD, load_weight_bytes> {
  static constexpr int ADDED = WEIGHT_OFFSET;
};
inline void words_of_nibbles(const void* from, Words& low, Words& high) {
  constexpr uint32_t LOW = NIBBLES_PER_WORD == 4 ? 0x0F0F0F0Fu : 0x000F000Fu;
  const Words both = NIBBLES_PER_WORD == 4 ? load<Words>(from) : load_weight_bytes(from);
  low = both & LOW, high = (both >> 4) & LOW;
}
struct Nibbles : Halves<NIBBLES_PER_WORD, words_of_nibbles> {  // -8..7
  static constexpr int ADDED = 8, SHORT_SUMS = 8;  // 8 * 2 * 15 * 127 is a short
};
struct Unsigned : Nibbles {  // 0..15: weights with minima
  static constexpr int ADDED = 0;
};
struct Sixes : Nibbles {  // -32..31: low bits as nibbles, then two high bits of each quarter of the columns
  static constexpr int ADDED = 32, SHORT_SUMS = Rounding::MIN_PART / 4;  // 4 * 2 * 32 * 127 is a short
  static constexpr int64_t BYTES = BLOCK * 3 / 4 * NIBBLES_PER_WORD;
  static void unpack(const char* p, int, Words* columns) {
    constexpr uint32_t HIGH = NIBBLES_PER_WORD == 4 ? 0x30303030u : 0x00300030u;
    Nibbles::unpack(p, 0, columns);
    const Words all = load_quarters(p + Nibbles::BYTES);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      Words by;  // shift counts: 4, 2, 0 and -2 bits to the left
      for (int l = 0; l < LANES; l++) by[l] = 2 * std::abs(2 - (v * LANES + l) / (BLOCK / 4));
      columns[v] |= (2 * v < VECTORS ? all << by : all >> by) & HIGH;
    }
  }
};

// Add the products of R rows of a tile of ALL rounded rows over the steps from p to `end` to the sums. Integer sums are
// exact in any order.
template <class Columns, int ALL, int R>
inline void sum_steps(const char*& p, const char* end, const uint32_t*& value, Prefetcher& next,
                      Ints (&sum)[R][VECTORS]) {
  constexpr bool MEMORY_BOUND = R <= MEMORY_BOUND_ROWS && std::is_same_v<Columns, Bytes> && BYTES_PER_WORD == 4;
  for (; p < end; p += Columns::BYTES, value += ALL) {
    Words columns[VECTORS];
    next.step<Columns::BYTES, MEMORY_BOUND>(p);
    Columns::unpack(p, 0, columns);
    multiply(sum, columns, [&](int r) { return value[r]; }, dot_bytes);
  }
}

#ifndef SUMS_IN_SHORTS
template <class Columns> constexpr bool IN_SHORTS = false;
#else
template <class Columns> constexpr bool IN_SHORTS = !std::is_same_v<Columns, Bytes>;
// `sum_steps` for unsigned values, in 16 bits as long as they fit; times a factor for each column. With 6 bits sums
// `start` at what was added to the values, and may overflow until the last.
template <class Columns, int ALL, int R>
inline void sum_in_shorts(const char*& p, const char* end, const uint32_t*& value, const uint32_t*& start,
                          Prefetcher& next, const Ints (&factor)[VECTORS], Ints (&sum)[R][VECTORS]) {
  while (p < end) {
    Words shorts[R][VECTORS] = {};
    if constexpr (std::is_same_v<Columns, Sixes>)
#pragma GCC unroll 12
      for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) shorts[r][v] = broadcast(start[r]);
    start += ALL;
#pragma GCC unroll 1  // unrolling would need too many registers
    for (const char* part = p + Columns::SHORT_SUMS * Columns::BYTES; p < part; p += Columns::BYTES, value += ALL) {
      Words columns[VECTORS];
      next.step<Columns::BYTES>();
      Columns::unpack(p, 0, columns);
      multiply(shorts, columns, [&](int r) { return value[r]; }, add_shorts);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++)
        sum[r][v] += dot_shorts(shorts[r][v], factor[v] << 16 | (factor[v] & 0xFFFF));
  }
}
#endif

#ifdef BYTES_BY_TWOS
// `sum_steps` for pairs of rows, columns and steps; leaves the last step of an odd number.
template <class Columns, int ALL, int R>
inline void sum_by_twos(const char*& p, const char* end, const uint32_t*& value, Prefetcher& next,
                        Ints (&sum)[R][VECTORS]) {
  constexpr auto first = [](int two) { return std::min(2 * two, R - 2); };  // the last two may overlap previous ones
  constexpr int TWOS = (R + 1) / 2;
  static_assert(BYTES_PER_WORD == 4 && NIBBLES_PER_WORD == 4);
  Ints before[R][VECTORS], sums[TWOS][VECTORS][2] = {};
  std::memcpy(before, sum, sizeof before);
  for (; end - p >= 2 * Columns::BYTES; p += 2 * Columns::BYTES, value += 2 * ALL) {
    Words rows[TWOS], words[VECTORS], more[VECTORS];
    next.step<Columns::BYTES>(), next.step<Columns::BYTES>();
#pragma GCC unroll 3
    for (int i = 0; i < TWOS; i++) rows[i] = two_rows(value + first(i), value + ALL + first(i));
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

// Reads the column scales of a block, part after part of the inputs.
template <class Columns, Records::Kind KIND, bool MINIMA_>
class Scales {
 public:
  static constexpr bool MINIMA = MINIMA_, CODED = KIND == Records::CODES;
  // Of the part: integers that multiply its sums, and its total. Of all parts with them: the scales of both.
  Ints code[VECTORS];
  Floats minimum_code[VECTORS], scale[VECTORS], minimum[VECTORS];
  // Of the next part, and the number of parts left in its unit, which starts with a group: returning to the place of the
  // group's first part reads all of the group again.
  struct Place {
    const char* at;
    int64_t left;
  } place;

  Scales(const Weight& w, int64_t b) : unit(w.records.unit) {
    const int64_t of_unit = (1 + MINIMA) * BLOCK * (sizeof(float) + (CODED ? unit : 0));
    place = {static_cast<const char*>(w.scales) + b * (w.groups / unit) * of_unit, 0};
    for (int v = 0; v < VECTORS; v++) code[v] = Ints{} + 1, minimum_code[v] = broadcast(1.0f);
  }
  void next() {
    auto& [at, left] = place;
    if (!CODED || left == 0) {
      for (int v = 0; v < VECTORS; v++, at += sizeof(Floats)) scale[v] = load<Floats>(at);
      for (int v = 0; v < VECTORS && MINIMA; v++, at += sizeof(Floats)) minimum[v] = load<Floats>(at);
      left = unit;
    }
    left--;
    if (!CODED) return;
    for (int v = 0; v < VECTORS; v++, at += LANES) code[v] = ints_of_bytes(at);
    for (int v = 0; v < VECTORS && MINIMA; v++, at += LANES) minimum_code[v] = to_floats(ints_of_bytes(at));
  }
  // `before` plus the sums of a group of inputs, and `less` of its minima. of_row: the scale of the row's inputs.
  Floats add(Ints sum, Floats less, Floats of_row, int v, Floats before) const {
    Floats product = to_floats(sum) * scale[v];
    if constexpr (MINIMA) product = fma(broadcast(0.0f) - less, minimum[v], product);
    return fma(product, of_row, before);
  }

 private:
  const int64_t unit;
};

struct Unscaled {  // scaled after the last step
  static constexpr bool MINIMA = false, CODED = false;
  struct {} place;
  Unscaled(const Weight&, int64_t) {}
  static Floats add(Ints sum, Floats, Floats of_row, int, Floats before) { return fma(to_floats(sum), of_row, before); }
};

// Call run with the storage and the `Scales` of a weight.
template <class Columns, class Run>
inline void dispatch_records(const Records& records, const Run& run) {
  using WithMinima = std::conditional_t<std::is_same_v<Columns, Nibbles>, Unsigned, Columns>;
  const auto dispatch = [&]<Records::Kind KIND>(std::integral_constant<Records::Kind, KIND>) {
    if (records.minima) run.template operator()<WithMinima, Scales<WithMinima, KIND, true>>();
    else run.template operator()<Columns, Scales<Columns, KIND, false>>();
  };
  if (records.kind == Records::CODES) return dispatch(std::integral_constant<Records::Kind, Records::CODES>());
  if (records.kind == Records::FLOATS) return dispatch(std::integral_constant<Records::Kind, Records::FLOATS>());
  if constexpr (std::is_same_v<Columns, Bytes>) run.template operator()<Bytes, Unscaled>();
}

// Multiply sums [rows, BLOCK] by the column scales of block b (one group).
inline void scale_columns(const Weight& w, int64_t b, int rows, float* sums) {
  const float* scale = static_cast<const float*>(w.scales) + b * BLOCK;
  for (int i = 0; i < rows * BLOCK; i += LANES)
    store(sums + i, load<Floats>(sums + i) * load<Floats>(scale + i % BLOCK));
}

// `block_product` for a tile of rounded rows. Sums within a group are exact; groups are added in order. S: `Scales`.
//
// The sums of many rows exceed the registers. So a group is multiplied by AT_ONCE rows of the tile, then, from L1, by
// the next ones.
template <class Columns, int R, class S>
[[gnu::noinline]] void rounded_product(Rounded& x, int64_t tile, const Weight& w, int64_t b, Prefetcher next,
                                       float* sums) {
  constexpr bool SCALED = !std::is_same_v<S, Unscaled>;
  constexpr int AT_ONCE = ROWS <= 6 || R <= 4 ? R : R % 4 ? R / 2 : 4;
  static_assert(R % AT_ONCE == 0);
  const Rounding how = Rounding::of(w);
  const int64_t K = w.steps * how.per_word, parts = how.parts(K), steps = how.part / how.per_word;
  const char* p = w.block(b);
  const uint32_t* value = x.words_of(tile, K, how);
  [[maybe_unused]] const uint32_t* start = x.starts_of(tile, K);
  const float *scales = x.scales_of(tile, K, how), *total = x.totals_of(tile, K, how);
  S of_columns(w, b);
  next.share(R / AT_ONCE);
  for (int64_t g = 0, first_part = 0, end; first_part < parts; g++, first_part = end) {
    end = std::min(parts, first_part + how.group / how.part);
    [[maybe_unused]] const std::tuple group(p, value, start, total, of_columns.place);
    for (int first = 0; first < R; first += AT_ONCE) {
      if constexpr (AT_ONCE < R) {
        std::tie(p, value, start, total, of_columns.place) = group;
        value += first, start += first, total += first;
      }
      Ints sum[AT_ONCE][VECTORS] = {};
      Floats less[AT_ONCE][VECTORS] = {};
      for (int64_t part = first_part; part < end; part++, total += R) {
        const char* to = p + std::min(steps, w.steps - part * steps) * Columns::BYTES;
        if constexpr (SCALED) of_columns.next();
        Ints of_part[AT_ONCE][VECTORS];
#pragma GCC unroll 12
        for (int r = 0; r < AT_ONCE; r++)
          for (int v = 0; v < VECTORS; v++) of_part[r][v] = Ints{} + int32_t(total[r]) * -Columns::ADDED;
#ifdef BYTES_BY_TWOS
        if constexpr (AT_ONCE > 1) sum_by_twos<Columns, R>(p, to, value, next, of_part);
#endif
#ifdef SUMS_IN_SHORTS
        if constexpr (IN_SHORTS<Columns>) sum_in_shorts<Columns, R>(p, to, value, start, next, of_columns.code, sum);
#endif
        if constexpr (!IN_SHORTS<Columns>) sum_steps<Columns, R>(p, to, value, next, of_part);
#pragma GCC unroll 12
        for (int r = 0; r < AT_ONCE; r++)
          for (int v = 0; v < VECTORS; v++) {
            if constexpr (S::CODED) of_part[r][v] *= of_columns.code[v];
            if constexpr (!IN_SHORTS<Columns> || std::is_same_v<Columns, Nibbles>) sum[r][v] += of_part[r][v];
            if constexpr (S::MINIMA) less[r][v] = fma(broadcast(total[r]), of_columns.minimum_code[v], less[r][v]);
          }
      }
#pragma GCC unroll 12
      for (int r = 0; r < AT_ONCE; r++) {
        const Floats of_row = broadcast(scales[g * R + first + r]);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
          float* to = sums + (first + r) * BLOCK + v * LANES;
          store(to, of_columns.add(sum[r][v], less[r][v], of_row, v, g ? load<Floats>(to) : Floats{}));
        }
      }
    }
    value -= R - AT_ONCE, start -= R - AT_ONCE, total -= R - AT_ONCE;
  }
  if constexpr (!SCALED) scale_columns(w, b, R, sums);
}

}  // namespace eagle
