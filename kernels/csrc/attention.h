// Attention of one layer over the live slots of its cache, with head norms, RoPE and the cache write.
//
// It is batch-invariant: sums run over the slots that a token attends to, in ascending order, in blocks of
// BLOCK_SLOTS that start from zero and are added in order. So they do not depend on other tokens' slots or on
// threads. Slots before a sliding window are counted too, with zero weight; blocks before the windows of all rows are
// skipped. Softmax weights are relative to a power of two, so that rescaling a block is exact.
//
// Scores and weighted values are products of query rows with tiles of BLOCK columns: slots for scores, dimensions of a
// head for values. kv_dtype.h and kv_int8.h store keys and values and pack them to that layout.
#pragma once

#include "amx_products.h"
#include "kv_int8.h"
#include "kv_dtype.h"

namespace eagle {

// Apply RMSNorm, if there is a weight, and RoPE to a head [size], in pairs (i, i + size/2).
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

// Integer sums are exact in any order, so int8 products may use AMX or vectors. From this number of rows on, AMX
// is faster.
constexpr int MIN_AMX_ROWS = 8;
#ifdef TILES
template <class X>
constexpr Dot DOT = std::is_same_v<X, Int8Keys>     ? Dot::UNSIGNED_B  // keys are stored with BYTE_OFFSET
                    : std::is_same_v<X, Int8Values> ? Dot::UNSIGNED_A
                                                    : Dot::PAIRS;
#endif
template <class X>
constexpr bool INTEGER_AMX = TILE_ROWS && (std::is_same_v<X, Int8Keys> || std::is_same_v<X, Int8Values>);

// Attention of the query rows of one key/value head of one sequence. Stored: `DtypeKV` or `Int8KV`.
template <class Stored>
struct Attention {
  using Keys = typename Stored::Keys;  // element types of products
  using Values = typename Stored::Values;
  static constexpr int W = Stored::W;  // slots in a word of weights
  static constexpr bool IN_TILES = TILED<Keys> || INTEGER_AMX<Keys>;
  Stored stored;
  const Buffer<float> scores;  // [ROWS, SCORES], overwritten by softmax weights
  const int group_rows;  // AMX tiles are shaped for this number of rows
  const int64_t window;
  const float cap;
  PrefetchRange next_keys, next_values;

  // padded: hd in whole tiles.
  Attention(int64_t hd, int64_t padded, const Groups& groups, const AttentionLayer& layer)
      : stored(hd, padded, groups.count), scores(2 * ROWS * SCORES), group_rows(groups.size),
        window(layer.window), cap(layer.cap) {
    std::fill_n(&scores[group_rows * SCORES], ROWS * SCORES, 0.0f);  // products read rows beyond the last, see `DtypeKV`
  }

  bool fills_amx_tile(int rows) const { return rows == group_rows && rows >= MIN_AMX_ROWS; }

  // Compute the scores of `rows` rows of a group, from `row` on, with a tile of keys at offset `at` of the block.
  void compute_scores(int64_t group, int row, int rows, const char* tile, int64_t at) {
    float* to = &scores[row * SCORES + at];
#ifdef TILES
    if (TILED<Keys> || (INTEGER_AMX<Keys> && fills_amx_tile(rows) && stored.words % TILE_WORDS == 0))
      // Also overwrites following rows, which are computed later.
      return tiled_rows<DOT<Keys>>(stored.query_rows(group, row), stored.words, tile, stored.words, false, to, SCORES,
                                   next_keys);
#endif
    dispatch_rows(rows, [&](auto R) {
      tile_product<Keys, 1, ROWS, R>(&stored.queries[group * stored.words * ROWS + row], rows, tile, stored.words,
                                     false, to, SCORES, next_keys);
    });
  }

  // Add the weighted values of these rows over `count` words of weights from `first` on; 0 starts new sums.
  void add_values(int row, int rows, const char* tiles, int64_t first, int64_t count, const SoftmaxSums& sums) {
    const auto* weights = reinterpret_cast<const uint32_t*>(&scores[row * SCORES]) + first;
    for (int64_t d = 0; d < stored.padded; d += BLOCK, tiles += Stored::VALUE_WORDS * Columns<Values>::BYTES) {
      float* to = sums.out + row * stored.padded + d;
      int64_t done = 0;
#ifdef TILES
      if constexpr (TILED<Values>) {
        alignas(64) float tile_sums[TILE_ROWS / 2 * BLOCK];
        for (int r = 0; r < rows && first; r++) std::copy_n(to + r * stored.padded, BLOCK, tile_sums + r * BLOCK);
        tiled_rows<DOT<Values>>(weights, SCORES, tiles, count, first > 0, tile_sums, BLOCK, next_values);
        for (int r = 0; r < rows; r++) std::copy_n(tile_sums + r * BLOCK, BLOCK, to + r * stored.padded);
        continue;
      }
      if (INTEGER_AMX<Values> && fills_amx_tile(rows) && count >= TILE_WORDS) {
        done = count / TILE_WORDS * TILE_WORDS;
        tiled_rows<DOT<Values>>(weights, SCORES, tiles, done, first > 0, to, stored.padded, next_values);
        if (done == count) continue;
      }
#endif
      dispatch_rows(rows, [&](auto R) {
        tile_product<Values, SCORES, 1, R>(weights + done, rows, tiles + done * Columns<Values>::BYTES, count - done,
                                           first + done > 0, to, stored.padded, next_values);
      });
    }
  }

  // Compute the softmax sums of all groups over one block of slots of head h of sequence b. row_slots: of the tokens of
  // this sequence. sums_of(group): memory for a group's sums. done(group, sums): called when they are complete.
  template <class SumsOf, class Done>
  void attend(const Groups& groups, int64_t block, const VisibleSlots* row_slots, const Cache& k, const Cache& v,
              int64_t b, int64_t h, const SumsOf& sums_of, const Done& done) {
    const float scale = 1.44269504f / std::sqrt(float(stored.hd));
    // shared: leading slots of the block that all rows of a group see. min_before, max_before: slots of the block
    // before the sliding window, over the rows.
    struct Span { int64_t shared, min_before, max_before; };
    const auto span = [&](int64_t group) {
      int64_t shared = BLOCK_SLOTS, min_before = BLOCK_SLOTS, max_before = 0;
      for (int64_t row = groups.begin(group); row < groups.begin(group + 1); row = groups.next(group, row)) {
        const VisibleSlots& slots = row_slots[row / groups.per_kv];
        const int64_t before = slots.before_window(block, window);
        shared = std::clamp<int64_t>(slots.prefix - block * BLOCK_SLOTS, 0, shared);
        min_before = std::min(min_before, before), max_before = std::max(max_before, before);
      }
      return Span{shared, min_before, max_before};
    };
    int64_t packed = 0;
    for (int64_t g = 0; g < groups.count; g++)
      if (const Span of = span(g); of.min_before < BLOCK_SLOTS) packed = std::max(packed, of.shared);
    stored.load_block(k, v, b, h, block, packed);
    for (int64_t g = 0; g < groups.count; g++) {
      const SoftmaxSums sums = sums_of(g);
      const int64_t begin = groups.begin(g), end = groups.begin(g + 1);
      const int rows = groups.rows_of(g);
      const Span of = span(g);
      const int64_t shared = of.shared;
      if (of.min_before == BLOCK_SLOTS) {
        sums.clear(rows), done(g, sums);
        continue;
      }
      // Call body(row, rows, slots, count) for the rows of each token; `count` of its slots are in the block.
      const auto each = [&](const auto& body) {
        for (int64_t row = begin; row < end; row = groups.next(g, row)) {
          const VisibleSlots& slots = row_slots[row / groups.per_kv];
          body(int(row - begin), int(groups.next(g, row) - row), slots, slots.count_in(block));
        }
      };
      for (int64_t j = 0; j < shared; j += BLOCK) compute_scores(g, 0, rows, stored.key_tile(j), j);
      each([&](int row, int rows, const VisibleSlots& slots, int64_t count) {
        for (int64_t j = shared; j < count; j += BLOCK)
          compute_scores(g, row, rows, stored.row_key_tile(slots, j, std::min<int64_t>(BLOCK, count - j)), j);
      });
      const auto softmax = [&](int row, int rows, const VisibleSlots& slots, int64_t count) {
        stored.softmax(g, row, rows, slots, shared, slots.before_window(block, window), count, scale, cap * 1.44269504f,
                       scores, sums);
      };
      if (shared == BLOCK_SLOTS && !of.max_before) softmax(0, rows, row_slots[begin / groups.per_kv], shared);
      else each(softmax);
      const int64_t words = shared / W, whole = TILED<Values> ? words / TILE_WORDS * TILE_WORDS : words;
      add_values(0, rows, stored.value_tiles(), 0, whole, sums);
      each([&](int row, int rows, const VisibleSlots& slots, int64_t count) {
        const int64_t from = whole * W;
        if (count > from)
          add_values(row, rows, stored.row_value_tiles(slots, from, count - from), whole,
                 tile_words<Values>((count - from + W - 1) / W), sums);
      });
      stored.dequantize(rows, sums);
      done(g, sums);
    }
  }
};

// Everything between wqkv and wo of one layer: rotate queries (into `rotated`) and keys, write the cache, attend.
// qkv [B*T, width], rotated and out [B*T, heads*hd].
template <class Stored, class E, class Out>
void attention_part(const Team& team, const Pass& pass, const Value<E>* qkv, const AttentionLayer& layer,
                    Value<E>* rotated, Value<Out>* out) {
  const Groups& groups = pass.groups;
  const Cache &k = layer.k, &v = layer.v;
  const int64_t heads = pass.heads, kv_heads = pass.kv_heads, hd = pass.hd, T = pass.T;
  team.parallel_for(pass.B * T, [&](int64_t row) {
    const Value<E>* from = qkv + row * pass.width();
    const int64_t angle = row * hd / 2 + (layer.window ? pass.local : 0), b = row / T, slot = pass.slots[row];
    const auto rotate = [&](int64_t h, auto dtype, auto* to) {
      rotate_head<E, decltype(dtype)>(from + h * hd, pass.cosine + angle, pass.sine + angle,
                                      h < heads ? layer.q_norm : layer.k_norm, layer.eps, hd, to);
    };
    for (int64_t h = 0; h < heads; h++) rotate(h, E(), rotated + (row * heads + h) * hd);
    for (int64_t h = 0; h < kv_heads; h++) {
      Stored::store_key(k, b, slot, h, hd, [&](auto dtype, auto* to) { rotate(heads + h, dtype, to); });
      Stored::store_value(v, b, slot, h, hd, from + (heads + kv_heads + h) * hd);
    }
  });
  team.barrier();
  // A unit is a key/value head of a sequence; an item is a block of slots of a unit. Threads have contiguous ranges
  // of items. The thread of a unit's first block adds its own next blocks to it. The other blocks are added after a
  // barrier.
  const int64_t units = pass.B * kv_heads, skipped = pass.first_block(layer.window);
  const int64_t blocks = pass.max_blocks() - skipped;
  const auto first_item = [&](int64_t thread) { return units * blocks * thread / team.threads; };
  const auto write_output = [&](int64_t unit, int64_t group, const SoftmaxSums& sums) {
    for (int r = 0; r < groups.rows_of(group); r++) {
      const int64_t row = groups.begin(group) + r, of_row = unit / kv_heads * T + row / groups.per_kv;
      const int64_t head = unit % kv_heads * groups.per_kv + row % groups.per_kv;
      sums.normalize<Out>(r, hd, layer.sinks ? layer.sinks + head : nullptr, out + (of_row * heads + head) * hd);
    }
  };
  Attention<Stored> attention(hd, pass.padded(), groups, layer);
  Tiles shapes;
  if (attention.IN_TILES) shapes.shape(groups.size);
  const Buffer<float> next_sums(SoftmaxSums::size(pass.padded()));
  const SoftmaxSums next(next_sums, pass.padded());
  const int64_t end = first_item(team.thread + 1);
  for (int64_t item = first_item(team.thread), before = -1; item < end; item++) {
    const int64_t unit = item / blocks, block = item % blocks, b = unit / kv_heads, kv = unit % kv_heads;
    const bool owns_first = item - block >= first_item(team.thread);  // this thread has the unit's first block
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
        return Stored::prefetch_range(cache, unit / kv_heads, block, unit % kv_heads, slots, hd);
      };
      attention.next_keys = ahead(k), attention.next_values = ahead(v);
    }
    const bool add = owns_first && block;
    attention.attend(
        groups, skipped + block, &pass.row_slots[b * T], k, v, b, kv,
        [&](int64_t group) { return add ? next : pass.sums_of(item, group); },
        [&](int64_t group, const SoftmaxSums& sums) {
          const SoftmaxSums first = add ? pass.sums_of(item - block, group) : sums;
          if (add) first.add(sums, groups.rows_of(group));
          if (owns_first && block + 1 == blocks) write_output(unit, group, first);
        });
  }
  const auto first_end = [&](int64_t unit) {  // of the thread that has a unit's first block
    int64_t thread = 0;
    while (first_item(thread + 1) <= unit * blocks) thread++;
    return first_item(thread + 1);
  };
  bool all_finished = true;
  for (int64_t unit = 0; unit < units; unit++) all_finished &= first_end(unit) >= (unit + 1) * blocks;
  if (all_finished) return;
  team.barrier();
  team.parallel_for(units * groups.count, [&](int64_t i) {
    const int64_t unit = i / groups.count, group = i % groups.count;
    if (first_end(unit) >= (unit + 1) * blocks) return;
    const SoftmaxSums sums = pass.sums_of(unit * blocks, group);
    for (int64_t item = first_end(unit); item < (unit + 1) * blocks; item++)
      sums.add(pass.sums_of(item, group), groups.rows_of(group));
    write_output(unit, group, sums);
  });
}

}  // namespace eagle
