// A KV cache in the model's dtype. Blocks of slots are packed to the layout of tiles once for all rows.
#pragma once

#include "pass.h"

namespace eagle {

// Keys and values of one head of one sequence, see `Attention`.
template <class E>
struct DtypeKV {
  using Keys = Input<E>;
  using Values = Input<E>;
  static constexpr int W = Keys::PER_WORD;
  static constexpr int64_t VALUE_WORDS = BLOCK_SLOTS / W;
  const int64_t hd, words, padded;
  // Queries [groups, words, ROWS], for AMX [groups, ROWS, words]; tiles of keys [words, BLOCK] and values
  // [VALUE_WORDS, BLOCK], of a block's shared slots and of one row's slots. Products read up to ROWS rows beyond the
  // last, and whole tiles.
  const Buffer<uint32_t> queries, keys, row_keys, values, row_values;
  const Value<E>*k = nullptr, *v = nullptr;
  int64_t k_stride = 0, v_stride = 0, first = 0;  // strides of slots; first slot of the block

  DtypeKV(int64_t hd, int64_t padded, int64_t groups)
      : hd(hd), words(tile_words<Keys>(hd / W)), padded(padded), queries((groups + 1) * words * ROWS),
        keys(BLOCK_SLOTS * words), row_keys(BLOCK * words), values(VALUE_WORDS * padded),
        row_values(VALUE_WORDS * padded) {
    // Clear what is read before it is written: stale memory may hold denormals, which are 100 times as slow on Intel.
    std::fill_n(&queries[0], (groups + 1) * words * ROWS, 0);
    if (words == hd / W) return;
    std::fill_n(&keys[0], BLOCK_SLOTS * words, 0), std::fill_n(&row_keys[0], BLOCK * words, 0);
  }

  static Value<E>* address(const Cache& cache, int64_t b, int64_t slot, int64_t h) {
    return static_cast<Value<E>*>(cache.data) + cache.offset(b, slot, h);
  }
  // Store a key. rotate(dtype, to) writes it.
  template <class Rotate>
  static void store_key(const Cache& cache, int64_t b, int64_t slot, int64_t h, int64_t, const Rotate& rotate) {
    rotate(E(), address(cache, b, slot, h));
  }
  static void store_value(const Cache& cache, int64_t b, int64_t slot, int64_t h, int64_t hd,
                          const Value<E>* value) {
    std::memcpy(address(cache, b, slot, h), value, hd * sizeof(Value<E>));
  }
  static PrefetchRange prefetch_range(const Cache& cache, int64_t b, int64_t block, int64_t h, int64_t count,
                                      int64_t hd) {
    const Value<E>* from = address(cache, b, block * BLOCK_SLOTS, h);
    return {(const char*)from, (const char*)(from + count * hd)};
  }

  // Pack the first `count` slots of a block of head h, which all rows share.
  void load_block(const Cache& of_keys, const Cache& of_values, int64_t b, int64_t h, int64_t block, int64_t count) {
    k = address(of_keys, b, 0, h), v = address(of_values, b, 0, h);
    k_stride = of_keys.slot, v_stride = of_values.slot, first = block * BLOCK_SLOTS;
    pack_keys(count, [&](int64_t i) { return k + (first + i) * k_stride; }, keys);
    pack_values(count, [&](int64_t i) { return v + (first + i) * v_stride; }, values);
  }
  const char* key_tile(int64_t at) const { return (const char*)&keys[at * words]; }
  const char* value_tiles() const { return (const char*)&values[0]; }

  // Pack `count` of a row's visible slots, from number `from` of the block on.
  const char* row_key_tile(const VisibleSlots& slots, int64_t from, int64_t count) {
    pack_keys(count, [&](int64_t i) { return k + slots.slot(first + from + i) * k_stride; }, row_keys);
    return (const char*)&row_keys[0];
  }
  const char* row_value_tiles(const VisibleSlots& slots, int64_t from, int64_t count) {
    pack_values(count, [&](int64_t i) { return v + slots.slot(first + from + i) * v_stride; },
                row_values);
    const int64_t end = (count + W - 1) / W, rest = tile_words<Values>(end) - end;
    for (int64_t d = 0; d < padded && rest; d += BLOCK)
      std::fill_n(&row_values[(d / BLOCK * VALUE_WORDS + end) * BLOCK], rest * BLOCK, 0);
    return (const char*)&row_values[0];
  }

  // LANES words of a row from the w-th on.
  Words words_of(const Value<E>* row, int64_t w) const {
    const int64_t rest = hd / W - w;
    if constexpr (W == 2) return (Words)Fp32::get(reinterpret_cast<const float*>(row) + w, rest);
    else return (Words)E::get(row + w, rest);
  }

  uint32_t* query_rows(int64_t group, int row) const { return &queries[(group * ROWS + row) * words]; }
  void set_query(int64_t group, int row, const Value<E>* query) {
    const int64_t all = hd / W;
    if (TILED<Keys>) return (void)std::memcpy(query_rows(group, row), query, all * sizeof(uint32_t));
    for (int64_t w = 0; w < all; w += LANES) {
      const Words some = words_of(query, w);
      uint32_t* to = &queries[(group * words + w) * ROWS + row];
      for (int64_t i = 0; i < LANES && w + i < all; i++) to[i * ROWS] = some[i];
    }
  }

  // Pack `count` keys row(i) to tiles [words, BLOCK].
  template <class Row>
  void pack_keys(int64_t count, const Row& row, uint32_t* to) const {
    // Stored words are transposed; a stored word has PARTS words of a tile.
    constexpr int64_t PARTS = sizeof(float) / sizeof(Value<E>) / W;
    const int64_t words = this->words, all = hd / W / PARTS;  // copies, as members would be reloaded after every store
    for (int64_t j = 0; j < count; j += LANES)
      for (int64_t w = 0; w < all; w += LANES) {
        Words some[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
          some[i] = (Words)Fp32::get(reinterpret_cast<const float*>(row(std::min(j + i, count - 1))) + w, all - w);
        transpose(some);
        uint32_t* at = to + (j / BLOCK * words + w * PARTS) * BLOCK + j % BLOCK;
        for (int64_t i = 0; i < LANES && w + i < all; i++, at += PARTS * BLOCK)
          if constexpr (PARTS == 1) store(at, some[i]);
          else store(at, even(some[i])), store(at + BLOCK, odd(some[i]));
      }
    for (int64_t j = (count + LANES - 1) / LANES * LANES; j % BLOCK; j += LANES)  // the rest of a tile
      for (int64_t w = 0; w < words; w++) store(to + (j / BLOCK * words + w) * BLOCK + j % BLOCK, Words{});
  }

  // Pack `count` values row(i) to tiles [VALUE_WORDS, BLOCK]. A pair has the values of two slots; the last may repeat
  // one.
  template <class Row>
  void pack_values(int64_t count, const Row& row, uint32_t* to) const {
    const int64_t hd = this->hd, padded = this->padded;
    for (int64_t k = 0; k * W < count; k++) {
      const Value<E>* from[W];
      for (int i = 0; i < W; i++) from[i] = row(std::min(k * W + i, count - 1));
      for (int64_t d = 0; d < padded; d += W * LANES) {
        Words some[W] = {};
        for (int i = 0; i < W && d < hd; i++)
          some[i] = W == 2 ? (Words)Fp32::get((const float*)(from[i] + d), (hd - d) / 2)
                           : (Words)E::get(from[i] + d, hd - d);
        if constexpr (W == 2) zip(some[0], some[1]);
        uint32_t* at = to + (d / BLOCK * VALUE_WORDS + k) * BLOCK + d % BLOCK;
        for (int i = 0; i < W; i++) store(at + i * LANES, some[i]);
      }
    }
  }

  // Turn the scores of `rows` rows into softmax weights of `count` slots; slots before `from` get weight 0.
  // cap: a soft cap of scaled scores, or 0.
  void softmax(int64_t, int row, int rows, const VisibleSlots&, int64_t, int64_t from, int64_t count, float scale,
               float cap, float* scores, const SoftmaxSums& sums) const {
    for (int r = row; r < row + rows; r++) {
      for (int64_t j = 0; cap && j < count; j += LANES)
        store(scores + r * SCORES + j, soft_cap(load<Floats>(scores + r * SCORES + j) * scale, cap));
      std::fill_n(scores + r * SCORES, from, -INFINITY);
      softmax_row(scores + r * SCORES, count, cap ? 1.0f : scale, sums.exponent[r], sums.total + r * LANES);
    }
  }
  void dequantize(int, const SoftmaxSums&) const {}

  // Turn `count` scores of a row into weights 2^(score * scale - exponent), padded with zeros to a whole word.
  // Weights are rounded to bfloat16 where pairs are multiplied; their total is not.
  static void softmax_row(float* row, int64_t count, float scale, float& exponent, float* total) {
    const Floats nearest = broadcast(ROUND);
    for (int64_t j = count; j < BLOCK_SLOTS && j % (W * LANES); j++) row[j] = -INFINITY;
    Floats top = broadcast(-1e30f), sum = {};
    for (int64_t j = 0; j < count; j += LANES) top = larger(load<Floats>(row + j), top);
    top = (larger(top * scale, broadcast(-4e6f)) + nearest) - nearest;
    exponent = count ? largest_lane(__builtin_convertvector(top, Ints)) : -1e30f;
    const Floats relative = broadcast(-exponent), factor = broadcast(scale);
    for (int64_t j = 0; j < count; j += W * LANES)
#pragma GCC unroll 2
      for (int i = 0; i < W; i++) {
        const Floats x = fma(load<Floats>(row + j + i * LANES), factor, relative);
        const Floats n = x + nearest, f = x - (n - nearest);
        const Floats scaled = (Floats)((Ints)power_of_two<sizeof(Value<E>) == 4>(f) + ((Ints)n << 23));
        const Floats weight = x > -125.0f ? scaled : Floats{};
        sum += weight;
        if constexpr (W == 2) Bf16::put(reinterpret_cast<uint16_t*>(row) + j + i * LANES, weight);
        else store(row + j, weight);
      }
    store(total, sum);
  }
};

}  // namespace eagle
