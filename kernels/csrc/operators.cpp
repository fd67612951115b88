// The operators of `torch.ops.NAMESPACE`. Each instruction set has a namespace, a macro of the compiler's command line.
// Linear layers, attention and whole layers are in files that do not include PyTorch.
#include "delta.h"
#include "kv_int8.h"
#include "packing.h"
#include "tree.h"
#include "vocabulary.h"

namespace eagle {

void use_threads(int64_t count) { requested_threads = count; }

// A packed weight, its scale and its bias.
using Operands = std::tuple<Tensor, Maybe, Maybe>;
// An embedding table [V, H]; or none [0, H], whose dtype counts, with the weight, scales and codes of a stored one, and
// whether it has minima.
using Table = std::tuple<Tensor, Maybe, Maybe, Maybe, bool>;
// A network: embeddings, RoPE's inverse frequencies [hd/2] or [2, hd/2], the factor of its sines and cosines, the
// layers (see `layer_table`), eps of the norms.
using Network = std::tuple<Table, Tensor, double, Tensor, double>;
// The final norm, the lm_head and its number of outputs.
using LmHead = std::tuple<Numbers, Operands, int64_t>;
// An EAGLE-3 head: the norms of embeddings and of features, and its network.
using Head = std::tuple<Numbers, Numbers, Network>;

// Call body(Kernels<E>()) for the dtype of x.
template <class Body>
inline void dispatch_dtype(const Tensor& x, const Body& body) {
  if (x.scalar_type() == ScalarType::Float) body(Kernels<Fp32>());
  else body(Kernels<Bf16>());
}

inline Weight weight(const Tensor* packed, const Tensor* scale, const Tensor* bias) {
  if (!packed) return {};
  const Tensor& t = *packed;
  const ScalarType type = t.scalar_type();
  const Weight::Format format = type == ScalarType::Char      ? Weight::INT8
                                : type != ScalarType::Byte    ? Weight::WHOLE
                                : t.dim() != 4                ? Weight::MXFP4
                                : t.size(2) == BLOCK          ? Weight::W8A8
                                : t.size(2) == BLOCK / 2      ? Weight::W4A8
                                                              : Weight::W6A8;
  Weight found{format, static_cast<const char*>(data(t)), scale ? data(*scale) : nullptr, t.size(0), t.size(1), 1,
               t.stride(0) * int64_t(t.element_size()), floats(bias)};
  if (format == Weight::MXFP4) found.groups = scale->size(1);
  if (scale && scale->dim() == 4) {  // [blocks, units, 1 or 2, bytes]
    const int64_t unit = scale->size(3) / BLOCK - int64_t(sizeof(float));
    found.records = {unit ? Records::CODES : Records::FLOATS, scale->size(2) == 2, std::max<int64_t>(unit, 1)};
    found.groups = scale->size(1) * found.records.unit;
  }
  return found;
}
inline Weight weight(const Operands& operands) {
  const auto& [packed, scale, bias] = operands;
  return weight(&packed, scale ? &*scale : nullptr, bias ? &*bias : nullptr);
}
inline int64_t head_size(const Tensor& angles) { return 2 * angles.size(-1); }  // also of inverse frequencies
// t: [B, S, kv_heads, hd], or in int8 [B, blocks, kv_heads, bytes of a block].
inline Cache cache(const Tensor& t) {
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2), t.size(2), int64_t(t.element_size()),
          t.scalar_type() == ScalarType::Byte};
}

inline PassArgs pass_args(const Tensor& x, int64_t heads, const Cache& keys, const Numbers& cosine, const Numbers& sine,
                          const Longs& slots, const Flags& visible) {
  return {x.size(0), x.size(1), heads, keys.heads, head_size(cosine), visible.size(2), cosine.values, sine.values,
          slots.values, visible.values, cosine.dim() == 4 ? cosine.numel() / 2 : 0};
}

enum Mode { SAME, FLOAT32 };  // as in packed.py; other values are gates
inline Gate gate_of(int64_t mode) { return mode > FLOAT32 ? Gate(mode) : Gate::NONE; }

// x [..., K] times a weight, plus residual [..., N] -> [..., N] in x's dtype, or in float32 (FLOAT32). Other modes
// are the gates of `Kernels::linear`.
Tensor linear(const Dense& x, const Operands& operands, const Maybe& residual, int64_t columns, int64_t mode) {
  auto shape = x.sizes().vec();
  shape.back() = columns;
  Tensor out = empty(shape, mode == FLOAT32 ? ScalarType::Float : x.scalar_type());
  dispatch_dtype(x, [&](auto kernels) {
    kernels.linear(threads(), data(x), out.numel() / columns, weight(operands), data(residual), gate_of(mode),
                   mode == FLOAT32, columns, out.mutable_data_ptr());
  });
  return out;
}

// Attention: qkv [B, T, (nh + 2 nkv) * hd], caches k, v -> [B, T, nh * hd]. window, sinks, cap: see `AttentionLayer`.
Tensor attend(const Dense& qkv, const Numbers& cosine, const Numbers& sine, const Maybe& q_norm, const Maybe& k_norm,
              double eps, Tensor& k, Tensor& v, const Longs& slots, const Flags& visible, int64_t window,
              const Maybe& sinks, double cap) {
  const int64_t heads = qkv.size(2) / head_size(cosine) - 2 * k.size(2);
  const AttentionLayer layer{floats(q_norm), floats(k_norm), float(eps), cache(k), cache(v), window, floats(sinks),
                             float(cap)};
  const PassArgs args = pass_args(qkv, heads, layer.k, cosine, sine, slots, visible);
  Tensor out = empty({args.B, args.T, heads * args.hd}, qkv.scalar_type());
  dispatch_dtype(qkv, [&](auto kernels) { kernels.attend(threads(), args, data(qkv), layer, out.mutable_data_ptr()); });
  return out;
}

// RMSNorm of x [..., H]. weight [H] is float32, as in all norms.
Tensor rms_norm(const Dense& x, const Numbers& weight, double eps) {
  Tensor out = empty(x.sizes().vec(), x.scalar_type());
  const int64_t H = x.size(-1);
  dispatch_dtype(x, [&](auto kernels) {
    kernels.rms_norm(data(x), weight.values, x.numel() / H, H, eps, out.mutable_data_ptr(), H);
  });
  return out;
}

// The logits [B, T, V] of x [B, T, H].
Tensor logits(const Tensor& x, const LmHead& lm_head, double eps) {
  const auto& [norm, weight, columns] = lm_head;
  return linear(rms_norm(x, norm, eps), weight, {}, columns, FLOAT32);
}

// bits: 24 bits of the layer's weights, the number of experts (16), of experts per token (16), and `renormalize`.
Mixture mixture_of(const Weight& router, int64_t bits) {
  return {router, bits >> 24 & 0xFFFF, bits >> 40 & 0xFFFF, bool(bits >> 56)};
}

// residual [.., H] plus a mixture of experts of x [.., H]. mode: of its gate. weights, chosen: see `Mixture`.
Tensor experts(const Dense& x, const Tensor& residual, const Operands& router, const Operands& gate_up,
               const Operands& down, int64_t bits, int64_t mode, const Maybe& weights, const Maybe& chosen) {
  Tensor out = copy(residual);
  const int64_t H = x.size(-1);
  Layer layer{};
  layer.gate_up = weight(gate_up), layer.down = weight(down), layer.gate = gate_of(mode);
  layer.mixture = mixture_of(weight(router), bits);
  layer.mixture.weights = floats(weights), layer.mixture.chosen = longs(chosen);
  dispatch_dtype(x, [&](auto kernels) {
    kernels.experts(threads(), data(x), x.numel() / H, H, layer, out.mutable_data_ptr());
  });
  return out;
}

// An array of `Layer`, as bytes, built once: reading hundreds of tensors would take 5 % of a step. The tensors must
// outlive it. weights: those that each layer has, in the order of `Layer`. parts: three numbers per layer: a bit for
// each weight that it has, its window, the mode of its gate. k, v: caches by layer.
Tensor layer_table(const Tensors& weights, const std::vector<int64_t>& parts, const Tensors& k, const Tensors& v,
                   double eps) {
  static_assert(std::is_trivially_copyable_v<Layer>);
  Tensor all = empty({int64_t(k.size() * sizeof(Layer))}, ScalarType::Byte);
  auto* layer = static_cast<Layer*>(all.mutable_data_ptr());
  const Tensor* next = weights.data();
  for (size_t l = 0; l < k.size(); l++) {
    int64_t has = parts[3 * l];
    const auto next_weight = [&] {
      const Tensor* tensor = has & 1 ? next++ : nullptr;
      return has >>= 1, tensor;
    };
    const auto norm = [&] { return floats(next_weight()); };
    const auto packed = [&] {
      const Tensor *values = next_weight(), *scale = next_weight(), *bias = next_weight();
      return weight(values, scale, bias);
    };
    layer[l] = {norm(), packed(),
                {norm(), norm(), float(eps), cache(k[l]), cache(v[l]), parts[3 * l + 1], norm()},
                packed(), norm(), norm(), packed(), packed(), norm(), gate_of(parts[3 * l + 2]),
                mixture_of(packed(), parts[3 * l])};
  }
  return all;
}

// Run all layers on the residual stream [B, T, H] in place. Returns the streams entering the layers `aux` (L: after the
// last). input [B, T, inputs]: replaces the normed stream as input of the first layer's attention.
Tensor run_layers(Tensor& stream, const Numbers& cosine, const Numbers& sine, const Tensor& layer_table,
                  const Longs& slots, const Flags& visible, double eps, const std::vector<int64_t>& aux,
                  const void* input) {
  const int64_t H = stream.size(2);
  Tensor features = empty({stream.size(0), stream.size(1), int64_t(aux.size()) * H}, stream.scalar_type());
  const std::span all(static_cast<const Layer*>(data(layer_table)), layer_table.numel() / sizeof(Layer));
  dispatch_dtype(stream, [&](auto kernels) {
    const int64_t heads = kernels.inputs(all[0].wo) / head_size(cosine);
    const PassArgs args = pass_args(stream, heads, all[0].attention.k, cosine, sine, slots, visible);
    kernels.layers(threads(), args, H, all, eps, aux, input, stream.mutable_data_ptr(), features.mutable_data_ptr());
  });
  return features;
}

// Run layers on x [B, T, H] -> the residual stream after the last one, and features. See `run_layers`.
std::tuple<Tensor, Tensor> layers(const Tensor& x, const Numbers& cosine, const Numbers& sine,
                                  const Tensor& layer_table, const Longs& slots, const Flags& visible, double eps,
                                  const std::vector<int64_t>& aux, const Maybe& input) {
  Tensor stream = copy(x);
  Tensor features = run_layers(stream, cosine, sine, layer_table, slots, visible, eps, aux, data(input));
  return {stream, features};
}

// See model.py: rope_table.
std::tuple<Numbers, Numbers> angles(const Longs& positions, const Numbers& inverse, double factor) {
  const int64_t half = inverse.size(-1), rows = positions.numel();
  std::vector<int64_t> shape{positions.size(0), positions.size(1), half};
  if (inverse.dim() == 2) shape.insert(shape.begin(), inverse.size(0));
  Numbers cosine(shape), sine(shape);
  for (int64_t row = 0; row < cosine.numel() / half; row++)
    for (int64_t i = row * half, f = row / rows * half; i < (row + 1) * half; i++, f++) {
      const float angle = float(positions[row % rows]) * inverse[f];
      cosine[i] = std::cos(angle) * float(factor), sine[i] = std::sin(angle) * float(factor);
    }
  return {cosine, sine};
}

// The embeddings [B, T, H] of tokens.
Tensor embed(const Longs& tokens, const Table& embeddings) {
  const auto& [table, weight, scale, codes, minima] = embeddings;
  const int64_t B = tokens.size(0), T = tokens.size(1);
  if (!weight) return gather_rows(table, B, T, [&](int64_t i) { return tokens[i]; });
  const int64_t H = table.size(1), units = scale->size(1) / (1 + minima);
  const StoredTable stored{static_cast<const uint8_t*>(data(weight)), floats(scale),
                           static_cast<const int8_t*>(data(codes)),
                           H, weight->size(1) * 8 / H, units, codes ? codes->size(1) / (1 + minima) : units, minima};
  Tensor out = empty({B, T, H}, table.scalar_type());
  dispatch_dtype(out, [&](auto kernels) {
    kernels.rows(stored, &tokens[0], B * T, out.mutable_data_ptr());
  });
  return out;
}

// head.py: Eagle3Head.run_layers over tokens [B, T] and features [B, T, H] -> the residual stream.
Tensor head_forward(const Longs& tokens, const Dense& feature, const Longs& positions, const Longs& slots,
                    const Flags& visible, const Head& weights) {
  const auto& [table_norm, feature_norm, network] = weights;
  const auto& [table, inverse, factor, layer_table, eps] = network;
  const int64_t M = tokens.numel(), H = feature.size(2), S = std::get<0>(table).size(1);
  const auto [cosine, sine] = angles(positions, inverse, factor);
  const Tensor embedded = embed(tokens, table);
  Tensor input = empty({tokens.size(0), tokens.size(1), S + H}, feature.scalar_type()), stream = copy(feature);
  auto* to = static_cast<char*>(input.mutable_data_ptr());
  const auto norm = [&](const Tensor& x, const float* weight, int64_t size, double eps, char* out) {
    dispatch_dtype(x, [&](auto kernels) { kernels.rms_norm(data(x), weight, M, size, eps, out, S + H); });
  };
  norm(embedded, table_norm.values, S, eps, to);
  norm(feature, feature_norm.values, H, eps, to + S * feature.element_size());
  run_layers(stream, cosine, sine, layer_table, slots, visible, eps, {}, data(input));
  return stream;
}

// Transformer.forward over tokens [B, T]; embeddings are multiplied by `scale`. Returns what `layers` returns.
std::tuple<Tensor, Tensor> target_forward(const Longs& tokens, const Longs& positions, const Longs& slots,
                                  const Flags& visible, double scale, const std::vector<int64_t>& aux,
                                  const Network& network) {
  const auto& [table, inverse, factor, layer_table, eps] = network;
  Tensor x = embed(tokens, table);
  if (scale != 1) dispatch_dtype(x, [&](auto kernels) { kernels.scale(scale, x.numel(), x.mutable_data_ptr()); });
  const auto [cosine, sine] = angles(positions, inverse, factor);
  Tensor features = run_layers(x, cosine, sine, layer_table, slots, visible, eps, aux, nullptr);
  return {x, features};
}

// Run the target on a tree -> logits, features, see engine/step.py: verify. tokens, depth [B, T], ancestors [B, T, T],
// length [B], n live slots.
std::tuple<Tensor, Tensor> verify(const Longs& tokens, const Longs& depth, const Flags& ancestors, const Longs& length,
                                  int64_t n, double scale, const std::vector<int64_t>& aux, const LmHead& lm_head,
                                  const Network& network) {
  const int64_t B = depth.size(0), T = depth.size(1);
  const Longs positions({B, T}), slots({B, T});
  for (int64_t i = 0; i < B * T; i++)
    positions[i] = length[i / T] + depth[i], slots[i] = length[i / T] + i % T;
  const Flags visible = tree_attention_mask(length, ancestors, n);
  const auto [x, features] = target_forward(tokens, positions, slots, visible, scale, aux, network);
  return {logits(x, lm_head, std::get<4>(network)), features};
}

// Run the head on the n_unread [B] tokens, at most W, with unread features [B, R, F], see engine/draft.py: catch_up.
// Returns its output at the last committed token [B, 1, H]. text [B, S], length [B], n live slots; fuse: the layer
// over features, with `columns` outputs.
Tensor catch_up(const Longs& text, const Longs& length, const Longs& n_unread, const Tensor& unread, int64_t W,
                int64_t n, const Operands& fuse, int64_t columns, const Head& weights) {
  const int64_t B = length.size(0), S = text.size(1);
  const int64_t T = std::clamp<int64_t>(*std::max_element(&n_unread[0], &n_unread[B]), 1, W);
  const Longs tokens({B, T}), positions({B, T}), last({B, 1});
  const Flags visible({B, T, n});
  for (int64_t b = 0; b < B; b++) {
    // A frozen sequence may have more than W unread tokens.
    last[b] = std::clamp<int64_t>(n_unread[b] - 1, 0, T - 1);
    for (int64_t i = b * T; i < b * T + T; i++) {
      positions[i] = length[b] - n_unread[b] + i % T;
      tokens[i] = text[b * S + std::min(positions[i] + 1, S - 1)];
      const int64_t seen = std::clamp<int64_t>(positions[i] + 1, 0, n);
      std::fill(std::fill_n(&visible[i * n], seen, true), &visible[i * n] + n, false);
    }
  }
  Tensor all = unread;
  const Tensor fused = linear(torch::stable::narrow(all, 1, 0, T), fuse, {}, columns, SAME);
  return gather_tokens(head_forward(tokens, fused, positions, positions, visible, weights), last);
}

// Grow the tree of T nodes of an EAGLE-3 head below root [B, 1] at length [B], see engine/draft.py: grow. It has
// `depth` levels of `width` nodes; costs limit both. Returns the tree and its levels. last [B, 1, H]: see `catch_up`.
// noise [B, > depth, V] of all token ids; draft_ids [Vd]: the token ids of the draft vocabulary.
std::tuple<TreeFields, int64_t> grow(const Tensor& last, const Longs& root, const Longs& length, int64_t n, int64_t T,
                                     int64_t depth, int64_t width, const CostFields& fields, const LmHead& lm_head,
                                     const Maybe& noise, const Longs& draft_ids, const Head& weights) {
  const MarginalCosts costs(fields);
  const int64_t B = last.size(0), count = width + depth * width * width, Vd = draft_ids.size(0);
  const double eps = std::get<4>(std::get<2>(weights));
  const Numbers scores({B, count}), of_root({B, 1});  // of all candidates
  const Longs tokens({B, count}), parents({B, count}), no_parent({B, 1});
  std::fill_n(of_root.values, B, 0.0f), std::fill_n(no_parent.values, B, -1);
  const auto noise_at = [&](int64_t level) -> Maybe {  // of the draft vocabulary [B, 1, Vd]
    if (!noise) return {};
    const Numbers all(*noise), of_level({B, 1, Vd});
    for (int64_t b = 0; b < B; b++) {
      const float* row = &all[(b * all.size(1) + level) * all.size(2)];
      for (int64_t i = 0; i < Vd; i++) of_level[b * Vd + i] = row[draft_ids[i]];
    }
    return of_level;
  };
  // The beam starts as the root, which is not among the drafted nodes.
  Tensor feature = last, beam_scores = of_root, beam_flat = no_parent, visible = Flags({B, 1, 0});
  for (int64_t level = 0, size = 0, drafted = 0;; level++) {
    const int64_t rows = feature.size(1), added = rows * width;
    const auto [log_probs, ids] = rank(logits(feature, lm_head, eps), noise_at(level), width, draft_ids);
    const Numbers before(beam_scores), children({B, added});
    const Longs flat(beam_flat);
    for (int64_t b = 0; b < B; b++)
      for (int64_t i = 0; i < added; i++) {
        const int64_t to = b * count + size + i, from = b * rows + i / width;
        scores[to] = children[b * added + i] = before[from] + log_probs[b * added + i];
        tokens[to] = ids[b * added + i], parents[to] = flat[from];
      }
    size += added;
    const int64_t next = level == depth ? 0 : costs ? costs.expand(children, width) : width;
    if (!next) return {pruned(scores, tokens, parents, root, T, size, costs), level};
    const auto [best, token, candidates, now, row] = advance(children, ids, visible, size - added, next);
    const Longs positions({B, next}), slots({B, next});
    for (int64_t i = 0; i < B * next; i++)
      positions[i] = length[i / next] + level, slots[i] = length[i / next] + drafted + i % next;
    const Flags mask = tree_attention_mask(length, now, n);
    feature = head_forward(token, gather_tokens(feature, row), positions, slots, mask, weights);
    beam_scores = best, beam_flat = candidates, visible = now, drafted += next;
  }
}

// The whole draft of an EAGLE-3 head: `catch_up`, then `grow`.
std::tuple<TreeFields, int64_t> draft(const Longs& text, const Longs& n_unread, const Tensor& unread, int64_t W,
                                      const Operands& fuse, int64_t columns, const Longs& root, const Longs& length,
                                      int64_t n, int64_t T, int64_t depth, int64_t width, const CostFields& costs,
                                      const LmHead& lm_head, const Maybe& noise, const Longs& draft_ids,
                                      const Head& weights) {
  const Tensor last = catch_up(text, length, n_unread, unread, W, n, fuse, columns, weights);
  return grow(last, root, length, n, T, depth, width, costs, lm_head, noise, draft_ids, weights);
}

// An array of `Cache`, as bytes: keys and values by layer, see `layer_table`.
Tensor cache_table(const Tensors& k, const Tensors& v) {
  Tensor all = empty({int64_t(2 * k.size() * sizeof(Cache))}, ScalarType::Byte);
  auto* next = static_cast<Cache*>(all.mutable_data_ptr());
  for (size_t l = 0; l < k.size(); l++) *next++ = cache(k[l]), *next++ = cache(v[l]);
  return all;
}

// Copy the slots `source` [B, W] of all caches of a `cache_table` to slots `target` [B, W]. All slots of a sequence are
// read before the first is written. hd: head size.
void move(const Tensor& cache_table, int64_t hd, const Longs& source, const Longs& target) {
  const int64_t B = source.size(0), W = source.size(1), count = cache_table.numel() / sizeof(Cache);
  if (std::equal(source.values, source.values + B * W, target.values)) return;
  // pieces(slot, f): call f(address, bytes) for each piece of a head's slot.
  const auto move_head = [&](std::vector<char>& copied, int64_t b, const auto& pieces) {
    char* next = copied.data();
    for (int64_t i = b * W; i < b * W + W; i++)
      if (source[i] != target[i])
        pieces(source[i], [&](char* from, int64_t size) { std::memcpy(next, from, size), next += size; });
    next = copied.data();
    for (int64_t i = b * W; i < b * W + W; i++)
      if (source[i] != target[i])
        pieces(target[i], [&](char* to, int64_t size) { std::memcpy(to, next, size), next += size; });
  };
  Team::run(threads(), [&](const Team& team) {
    std::vector<char> copied(W * (hd + 1) * sizeof(float));
    team.parallel_for(count, [&](int64_t i) {
      const Cache& c = static_cast<const Cache*>(data(cache_table))[i];
      const auto address = [&](int64_t b, int64_t slot, int64_t h) {
        return (char*)c.data + c.offset(b, slot, h) * c.item;
      };
      for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < c.heads; h++)
          if (c.is_int8)
            move_head(copied, b, [&](int64_t slot, const auto& f) {
              Int8Block(c, b, slot, h).pieces(hd, i % 2 == 0, f);
            });
          else move_head(copied, b, [&](int64_t slot, const auto& f) { f(address(b, slot, h), hd * c.item); });
    });
  });
}

// Commit the tokens of a step or of a prompt's end, see engine/step.py: commit. Moves the path's slots of
// cache_table, if given, to the end of the committed slots; then `emit` and `append_features`.
Longs commit(const Longs& tokens, const Longs& count, const Longs& path, const Maybe& features, const Maybe& cache_table,
             int64_t hd, Tensor& text, Tensor& root, Tensor& length, Tensor& done, Tensor& out, const Longs& limit,
             const Longs& stop_ids, const Maybe& where, bool more, Tensor& unread, Tensor& unread_count) {
  const int64_t B = path.size(0), W = path.size(1);
  const Flags moving = where ? Flags(*where) : Flags({B});
  for (int64_t b = 0; b < B && !where; b++) moving[b] = !done.const_data_ptr<bool>()[b];
  if (cache_table) {
    const int64_t* at = length.const_data_ptr<int64_t>();
    const Longs from({B, W}), to({B, W});
    for (int64_t i = 0; i < B * W; i++) {
      const int64_t b = i / W;
      to[i] = at[b] + i % W, from[i] = i % W < count[b] ? at[b] + path[i] : to[i];
    }
    move(*cache_table, hd, from, to);
  }
  const Longs appended = emit(tokens, count, text, root, length, done, out, limit, stop_ids);
  append_features(features, path, appended, moving, more, unread, unread_count);
  return appended;
}

}  // namespace eagle

#define ON_TENSORS(X) \
  X(linear) X(attend) X(delta) X(experts) X(rms_norm) X(layer_table) X(layers) X(head_forward) X(target_forward) \
  X(verify) X(draft) X(grow) X(cache_table) X(move) X(restrict) X(pack) X(pack_nibbles) X(pack_sixes) X(gumbel) \
  X(draw) X(rank) X(advance) X(tree_attention_mask) X(prune) X(join) X(lookup) X(accept) X(commit) X(angles) X(embed)
#define OF_NUMBERS(X) X(layout) X(int8_block_sizes) X(use_threads)
#define DEFINE(name) m.def(eagle::Operator<&eagle::name>::schema(#name).c_str());
#define IMPLEMENT(name) m.impl(#name, eagle::Operator<&eagle::name>::call);
#define LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)  // these expand NAMESPACE
#define LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)

LIBRARY(NAMESPACE, m) { ON_TENSORS(DEFINE) OF_NUMBERS(DEFINE) }
LIBRARY_IMPL(NAMESPACE, CPU, m) { ON_TENSORS(IMPLEMENT) }
LIBRARY_IMPL(NAMESPACE, CompositeExplicitAutograd, m) { OF_NUMBERS(IMPLEMENT) }
