// Attention of one layer over the live prefix of its cache, after head norms, rotary and the cache write.
//
// Row-invariant: a row counts the slots that it sees, in ascending order; a slot's number is its rank for this
// row. Sums run over ranks, in blocks of BLOCK_SLOTS that begin from zero and are added in order. Where a slot
// lies among other rows' slots, what rows there are and which thread takes a block changes nothing. A window leaves
// ranks as they are: those before it have no weight, and blocks that are before all rows' windows are left out. Softmax
// weights are taken relative to a power of two, so that bringing two blocks to one scale is exact.
//
// Scores and weighted values are products like those of a linear layer: rows of a group times a tile of BLOCK
// columns, which are slots for scores and places in a head for values. How keys and values are stored and get to
// that layout is in in_dtype.h and in_bytes.h.
#pragma once

#include "amx_products.h"
#include "in_bytes.h"
#include "in_dtype.h"

namespace eagle {

// A head [size], normed if there is a weight, then rotated by cos, sin [size / 2] in pairs (i, i + size/2).
template <class E, class Out>
inline void rotate_head(const Value<E>* head, const float* cosine, const float* sine, const float* norm,
                        float eps, int64_t size, Value<Out>* out) {
  auto* normed = static_cast<Value<E>*>(alloca(size * sizeof(Value<E>)));
  if (norm) norm_row<E>(head, norm, size, eps, normed), head = normed;
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t rest = half - i;
    const Floats a = E::get(head + i, rest), b = E::get(head + half + i, rest);
    const Floats c = Fp32::get(cosine + i, rest), s = Fp32::get(sine + i, rest);
    Out::put(out + i, a * c - b * s, rest);
    Out::put(out + half + i, fma(b, c, a * s), rest);
  }
}

// Integers have the same sum in any order. So of products of bytes, those of all rows of a group go through AMX, in whole
// tiles, unless they are so few that vectors are as fast.
constexpr int LEAST_ROWS = 8;
#ifdef TILES
template <class X>
constexpr Dot DOT = std::is_same_v<X, KeyBytes>     ? Dot::UNSIGNED_B  // has BYTE_OFFSET
                    : std::is_same_v<X, ValueBytes> ? Dot::UNSIGNED_A
                                                    : Dot::PAIRS;
#endif
template <class X>
constexpr bool IN_ANY_ORDER = TILE_ROWS && (std::is_same_v<X, KeyBytes> || std::is_same_v<X, ValueBytes>);

// The rows that attend to one head of one sequence, whose keys and values are `Stored`: `InDtype` or `InBytes`.
template <class Stored>
struct Attention {
  using Keys = typename Stored::Keys;  // what products with tiles of them multiply
  using Values = typename Stored::Values;
  static constexpr int W = Stored::W;  // slots in a word of weights
  static constexpr bool IN_TILES = TILED<Keys> || IN_ANY_ORDER<Keys>;
  Stored stored;
  const Room<float> scores;  // [ROWS, SCORES], of which weights take the place
  const int tall;  // rows of a group, for which tiles are shaped
  const int64_t window;
  Ahead next_keys, next_values;

  // padded: hd in whole tiles.
  Attention(int64_t hd, int64_t padded, const Groups& groups, int64_t window)
      : stored(hd, padded, groups.count), scores(2 * ROWS * SCORES), tall(groups.size), window(window) {
    std::fill_n(&scores[tall * SCORES], ROWS * SCORES, 0.0f);  // of rows after the last, as in `InDtype`
  }

  bool fills_tiles(int rows) const { return rows == tall && rows >= LEAST_ROWS; }

  // `rows` of a group's rows from `row` on: their scores with a tile of keys, from `place` of the block on.
  void score(int64_t group, int row, int rows, const char* tile, int64_t place) {
    float* to = &scores[row * SCORES + place];
#ifdef TILES
    if (TILED<Keys> || (IN_ANY_ORDER<Keys> && fills_tiles(rows) && stored.words % TILE_WORDS == 0))
      // What it has of other rows, in this order, they overwrite.
      return tiled_rows<DOT<Keys>>(stored.query_rows(group, row), stored.words, tile, stored.words, false, to, SCORES,
                                   next_keys);
#endif
    by_rows(rows, [&](auto R) {
      tile_product<Keys, 1, ROWS, R>(&stored.queries[group * stored.words * ROWS + row], rows, tile, stored.words,
                                     false, to, SCORES, next_keys);
    });
  }

  // The same: their weighted values, over `count` words of weights from `first` on. All that is before `first`
  // is in the sums already.
  void gather(int row, int rows, const char* tiles, int64_t first, int64_t count, const Sums& sums) {
    const auto* weights = reinterpret_cast<const uint32_t*>(&scores[row * SCORES]) + first;
    for (int64_t d = 0; d < stored.padded; d += BLOCK, tiles += Stored::VALUE_WORDS * Columns<Values>::BYTES) {
      float* to = sums.out + row * stored.padded + d;
      int64_t done = 0;
#ifdef TILES
      if constexpr (TILED<Values>) {
        alignas(64) float few[TILE_ROWS / 2 * BLOCK];
        for (int r = 0; r < rows && first; r++) std::copy_n(to + r * stored.padded, BLOCK, few + r * BLOCK);
        tiled_rows<DOT<Values>>(weights, SCORES, tiles, count, first > 0, few, BLOCK, next_values);
        for (int r = 0; r < rows; r++) std::copy_n(few + r * BLOCK, BLOCK, to + r * stored.padded);
        continue;
      }
      if (IN_ANY_ORDER<Values> && fills_tiles(rows) && count >= TILE_WORDS) {
        done = count / TILE_WORDS * TILE_WORDS;
        tiled_rows<DOT<Values>>(weights, SCORES, tiles, done, first > 0, to, stored.padded, next_values);
        if (done == count) continue;
      }
#endif
      by_rows(rows, [&](auto R) {
        tile_product<Values, SCORES, 1, R>(weights + done, rows, tiles + done * Columns<Values>::BYTES, count - done,
                                           first + done > 0, to, stored.padded, next_values);
      });
    }
  }

  // The sums of the rows of all groups over a block of slots of head h of sequence b. seen: of the rows of this
  // sequence. use(group) says where a group's sums go, done(group) that they are there.
  template <class Use, class Done>
  void attend(const Groups& groups, int64_t block, const Seen* seen, const Cache& k, const Cache& v, int64_t b,
              int64_t h, const Use& use, const Done& done) {
    const float scale = 1.44269504f / std::sqrt(float(stored.hd));
    struct Span { int64_t shared, least, most; };
    // Slots of the block that have one rank for all rows of a group; the least and the largest number of them that are
    // before the window of a row.
    const auto span = [&](int64_t group) {
      int64_t shared = BLOCK_SLOTS, least = BLOCK_SLOTS, most = 0;
      for (int64_t row = groups.begin(group); row < groups.begin(group + 1); row = groups.next(group, row)) {
        const Seen& slots = seen[row / groups.per_kv];
        const int64_t before = slots.before(block, window);
        shared = std::clamp<int64_t>(slots.prefix - block * BLOCK_SLOTS, 0, shared);
        least = std::min(least, before), most = std::max(most, before);
      }
      return Span{shared, least, most};
    };
    int64_t packed = 0;
    for (int64_t g = 0; g < groups.count; g++)
      if (const Span of = span(g); of.least < BLOCK_SLOTS) packed = std::max(packed, of.shared);
    stored.open(k, v, b, h, block, packed);
    for (int64_t g = 0; g < groups.count; g++) {
      const Sums sums = use(g);
      const int64_t begin = groups.begin(g), end = groups.begin(g + 1);
      const int rows = groups.rows_of(g);
      const Span of = span(g);
      const int64_t shared = of.shared;
      if (of.least == BLOCK_SLOTS) {
        sums.clear(rows), done(g, sums);
        continue;
      }
      // own(row, rows, seen, count) for every row of the sequence: `count` of its slots are in the block.
      const auto each = [&](const auto& own) {
        for (int64_t row = begin; row < end; row = groups.next(g, row)) {
          const Seen& slots = seen[row / groups.per_kv];
          own(int(row - begin), int(groups.next(g, row) - row), slots, slots.in(block));
        }
      };
      for (int64_t j = 0; j < shared; j += BLOCK) score(g, 0, rows, stored.key_tile(j), j);
      each([&](int row, int rows, const Seen& slots, int64_t count) {
        for (int64_t j = shared; j < count; j += BLOCK)
          score(g, row, rows, stored.own_key_tile(slots, j, std::min<int64_t>(BLOCK, count - j)), j);
      });
      const auto weigh = [&](int row, int rows, const Seen& slots, int64_t count) {
        stored.weigh(g, row, rows, slots, shared, slots.before(block, window), count, scale, scores, sums);
      };
      if (shared == BLOCK_SLOTS && !of.most) weigh(0, rows, seen[begin / groups.per_kv], shared);
      else each(weigh);
      const int64_t words = shared / W, whole = TILED<Values> ? words / TILE_WORDS * TILE_WORDS : words;
      gather(0, rows, stored.value_tiles(), 0, whole, sums);
      each([&](int row, int rows, const Seen& slots, int64_t count) {
        const int64_t from = whole * W;
        if (count > from)
          gather(row, rows, stored.own_value_tiles(slots, from, count - from), whole,
                 tile_words<Values>((count - from + W - 1) / W), sums);
      });
      stored.finish(rows, sums);
      done(g, sums);
    }
  }
};

// Everything between wqkv and wo for one layer: rotate queries and keys (into `rotated` and the cache), store
// the values, attend. qkv [B*T, width], rotated and out [B*T, heads*hd], k and v [B, S, kv_heads, hd] as `Stored`.
template <class Stored, class E, class Out>
void attention_part(const Team& team, const Pass& pass, const Value<E>* qkv, const Attending& layer,
                    Value<E>* rotated, Value<Out>* out) {
  const Groups& groups = pass.groups;
  const Cache &k = layer.k, &v = layer.v;
  const int64_t heads = pass.heads, kv_heads = pass.kv_heads, hd = pass.hd, T = pass.T;
  team.share(pass.B * T, [&](int64_t row) {
    const Value<E>* from = qkv + row * pass.width();
    const int64_t turn = row * hd / 2 + (layer.window ? pass.local : 0), b = row / T, slot = pass.slots[row];
    const auto rotate = [&](int64_t h, auto dtype, auto* to) {
      rotate_head<E, decltype(dtype)>(from + h * hd, pass.cosine + turn, pass.sine + turn,
                                      h < heads ? layer.q_norm : layer.k_norm, layer.eps, hd, to);
    };
    for (int64_t h = 0; h < heads; h++) rotate(h, E(), rotated + (row * heads + h) * hd);
    for (int64_t h = 0; h < kv_heads; h++) {
      Stored::store_key(k, b, slot, h, hd, [&](auto dtype, auto* to) { rotate(heads + h, dtype, to); });
      Stored::store_value(v, b, slot, h, hd, from + (heads + kv_heads + h) * hd);
    }
  });
  team.meet();
  // An item is a block of slots of a unit, which is a key/value head of a sequence. A thread's items follow each
  // other. Whoever has the first block of a unit adds the next ones to it as far as they are its own; what is
  // left then is added after all have met.
  const int64_t units = pass.B * kv_heads, skipped = pass.first_block(layer.window), blocks = pass.blocks() - skipped;
  const auto begin = [&](int64_t thread) { return units * blocks * thread / team.all; };
  const auto finish = [&](int64_t unit, int64_t group, const Sums& sums) {
    for (int r = 0; r < groups.rows_of(group); r++) {
      const int64_t row = groups.begin(group) + r, of_row = unit / kv_heads * T + row / groups.per_kv;
      const int64_t head = unit % kv_heads * groups.per_kv + row % groups.per_kv;
      sums.finish<Out>(r, hd, layer.sinks ? layer.sinks + head : nullptr, out + (of_row * heads + head) * hd);
    }
  };
  Attention<Stored> attention(hd, pass.padded(), groups, layer.window);
  Tiles shapes;
  if (attention.IN_TILES) shapes.shape(groups.size);
  const Room<float> room(Sums::size(pass.padded()));
  const Sums next(room, pass.padded());
  const int64_t end = begin(team.me + 1);
  for (int64_t item = begin(team.me), before = -1; item < end; item++) {
    const int64_t unit = item / blocks, block = item % blocks, b = unit / kv_heads, kv = unit % kv_heads;
    const bool ours = item - block >= begin(team.me);  // the unit's first block is this thread's
    if (unit != before)
      for (int64_t g = 0; g < groups.count; g++)
        for (int r = 0; r < groups.rows_of(g); r++) {
          const int64_t row = groups.begin(g) + r, head = kv * groups.per_kv + row % groups.per_kv;
          attention.stored.set_query(g, r, rotated + ((b * T + row / groups.per_kv) * heads + head) * hd);
        }
    before = unit;
    if (item + 1 < end) {
      const int64_t unit = (item + 1) / blocks, block = skipped + (item + 1) % blocks;
      const auto ahead = [&](const Cache& cache) {
        const int64_t slots = std::min(BLOCK_SLOTS, pass.n - block * BLOCK_SLOTS);
        return Stored::ahead(cache, unit / kv_heads, block, unit % kv_heads, slots, hd);
      };
      attention.next_keys = ahead(k), attention.next_values = ahead(v);
    }
    const bool add = ours && block;
    attention.attend(
        groups, skipped + block, &pass.seen[b * T], k, v, b, kv,
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
