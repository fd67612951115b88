// A KV cache in int8, with one scale (step = largest magnitude / 127) per head and slot.
//
// It is stored in the layout of tiles, so only slots that rows do not share are packed. Queries and softmax weights are
// rounded to integers per row. So sums within a block are exact in any order, for any set of shared slots.
//
// A block has BLOCK_SLOTS slots of one head: their steps (floats), then tiles of keys [words, BLOCK] or values
// [VALUE_WORDS, BLOCK]. A word has BYTES_PER_WORD values. BYTE_OFFSET is added to keys.
#pragma once

#include "pass.h"

namespace eagle {

// Integer products. Sums are declared as floats and hold the bits of integers.
struct Int8Keys {
  static Floats dot(Floats sum, Words keys, Words query) { return (Floats)dot_bytes((Ints)sum, keys, query); }
};
struct Int8Values {
  static Floats dot(Floats sum, Words values, Words weights) {
    return (Floats)dot_bytes((Ints)sum, weights, values);
  }
};
template <> struct Columns<Int8Keys> : Bytes {};
template <> struct Columns<Int8Values> : Bytes {};

// Ranges of rounded values. Queries and softmax weights use 14 bits where words are pairs of 16 bits; weights use 8
// bits where one operand of a product is unsigned.
constexpr float MAX_STORED = 127, MAX_QUERY = BYTES_PER_WORD == 2 ? 8191 : 127;
constexpr float MAX_WEIGHT = BYTES_PER_WORD == 2 ? 8191 : BYTE_OFFSET ? 255 : 127;

// The layout of a block.
struct Int8Block {
  static constexpr int64_t STEPS = BLOCK_SLOTS * sizeof(float), P = BYTES_PER_WORD, VALUE_WORDS = BLOCK_SLOTS / P;
  static int64_t words(int64_t hd) { return (hd + P - 1) / P; }
  static int64_t key_bytes(int64_t hd) { return STEPS + BLOCK_SLOTS * words(hd) * P; }
  static int64_t value_bytes(int64_t hd) { return STEPS + BLOCK_SLOTS * ((hd + BLOCK - 1) / BLOCK * BLOCK); }

  char* const data;
  const int64_t i;  // slot in the block

  Int8Block(const Cache& cache, int64_t b, int64_t slot, int64_t h)
      : data((char*)cache.data + cache.offset(b, slot / BLOCK_SLOTS, h)), i(slot % BLOCK_SLOTS) {}
  float& step() const { return reinterpret_cast<float*>(data)[i]; }
  char* tiles() const { return data + STEPS; }
  // The words of a key are KEY_STRIDE apart.
  static constexpr int64_t KEY_STRIDE = BLOCK * P;
  char* key(int64_t words) const { return tiles() + (i / BLOCK * words * BLOCK + i % BLOCK) * P; }
  char& value(int64_t d) const { return tiles()[value_offset(i, d)]; }
  // Call f(address, bytes) for each piece of the slot's key or value.
  template <class F>
  void pieces(int64_t hd, bool is_key, const F& f) const {
    f(reinterpret_cast<char*>(&step()), sizeof(float));
    for (int64_t d = 0; d < hd; d++)
      f(is_key ? &key(words(hd))[d / P * KEY_STRIDE + d % P] : &value(d), 1);
  }
  static int64_t value_offset(int64_t i, int64_t d) {
    return ((d / BLOCK * VALUE_WORDS + i / P) * BLOCK + d % BLOCK) * P + i % P;
  }
};

// Keys and values of one head of one sequence, see `Attention`.
template <class E>
struct Int8KV {
  using Keys = Int8Keys;
  using Values = Int8Values;
  static constexpr int W = BYTES_PER_WORD;
  static constexpr int64_t VALUE_WORDS = Int8Block::VALUE_WORDS;
  const int64_t hd, words, padded;
  // Queries [groups, words, ROWS], for AMX also [groups, ROWS, words]; by row, the step and the correction of
  // BYTE_OFFSET; tiles of one row's slots, and the steps of all its slots.
  const Buffer<uint32_t> queries, queries_by_row;
  const Buffer<float> query_steps;
  const Buffer<int32_t> offsets;
  const Buffer<char> row_keys, row_values;
  alignas(64) float key_steps[BLOCK_SLOTS], value_steps[BLOCK_SLOTS], weight_steps[ROWS];
  const Cache *of_keys = nullptr, *of_values = nullptr;
  int64_t b = 0, h = 0, block = 0;

  Int8KV(int64_t hd, int64_t padded, int64_t groups)
      : hd(hd), words(Int8Block::words(hd)), padded(padded), queries((groups * words + 1) * ROWS),
        queries_by_row(TILE_ROWS ? groups * ROWS * words : 1),
        query_steps(groups * ROWS), offsets(groups * ROWS),
        row_keys(BLOCK * words * W), row_values(BLOCK_SLOTS * padded) {}

  template <class Rotate>
  static void store_key(const Cache& cache, int64_t b, int64_t slot, int64_t h, int64_t hd, const Rotate& rotate) {
    auto* head = static_cast<float*>(alloca(hd * sizeof(float)));
    auto* bytes = static_cast<char*>(alloca(hd + LANES));
    rotate(Fp32(), head);
    const Int8Block to(cache, b, slot, h);
    const int64_t words = Int8Block::words(hd);
    to.step() = round_values<Fp32>(head, hd, MAX_STORED,
                                   [&](int64_t i, Ints x) { store_bytes(bytes + i, x ^ BYTE_OFFSET); });
    for (int64_t w = 0; w < words; w++)
      std::memcpy(to.key(words) + w * Int8Block::KEY_STRIDE, bytes + w * W, W);
  }
  static void store_value(const Cache& cache, int64_t b, int64_t slot, int64_t h, int64_t hd,
                          const Value<E>* value) {
    auto* bytes = static_cast<char*>(alloca(hd + LANES));
    const Int8Block to(cache, b, slot, h);
    to.step() = round_values<E>(value, hd, MAX_STORED, [&](int64_t i, Ints x) { store_bytes(bytes + i, x); });
    for (int64_t d = 0; d < hd; d++) to.value(d) = bytes[d];
  }
  static PrefetchRange prefetch_range(const Cache& cache, int64_t b, int64_t block, int64_t h, int64_t, int64_t) {
    const char* from = Int8Block(cache, b, block * BLOCK_SLOTS, h).data;
    return {from, from + cache.slot};
  }

  void load_block(const Cache& k, const Cache& v, int64_t sequence, int64_t head, int64_t number, int64_t) {
    of_keys = &k, of_values = &v, b = sequence, h = head, block = number;
  }
  Int8Block key_block() const { return {*of_keys, b, block * BLOCK_SLOTS, h}; }
  Int8Block value_block() const { return {*of_values, b, block * BLOCK_SLOTS, h}; }
  const char* key_tile(int64_t at) const { return key_block().tiles() + at * words * W; }
  const char* value_tiles() const { return value_block().tiles(); }

  const char* row_key_tile(const VisibleSlots& slots, int64_t from, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
      const Int8Block key(*of_keys, b, slots.slot(block * BLOCK_SLOTS + from + i), h);
      for (int64_t w = 0; w < words; w++)
        std::memcpy(&row_keys[(w * BLOCK + i) * W], key.key(words) + w * Int8Block::KEY_STRIDE, W);
    }
    return row_keys;
  }
  const char* row_value_tiles(const VisibleSlots& slots, int64_t from, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
      const Int8Block value(*of_values, b, slots.slot(block * BLOCK_SLOTS + from + i), h);
      for (int64_t d = 0; d < hd; d++) row_values[Int8Block::value_offset(i, d)] = value.value(d);
    }
    return row_values;
  }

  const uint32_t* query_rows(int64_t group, int row) const { return &queries_by_row[(group * ROWS + row) * words]; }
  void set_query(int64_t group, int row, const Value<E>* query) {
    auto* q = static_cast<char*>(alloca((hd + LANES) * 4 / W));
    Ints sum = {};
    query_steps[group * ROWS + row] = round_values<E>(query, hd, MAX_QUERY, [&](int64_t i, Ints x) {
      sum += x;
      if constexpr (W == 4) store_bytes(q + i, x);
      else store_shorts(q + 2 * i, (Words)x);
    });
    offsets[group * ROWS + row] = -BYTE_OFFSET * sum_of_lanes(sum);
    for (int64_t w = 0; w < words; w++) std::memcpy(&queries[(group * words + w) * ROWS + row], q + 4 * w, 4);
    if (TILE_ROWS) std::memcpy(&queries_by_row[(group * ROWS + row) * words], q, 4 * words);
  }

  // See kv_dtype.h. Weights are multiplied by the steps of their values, then rounded.
  void softmax(int64_t group, int row, int rows, const VisibleSlots& slots, int64_t shared, int64_t from, int64_t count,
               float scale, float cap, float* scores, const SoftmaxSums& sums) {
    const float *keys = &key_block().step(), *values = &value_block().step();
    const int64_t end = (count + LANES - 1) / LANES * LANES;
    if (end > shared || from) {
      std::copy_n(keys, shared, key_steps), std::copy_n(values, shared, value_steps);
      for (int64_t i = shared; i < count; i++) {
        const int64_t slot = slots.slot(block * BLOCK_SLOTS + i);
        key_steps[i] = Int8Block(*of_keys, b, slot, h).step();
        value_steps[i] = Int8Block(*of_values, b, slot, h).step();
      }
      const auto mask = [&](int64_t i) {  // lowest score, no weight
        key_steps[i] = 1e25f, value_steps[i] = 0;
        for (int r = row; r < row + rows; r++) {
          const int32_t lowest = -(1 << 30);
          std::memcpy(&scores[r * SCORES + i], &lowest, sizeof lowest);
        }
      };
      for (int64_t i = 0; i < from; i++) mask(i);
      for (int64_t i = count; i < end; i++) mask(i);
      keys = key_steps, values = value_steps;
    }
    // One loop over rows per phase hides the latency of each row's reductions.
    for (int r = row; r < row + rows; r++)
      sums.exponent[r] = scale_scores(scores + r * SCORES, end, query_steps[group * ROWS + r] * scale,
                                  offsets[group * ROWS + r], keys, cap);
    for (int r = row; r < row + rows; r++)
      weight_steps[r] =
          weights(scores + r * SCORES, end, sums.exponent[r], values, sums.total + r * LANES) / MAX_WEIGHT;
    for (int r = row; r < row + rows; r++) round_weights(scores + r * SCORES, end, weight_steps[r]);
  }

  // Turn a row's integer sums into scores (exponents of two). Returns the exponent that weights are relative to.
  static float scale_scores(float* row, int64_t end, float scale, int32_t offset, const float* keys, float cap) {
    const Floats factor = broadcast(std::max(scale, 1e-20f));  // above 0: masked scores stay the lowest
    Floats top = broadcast(-1e30f);
    for (int64_t j = 0; j < end; j += LANES) {
      Floats x = to_floats(load<Ints>(row + j) + offset) * (load<Floats>(keys + j) * factor);
      if (cap) x = x < -1e20f ? x : soft_cap(x, cap);  // masked scores stay the lowest
      store(row + j, x);
      top = larger(x, top);
    }
    const Floats nearest = broadcast(ROUND);
    top = (larger(top, broadcast(-4e6f)) + nearest) - nearest;
    return end ? largest_lane(__builtin_convertvector(top, Ints)) : -1e30f;
  }

  // Turn scores into weights relative to 2^exponent, sum them in `total`, and multiply them by their values' steps.
  // Returns the largest product.
  static float weights(float* row, int64_t end, float exponent, const float* values, float* total) {
    const Floats nearest = broadcast(ROUND), relative = broadcast(exponent), lowest = broadcast(-100.0f);
    Floats sum = {}, largest = {};
    for (int64_t j = 0; j < end; j += LANES) {
      const Floats x = larger(load<Floats>(row + j) - relative, lowest), n = x + nearest, f = x - (n - nearest);
      const Floats weight = (Floats)((Ints)power_of_two<false>(f) + ((Ints)n << 23));
      const Floats product = weight * load<Floats>(values + j);
      sum += weight;
      store(row + j, product);
      largest = larger(product, largest);
    }
    store(total, sum);
    float found;
    const int32_t bits = largest_lane((Ints)largest);  // positive floats are ordered like their bits
    std::memcpy(&found, &bits, sizeof found);
    return found;
  }

  static void round_weights(float* row, int64_t end, float step) {
    const Floats inverse = broadcast(step > 1e-30f ? 1.0f / step : 0.0f), nearest = broadcast(ROUND);
    auto* to = reinterpret_cast<char*>(row);
    for (int64_t j = 0; j < end; j += LANES) {
      const Ints rounded = (Ints)fma(load<Floats>(row + j), inverse, nearest);  // in the lowest bits
      if constexpr (W == 4) store_bytes(to + j, rounded);
      else store_shorts(to + 2 * j, (Words)rounded);
    }
  }

  void dequantize(int rows, const SoftmaxSums& sums) const {
    for (int r = 0; r < rows; r++)
      for (float *to = sums.out + r * padded, *end = to + padded; to < end; to += LANES)
        store(to, to_floats(load<Ints>(to)) * weight_steps[r]);
  }
};

}  // namespace eagle
