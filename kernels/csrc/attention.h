// Attention of one layer over the live prefix of its cache, after head norms, rotary and the cache write.
//
// Sums run over the slots in ascending order, and a slot that a row does not see adds nothing: a row's result
// depends neither on the rows computed with it nor on the threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <alloca.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "norm.h"
#include "team.h"
#include "vectors.h"

namespace {

using at::Tensor;

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

// What every layer of a pass shares: B sequences of T rows each, their rotations, cache slots and mask. The
// heads that share a key/value head make per_kv * T query rows, taken in groups of up to 16, one per lane.
struct Pass {
  int64_t B, T, heads, kv_heads, hd, per_kv, groups, n;
  const Tensor cosine, sine, slots, visible;
  bool split;                                 // whether units are too few for a thread to take whole ones
  mutable std::vector<float> scores, totals;  // of all units, if so
  std::vector<std::vector<int32_t>> live;     // by sequence and group: slots that one of its rows attends to
  std::vector<std::vector<uint16_t>> seen;    // and for each of them, bit r: row r does

  // x [B, T, ...], the keys of a layer [B, S, kv_heads, hd], and what the operators are given.
  Pass(const Tensor& x, int64_t heads, const Tensor& keys, const Tensor& cosine, const Tensor& sine,
       const Tensor& slots, const Tensor& visible)
      : B(x.size(0)), T(x.size(1)), heads(heads), kv_heads(keys.size(2)), hd(keys.size(3)),
        per_kv(heads / kv_heads), groups((per_kv * T + LANES - 1) / LANES), n(visible.size(2)),
        cosine(cosine.contiguous()), sine(sine.contiguous()), slots(slots.contiguous()),
        visible(visible.contiguous()), live(B * groups), seen(B * groups) {
    split = at::get_num_threads() > 1 && units() < 4 * at::get_num_threads();
    if (split) scores.resize(units() * n * LANES), totals.resize(units() * LANES);
  }

  int64_t units() const { return B * kv_heads * groups; }
  float* scores_of(int64_t unit) const { return &scores[unit * n * LANES]; }
  int64_t width() const { return (heads + 2 * kv_heads) * hd; }
  int group_size(int64_t group) const { return std::min<int64_t>(LANES, per_kv * T - group * LANES); }
  // Which query head and which row of the pass the r-th row of a group is.
  int64_t head_of(int64_t kv, int64_t group, int r) const { return kv * per_kv + (group * LANES + r) / T; }
  int64_t row_of(int64_t b, int64_t group, int r) const { return b * T + (group * LANES + r) % T; }

  void read_mask(const Team& team) {
    team.share(B * groups, [&](int64_t unit) {
      std::vector<uint16_t> bits(n);
      for (int r = 0; r < group_size(unit % groups); r++) {
        const bool* row = visible.const_data_ptr<bool>() + row_of(unit / groups, unit % groups, r) * n;
        for (int64_t j = 0; j < n; j++) bits[j] |= uint16_t(row[j]) << r;
      }
      for (int64_t j = 0; j < n; j++)
        if (bits[j]) live[unit].push_back(j), seen[unit].push_back(bits[j]);
    });
  }
};

// Scores, softmax weights and weighted values of one group of query rows.
template <class E>
struct QueryGroup {
  static constexpr int W = E::PER_WORD;
  static constexpr int KEYS = 8;    // slots scored together: they share the loads of the queries
  static constexpr int AHEAD = 32;  // how many slots ahead of use their rows are fetched
  const std::vector<int32_t>& live;
  const std::vector<uint16_t>& seen;
  const int64_t hd, stride;  // stride: from one slot to the next, in values
  uint32_t* queries;         // [hd words, 16]
  float* scores;             // [live, 16]

  // Products of all queries [words, 16] with KEYS keys -> sums [KEYS, 16]. A function of its own keeps
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

  // Scores of the live slots `from` to `to`.
  void score(const Value<E>* keys, float scale, int64_t from, int64_t to) {
    const int64_t words = hd / W;
    const Words lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const auto row = [&](int64_t j) { return keys + live[std::min(j, to - 1)] * stride; };
    alignas(64) float sums[KEYS * LANES];
    for (int64_t j = from; j < to; j += KEYS) {
      const uint32_t* key[KEYS];
      for (int i = 0; i < KEYS; i++) key[i] = reinterpret_cast<const uint32_t*>(row(j + i));
      for (int i = 0; i < KEYS; i++)  // rows of one head lie apart: the processor does not foresee them
        for (int64_t w = 0; w < words; w += LANES) __builtin_prefetch(row(j + i + AHEAD) + w * W);
      products(queries, key, words, sums);
      for (int i = 0; i < KEYS && j + i < to; i++) {
        const Words bits = (broadcast(uint32_t(seen[j + i])) >> lane) & 1u;
        const Floats score = load<Floats>(sums + i * LANES) * scale;
        store(scores + (j + i) * LANES, bits != 0u ? score : broadcast(-INFINITY));
      }
    }
  }

  // Scores become softmax weights, unnormalised; returns their sums by lane.
  Floats weigh() {
    const int64_t count = live.size();
    const Floats nothing = broadcast(-INFINITY);
    Floats most = nothing, total = {};
    for (int64_t j = 0; j < count; j++) {
      const Floats score = load<Floats>(scores + j * LANES);
      most = score > most ? score : most;
    }
    for (int64_t j = 0; j < count; j++) {
      const Floats score = load<Floats>(scores + j * LANES);
      const Floats weight = score == nothing ? Floats{} : exponential(score - most);
      total += weight;
      store(scores + j * LANES, weight);
    }
    return total;
  }

  // The weighted values of R rows from `row` on, over `total`: one vector's worth of the head, from d on. The
  // last part of a head may be less than a vector: then not FULL.
  template <int R, bool FULL>
  void gather(const Value<E>* values, int64_t d, int row, Value<E>* const* out, const float* total) {
    const int64_t count = live.size(), rest = hd - d;
    Floats sum[R][W] = {};
    for (int64_t j = 0; j < count; j++) {
      __builtin_prefetch(values + live[std::min(j + AHEAD, count - 1)] * stride + d);
      Words words = {};
      if constexpr (FULL) words = load<Words>(values + live[j] * stride + d);
      else std::memcpy(&words, values + live[j] * stride + d, rest * sizeof(Value<E>));
      Floats value[W];
      if constexpr (W == 2) value[0] = even(words), value[1] = odd(words);
      else value[0] = (Floats)words;
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Floats weight = broadcast(scores[j * LANES + row + r]);
#pragma GCC unroll 2
        for (int i = 0; i < W; i++) sum[r][i] = fma(weight, value[i], sum[r][i]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const float share = total[row + r] > 0 ? 1.0f / total[row + r] : 0.0f;
      if constexpr (W == 2) {  // even and odd values were summed apart
        Floats low, high;
        for (int l = 0; l < LANES / 2; l++) {
          low[2 * l] = sum[r][0][l], low[2 * l + 1] = sum[r][1][l];
          high[2 * l] = sum[r][0][LANES / 2 + l], high[2 * l + 1] = sum[r][1][LANES / 2 + l];
        }
        E::put(out[row + r] + d, low * share, rest);
        if (rest > LANES) E::put(out[row + r] + d + LANES, high * share, rest - LANES);
      } else {
        E::put(out[row + r] + d, sum[r][0] * share, rest);
      }
    }
  }

  // The same for `rows` rows, ROWS_AT_ONCE in a pass over the values.
  static constexpr int ROWS_AT_ONCE = 8;
  template <int R = ROWS_AT_ONCE>
  void gather_rows(int rows, const Value<E>* values, int64_t d, int row, Value<E>* const* out,
                   const float* total) {
    if (rows >= R) {
      if (hd - d >= W * LANES) gather<R, true>(values, d, row, out, total);
      else gather<R, false>(values, d, row, out, total);
      if (rows > R) gather_rows<ROWS_AT_ONCE>(rows - R, values, d, row + R, out, total);
    } else if constexpr (R > 1) {
      gather_rows<R - 1>(rows, values, d, row, out, total);
    }
  }
};

// Everything between wqkv and wo for one layer: rotate queries and keys (into `rotated` and the cache), store
// the values, attend. qkv [B*T, width], rotated and out [B*T, heads*hd], k and v [B, S, kv_heads, hd].
template <class E>
void attention_part(const Team& team, const Pass& pass, const Value<E>* qkv, const Value<E>* q_norm,
                    const Value<E>* k_norm, float eps, const Tensor& k, const Tensor& v, Value<E>* rotated,
                    Value<E>* out) {
  const int64_t heads = pass.heads, kv_heads = pass.kv_heads, groups = pass.groups, hd = pass.hd;
  const auto *cosine = pass.cosine.const_data_ptr<float>(), *sine = pass.sine.const_data_ptr<float>();
  const auto* slots = pass.slots.const_data_ptr<int64_t>();
  auto* keys = static_cast<Value<E>*>(k.mutable_data_ptr());
  auto* values = static_cast<Value<E>*>(v.mutable_data_ptr());
  const int64_t sequence = k.stride(0), stride = k.stride(1);
  team.share(pass.B * pass.T, [&](int64_t row) {
    const Value<E>* from = qkv + row * pass.width();
    const int64_t place = row / pass.T * sequence + slots[row] * stride, turn = row * hd / 2;
    for (int64_t h = 0; h < heads + kv_heads; h++) {
      const bool query = h < heads;
      Value<E>* to = query ? rotated + (row * heads + h) * hd : keys + place + (h - heads) * hd;
      rotate_head<E>(from + h * hd, cosine + turn, sine + turn, query ? q_norm : k_norm, eps, hd, to);
    }
    std::memcpy(values + place, from + (heads + kv_heads) * hd, kv_heads * hd * sizeof(Value<E>));
  });
  team.meet();
  const int64_t words = hd / E::PER_WORD, units = pass.units(), vector = E::PER_WORD * LANES;
  const float scale = 1.0f / std::sqrt(float(hd));
  std::vector<uint32_t> queries(words * LANES);
  Value<E>* to[LANES];
  // What a unit, one group of rows of one key/value head, works on. `fill`: with its queries.
  const auto group_of = [&](int64_t unit, float* scores, bool fill) {
    const int64_t b = unit / (kv_heads * groups), kv = unit / groups % kv_heads, group = unit % groups;
    for (int r = 0; r < pass.group_size(group); r++) {
      const int64_t place = (pass.row_of(b, group, r) * heads + pass.head_of(kv, group, r)) * hd;
      for (int64_t w = 0; fill && w < words; w++)
        std::memcpy(&queries[w * LANES + r], rotated + place + w * E::PER_WORD, 4);
      to[r] = out + place;
    }
    const int64_t mask = b * groups + group;
    return QueryGroup<E>{pass.live[mask], pass.seen[mask], hd, stride, queries.data(), scores};
  };
  const auto start = [&](int64_t unit) {
    return unit / (kv_heads * groups) * sequence + unit / groups % kv_heads * hd;
  };
  const auto size = [&](int64_t unit) { return pass.group_size(unit % groups); };

  if (!pass.split) {  // enough units for all threads: each does its own, the scores stay in its cache
    std::vector<float> scores(pass.n * LANES);
    alignas(64) float total[LANES];
    team.share(units, [&](int64_t unit) {
      QueryGroup<E> group = group_of(unit, scores.data(), true);
      group.score(keys + start(unit), scale, 0, group.live.size());
      store(total, group.weigh());
      const Value<E>* from = values + start(unit);
      for (int64_t d = 0; d < hd; d += vector) group.gather_rows(size(unit), from, d, 0, to, total);
    });
    return;
  }
  // Few units, as in plain decoding: the threads share the slots to score and the parts of a head to gather.
  constexpr int64_t SLOTS = 128;  // that one thread scores at a time
  const int64_t pieces = (pass.n + SLOTS - 1) / SLOTS, parts = (hd + vector - 1) / vector;
  team.share(units * pieces, [&](int64_t item) {
    const int64_t unit = item / pieces, from = item % pieces * SLOTS;
    QueryGroup<E> group = group_of(unit, pass.scores_of(unit), true);
    const int64_t count = group.live.size();
    if (from < count) group.score(keys + start(unit), scale, from, std::min(from + SLOTS, count));
  });
  team.meet();
  team.share(units, [&](int64_t unit) {
    store(&pass.totals[unit * LANES], group_of(unit, pass.scores_of(unit), false).weigh());
  });
  team.meet();
  team.share(units * parts, [&](int64_t item) {
    const int64_t unit = item / parts, d = item % parts * vector;
    group_of(unit, pass.scores_of(unit), false)
        .gather_rows(size(unit), values + start(unit), d, 0, to, &pass.totals[unit * LANES]);
  });
}

}  // namespace
