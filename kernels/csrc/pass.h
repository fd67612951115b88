// What the layers of a pass share: which slots each row sees, how rows are grouped, and the sums of softmax.
#pragma once

#include "tiles.h"

namespace eagle {

constexpr int64_t BLOCK_SLOTS = 128;  // of one row, that are summed up before they are added to those before
constexpr int64_t SCORES = BLOCK_SLOTS + BLOCK;  // room of a row: a tile may begin at any slot of a block

// The slots that one row attends to: all before `prefix`, then those of the tail, in ascending order.
struct Seen {
  int64_t prefix = 0;
  std::vector<int32_t> tail;

  int64_t count() const { return prefix + tail.size(); }
  int64_t slot(int64_t rank) const { return rank < prefix ? rank : tail[rank - prefix]; }
  int64_t in(int64_t block) const {  // how many of them are
    return std::clamp<int64_t>(count() - block * BLOCK_SLOTS, 0, BLOCK_SLOTS);
  }

  // How many of them come before the last `window` slots of the row; 0: all are its last.
  int64_t before(int64_t block, int64_t window) const {
    return window ? std::clamp<int64_t>(count() - window - block * BLOCK_SLOTS, 0, BLOCK_SLOTS) : 0;
  }

  void read(const bool* visible, int64_t n) {
    const void* hidden = std::memchr(visible, 0, n);
    prefix = hidden ? static_cast<const bool*>(hidden) - visible : n;
    for (int64_t j = prefix; j < n; j++)
      if (visible[j]) tail.push_back(j);
  }
};

// The query rows of one sequence that share a key/value head: `per_kv` heads of each of T rows, in this order,
// taken in groups of nearly equal size.
struct Groups {
  int64_t per_kv, rows, size, count;
  Groups(int64_t per_kv, int64_t T)
      : per_kv(per_kv), rows(per_kv * T), size(tile_size(rows)), count(tiles_of(rows)) {}

  int64_t begin(int64_t group) const { return std::min(rows, group * size); }
  int rows_of(int64_t group) const { return begin(group + 1) - begin(group); }
  // The first of a group's rows after `row` that is another row of the sequence, or the group's end.
  int64_t next(int64_t group, int64_t row) const {
    return std::min(begin(group + 1), (row / per_kv + 1) * per_kv);
  }
};

// Softmax sums of one group of query rows over some slots, before they are divided by their total.
struct Sums {
  // By row: weighted values; LANES parts of the weights' sum; the power of two that weights are relative to.
  float *out, *total, *most;
  int64_t padded;  // size of a row of `out`

  Sums(float* room, int64_t padded)
      : out(room), total(out + ROWS * padded), most(total + ROWS * LANES), padded(padded) {}
  static int64_t size(int64_t padded) { return ROWS * (padded + LANES) + (ROWS + 15) / 16 * 16; }  // whole lines

  // Add the sums over later slots.
  void add(const Sums& later, int rows) const {
    for (int r = 0; r < rows; r++) {
      const float both = std::max(most[r], later.most[r]);
      const Floats ours = power(most[r] - both), theirs = power(later.most[r] - both);
      const auto merge = [&](float* to, const float* from) {
        store(to, fma(load<Floats>(from), theirs, load<Floats>(to) * ours));
      };
      most[r] = both;
      merge(total + r * LANES, later.total + r * LANES);
      for (int64_t d = r * padded; d < (r + 1) * padded; d += LANES) merge(out + d, later.out + d);
    }
  }

  // 2^n for whole n <= 0; 0 below the exponents of floats.
  static Floats power(float n) {
    const uint32_t bits = n < -126.0f ? 0 : uint32_t(int32_t(n) + 127) << 23;
    return (Floats)broadcast(bits);
  }

  // Those over no slots.
  void clear(int rows) const {
    std::fill_n(out, rows * padded, 0.0f), std::fill_n(total, rows * LANES, 0.0f), std::fill_n(most, rows, -1e30f);
  }

  // One row's weighted values over its total, into `to` [hd]. sink: a score with no value, if there is one.
  template <class Out>
  void finish(int row, int64_t hd, const float* sink, Value<Out>* to) const {
    float sum = 0;
    for (int l = 0; l < LANES; l++) sum += total[row * LANES + l];
    if (sink) sum += std::exp2(*sink * 1.44269504f - most[row]);
    const float share = sum > 0 ? 1.0f / sum : 0.0f;
    for (int64_t d = 0; d < hd; d += LANES)
      Out::put(to + d, load<Floats>(out + row * padded + d) * share, hd - d);
  }
};

// What every layer of a pass shares.
struct Pass : Rows {
  Groups groups;
  std::vector<Seen> seen;         // [B, T]
  Room<float> sums;  // room for those of all units, blocks and groups; few are used

  explicit Pass(const Rows& rows)
      : Rows(rows), groups(heads / kv_heads, T), seen(B * T),
        sums(B * kv_heads * (n / BLOCK_SLOTS + 1) * groups.count * Sums::size(padded())) {}

  int64_t padded() const { return (hd + BLOCK - 1) / BLOCK * BLOCK; }  // a head's values in sums: whole tiles
  Sums sums_of(int64_t item, int64_t group) const {
    return Sums(&sums[(item * groups.count + group) * Sums::size(padded())], padded());
  }
  int64_t blocks() const {  // of the row that has most
    int64_t most = 1;
    for (const Seen& row : seen) most = std::max(most, row.count());
    return (most + BLOCK_SLOTS - 1) / BLOCK_SLOTS;
  }
  int64_t first_block(int64_t window) const {  // that any row sees through its window
    int64_t first = INT64_MAX;
    for (const Seen& row : seen) first = std::min(first, row.count() - window);
    return window ? std::max<int64_t>(first, 0) / BLOCK_SLOTS : 0;
  }
  void read_mask(const Team& team) {
    team.share(B * T, [&](int64_t row) { seen[row].read(visible + row * n, n); });
  }
};

}  // namespace eagle
