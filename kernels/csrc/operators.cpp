// The operators `torch.ops.NAMESPACE`: what they take and return. NAMESPACE is given to the compiler, as each
// instruction set has its own. Linear layers, attention and all that joins them are in files without PyTorch.
#include "delta.h"
#include "in_bytes.h"
#include "packing.h"
#include "tree.h"
#include "vocabulary.h"

namespace eagle {

void use_threads(int64_t count) { own_threads = count; }

// A packed weight, its scale and its bias.
using Operands = std::tuple<Tensor, Maybe, Maybe>;
// A network: the embedding table, the inverse frequencies of the rotation [hd/2] or [2, hd/2], the factor of its sines
// and cosines, the layers (see `stack`), eps of their norms.
using Network = std::tuple<Tensor, Tensor, double, Tensor, double>;
// What scores rows of a stream: its norm, the lm_head, the number of its ids.
using Scoring = std::tuple<Numbers, Operands, int64_t>;
// An EAGLE-3 head: the norms of its embeddings and its features, and its network.
using Head = std::tuple<Numbers, Numbers, Network>;

// body(Kernels<E>()) with the dtype of x.
template <class Body>
inline void by_dtype(const Tensor& x, const Body& body) {
  if (x.scalar_type() == ScalarType::Float) body(Kernels<Fp32>());
  else body(Kernels<Bf16>());
}

inline Weight weight(const Tensor* packed, const Tensor* scale, const Tensor* bias) {
  if (!packed) return {};
  const Tensor& t = *packed;
  const ScalarType type = t.scalar_type();
  const Weight::Format format = type == ScalarType::Char                    ? Weight::INT8
                                : type != ScalarType::Byte                  ? Weight::WHOLE
                                : scale->scalar_type() == ScalarType::Byte  ? Weight::MXFP4
                                : t.dim() == 3                              ? Weight::INT4
                                : scale->scalar_type() == ScalarType::Float ? Weight::W8A8
                                                                            : Weight::W4A8;
  const bool grouped = format == Weight::INT4 || format == Weight::W4A8 || format == Weight::MXFP4;
  return {format, static_cast<const char*>(data(t)), scale ? data(*scale) : nullptr, t.size(0), t.size(1),
          grouped ? scale->size(1) : 1, t.stride(0) * int64_t(t.element_size()), floats(bias)};
}
inline Weight weight(const Operands& of) {
  const auto& [packed, scale, bias] = of;
  return weight(&packed, scale ? &*scale : nullptr, bias ? &*bias : nullptr);
}
inline int64_t head_size(const Tensor& angles) { return 2 * angles.size(-1); }  // or frequencies
// Of a tensor [B, S, kv_heads, hd] or, in bytes, [B, blocks, kv_heads, bytes of a block].
inline Cache cache(const Tensor& t) {
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2), t.size(2), int64_t(t.element_size()),
          t.scalar_type() == ScalarType::Byte};
}

// x [B, T, ...].
inline Rows rows_in(const Tensor& x, int64_t heads, const Cache& keys, const Numbers& cosine, const Numbers& sine,
                    const Longs& slots, const Flags& visible) {
  return {x.size(0), x.size(1), heads, keys.heads, head_size(cosine), visible.size(2), cosine.values, sine.values,
          slots.values, visible.values, cosine.dim() == 4 ? cosine.numel() / 2 : 0};
}

enum Mode { SAME, FLOAT32 };  // as in Python; the others are gates
inline Gate gate_of(int64_t mode) { return mode > FLOAT32 ? Gate(mode) : Gate::NONE; }

// x [..., K] times a weight, plus residual [..., N], in x's dtype -> [..., N]; FLOAT32: in float32; others: the gates of
// `Kernels::linear`.
Tensor linear(const Dense& x, const Operands& of, const Maybe& residual, int64_t columns, int64_t mode) {
  auto shape = x.sizes().vec();
  shape.back() = columns;
  Tensor out = empty(shape, mode == FLOAT32 ? ScalarType::Float : x.scalar_type());
  by_dtype(x, [&](auto kernels) {
    kernels.linear(threads(), data(x), out.numel() / columns, weight(of), data(residual), gate_of(mode), mode == FLOAT32,
                   columns, out.mutable_data_ptr());
  });
  return out;
}

// Attention: qkv [B, T, (nh + 2 nkv) * hd], caches k, v as `rows_in` has them -> [B, T, nh * hd]. window, sinks: see
// `Attending`.
Tensor attend(const Dense& qkv, const Numbers& cosine, const Numbers& sine, const Maybe& q_norm, const Maybe& k_norm,
              double eps, Tensor& k, Tensor& v, const Longs& slots, const Flags& visible, int64_t window,
              const Maybe& sinks) {
  const int64_t heads = qkv.size(2) / head_size(cosine) - 2 * k.size(2);
  const Attending layer{floats(q_norm), floats(k_norm), float(eps), cache(k), cache(v), window, floats(sinks)};
  const Rows rows = rows_in(qkv, heads, layer.k, cosine, sine, slots, visible);
  Tensor out = empty({rows.B, rows.T, heads * rows.hd}, qkv.scalar_type());
  by_dtype(qkv, [&](auto kernels) { kernels.attend(threads(), rows, data(qkv), layer, out.mutable_data_ptr()); });
  return out;
}

// Each row of x [..., H] over its root mean square, times weight [H] (float32, as of all norms).
Tensor rms_norm(const Dense& x, const Numbers& weight, double eps) {
  Tensor out = empty(x.sizes().vec(), x.scalar_type());
  const int64_t H = x.size(-1);
  by_dtype(x, [&](auto kernels) {
    kernels.rms_norm(data(x), weight.values, x.numel() / H, H, eps, out.mutable_data_ptr(), H);
  });
  return out;
}

// Logits [B, T, V] of rows x [B, T, H].
Tensor logits(const Tensor& x, const Scoring& of, double eps) {
  const auto& [norm, weight, columns] = of;
  return linear(rms_norm(x, norm, eps), weight, {}, columns, FLOAT32);
}

// bits: above the 24 of a layer's weights how many experts it has and a row uses, and whether their shares sum to 1.
Mixture mixture_of(const Weight& router, int64_t bits) {
  return {router, bits >> 24 & 0xFFFF, bits >> 40 & 0xFFFF, bool(bits >> 56)};
}

// residual [.., H] and what a mixture makes of x [.., H]. mode: of its gate.
Tensor experts(const Dense& x, const Tensor& residual, const Operands& router, const Operands& gate_up,
               const Operands& down, int64_t bits, int64_t mode) {
  Tensor out = copy(residual);
  const int64_t H = x.size(-1);
  Layer layer{};
  layer.gate_up = weight(gate_up), layer.down = weight(down), layer.gate = gate_of(mode);
  layer.mixture = mixture_of(weight(router), bits);
  by_dtype(x, [&](auto kernels) {
    kernels.experts(threads(), data(x), x.numel() / H, H, layer, out.mutable_data_ptr());
  });
  return out;
}

// The layers of a pass as bytes, read from tensors once: hundreds would take a twentieth of a step. These stay where they
// are, and live longer. weights: those that each layer has, in the order of `Layer`. parts: three numbers of each layer:
// the bits of its weights, its window, the mode of its gate. k, v: the keys and the values of each.
Tensor stack(const Tensors& weights, const std::vector<int64_t>& parts, const Tensors& k, const Tensors& v, double eps) {
  static_assert(std::is_trivially_copyable_v<Layer>);
  Tensor all = empty({int64_t(k.size() * sizeof(Layer))}, ScalarType::Byte);
  auto* layer = static_cast<Layer*>(all.mutable_data_ptr());
  const Tensor* next = weights.data();
  for (size_t l = 0; l < k.size(); l++) {
    int64_t has = parts[3 * l];
    const auto take = [&] {
      const Tensor* taken = has & 1 ? next++ : nullptr;
      return has >>= 1, taken;
    };
    const auto norm = [&] { return floats(take()); };
    const auto packed = [&] {
      const Tensor *numbers = take(), *scale = take(), *bias = take();
      return weight(numbers, scale, bias);
    };
    layer[l] = {norm(), packed(),
                {norm(), norm(), float(eps), cache(k[l]), cache(v[l]), parts[3 * l + 1], norm()},
                packed(), norm(), norm(), packed(), packed(), norm(), gate_of(parts[3 * l + 2]),
                mixture_of(packed(), parts[3 * l])};
  }
  return all;
}

// All layers on `stream` [B, T, H], in place -> those entering the layers `aux` (L: after all). read [B, T, inputs]:
// what the first layer's attention reads, if that is not the stream, normed.
Tensor run(Tensor& stream, const Numbers& cosine, const Numbers& sine, const Tensor& stack, const Longs& slots,
           const Flags& visible, double eps, const std::vector<int64_t>& aux, const void* read) {
  const int64_t H = stream.size(2);
  Tensor features = empty({stream.size(0), stream.size(1), int64_t(aux.size()) * H}, stream.scalar_type());
  const std::span all(static_cast<const Layer*>(data(stack)), stack.numel() / sizeof(Layer));
  by_dtype(stream, [&](auto kernels) {
    const int64_t heads = kernels.inputs(all[0].wo) / head_size(cosine);
    const Rows rows = rows_in(stream, heads, all[0].attending.k, cosine, sine, slots, visible);
    kernels.layers(threads(), rows, H, all, eps, aux, read, stream.mutable_data_ptr(), features.mutable_data_ptr());
  });
  return features;
}

// Layers on x [B, T, H] -> the residual stream after all of them, and features: see `run`.
std::tuple<Tensor, Tensor> layers(const Tensor& x, const Numbers& cosine, const Numbers& sine, const Tensor& stack,
                                  const Longs& slots, const Flags& visible, double eps,
                                  const std::vector<int64_t>& aux, const Maybe& read) {
  Tensor stream = copy(x);
  Tensor features = run(stream, cosine, sine, stack, slots, visible, eps, aux, data(read));
  return {stream, features};
}

// As model.py: rope_table.
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

// A pass of an EAGLE-3 head, as head.py: Eagle3Head.run_layers has it, over tokens [B, T] and features [B, T, H] -> the
// residual stream.
Tensor head(const Longs& tokens, const Dense& feature, const Longs& positions, const Longs& slots,
            const Flags& visible, const Head& of) {
  const auto& [table_norm, feature_norm, network] = of;
  const auto& [table, inverse, factor, stack, eps] = network;
  const int64_t M = tokens.numel(), H = feature.size(2), S = table.size(1);
  const auto [cosine, sine] = angles(positions, inverse, factor);
  const Tensor embedded = rows_of(table, tokens.size(0), tokens.size(1), [&](int64_t i) { return tokens[i]; });
  Tensor read = empty({tokens.size(0), tokens.size(1), S + H}, feature.scalar_type()), stream = copy(feature);
  auto* to = static_cast<char*>(read.mutable_data_ptr());
  const auto norm = [&](const Tensor& x, const float* weight, int64_t size, double eps, char* out) {
    by_dtype(x, [&](auto kernels) { kernels.rms_norm(data(x), weight, M, size, eps, out, S + H); });
  };
  norm(embedded, table_norm.values, S, eps, to), norm(feature, feature_norm.values, H, eps, to + S * feature.element_size());
  run(stream, cosine, sine, stack, slots, visible, eps, {}, data(read));
  return stream;
}

// A pass of a target over tokens [B, T], whose rows of the table are times `scale` -> as `layers`.
std::tuple<Tensor, Tensor> target(const Longs& tokens, const Longs& positions, const Longs& slots,
                                  const Flags& visible, double scale, const std::vector<int64_t>& aux,
                                  const Network& network) {
  const auto& [table, inverse, factor, stack, eps] = network;
  Tensor x = rows_of(table, tokens.size(0), tokens.size(1), [&](int64_t i) { return tokens[i]; });
  if (scale != 1) by_dtype(x, [&](auto kernels) { kernels.scale(scale, x.numel(), x.mutable_data_ptr()); });
  const auto [cosine, sine] = angles(positions, inverse, factor);
  Tensor features = run(x, cosine, sine, stack, slots, visible, eps, aux, nullptr);
  return {x, features};
}

// `target` over the nodes of a tree -> logits, features, see engine/step.py: verify. tokens, depth [B, T], sees
// [B, T, T]; length [B], n live slots.
std::tuple<Tensor, Tensor> verify(const Longs& tokens, const Longs& depth, const Flags& sees, const Longs& length,
                                  int64_t n, double scale, const std::vector<int64_t>& aux, const Scoring& scoring,
                                  const Network& network) {
  const int64_t B = depth.size(0), T = depth.size(1);
  const Longs positions({B, T}), slots({B, T});
  for (int64_t i = 0; i < B * T; i++)
    positions[i] = length[i / T] + depth[i], slots[i] = length[i / T] + i % T;
  const auto [x, features] = target(tokens, positions, slots, see(length, sees, n), scale, aux, network);
  return {logits(x, scoring, std::get<4>(network)), features};
}

// The head's output at the last committed token [B, 1, H] after it has read the n_new [B] tokens, at most W, whose
// features are unread [B, R, F]: engine/draft.py: catch_up. text [B, S], length [B], n live slots; fuse: the layer over
// features, which has so many columns.
Tensor catch_up(const Longs& text, const Longs& length, const Longs& n_new, const Tensor& unread, int64_t W, int64_t n,
                const Operands& fuse, int64_t columns, const Head& of) {
  const int64_t B = length.size(0), S = text.size(1);
  const int64_t T = std::clamp<int64_t>(*std::max_element(&n_new[0], &n_new[B]), 1, W);
  const Longs tokens({B, T}), positions({B, T}), last({B, 1});
  const Flags visible({B, T, n});
  for (int64_t b = 0; b < B; b++) {
    // A sequence that is held still may have more unread tokens than W.
    last[b] = std::clamp<int64_t>(n_new[b] - 1, 0, T - 1);
    for (int64_t i = b * T; i < b * T + T; i++) {
      positions[i] = length[b] - n_new[b] + i % T;
      tokens[i] = text[b * S + std::min(positions[i] + 1, S - 1)];
      const int64_t seen = std::clamp<int64_t>(positions[i] + 1, 0, n);
      std::fill(std::fill_n(&visible[i * n], seen, true), &visible[i * n] + n, false);
    }
  }
  Tensor all = unread;
  const Tensor fused = linear(torch::stable::narrow(all, 1, 0, T), fuse, {}, columns, SAME);
  return picked(head(tokens, fused, positions, positions, visible, of), last);
}

// The tree of T nodes that an EAGLE-3 head grows below root [B, 1], which stands at length [B], on `depth` levels of
// `width` nodes, or of those worth their prices, and its levels: engine/draft.py: grow. last [B, 1, H]: see
// `catch_up`. noise [B, > depth, V] at all ids; names [Vd]: the ids that the head knows.
std::tuple<TreeFields, int64_t> grow(const Tensor& last, const Longs& root, const Longs& length, int64_t n, int64_t T,
                                     int64_t depth, int64_t width, const PriceList& list, const Scoring& scoring,
                                     const Maybe& noise, const Longs& names, const Head& of) {
  const Prices prices(list);
  const int64_t B = last.size(0), count = width + depth * width * width, Vd = names.size(0);
  const double eps = std::get<4>(std::get<2>(of));
  const Numbers scores({B, count}), of_root({B, 1});  // of all candidates
  const Longs tokens({B, count}), parents({B, count}), above({B, 1});
  std::fill_n(of_root.values, B, 0.0f), std::fill_n(above.values, B, -1);
  const auto noise_at = [&](int64_t level) -> Maybe {  // of the head's ids [B, 1, Vd]
    if (!noise) return {};
    const Numbers all(*noise), own({B, 1, Vd});
    for (int64_t b = 0; b < B; b++) {
      const float* row = &all[(b * all.size(1) + level) * all.size(2)];
      for (int64_t i = 0; i < Vd; i++) own[b * Vd + i] = row[names[i]];
    }
    return own;
  };
  // The beam: at first the root alone, which has no row among the drafted ones.
  Tensor feature = last, beam_scores = of_root, beam_flat = above, sees = Flags({B, 1, 0});
  for (int64_t level = 0, size = 0, drafted = 0;; level++) {
    const int64_t rows = feature.size(1), more = rows * width;
    const auto [likely, ids] = rank(logits(feature, scoring, eps), noise_at(level), width, names);
    const Numbers before(beam_scores), children({B, more});
    const Longs flat(beam_flat);
    for (int64_t b = 0; b < B; b++)
      for (int64_t i = 0; i < more; i++) {
        const int64_t to = b * count + size + i, from = b * rows + i / width;
        scores[to] = children[b * more + i] = before[from] + likely[b * more + i];
        tokens[to] = ids[b * more + i], parents[to] = flat[from];
      }
    size += more;
    const int64_t next = level == depth ? 0 : prices ? prices.rows(children, width) : width;
    if (!next) return {pruned(scores, tokens, parents, root, T, size, prices), level};
    const auto [best, token, places, now, row] = advance(children, ids, sees, size - more, next);
    const Longs positions({B, next}), slots({B, next});
    for (int64_t i = 0; i < B * next; i++)
      positions[i] = length[i / next] + level, slots[i] = length[i / next] + drafted + i % next;
    feature = head(token, picked(feature, row), positions, slots, see(length, now, n), of);
    beam_scores = best, beam_flat = places, sees = now, drafted += next;
  }
}

// `grow` after `catch_up`: the whole draft of an EAGLE-3 head.
std::tuple<TreeFields, int64_t> draft(const Longs& text, const Longs& n_new, const Tensor& unread, int64_t W,
                                      const Operands& fuse, int64_t columns, const Longs& root, const Longs& length,
                                      int64_t n, int64_t T, int64_t depth, int64_t width, const PriceList& list,
                                      const Scoring& scoring, const Maybe& noise, const Longs& names, const Head& of) {
  const Tensor last = catch_up(text, length, n_new, unread, W, n, fuse, columns, of);
  return grow(last, root, length, n, T, depth, width, list, scoring, noise, names, of);
}

// The keys and the values of every layer as bytes, as `stack` has them.
Tensor places(const Tensors& k, const Tensors& v) {
  Tensor all = empty({int64_t(2 * k.size() * sizeof(Cache))}, ScalarType::Byte);
  auto* next = static_cast<Cache*>(all.mutable_data_ptr());
  for (size_t l = 0; l < k.size(); l++) *next++ = cache(k[l]), *next++ = cache(v[l]);
  return all;
}

// Copy entries `source` [B, W] of all caches, see `places`, to `target` [B, W]. A row's are read before any is written.
// hd: the size of a head.
void move(const Tensor& places, int64_t hd, const Longs& source, const Longs& target) {
  const int64_t B = source.size(0), W = source.size(1), count = places.numel() / sizeof(Cache);
  if (std::equal(source.values, source.values + B * W, target.values)) return;
  // pieces(slot, f): f(address, bytes) of all that a head has of a slot.
  const auto move_head = [&](std::vector<char>& kept, int64_t b, const auto& pieces) {
    char* next = kept.data();
    for (int64_t i = b * W; i < b * W + W; i++)
      if (source[i] != target[i])
        pieces(source[i], [&](char* from, int64_t size) { std::memcpy(next, from, size), next += size; });
    next = kept.data();
    for (int64_t i = b * W; i < b * W + W; i++)
      if (source[i] != target[i])
        pieces(target[i], [&](char* to, int64_t size) { std::memcpy(to, next, size), next += size; });
  };
  Team::run(threads(), [&](const Team& team) {
    std::vector<char> kept(W * (hd + 1) * sizeof(float));
    team.share(count, [&](int64_t i) {
      const Cache& c = static_cast<const Cache*>(data(places))[i];
      const auto place = [&](int64_t b, int64_t slot, int64_t h) { return (char*)c.data + c.place(b, slot, h) * c.item; };
      for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < c.heads; h++)
          if (c.in_bytes)
            move_head(kept, b, [&](int64_t slot, const auto& f) { ByteBlock(c, b, slot, h).pieces(hd, i % 2 == 0, f); });
          else move_head(kept, b, [&](int64_t slot, const auto& f) { f(place(b, slot, h), hd * c.item); });
    });
  });
}

// Commit what a step or a prompt's end gives, see engine/step.py: commit. What is in `places` is moved to the path,
// none if it is where it belongs. The rest is that of `emit` and `hand_over`.
Longs commit(const Longs& tokens, const Longs& count, const Longs& path, const Maybe& features, const Maybe& places,
             int64_t hd, Tensor& text, Tensor& root, Tensor& length, Tensor& done, Tensor& out, const Longs& limit,
             const Longs& stop_ids, const Maybe& where, bool more, Tensor& unread, Tensor& unread_count) {
  const int64_t B = path.size(0), W = path.size(1);
  const Flags moving = where ? Flags(*where) : Flags({B});
  for (int64_t b = 0; b < B && !where; b++) moving[b] = !done.const_data_ptr<bool>()[b];
  if (places) {
    const int64_t* at = length.const_data_ptr<int64_t>();
    const Longs from({B, W}), to({B, W});
    for (int64_t i = 0; i < B * W; i++) {
      const int64_t b = i / W;
      to[i] = at[b] + i % W, from[i] = i % W < count[b] ? at[b] + path[i] : to[i];
    }
    move(*places, hd, from, to);
  }
  const Longs appended = emit(tokens, count, text, root, length, done, out, limit, stop_ids);
  hand_over(features, path, appended, moving, more, unread, unread_count);
  return appended;
}

}  // namespace eagle

#define ON_TENSORS(X) \
  X(linear) X(attend) X(delta) X(experts) X(rms_norm) X(stack) X(layers) X(head) X(target) X(verify) \
  X(draft) X(grow) X(places) X(move) X(restrict) X(pack) X(pack_nibbles) X(gumbel) X(draw) X(rank) X(advance) X(see) \
  X(prune) X(join) X(follow) X(accept) X(commit) X(angles)
#define OF_NUMBERS(X) X(layout) X(byte_blocks) X(use_threads)
#define DEFINE(name) m.def(eagle::Operator<&eagle::name>::schema(#name).c_str());
#define IMPLEMENT(name) m.impl(#name, eagle::Operator<&eagle::name>::call);
#define LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)  // these expand NAMESPACE
#define LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)

LIBRARY(NAMESPACE, m) { ON_TENSORS(DEFINE) OF_NUMBERS(DEFINE) }
LIBRARY_IMPL(NAMESPACE, CPU, m) { ON_TENSORS(IMPLEMENT) }
LIBRARY_IMPL(NAMESPACE, CompositeExplicitAutograd, m) { OF_NUMBERS(IMPLEMENT) }
