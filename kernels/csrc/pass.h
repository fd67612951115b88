// The state that the layers of a pass share: visible slots of each token, groups of query rows, softmax sums.
#pragma once

#include "tiles.h"

namespace eagle {

constexpr int64_t BLOCK_SLOTS = 128;  // slots per block; each block is summed separately, then added
constexpr int64_t SCORES = BLOCK_SLOTS + BLOCK;  // size of a row: a tile may start at any slot of a block

// The slots that a token attends to, in ascending order: all before `prefix`, then those of the tail.
struct VisibleSlots {
  int64_t prefix = 0;
  std::vector<int32_t> tail;

  int64_t count() const { return prefix + tail.size(); }
  int64_t slot(int64_t rank) const { return rank < prefix ? rank : tail[rank - prefix]; }
  int64_t count_in(int64_t block) const {
    return std::clamp<int64_t>(count() - block * BLOCK_SLOTS, 0, BLOCK_SLOTS);
  }

  // The number of slots of a block that precede the sliding window.
  int64_t before_window(int64_t block, int64_t window) const {
    return window ? std::clamp<int64_t>(count() - window - block * BLOCK_SLOTS, 0, BLOCK_SLOTS) : 0;
  }

  void set(const bool* visible, int64_t n) {
    const void* hidden = std::memchr(visible, 0, n);
    prefix = hidden ? static_cast<const bool*>(hidden) - visible : n;
    for (int64_t j = prefix; j < n; j++)
      if (visible[j]) tail.push_back(j);
  }
};

// The query rows of a sequence that share a key/value head: `per_kv` heads of each of T tokens, in groups of nearly
// equal size.
struct Groups {
  int64_t per_kv, rows, size, count;
  Groups(int64_t per_kv, int64_t T)
      : per_kv(per_kv), rows(per_kv * T), size(tile_size(rows)), count(tiles_of(rows)) {}

  int64_t begin(int64_t group) const { return std::min(rows, group * size); }
  int rows_of(int64_t group) const { return begin(group + 1) - begin(group); }
  // The first row of the next token in the group, or the group's end.
  int64_t next(int64_t group, int64_t row) const {
    return std::min(begin(group + 1), (row / per_kv + 1) * per_kv);
  }
};

// Unnormalized softmax sums of a group of query rows over some slots.
struct SoftmaxSums {
  // By row: weighted values; the sum of weights, by lane; the exponent of two that weights are relative to.
  float *out, *total, *exponent;
  int64_t padded;  // size of a row of `out`

  SoftmaxSums(float* memory, int64_t padded)
      : out(memory), total(out + ROWS * padded), exponent(total + ROWS * LANES), padded(padded) {}
  static int64_t size(int64_t padded) { return ROWS * (padded + LANES) + (ROWS + 15) / 16 * 16; }  // whole cache lines

  // Add the sums over later slots.
  void add(const SoftmaxSums& later, int rows) const {
    for (int r = 0; r < rows; r++) {
      const float both = std::max(exponent[r], later.exponent[r]);
      const Floats ours = power(exponent[r] - both), theirs = power(later.exponent[r] - both);
      const auto merge = [&](float* to, const float* from) {
        store(to, fma(load<Floats>(from), theirs, load<Floats>(to) * ours));
      };
      exponent[r] = both;
      merge(total + r * LANES, later.total + r * LANES);
      for (int64_t d = r * padded; d < (r + 1) * padded; d += LANES) merge(out + d, later.out + d);
    }
  }

  // 2^n for integers n <= 0; 0 on underflow.
  static Floats power(float n) {
    const uint32_t bits = n < -126.0f ? 0 : uint32_t(int32_t(n) + 127) << 23;
    return (Floats)broadcast(bits);
  }

  // Initialize the sums.
  void clear(int rows) const {
    std::fill_n(out, rows * padded, 0.0f), std::fill_n(total, rows * LANES, 0.0f), std::fill_n(exponent, rows, -1e30f);
  }

  // Write a row's weighted values / its total to `to` [hd]. sink: a score without value, if any.
  template <class Out>
  void normalize(int row, int64_t hd, const float* sink, Value<Out>* to) const {
    float sum = 0;
    for (int l = 0; l < LANES; l++) sum += total[row * LANES + l];
    if (sink) sum += std::exp2(*sink * 1.44269504f - exponent[row]);
    const float factor = sum > 0 ? 1.0f / sum : 0.0f;
    for (int64_t d = 0; d < hd; d += LANES)
      Out::put(to + d, load<Floats>(out + row * padded + d) * factor, hd - d);
  }
};

struct Pass : PassArgs {
  Groups groups;
  std::vector<VisibleSlots> row_slots;  // [B, T]
  Buffer<float> sums;  // of all units, blocks and groups; most stay unused

  explicit Pass(const PassArgs& args)
      : PassArgs(args), groups(heads / kv_heads, T), row_slots(B * T),
        sums(B * kv_heads * (n / BLOCK_SLOTS + 1) * groups.count * SoftmaxSums::size(padded())) {}

  int64_t padded() const { return (hd + BLOCK - 1) / BLOCK * BLOCK; }  // head size in whole tiles
  SoftmaxSums sums_of(int64_t item, int64_t group) const {
    return SoftmaxSums(&sums[(item * groups.count + group) * SoftmaxSums::size(padded())], padded());
  }
  int64_t max_blocks() const {
    int64_t slots = 1;
    for (const VisibleSlots& row : row_slots) slots = std::max(slots, row.count());
    return (slots + BLOCK_SLOTS - 1) / BLOCK_SLOTS;
  }
  int64_t first_block(int64_t window) const {  // in the sliding window of any row
    int64_t first = INT64_MAX;
    for (const VisibleSlots& row : row_slots) first = std::min(first, row.count() - window);
    return window ? std::max<int64_t>(first, 0) / BLOCK_SLOTS : 0;
  }
  void read_mask(const Team& team) {
    team.parallel_for(B * T, [&](int64_t row) { row_slots[row].set(visible + row * n, n); });
  }
};

}  // namespace eagle
