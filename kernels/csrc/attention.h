// Attention of one layer over the live prefix of its cache, after head norms, rotary and the cache write.
//
// Row-invariant: a row counts the slots that it sees, in ascending order; a slot's number is its rank for this
// row. Sums run over ranks, in blocks of BLOCK_SLOTS that begin from zero and are added in order. Where a slot
// lies among other rows' slots, what rows there are and which thread takes a block changes nothing. Softmax
// weights are taken relative to a power of two, so that bringing two blocks to one scale is exact.
//
// Scores and weighted values are products like those of a linear layer: rows of a group times a tile of BLOCK
// columns, which are slots for scores and places in a head for values. Keys and values are brought to that
// layout a block at a time, once for all rows.
#pragma once

#include <alloca.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"
#include "norm.h"
#include "products.h"
#include "team.h"
#include "tiles.h"
#include "vectors.h"

namespace eagle {

// A head [size], normed if there is a weight, then rotated by cos, sin [size / 2] in pairs (i, i + size/2).
template <class E>
inline void rotate_head(const Value<E>* head, const float* cosine, const float* sine, const Value<E>* norm,
                        float eps, int64_t size, Value<E>* out) {
  auto* normed = static_cast<Value<E>*>(alloca(size * sizeof(Value<E>)));
  if (norm) norm_row<E>(head, norm, size, eps, normed), head = normed;
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t rest = half - i;
    const Floats a = E::get(head + i, rest), b = E::get(head + half + i, rest);
    const Floats c = Fp32::get(cosine + i, rest), s = Fp32::get(sine + i, rest);
    E::put(out + i, a * c - b * s, rest);
    E::put(out + half + i, fma(b, c, a * s), rest);
  }
}

constexpr int64_t BLOCK_SLOTS = 128;  // of one row, that are summed up before they are added to those before

// The slots that one row attends to: all before `prefix`, then those of the tail, in ascending order.
struct Seen {
  int64_t prefix = 0;
  std::vector<int32_t> tail;

  int64_t count() const { return prefix + tail.size(); }
  int64_t slot(int64_t rank) const { return rank < prefix ? rank : tail[rank - prefix]; }
  int64_t in(int64_t block) const {  // how many of them are
    return std::clamp<int64_t>(count() - block * BLOCK_SLOTS, 0, BLOCK_SLOTS);
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
  // By row: the power of two that weights are relative to; LANES parts of the weights' sum; weighted values.
  float *most, *total, *out;
  int64_t padded;  // size of a row of `out`

  Sums(float* room, int64_t padded)
      : most(room), total(room + ROWS), out(total + ROWS * LANES), padded(padded) {}
  static int64_t size(int64_t padded) { return ROWS * (1 + LANES + padded); }

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

  // One row's weighted values over its total, into `to` [hd].
  template <class Out>
  void finish(int row, int64_t hd, Value<Out>* to) const {
    float sum = 0;
    for (int l = 0; l < LANES; l++) sum += total[row * LANES + l];
    const float share = sum > 0 ? 1.0f / sum : 0.0f;
    for (int64_t d = 0; d < hd; d += LANES)
      Out::put(to + d, load<Floats>(out + row * padded + d) * share, hd - d);
  }
};

// What every layer of a pass shares.
struct Pass : Rows {
  Groups groups;
  std::vector<Seen> seen;         // [B, T]
  std::unique_ptr<float[]> sums;  // room for those of all units, blocks and groups; few are used

  explicit Pass(const Rows& rows)
      : Rows(rows), groups(heads / kv_heads, T), seen(B * T),
        sums(new float[B * kv_heads * (n / BLOCK_SLOTS + 1) * groups.count * Sums::size(padded())]) {}

  int64_t padded() const { return (hd + BLOCK - 1) / BLOCK * BLOCK; }  // a head's values in sums: whole tiles
  Sums sums_of(int64_t item, int64_t group) const {
    return Sums(&sums[(item * groups.count + group) * Sums::size(padded())], padded());
  }
  int64_t blocks() const {  // of the row that has most
    int64_t most = 1;
    for (const Seen& row : seen) most = std::max(most, row.count());
    return (most + BLOCK_SLOTS - 1) / BLOCK_SLOTS;
  }
  void read_mask(const Team& team) {
    team.share(B * T, [&](int64_t row) { seen[row].read(visible + row * n, n); });
  }
};

// One layer's keys and values of one head of one sequence, and the rows that attend to them.
template <class E>
struct Attention {
  using X = Read<E>;  // products multiply words of these
  static constexpr int W = X::PER_WORD;
  static constexpr int64_t SCORES = BLOCK_SLOTS + BLOCK;  // of a row: a tile may begin at any slot of a block
  const int64_t hd, words, padded;
  static constexpr int64_t VALUE_WORDS = BLOCK_SLOTS / W;
  // queries [groups, words, ROWS]; tiles of keys [words, BLOCK] and of values [VALUE_WORDS, BLOCK], of a block
  // and of slots that are a row's own; scores [ROWS, SCORES], of which weights take the place. Products read
  // up to ROWS rows after the last.
  const std::unique_ptr<uint32_t[]> queries, keys, own_keys, values, own_values;
  const std::unique_ptr<float[]> scores;
  Ahead next_keys, next_values;

  // padded: hd in whole tiles.
  Attention(int64_t hd, int64_t padded, int64_t groups)
      : hd(hd), words(hd / W), padded(padded), queries(new uint32_t[(groups * words + 1) * ROWS]),
        keys(new uint32_t[BLOCK_SLOTS * words]), own_keys(new uint32_t[BLOCK * words]),
        values(new uint32_t[VALUE_WORDS * padded]), own_values(new uint32_t[VALUE_WORDS * padded]),
        scores(new float[2 * ROWS * SCORES]) {}

  // LANES words of a row from the w-th on.
  Words words_of(const Value<E>* row, int64_t w) const {
    if constexpr (W == 2) return (Words)Fp32::get(reinterpret_cast<const float*>(row) + w, words - w);
    else return (Words)E::get(row + w, words - w);
  }

  void set_query(int64_t group, int row, const Value<E>* query) {
    for (int64_t w = 0; w < words; w += LANES) {
      const Words some = words_of(query, w);
      uint32_t* to = &queries[(group * words + w) * ROWS + row];
      for (int64_t i = 0; i < LANES && w + i < words; i++) to[i * ROWS] = some[i];
    }
  }

  // `count` keys, row(i) the i-th -> tiles [words, BLOCK].
  template <class Row>
  void pack_keys(int64_t count, const Row& row, uint32_t* to) const {
    for (int64_t j = 0; j < count; j += LANES)
      for (int64_t w = 0; w < words; w += LANES) {
        Words some[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) some[i] = words_of(row(std::min(j + i, count - 1)), w);
        transpose(some);
        uint32_t* place = to + (j / BLOCK * words + w) * BLOCK + j % BLOCK;
        for (int64_t i = 0; i < LANES && w + i < words; i++) store(place + i * BLOCK, some[i]);
      }
  }

  // `count` values -> tiles [VALUE_WORDS, BLOCK]. A pair is of the values of two slots; the last one may be
  // of one slot twice.
  template <class Row>
  void pack_values(int64_t count, const Row& row, uint32_t* to) const {
    for (int64_t k = 0; k * W < count; k++) {
      const Value<E>* from[W];
      for (int i = 0; i < W; i++) from[i] = row(std::min(k * W + i, count - 1));
      for (int64_t d = 0; d < padded; d += W * LANES) {
        Words some[W] = {};
        for (int i = 0; i < W && d < hd; i++)
          some[i] = W == 2 ? (Words)Fp32::get((const float*)(from[i] + d), (hd - d) / 2)
                           : (Words)E::get(from[i] + d, hd - d);
        if constexpr (W == 2) zip(some[0], some[1]);
        uint32_t* place = to + (d / BLOCK * VALUE_WORDS + k) * BLOCK + d % BLOCK;
        for (int i = 0; i < W; i++) store(place + i * LANES, some[i]);
      }
    }
  }

  // `rows` of a group's rows from `row` on: their scores with a tile of keys, from `place` of the block on.
  void score(int64_t group, int row, int rows, const uint32_t* tile, int64_t place) {
    by_rows(rows, [&](auto R) {
      tile_product<X, 1, ROWS, R>(&queries[group * words * ROWS + row], rows, tile, words, false,
                                  &scores[row * SCORES + place], SCORES, next_keys);
    });
  }

  // The same: their weighted values, over `count` words of weights from `first` on. All that is before `first`
  // is in the sums already.
  void gather(int row, int rows, const uint32_t* tiles, int64_t first, int64_t count, const Sums& sums) {
    const auto* weights = reinterpret_cast<const uint32_t*>(&scores[row * SCORES]) + first;
    float* out = sums.out + row * padded;
    for (int64_t d = 0; d < padded; d += BLOCK)
      by_rows(rows, [&](auto R) {
        tile_product<X, SCORES, 1, R>(weights, rows, tiles + d * VALUE_WORDS, count, first > 0, out + d, padded,
                                      next_values);
      });
  }

  // The `count` scores of a row times `scale`, in powers of two, become weights relative to 2^most, with zeros
  // up to a whole word. For bfloat16 they are rounded to it where pairs are multiplied; their total is not.
  void weigh(float* row, int64_t count, float scale, float& most, float* total) const {
    const Floats nearest = broadcast(ROUND);
    for (int64_t j = count; j < BLOCK_SLOTS && j % (W * LANES); j++) row[j] = -INFINITY;
    Floats top = broadcast(-1e30f), sum = {};
    for (int64_t j = 0; j < count; j += LANES) top = larger(load<Floats>(row + j), top);
    top = (larger(top * scale, broadcast(-4e6f)) + nearest) - nearest;
    most = count ? largest_lane(__builtin_convertvector(top, Ints)) : -1e30f;
    const Floats relative = broadcast(-most), factor = broadcast(scale);
    for (int64_t j = 0; j < count; j += W * LANES)
#pragma GCC unroll 2
      for (int i = 0; i < W; i++) {
        const Floats x = fma(load<Floats>(row + j + i * LANES), factor, relative);
        const Floats n = x + nearest, f = x - (n - nearest);
        const Floats scaled = (Floats)((Ints)power(f) + ((Ints)n << 23));
        const Floats weight = x > -125.0f ? scaled : Floats{};
        sum += weight;
        if constexpr (W == 2) Bf16::put(reinterpret_cast<uint16_t*>(row) + j + i * LANES, weight);
        else store(row + j, weight);
      }
    store(total, sum);
  }

  static Floats larger(Floats a, Floats b) { return a > b ? a : b; }

  // 2^f for f in -0.5 .. 0.5: to a relative 1e-7, or 1e-4, a twentieth of the rounding of bfloat16.
  static Floats power(Floats f) {
    if constexpr (sizeof(Value<E>) == 2) {
      const Floats p = fma(broadcast(C3), f, broadcast(C2));
      return fma(fma(p, f, broadcast(C1)), f, broadcast(C0));
    }
    Floats p = broadcast(1.5252734e-5f);  // ln(2)^k / k!
    for (float c : {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f,
                    1.0f})
      p = fma(p, f, broadcast(c));
    return p;
  }

  // The block's sums of the rows of all groups. k, v: of this head, `stride` from slot to slot. seen: of the
  // rows of this sequence. use(group) says where a group's sums go, done(group) that they are there.
  template <class Use, class Done>
  void attend(const Groups& groups, int64_t block, const Seen* seen, const Value<E>* k, const Value<E>* v,
              int64_t stride, const Use& use, const Done& done) {
    const float scale = 1.44269504f / std::sqrt(float(hd));
    const int64_t first = block * BLOCK_SLOTS;
    const auto shared_by = [&](int64_t group) {  // slots of the block that have one rank for all rows
      int64_t prefix = INT64_MAX;
      for (int64_t row = groups.begin(group); row < groups.begin(group + 1); row = groups.next(group, row))
        prefix = std::min(prefix, seen[row / groups.per_kv].prefix);
      return std::clamp<int64_t>(prefix - first, 0, BLOCK_SLOTS);
    };
    int64_t packed = 0;
    for (int64_t g = 0; g < groups.count; g++) packed = std::max(packed, shared_by(g));
    pack_keys(packed, [&](int64_t i) { return k + (first + i) * stride; }, keys.get());
    pack_values(packed, [&](int64_t i) { return v + (first + i) * stride; }, values.get());
    for (int64_t g = 0; g < groups.count; g++) {
      const Sums sums = use(g);
      const int64_t shared = shared_by(g), begin = groups.begin(g), end = groups.begin(g + 1);
      const int rows = groups.rows_of(g);
      // own(row, rows, seen, count) for every row of the sequence that has more slots than it shares.
      const auto each = [&](const auto& own) {
        for (int64_t row = begin; row < end; row = groups.next(g, row)) {
          const Seen& slots = seen[row / groups.per_kv];
          own(int(row - begin), int(groups.next(g, row) - row), slots, slots.in(block));
        }
      };
      for (int64_t j = 0; j < shared; j += BLOCK) score(g, 0, rows, &keys[j * words], j);
      each([&](int row, int rows, const Seen& slots, int64_t count) {
        for (int64_t j = shared; j < count; j += BLOCK) {
          const auto key = [&](int64_t i) { return k + slots.slot(first + j + i) * stride; };
          pack_keys(std::min<int64_t>(BLOCK, count - j), key, own_keys.get());
          score(g, row, rows, own_keys.get(), j);
        }
      });
      each([&](int row, int rows, const Seen&, int64_t count) {
        for (int r = row; r < row + rows; r++)
          weigh(&scores[r * SCORES], count, scale, sums.most[r], sums.total + r * LANES);
      });
      const int64_t whole = shared / W;  // words
      gather(0, rows, values.get(), 0, whole, sums);
      each([&](int row, int rows, const Seen& slots, int64_t count) {
        if (count <= whole * W) return;
        const auto value = [&](int64_t i) { return v + slots.slot(first + whole * W + i) * stride; };
        pack_values(count - whole * W, value, own_values.get());
        gather(row, rows, own_values.get(), whole, (count - whole * W + W - 1) / W, sums);
      });
      done(g, sums);
    }
  }

 private:
  static constexpr float C0 = 0.99992807f, C1 = 0.69326099f, C2 = 0.24261113f, C3 = 0.055171669f;
};

// Everything between wqkv and wo for one layer: rotate queries and keys (into `rotated` and the cache), store
// the values, attend. qkv [B*T, width], rotated and out [B*T, heads*hd], k and v [B, S, kv_heads, hd].
template <class E, class Out>
void attention_part(const Team& team, const Pass& pass, const Value<E>* qkv, const Norms& norms, const Cache& k,
                    const Cache& v, Value<E>* rotated, Value<Out>* out) {
  const Groups& groups = pass.groups;
  const int64_t heads = pass.heads, kv_heads = pass.kv_heads, hd = pass.hd, T = pass.T;
  auto *keys = static_cast<Value<E>*>(k.data), *values = static_cast<Value<E>*>(v.data);
  const auto *q_norm = static_cast<const Value<E>*>(norms.q), *k_norm = static_cast<const Value<E>*>(norms.k);
  team.share(pass.B * T, [&](int64_t row) {
    const Value<E>* from = qkv + row * pass.width();
    const int64_t turn = row * hd / 2;
    for (int64_t h = 0; h < heads + kv_heads; h++) {
      const bool query = h < heads;
      Value<E>* to = query ? rotated + (row * heads + h) * hd
                           : keys + k.place(row / T, pass.slots[row], h - heads);
      rotate_head<E>(from + h * hd, pass.cosine + turn, pass.sine + turn, query ? q_norm : k_norm, norms.eps,
                     hd, to);
    }
    for (int64_t h = 0; h < kv_heads; h++)
      std::memcpy(values + v.place(row / T, pass.slots[row], h), from + (heads + kv_heads + h) * hd,
                  hd * sizeof(Value<E>));
  });
  team.meet();
  // An item is a block of slots of a unit, which is a key/value head of a sequence. A thread's items follow each
  // other. Whoever has the first block of a unit adds the next ones to it as far as they are its own; what is
  // left then is added after all have met.
  const int64_t units = pass.B * kv_heads, blocks = pass.blocks();
  const auto begin = [&](int64_t thread) { return units * blocks * thread / team.all; };
  const auto finish = [&](int64_t unit, int64_t group, const Sums& sums) {
    for (int r = 0; r < groups.rows_of(group); r++) {
      const int64_t row = groups.begin(group) + r, of_row = unit / kv_heads * T + row / groups.per_kv;
      const int64_t head = unit % kv_heads * groups.per_kv + row % groups.per_kv;
      sums.finish<Out>(r, hd, out + (of_row * heads + head) * hd);
    }
  };
  Attention<E> attention(hd, pass.padded(), groups.count);
  const std::unique_ptr<float[]> room(new float[Sums::size(pass.padded())]);
  const Sums next(room.get(), pass.padded());
  const int64_t end = begin(team.me + 1);
  for (int64_t item = begin(team.me), before = -1; item < end; item++) {
    const int64_t unit = item / blocks, block = item % blocks, b = unit / kv_heads, kv = unit % kv_heads;
    const bool ours = item - block >= begin(team.me);  // the unit's first block is this thread's
    if (unit != before)
      for (int64_t g = 0; g < groups.count; g++)
        for (int r = 0; r < groups.rows_of(g); r++) {
          const int64_t row = groups.begin(g) + r, head = kv * groups.per_kv + row % groups.per_kv;
          attention.set_query(g, r, rotated + ((b * T + row / groups.per_kv) * heads + head) * hd);
        }
    before = unit;
    if (item + 1 < end) {
      const int64_t unit = (item + 1) / blocks, slot = (item + 1) % blocks * BLOCK_SLOTS;
      const auto ahead = [&](const Cache& cache) {
        const auto* from = static_cast<const Value<E>*>(cache.data);
        from += cache.place(unit / kv_heads, slot, unit % kv_heads);
        return Ahead{(const char*)from, (const char*)(from + std::min(BLOCK_SLOTS, pass.n - slot) * hd)};
      };
      attention.next_keys = ahead(k), attention.next_values = ahead(v);
    }
    const bool add = ours && block;
    attention.attend(
        groups, block, &pass.seen[b * T], keys + k.place(b, 0, kv), values + v.place(b, 0, kv), k.slot,
        [&](int64_t group) { return add ? next : pass.sums_of(item, group); },
        [&](int64_t group, const Sums& sums) {
          const Sums first = add ? pass.sums_of(item - block, group) : sums;
          if (add) first.add(sums, groups.rows_of(group));
          if (ours && block + 1 == blocks) finish(unit, group, first);
        });
  }
  const auto first_end = [&](int64_t unit) {  // of the thread that has a unit's first block
    int64_t thread = 0;
    while (begin(thread + 1) <= unit * blocks) thread++;
    return begin(thread + 1);
  };
  bool all_finished = true;
  for (int64_t unit = 0; unit < units; unit++) all_finished &= first_end(unit) >= (unit + 1) * blocks;
  if (all_finished) return;
  team.meet();
  team.share(units * groups.count, [&](int64_t i) {
    const int64_t unit = i / groups.count, group = i % groups.count;
    if (first_end(unit) >= (unit + 1) * blocks) return;
    const Sums sums = pass.sums_of(unit * blocks, group);
    for (int64_t item = first_end(unit); item < (unit + 1) * blocks; item++)
      sums.add(pass.sums_of(item, group), groups.rows_of(group));
    finish(unit, group, sums);
  });
}

}  // namespace eagle
