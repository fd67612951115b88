// Attention of one layer over the live prefix of its cache, after head norms, rotary and the cache write.
//
// Row-invariant: a row's sums run over the slots it sees in ascending order, in blocks of BLOCK_SLOTS of them
// that begin from zero and are added in order. Where a slot lies among other rows' slots, what rows there are
// and which thread takes a block changes nothing. Softmax weights are taken relative to a power of two, so that
// bringing two blocks to one scale is exact.
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
#include "team.h"
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

// The query rows of one sequence that share a key/value head: T of each of `per_kv` heads, taken in groups of
// LANES, one per lane.
struct Groups {
  int64_t per_kv, T, count;
  Groups(int64_t per_kv, int64_t T) : per_kv(per_kv), T(T), count((per_kv * T + LANES - 1) / LANES) {}

  int size(int64_t group) const { return std::min<int64_t>(LANES, per_kv * T - group * LANES); }
  // Which query head and which row of its sequence the r-th row of a group is.
  int64_t head_of(int64_t kv, int64_t group, int r) const { return kv * per_kv + (group * LANES + r) / T; }
  int64_t row_of(int64_t group, int r) const { return (group * LANES + r) % T; }
};

constexpr int64_t BLOCK_SLOTS = 128;  // of one row, that are summed up before they are added to those before

// The slots that the rows of one sequence attend to, by block: entries start[k] .. start[k + 1] are the slots
// that are in the k-th block of some row. A slot may be in one block for one row and in the next for another.
struct LiveSlots {
  std::vector<int32_t> slots;
  std::vector<int64_t> start;
  std::vector<uint16_t> seen;  // [groups, entries], bit r: the r-th row of the group sees it, in this block

  int64_t blocks() const { return start.size() - 1; }

  // visible [T, n]: what each of the T rows of the sequence sees.
  void read(const bool* visible, int64_t T, int64_t n, const Groups& groups) {
    int64_t prefix = n;  // slots that all rows see: there a slot's rank is its number
    for (int64_t t = 0; t < T; t++)
      if (const void* hidden = std::memchr(visible + t * n, 0, prefix))
        prefix = static_cast<const bool*>(hidden) - (visible + t * n);
    const int64_t tail = n - prefix;
    std::vector<int32_t> block(T * tail, -1);  // of a row's slot, -1: it does not see it
    int64_t last = prefix ? (prefix - 1) / BLOCK_SLOTS : 0;
    for (int64_t t = 0; t < T; t++)
      for (int64_t j = 0, rank = prefix; j < tail; j++)
        if (visible[t * n + prefix + j])
          block[t * tail + j] = rank++ / BLOCK_SLOTS, last = std::max(last, (rank - 1) / BLOCK_SLOTS);
    const int64_t first = prefix / BLOCK_SLOTS;  // the first block with slots of the tail
    std::vector<int64_t> of_tail;                // the number in the tail of each entry from `prefix` on
    for (int64_t k = 0; k <= last; k++) {
      start.push_back(slots.size());
      for (int64_t j = k * BLOCK_SLOTS; j < std::min(prefix, (k + 1) * BLOCK_SLOTS); j++) slots.push_back(j);
      for (int64_t j = 0; k >= first && j < tail; j++)
        for (int64_t t = 0; t < T; t++)
          if (block[t * tail + j] == k) {
            slots.push_back(prefix + j), of_tail.push_back(j);
            break;
          }
    }
    start.push_back(slots.size());
    const int64_t entries = slots.size();
    seen.assign(groups.count * entries, 0);
    for (int64_t g = 0; g < groups.count; g++) {
      uint16_t* bits = &seen[g * entries];
      const int size = groups.size(g);
      auto j = of_tail.begin();
      for (int64_t k = 0; k < blocks(); k++)
        for (int64_t e = start[k]; e < start[k + 1]; e++) {
          if (slots[e] < prefix) bits[e] = uint16_t((1u << size) - 1);
          else {
            for (int r = 0; r < size; r++) bits[e] |= uint16_t(block[groups.row_of(g, r) * tail + *j] == k) << r;
            j++;
          }
        }
    }
  }
};

// Softmax sums of one group of query rows over some slots, before they are divided by their total.
struct Sums {
  Floats *most, *total;  // by row: the power of two that weights are relative to, and the weights' sum
  float* out;            // [rows, padded]: weighted values, for bfloat16 the even and the odd ones of a vector
  int64_t padded;

  Sums(float* room, int64_t padded)
      : most((Floats*)room), total((Floats*)(room + LANES)), out(room + 2 * LANES), padded(padded) {}

  // Add the sums over later slots.
  void add(const Sums& later, int rows) const {
    const Floats m = load<Floats>(most), l = load<Floats>(later.most), both = m > l ? m : l;
    const Floats ours = power(m - both), theirs = power(l - both);
    store(most, both);
    store(total, load<Floats>(total) * ours + load<Floats>(later.total) * theirs);
    for (int r = 0; r < rows; r++) {
      const Floats a = broadcast(ours[r]), b = broadcast(theirs[r]);
      for (int64_t d = r * padded; d < (r + 1) * padded; d += LANES)
        store(out + d, load<Floats>(out + d) * a + load<Floats>(later.out + d) * b);
    }
  }

  // 2^n for whole n <= 0; 0 below the exponents of floats.
  static Floats power(Floats n) {
    const Floats least = n < -126.0f ? broadcast(-126.0f) : n;
    const Ints bits = (__builtin_convertvector(least, Ints) + 127) << 23;
    return n < -126.0f ? Floats{} : (Floats)bits;
  }
};

// What every layer of a pass shares.
struct Pass : Rows {
  Groups groups;
  std::vector<LiveSlots> live;    // by sequence
  std::unique_ptr<float[]> sums;  // room for those of all units, blocks and groups; few are used

  explicit Pass(const Rows& rows)
      : Rows(rows), groups(heads / kv_heads, T), live(B),
        sums(new float[B * kv_heads * (n / BLOCK_SLOTS + 1) * groups.count * sums_size()]) {}

  // A head's values in sums: whole vectors, which for bfloat16 come in twos.
  int64_t padded() const { return (hd + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }
  int64_t sums_size() const { return LANES * (2 + padded()); }
  Sums sums_of(int64_t item, int64_t group) const {
    return Sums(&sums[(item * groups.count + group) * sums_size()], padded());
  }
  int64_t blocks() const {  // of the sequence that has most
    int64_t most = 0;
    for (const LiveSlots& slots : live) most = std::max(most, slots.blocks());
    return most;
  }

  void read_mask(const Team& team) {
    team.share(B, [&](int64_t b) { live[b].read(visible + b * T * n, T, n, groups); });
  }
};

// Scores, softmax weights and weighted values of one group of query rows over some entries of LiveSlots.
template <class E>
struct QueryGroup {
  static constexpr int W = E::PER_WORD;
  static constexpr int KEYS = 8;    // slots scored together: they share the loads of the queries
  static constexpr int AHEAD = 32;  // how many slots ahead of use their rows are fetched
  const int64_t hd, stride;  // stride: from one slot to the next, in values
  const uint32_t* queries;   // [words of hd, LANES]
  float* scores;             // [count, LANES]
  int64_t count = 0;
  const int32_t* slots = nullptr;  // [count]
  const uint16_t* seen = nullptr;

  // Of a block, which may be one that this sequence does not have.
  QueryGroup(const LiveSlots& live, int64_t block, int64_t group, int64_t hd, int64_t stride,
             const uint32_t* queries, float* scores)
      : hd(hd), stride(stride), queries(queries), scores(scores) {
    if (block >= live.blocks()) return;
    const int64_t first = live.start[block], entries = live.slots.size();
    count = live.start[block + 1] - first;
    slots = live.slots.data() + first, seen = live.seen.data() + group * entries + first;
  }

  // Products of all queries [words, LANES] with KEYS keys -> sums [KEYS, LANES]. A function of its own keeps
  // everything that the loop touches in registers.
  [[gnu::noinline]] static void products(const uint32_t* queries, const uint32_t* const* key, int64_t words,
                                         float* sums) {
    const uint32_t *k0 = key[0], *k1 = key[1], *k2 = key[2], *k3 = key[3];
    const uint32_t *k4 = key[4], *k5 = key[5], *k6 = key[6], *k7 = key[7];
    Floats s0 = {}, s1 = {}, s2 = {}, s3 = {}, s4 = {}, s5 = {}, s6 = {}, s7 = {};
    for (int64_t w = 0; w < words; w++) {
      const Words query = load<Words>(queries + w * LANES);
      s0 = E::dot(s0, query, broadcast(k0[w])), s1 = E::dot(s1, query, broadcast(k1[w]));
      s2 = E::dot(s2, query, broadcast(k2[w])), s3 = E::dot(s3, query, broadcast(k3[w]));
      s4 = E::dot(s4, query, broadcast(k4[w])), s5 = E::dot(s5, query, broadcast(k5[w]));
      s6 = E::dot(s6, query, broadcast(k6[w])), s7 = E::dot(s7, query, broadcast(k7[w]));
    }
    store(sums, s0), store(sums + LANES, s1), store(sums + 2 * LANES, s2), store(sums + 3 * LANES, s3);
    sums += 4 * LANES;
    store(sums, s4), store(sums + LANES, s5), store(sums + 2 * LANES, s6), store(sums + 3 * LANES, s7);
  }

  // Scores times `scale`; -infinity where a row does not see the slot.
  void score(const Value<E>* keys, float scale) {
    const int64_t words = hd / W;
    Words lane;
    for (int l = 0; l < LANES; l++) lane[l] = l;
    const auto row = [&](int64_t j) { return keys + slots[std::min(j, count - 1)] * stride; };
    alignas(64) float sums[KEYS * LANES];
    for (int64_t j = 0; j < count; j += KEYS) {
      const uint32_t* key[KEYS];
      for (int i = 0; i < KEYS; i++) key[i] = reinterpret_cast<const uint32_t*>(row(j + i));
      for (int i = 0; i < KEYS; i++)  // rows of one head lie apart: the processor does not foresee them
        for (int64_t w = 0; w < words; w += 16) __builtin_prefetch(row(j + i + AHEAD) + w * W);
      products(queries, key, words, sums);
      for (int i = 0; i < KEYS && j + i < count; i++) {
        const Words bits = (broadcast(uint32_t(seen[j + i])) >> lane) & 1u;
        const Floats score = load<Floats>(sums + i * LANES) * scale;
        store(scores + (j + i) * LANES, bits != 0u ? score : broadcast(-INFINITY));
      }
    }
  }

  // Scores in powers of two become weights relative to 2^most, and are added up.
  void weigh(const Sums& sums) {
    const Floats nearest = broadcast(ROUND);
    Floats most = broadcast(-1e30f), total = {};    // a row that sees none of them keeps this one
    for (int64_t j = 0; j < count; j++) {
      const Floats score = load<Floats>(scores + j * LANES);
      most = score > most ? score : most;
    }
    most = most > -1e30f ? (most + nearest) - nearest : most;
    for (int64_t j = 0; j < count; j++) {
      const Floats score = load<Floats>(scores + j * LANES), n = (score + nearest) - nearest;
      const Floats f = score - n;
      Floats p = broadcast(1.5252734e-5f);  // 2^f: ln(2)^k / k!
      for (float c : {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f,
                      1.0f})
        p = fma(p, f, broadcast(c));
      const Floats weight = score > -1e30f ? p * Sums::power(n - most) : Floats{};
      total += weight;
      store(scores + j * LANES, weight);
    }
    store(sums.most, most), store(sums.total, total);
  }

  // The weighted values of R rows from `row` on: one vector's worth of the head, from d on. The last part of a
  // head may be less than a vector: then not FULL.
  template <int R, bool FULL>
  void gather(const Value<E>* values, int64_t d, int row, const Sums& sums) {
    const int64_t rest = hd - d;
    Floats sum[R][W] = {};
    for (int64_t j = 0; j < count; j++) {
      __builtin_prefetch(values + slots[std::min(j + AHEAD, count - 1)] * stride + d);
      Words words = {};
      if constexpr (FULL) words = load<Words>(values + slots[j] * stride + d);
      else std::memcpy(&words, values + slots[j] * stride + d, rest * sizeof(Value<E>));
      Floats value[W];
      if constexpr (W == 2) value[0] = even(words), value[1] = odd(words);
      else value[0] = (Floats)words;
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const Floats weight = broadcast(scores[j * LANES + row + r]);
#pragma GCC unroll 2
        for (int i = 0; i < W; i++) sum[r][i] = fma(weight, value[i], sum[r][i]);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
      for (int i = 0; i < W; i++) store(sums.out + (row + r) * sums.padded + d + i * LANES, sum[r][i]);
  }

  // The same for `rows` rows, ROWS_AT_ONCE in a pass over the values.
  static constexpr int ROWS_AT_ONCE = ROWS < 8 ? ROWS : 8;
  template <int R = ROWS_AT_ONCE>
  void gather_rows(int rows, const Value<E>* values, int64_t d, int row, const Sums& sums) {
    if (rows >= R) {
      if (hd - d >= W * LANES) gather<R, true>(values, d, row, sums);
      else gather<R, false>(values, d, row, sums);
      if (rows > R) gather_rows<ROWS_AT_ONCE>(rows - R, values, d, row + R, sums);
    } else if constexpr (R > 1) {
      gather_rows<R - 1>(rows, values, d, row, sums);
    }
  }

  // Everything, of `rows` rows.
  void attend(const Value<E>* keys, const Value<E>* values, float scale, int rows, const Sums& sums) {
    score(keys, scale);
    weigh(sums);
    for (int64_t d = 0; d < hd; d += W * LANES) gather_rows(rows, values, d, 0, sums);
  }
};

// One row's sums over their total, into `out` [hd].
template <class E, class Out>
inline void finish_row(const Sums& sums, int row, int64_t hd, Value<Out>* out) {
  constexpr int W = E::PER_WORD;
  const float total = reinterpret_cast<const float*>(sums.total)[row], share = total > 0 ? 1.0f / total : 0.0f;
  for (int64_t d = 0; d < hd; d += W * LANES) {
    const float* from = sums.out + row * sums.padded + d;
    alignas(64) float values[W * LANES];
    for (int i = 0; i < W * LANES; i++) values[i] = from[i % W * LANES + i / W] * share;
    for (int i = 0; i < W * LANES && d + i < hd; i += LANES)
      Out::put(out + d + i, load<Floats>(values + i), hd - d - i);
  }
}

// Everything between wqkv and wo for one layer: rotate queries and keys (into `rotated` and the cache), store
// the values, attend. qkv [B*T, width], rotated and out [B*T, heads*hd], k and v [B, S, kv_heads, hd].
template <class E, class Out>
void attention_part(const Team& team, const Pass& pass, const Value<E>* qkv, const Norms& norms, const Cache& k,
                    const Cache& v, Value<E>* rotated, Value<Out>* out) {
  const int64_t heads = pass.heads, kv_heads = pass.kv_heads, groups = pass.groups.count, hd = pass.hd, T = pass.T;
  const int64_t sequence = k.sequence, stride = k.slot;
  auto *keys = static_cast<Value<E>*>(k.data), *values = static_cast<Value<E>*>(v.data);
  const auto *q_norm = static_cast<const Value<E>*>(norms.q), *k_norm = static_cast<const Value<E>*>(norms.k);
  team.share(pass.B * T, [&](int64_t row) {
    const Value<E>* from = qkv + row * pass.width();
    const int64_t place = row / T * sequence + pass.slots[row] * stride, turn = row * hd / 2;
    for (int64_t h = 0; h < heads + kv_heads; h++) {
      const bool query = h < heads;
      Value<E>* to = query ? rotated + (row * heads + h) * hd : keys + place + (h - heads) * hd;
      rotate_head<E>(from + h * hd, pass.cosine + turn, pass.sine + turn, query ? q_norm : k_norm, norms.eps,
                     hd, to);
    }
    std::memcpy(values + place, from + (heads + kv_heads) * hd, kv_heads * hd * sizeof(Value<E>));
  });
  team.meet();
  // An item is a block of slots of a unit, which is a key/value head of a sequence. A thread's items follow each
  // other. Whoever has the first block of a unit adds the next ones to it as far as they are its own; what is
  // left then is added after all have met.
  const int64_t words = hd / E::PER_WORD, units = pass.B * kv_heads, blocks = pass.blocks();
  const float scale = 1.44269504f / std::sqrt(float(hd));
  const auto begin = [&](int64_t thread) { return units * blocks * thread / team.all; };
  const auto finish = [&](int64_t unit, int64_t group, const Sums& sums) {
    for (int r = 0; r < pass.groups.size(group); r++) {
      const int64_t row = unit / kv_heads * T + pass.groups.row_of(group, r);
      finish_row<E, Out>(sums, r, hd, out + (row * heads + pass.groups.head_of(unit % kv_heads, group, r)) * hd);
    }
  };
  std::unique_ptr<float[]> room(new float[pass.sums_size() + BLOCK_SLOTS * 2 * LANES]);
  const Sums next(room.get(), pass.padded());
  std::vector<uint32_t> queries(groups * words * LANES);
  const int64_t end = begin(team.me + 1);
  for (int64_t item = begin(team.me), before = -1; item < end; item++) {
    const int64_t unit = item / blocks, block = item % blocks, b = unit / kv_heads, kv = unit % kv_heads;
    const bool ours = item - block >= begin(team.me);  // the unit's first block is this thread's
    const LiveSlots& live = pass.live[b];
    const int64_t from = b * sequence + kv * hd;
    for (int64_t g = 0; g < groups; g++) {
      uint32_t* transposed = &queries[g * words * LANES];
      for (int r = 0; unit != before && r < pass.groups.size(g); r++) {
        const Value<E>* query = rotated + ((b * T + pass.groups.row_of(g, r)) * heads + pass.groups.head_of(kv, g, r)) * hd;
        for (int64_t w = 0; w < words; w++) std::memcpy(&transposed[w * LANES + r], query + w * E::PER_WORD, 4);
      }
      const bool add = ours && block;
      const Sums sums = add ? next : pass.sums_of(item, g);
      QueryGroup<E>(live, block, g, hd, stride, transposed, room.get() + pass.sums_size())
          .attend(keys + from, values + from, scale, pass.groups.size(g), sums);
      if (add) pass.sums_of(item - block, g).add(next, pass.groups.size(g));
      if (ours && block + 1 == blocks) finish(unit, g, pass.sums_of(item - block, g));
    }
    before = unit;
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
  team.share(units * groups, [&](int64_t i) {
    const int64_t unit = i / groups, group = i % groups;
    if (first_end(unit) >= (unit + 1) * blocks) return;
    const Sums sums = pass.sums_of(unit * blocks, group);
    for (int64_t item = first_end(unit); item < (unit + 1) * blocks; item++)
      sums.add(pass.sums_of(item, group), pass.groups.size(group));
    finish(unit, group, sums);
  });
}

}  // namespace eagle
