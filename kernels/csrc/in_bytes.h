// Keys and values that are stored as bytes, each head of a slot in steps of its largest / 127.
//
// They lie in the layout of tiles, so that nothing is packed but slots that are a row's own. Queries and softmax
// weights are rounded to integers too, each row's by itself: within a block of slots all sums are exact, so that
// it is all one in which order they run and which of a row's slots are shared.
//
// A block of BLOCK_SLOTS slots of one head: their steps (floats), then tiles of keys [words, BLOCK] or of values
// [VALUE_WORDS, BLOCK]. A word has BYTES_PER_WORD values. BYTE_OFFSET is added to those of keys.
#pragma once

#include "pass.h"

namespace eagle {

// Products of integers, of which sums of floats have the bits.
struct KeyBytes {
  static Floats dot(Floats sum, Words keys, Words query) { return (Floats)dot_bytes((Ints)sum, keys, query); }
};
struct ValueBytes {
  static Floats dot(Floats sum, Words values, Words weights) {
    return (Floats)dot_bytes((Ints)sum, weights, values);
  }
};
template <> struct Columns<KeyBytes> : Bytes {};
template <> struct Columns<ValueBytes> : Bytes {};

// Up to which integers are rounded: 127 for what is stored. Where words are pairs of 16 bits, queries and weights
// have more of them; softmax weights, which have no sign, have eight if a product wants one side without.
constexpr float MOST_STORED = 127, MOST_OF_QUERY = BYTES_PER_WORD == 2 ? 8191 : 127;
constexpr float MOST_WEIGHT = BYTES_PER_WORD == 2 ? 8191 : BYTE_OFFSET ? 255 : 127;

// Where things lie in a block.
struct ByteBlock {
  static constexpr int64_t STEPS = BLOCK_SLOTS * sizeof(float), P = BYTES_PER_WORD, VALUE_WORDS = BLOCK_SLOTS / P;
  static int64_t words(int64_t hd) { return (hd + P - 1) / P; }
  static int64_t key_bytes(int64_t hd) { return STEPS + BLOCK_SLOTS * words(hd) * P; }
  static int64_t value_bytes(int64_t hd) { return STEPS + BLOCK_SLOTS * ((hd + BLOCK - 1) / BLOCK * BLOCK); }

  char* const data;
  const int64_t i;  // the slot in it

  ByteBlock(const Cache& cache, int64_t b, int64_t slot, int64_t h)
      : data((char*)cache.data + cache.place(b, slot / BLOCK_SLOTS, h)), i(slot % BLOCK_SLOTS) {}
  float& step() const { return reinterpret_cast<float*>(data)[i]; }
  char* tiles() const { return data + STEPS; }
  // Words of a key follow each other at KEY_STRIDE, values of one place in a head lie where `value` says.
  static constexpr int64_t KEY_STRIDE = BLOCK * P;
  char* key(int64_t words) const { return tiles() + (i / BLOCK * words * BLOCK + i % BLOCK) * P; }
  char& value(int64_t d) const { return tiles()[value_place(i, d)]; }
  // f(address, bytes) of all parts of the slot, of a key or of a value.
  template <class F>
  void pieces(int64_t hd, bool is_key, const F& f) const {
    f(reinterpret_cast<char*>(&step()), sizeof(float));
    for (int64_t d = 0; d < hd; d++)
      f(is_key ? &key(words(hd))[d / P * KEY_STRIDE + d % P] : &value(d), 1);
  }
  static int64_t value_place(int64_t i, int64_t d) {
    return ((d / BLOCK * VALUE_WORDS + i / P) * BLOCK + d % BLOCK) * P + i % P;
  }
};

// Keys and values of one head of one sequence, see `Attention`.
template <class E>
struct InBytes {
  using Keys = KeyBytes;
  using Values = ValueBytes;
  static constexpr int W = BYTES_PER_WORD;
  static constexpr int64_t VALUE_WORDS = ByteBlock::VALUE_WORDS;
  const int64_t hd, words, padded;
  // Queries [groups, words, ROWS], for AMX [groups, ROWS, words] too; by row of a group its step and what takes back the
  // offset of keys; tiles of slots that are a row's own, and steps of all of its slots.
  const Room<uint32_t> queries, queries_by_row;
  const Room<float> query_steps;
  const Room<int32_t> offsets;
  const Room<char> own_keys, own_values;
  alignas(64) float key_steps[BLOCK_SLOTS], value_steps[BLOCK_SLOTS], weight_steps[ROWS];
  const Cache *of_keys = nullptr, *of_values = nullptr;
  int64_t b = 0, h = 0, block = 0;

  InBytes(int64_t hd, int64_t padded, int64_t groups)
      : hd(hd), words(ByteBlock::words(hd)), padded(padded), queries((groups * words + 1) * ROWS),
        queries_by_row(TILE_ROWS ? groups * ROWS * words : 1),
        query_steps(groups * ROWS), offsets(groups * ROWS),
        own_keys(BLOCK * words * W), own_values(BLOCK_SLOTS * padded) {}

  template <class Rotate>
  static void store_key(const Cache& cache, int64_t b, int64_t slot, int64_t h, int64_t hd, const Rotate& rotate) {
    auto* head = static_cast<float*>(alloca(hd * sizeof(float)));
    auto* bytes = static_cast<char*>(alloca(hd + LANES));
    rotate(Fp32(), head);
    const ByteBlock to(cache, b, slot, h);
    const int64_t words = ByteBlock::words(hd);
    to.step() = round_values<Fp32>(head, hd, MOST_STORED,
                                   [&](int64_t i, Ints x) { store_bytes(bytes + i, x ^ BYTE_OFFSET); });
    for (int64_t w = 0; w < words; w++)
      std::memcpy(to.key(words) + w * ByteBlock::KEY_STRIDE, bytes + w * W, W);
  }
  static void store_value(const Cache& cache, int64_t b, int64_t slot, int64_t h, int64_t hd,
                          const Value<E>* value) {
    auto* bytes = static_cast<char*>(alloca(hd + LANES));
    const ByteBlock to(cache, b, slot, h);
    to.step() = round_values<E>(value, hd, MOST_STORED, [&](int64_t i, Ints x) { store_bytes(bytes + i, x); });
    for (int64_t d = 0; d < hd; d++) to.value(d) = bytes[d];
  }
  static Ahead ahead(const Cache& cache, int64_t b, int64_t block, int64_t h, int64_t, int64_t) {
    const char* from = ByteBlock(cache, b, block * BLOCK_SLOTS, h).data;
    return {from, from + cache.slot};
  }

  void open(const Cache& k, const Cache& v, int64_t sequence, int64_t head, int64_t number, int64_t) {
    of_keys = &k, of_values = &v, b = sequence, h = head, block = number;
  }
  ByteBlock key_block() const { return {*of_keys, b, block * BLOCK_SLOTS, h}; }
  ByteBlock value_block() const { return {*of_values, b, block * BLOCK_SLOTS, h}; }
  const char* key_tile(int64_t place) const { return key_block().tiles() + place * words * W; }
  const char* value_tiles() const { return value_block().tiles(); }

  const char* own_key_tile(const Seen& slots, int64_t from, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
      const ByteBlock key(*of_keys, b, slots.slot(block * BLOCK_SLOTS + from + i), h);
      for (int64_t w = 0; w < words; w++)
        std::memcpy(&own_keys[(w * BLOCK + i) * W], key.key(words) + w * ByteBlock::KEY_STRIDE, W);
    }
    return own_keys;
  }
  const char* own_value_tiles(const Seen& slots, int64_t from, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
      const ByteBlock value(*of_values, b, slots.slot(block * BLOCK_SLOTS + from + i), h);
      for (int64_t d = 0; d < hd; d++) own_values[ByteBlock::value_place(i, d)] = value.value(d);
    }
    return own_values;
  }

  const uint32_t* query_rows(int64_t group, int row) const { return &queries_by_row[(group * ROWS + row) * words]; }
  void set_query(int64_t group, int row, const Value<E>* query) {
    auto* q = static_cast<char*>(alloca((hd + LANES) * 4 / W));
    Ints sum = {};
    query_steps[group * ROWS + row] = round_values<E>(query, hd, MOST_OF_QUERY, [&](int64_t i, Ints x) {
      sum += x;
      if constexpr (W == 4) store_bytes(q + i, x);
      else store_shorts(q + 2 * i, (Words)x);
    });
    offsets[group * ROWS + row] = -BYTE_OFFSET * sum_of_lanes(sum);
    for (int64_t w = 0; w < words; w++) std::memcpy(&queries[(group * words + w) * ROWS + row], q + 4 * w, 4);
    if (TILE_ROWS) std::memcpy(&queries_by_row[(group * ROWS + row) * words], q, 4 * words);
  }

  // As in in_dtype.h. Weights are times the steps of their values, and rounded.
  void weigh(int64_t group, int row, int rows, const Seen& slots, int64_t shared, int64_t from, int64_t count,
             float scale, float* scores, const Sums& sums) {
    const float *keys = &key_block().step(), *values = &value_block().step();
    const int64_t end = (count + LANES - 1) / LANES * LANES;
    if (end > shared || from) {
      std::copy_n(keys, shared, key_steps), std::copy_n(values, shared, value_steps);
      for (int64_t i = shared; i < count; i++) {
        const int64_t slot = slots.slot(block * BLOCK_SLOTS + i);
        key_steps[i] = ByteBlock(*of_keys, b, slot, h).step();
        value_steps[i] = ByteBlock(*of_values, b, slot, h).step();
      }
      const auto without = [&](int64_t i) {  // below all scores, and of no weight
        key_steps[i] = 1e25f, value_steps[i] = 0;
        for (int r = row; r < row + rows; r++) {
          const int32_t least = -(1 << 30);
          std::memcpy(&scores[r * SCORES + i], &least, sizeof least);
        }
      };
      for (int64_t i = 0; i < from; i++) without(i);
      for (int64_t i = count; i < end; i++) without(i);
      keys = key_steps, values = value_steps;
    }
    // Row after row for each part, so that what one waits for is done meanwhile for the next.
    for (int r = row; r < row + rows; r++)
      sums.most[r] = scale_scores(scores + r * SCORES, end, query_steps[group * ROWS + r] * scale,
                                  offsets[group * ROWS + r], keys);
    for (int r = row; r < row + rows; r++)
      weight_steps[r] = weights(scores + r * SCORES, end, sums.most[r], values, sums.total + r * LANES) / MOST_WEIGHT;
    for (int r = row; r < row + rows; r++) round_weights(scores + r * SCORES, end, weight_steps[r]);
  }

  // A row's sums of integers -> scores in powers of two. Returns the power that weights are relative to.
  static float scale_scores(float* row, int64_t end, float scale, int32_t offset, const float* keys) {
    const Floats factor = broadcast(std::max(scale, 1e-20f));  // above 0: what is below all scores stays there
    Floats top = broadcast(-1e30f);
    for (int64_t j = 0; j < end; j += LANES) {
      const Floats x = to_floats(load<Ints>(row + j) + offset) * (load<Floats>(keys + j) * factor);
      store(row + j, x);
      top = larger(x, top);
    }
    const Floats nearest = broadcast(ROUND);
    top = (larger(top, broadcast(-4e6f)) + nearest) - nearest;
    return end ? largest_lane(__builtin_convertvector(top, Ints)) : -1e30f;
  }

  // Scores -> weights relative to 2^most, whose total this is, times the steps of their values. Returns the largest.
  static float weights(float* row, int64_t end, float most, const float* values, float* total) {
    const Floats nearest = broadcast(ROUND), relative = broadcast(most), least = broadcast(-100.0f);
    Floats sum = {}, largest = {};
    for (int64_t j = 0; j < end; j += LANES) {
      const Floats x = larger(load<Floats>(row + j) - relative, least), n = x + nearest, f = x - (n - nearest);
      const Floats weight = (Floats)((Ints)power_of_two<false>(f) + ((Ints)n << 23));
      const Floats product = weight * load<Floats>(values + j);
      sum += weight;
      store(row + j, product);
      largest = larger(product, largest);
    }
    store(total, sum);
    float found;
    const int32_t bits = largest_lane((Ints)largest);  // ordered as positive floats are
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

  // Sums of integers become what they stand for.
  void finish(int rows, const Sums& sums) const {
    for (int r = 0; r < rows; r++)
      for (float *to = sums.out + r * padded, *end = to + padded; to < end; to += LANES)
        store(to, to_floats(load<Ints>(to)) * weight_steps[r]);
  }
};

}  // namespace eagle
