// The operators `torch.ops.NAMESPACE`: what they take and return. NAMESPACE is given to the compiler, as each
// instruction set has its own. The kernels are in files without PyTorch, but for the parts in tree.h.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "tensors.h"
#include "tree.h"

namespace eagle {

// On how many threads the operators run: 0 as PyTorch's.
std::atomic<int64_t> own_threads{0};
inline int threads() { return own_threads ? int(own_threads) : int(torch::stable::get_num_threads()); }
void use_threads(int64_t count) { own_threads = count; }

// body(Kernels<E>()) with the dtype of x.
template <class Body>
inline void by_dtype(const Tensor& x, const Body& body) {
  if (x.scalar_type() == ScalarType::Float) body(Kernels<Fp32>());
  else body(Kernels<Bf16>());
}

inline Weight weight(const Tensor& t, const Tensor* scale, const Tensor* bias = nullptr) {
  const ScalarType type = t.scalar_type();
  const Weight::Format format = type == ScalarType::Char                    ? Weight::INT8
                                : type != ScalarType::Byte                  ? Weight::WHOLE
                                : scale->scalar_type() == ScalarType::Byte  ? Weight::MXFP4
                                : t.dim() == 3                              ? Weight::INT4
                                : scale->scalar_type() == ScalarType::Float ? Weight::W8A8
                                                                            : Weight::W4A8;
  const bool grouped = format == Weight::INT4 || format == Weight::W4A8 || format == Weight::MXFP4;
  return {format, static_cast<const char*>(t.const_data_ptr()), data(scale), t.size(0), t.size(1),
          grouped ? scale->size(1) : 1, t.stride(0) * int64_t(t.element_size()), floats(bias)};
}
inline Weight weight(const Tensor& t, const Maybe& scale, const Maybe& bias) {
  return weight(t, scale ? &*scale : nullptr, bias ? &*bias : nullptr);
}
inline int64_t head_size(const Tensor& angles) { return 2 * angles.size(angles.dim() - 1); }  // or frequencies
inline Cache cache(const Tensor& t) {
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2), t.scalar_type() == ScalarType::Byte};
}

// Contiguous copies, where needed, and what the kernels are told of them.
struct Shared {
  const Tensor cosine, sine, slots, visible;
  const Rows rows;

  // x [B, T, ...], keys [B, S, kv_heads, hd] or, in bytes, [B, blocks, kv_heads, bytes of a block].
  Shared(const Tensor& x, int64_t heads, const Tensor& keys, const Tensor& cosine, const Tensor& sine,
         const Tensor& slots, const Tensor& visible)
      : cosine(whole(cosine)), sine(whole(sine)), slots(whole(slots)), visible(whole(visible)),
        rows{x.size(0), x.size(1), heads, keys.size(2), head_size(cosine), visible.size(2),
             floats(this->cosine), floats(this->sine), longs(this->slots), this->visible.const_data_ptr<bool>(),
             cosine.dim() == 4 ? cosine.numel() / 2 : 0} {}
};

enum Mode { SAME = 0, FLOAT32 = 1, SILU = 2, GELU = 3, CLAMPED = 4 };  // as in Python
inline Gate gate_of(int64_t mode) {
  return mode == SILU ? Gate::SILU : mode == GELU ? Gate::GELU : mode == CLAMPED ? Gate::CLAMPED : Gate::NONE;
}

// x [..., K] times a packed weight with its scale and bias, plus residual [..., N], in x's dtype -> [..., N]; FLOAT32: in
// float32; others: the gates of `Kernels::linear`.
Tensor linear(const Tensor& x, const Tensor& packed, const Maybe& scale, const Maybe& bias,
              const Maybe& residual, int64_t columns, int64_t mode) {
  const Tensor in = whole(x);
  const Maybe onto = whole(residual);
  auto shape = in.sizes().vec();
  shape.back() = columns;
  Tensor out = empty(shape, mode == FLOAT32 ? ScalarType::Float : in.scalar_type());
  const Weight w = weight(packed, scale, bias);
  by_dtype(in, [&](auto kernels) {
    kernels.linear(threads(), data(in), out.numel() / columns, w, data(onto), gate_of(mode), mode == FLOAT32,
                   columns, out.mutable_data_ptr());
  });
  return out;
}

// Attention: qkv [B, T, (nh + 2 nkv) * hd], caches k, v as `Shared` has them -> [B, T, nh * hd]. window, sinks: see
// `Attending`.
Tensor attend(const Tensor& qkv, const Tensor& cosine, const Tensor& sine, const Maybe& q_norm,
              const Maybe& k_norm, double eps, Tensor& k, Tensor& v, const Tensor& slots,
              const Tensor& visible, int64_t window, const Maybe& sinks) {
  const Tensor in = whole(qkv);
  const Shared shared(in, in.size(2) / head_size(cosine) - 2 * k.size(2), k, cosine, sine, slots, visible);
  const Rows& rows = shared.rows;
  Tensor out = empty({rows.B, rows.T, rows.heads * rows.hd}, in.scalar_type());
  const Attending layer{floats(q_norm), floats(k_norm), float(eps), cache(k), cache(v), window, floats(sinks)};
  by_dtype(in, [&](auto kernels) { kernels.attend(threads(), rows, data(in), layer, out.mutable_data_ptr()); });
  return out;
}

// The delta nets of a layer for rows in slots length [B] ... of rings `mixed` [B, ring, 2 nk dk + nv dv] and `rates`
// [B, ring, 2 nv], which hold theirs already -> [B, T, nv, dv] (float32). state [B, nv, dk, dv] (float32) at boundaries
// start [B] is moved on; positions [B, T], local [B, T, T].
Tensor delta_(const Tensor& mixed, const Tensor& rates, const Tensor& length, const Tensor& positions,
              const Tensor& local, Tensor& state, Tensor& start) {
  const Tensor p = whole(positions), l = whole(local), n = whole(length);
  const int64_t B = p.size(0), T = p.size(1), nv = state.size(1), dk = state.size(2), dv = state.size(3);
  New<float> out({B, T, nv, dv});
  delta(threads(), {B, T, (mixed.size(2) - nv * dv) / (2 * dk), nv, dk, dv, mixed.size(1),
                    mixed.scalar_type() != ScalarType::Float, data(mixed), floats(rates), longs(n), longs(p),
                    l.const_data_ptr<bool>(), state.mutable_data_ptr<float>(), start.mutable_data_ptr<int64_t>(),
                    out.values});
  return out;
}

// Each row of x [..., H] over its root mean square, times weight [H] (float32, as of all norms).
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor in = whole(x);
  Tensor out = empty(in.sizes().vec(), in.scalar_type());
  const int64_t H = in.size(-1);
  by_dtype(in, [&](auto kernels) {
    kernels.rms_norm(data(in), floats(weight), in.numel() / H, H, eps, out.mutable_data_ptr());
  });
  return out;
}

enum Part {  // of a layer's weights, as in Python
  ATTN_NORM, WQKV, WQKV_SCALE, WQKV_BIAS, Q_NORM, K_NORM, SINKS, WO, WO_SCALE, WO_BIAS, WO_NORM, MLP_NORM,
  GATE_UP, GATE_UP_SCALE, GATE_UP_BIAS, DOWN, DOWN_SCALE, DOWN_BIAS, DOWN_NORM, ROUTER, ROUTER_SCALE, ROUTER_BIAS,
  PARTS
};
static_assert(PARTS <= 24);  // bits of a layer
// Above these bits: how many experts a layer has and a row uses, and whether their shares sum to 1.
Mixture mixture_of(const Weight& router, int64_t bits) {
  return {router, bits >> 24 & 0xFFFF, bits >> 40 & 0xFFFF, bool(bits >> 56)};
}

std::vector<Layer> layers_of(const Tensors& weights, const std::vector<int64_t>& parts, const Tensors& k,
                             const Tensors& v, double eps) {
  std::vector<Layer> all;
  const Tensor* next = weights.data();
  for (size_t l = 0; l < k.size(); l++) {
    const Tensor* w[PARTS];
    const int64_t has = parts[3 * l], window = parts[3 * l + 1], mode = parts[3 * l + 2];
    for (int part = 0; part < PARTS; part++) w[part] = has >> part & 1 ? next++ : nullptr;
    const auto weight_at = [&](int part) { return weight(*w[part], w[part + 1], w[part + 2]); };
    all.push_back({floats(w[ATTN_NORM]), weight_at(WQKV),
                   {floats(w[Q_NORM]), floats(w[K_NORM]), float(eps), cache(k[l]), cache(v[l]), window,
                    floats(w[SINKS])},
                   weight_at(WO), floats(w[WO_NORM]), floats(w[MLP_NORM]), weight_at(GATE_UP), weight_at(DOWN),
                   floats(w[DOWN_NORM]), gate_of(mode),
                   w[ROUTER] ? mixture_of(weight_at(ROUTER), has) : Mixture()});
  }
  return all;
}

// residual [.., H] and what a mixture makes of x [.., H]. bits: see `mixture_of`; mode: of its gate.
Tensor experts(const Tensor& x, const Tensor& residual, const Tensor& router, const Maybe& router_scale,
               const Maybe& router_bias, const Tensor& gate_up, const Maybe& gate_up_scale,
               const Maybe& gate_up_bias, const Tensor& down, const Maybe& down_scale, const Maybe& down_bias,
               int64_t bits, int64_t mode) {
  const Tensor in = whole(x);
  Tensor out = copy(whole(residual));
  const int64_t H = in.size(-1);
  Layer layer{};
  layer.gate_up = weight(gate_up, gate_up_scale, gate_up_bias), layer.down = weight(down, down_scale, down_bias);
  layer.mixture = mixture_of(weight(router, router_scale, router_bias), bits), layer.gate = gate_of(mode);
  by_dtype(in, [&](auto kernels) {
    kernels.experts(threads(), data(in), in.numel() / H, H, layer, out.mutable_data_ptr());
  });
  return out;
}

// x [B, T, H] -> the residual stream after all layers, and those entering the layers `aux` (L: after all).
// read [B, T, inputs]: what the first layer's attention reads, if that is not x, normed. weights: of each layer
// those that it has, in the order of `Part`. parts: three numbers of each layer: the bits of the weights that it has, its
// window, and the mode of its gate.
std::tuple<Tensor, Tensor> layers(const Tensor& x, const Tensor& cosine, const Tensor& sine,
                                  const Tensors& weights, const std::vector<int64_t>& parts,
                                  const Tensors& k, const Tensors& v,
                                  const Tensor& slots, const Tensor& visible, double eps,
                                  const std::vector<int64_t>& aux, const Maybe& read) {
  const Tensor in = whole(x);
  const Maybe inputs = whole(read);
  const int64_t H = x.size(2);
  Tensor stream = copy(in);
  Tensor features = empty({x.size(0), x.size(1), int64_t(aux.size()) * H}, in.scalar_type());
  const std::vector<Layer> all = layers_of(weights, parts, k, v, eps);
  by_dtype(x, [&](auto kernels) {
    const int64_t heads = kernels.inputs(all[0].wo) / head_size(cosine);
    const Shared shared(x, heads, k[0], cosine, sine, slots, visible);
    kernels.layers(threads(), shared.rows, H, all, eps, aux, data(inputs), stream.mutable_data_ptr(),
                   features.mutable_data_ptr());
  });
  return {stream, features};
}

// As model.py: rope_table. inverse [hd/2], or [2, hd/2].
std::tuple<Tensor, Tensor> angles_(const Tensor& positions, const Tensor& inverse, double factor) {
  const Tensor p = whole(positions), f = whole(inverse);
  const int64_t half = head_size(f) / 2, one = p.numel() * half;
  std::vector<int64_t> shape{p.size(0), p.size(1), half};
  if (f.dim() == 2) shape.insert(shape.begin(), f.size(0));
  Tensor cosine = empty(shape, ScalarType::Float), sine = empty(shape, ScalarType::Float);
  for (int64_t kind = 0; kind < f.numel() / half; kind++)
    angles(longs(p), floats(f) + kind * half, factor, p.numel(), half, cosine.mutable_data_ptr<float>() + kind * one,
           sine.mutable_data_ptr<float>() + kind * one);
  return {cosine, sine};
}

// A pass of an EAGLE-3 head, as networks/eagle.py: run_layers has it, over tokens [B, T] and features [B, T, H] -> the
// residual stream. inverse: of the rotation's frequencies. The rest is that of `layers`.
Tensor head(const Tensor& tokens, const Tensor& feature, const Tensor& positions, const Tensor& slots,
            const Tensor& visible, const Tensor& table, const Tensor& table_norm, const Tensor& feature_norm,
            const Tensor& inverse, double factor, const Tensors& weights, const std::vector<int64_t>& parts,
            const Tensors& k, const Tensors& v, double eps) {
  const Tensor ids = whole(tokens), in = whole(feature);
  const int64_t B = in.size(0), T = in.size(1), H = in.size(2), S = table.size(1);
  const auto angles = angles_(positions, inverse, factor);
  const Tensor &cosine = std::get<0>(angles), &sine = std::get<1>(angles);
  Tensor read = empty({B, T, S + H}, in.scalar_type()), stream = copy(in);
  const std::vector<Layer> all = layers_of(weights, parts, k, v, eps);
  by_dtype(in, [&](auto kernels) {
    const Shared shared(in, kernels.inputs(all[0].wo) / head_size(inverse), k[0], cosine, sine, slots, visible);
    kernels.beside(longs(ids), data(table), floats(table_norm), S, data(in), floats(feature_norm), B * T, H, float(eps),
                   read.mutable_data_ptr());
    kernels.layers(threads(), shared.rows, H, all, eps, {}, data(read), stream.mutable_data_ptr(), nullptr);
  });
  return stream;
}

// A pass of a target over tokens [B, T], rows of table [V, H] times `scale`. The rest is that of `head` and `layers`.
std::tuple<Tensor, Tensor> target(const Tensor& tokens, const Tensor& table, double scale, const Tensor& positions,
                                  const Tensor& inverse, double factor, const Tensors& weights,
                                  const std::vector<int64_t>& parts, const Tensors& k, const Tensors& v,
                                  const Tensor& slots, const Tensor& visible, double eps,
                                  const std::vector<int64_t>& aux) {
  const Longs ids(tokens);
  Tensor x = rows_of(table, ids.size(0), ids.size(1), [&](int64_t i) { return ids[i]; });
  if (scale != 1) by_dtype(x, [&](auto kernels) { kernels.scale(scale, x.numel(), x.mutable_data_ptr()); });
  const auto angles = angles_(positions, inverse, factor);
  return layers(x, std::get<0>(angles), std::get<1>(angles), weights, parts, k, v, slots,
                visible, eps, aux, {});
}

// `target` over the nodes of a tree, see kernels/backend.py: verify. tokens, depth [B, T], sees [B, T, T]; length [B],
// n live slots.
std::tuple<Tensor, Tensor> verify(const Tensor& tokens, const Tensor& depth, const Tensor& sees, const Tensor& length,
                                  int64_t n, const Tensor& table, double scale, const Tensor& inverse, double factor,
                                  const Tensors& weights, const std::vector<int64_t>& parts, const Tensors& k,
                                  const Tensors& v, double eps, const std::vector<int64_t>& aux) {
  const Longs below(depth), at(length);
  const int64_t B = below.size(0), T = below.size(1);
  New<int64_t> positions({B, T}), slots({B, T});
  for (int64_t i = 0; i < B * T; i++) positions[i] = at[i / T] + below[i], slots[i] = at[i / T] + i % T;
  return target(tokens, table, scale, positions, inverse, factor, weights, parts, k, v, slots, see(length, sees, n), eps,
                aux);
}

// x [..., K], each row as `rms_norm` has it, times a packed weight -> float32 [..., N].
Tensor normed_linear(const Tensor& x, const Tensor& norm, double eps, const Tensor& packed, const Maybe& scale,
                     const Maybe& bias, int64_t columns) {
  return linear(rms_norm(x, norm, eps), packed, scale, bias, {}, columns, FLOAT32);
}

std::tuple<Tensor, Tensor> rank_(const Tensor& logits, const Maybe& noise, int64_t k, const Maybe& names) {
  const Tensor in = whole(logits);
  const Maybe n = whole(noise);
  Tensor scores = empty({in.size(0), in.size(1), k}, in.scalar_type());
  Tensor ids = empty(scores.sizes().vec(), ScalarType::Long);
  const int64_t rows = in.size(0) * in.size(1), shared = n ? rows / (n->size(0) * n->size(1)) : 1;
  rank(threads(), floats(in), floats(n), longs(names), rows, shared, in.size(2), k,
       scores.mutable_data_ptr<float>(), ids.mutable_data_ptr<int64_t>());
  return {scores, ids};
}

// The head's output at the last committed token [B, 1, H] after it has read the n_new [B] tokens, at most W, whose
// features are unread [B, R, F]: drafters/eagle.py: catch_up. text [B, S], length [B], n live slots; fuse, ...: of the
// layer over features. The rest is that of `head`.
Tensor catch_up(const Tensor& text, const Tensor& length, const Tensor& n_new, const Tensor& unread, int64_t W,
                int64_t n, const Tensor& fuse, const Maybe& fuse_scale, const Maybe& fuse_bias, int64_t columns,
                const Tensor& table, const Tensor& table_norm, const Tensor& feature_norm, const Tensor& inverse,
                double factor, const Tensors& weights, const std::vector<int64_t>& parts, const Tensors& k,
                const Tensors& v, double eps) {
  const Longs in(text), at(length), count(n_new);
  const int64_t B = at.size(0), S = in.size(1);
  const int64_t T = std::clamp<int64_t>(*std::max_element(&count[0], &count[0] + B), 1, W);
  New<int64_t> tokens({B, T}), positions({B, T}), last({B, 1});
  New<bool> visible({B, T, n});
  for (int64_t b = 0; b < B; b++) {
    // A sequence that is held still may have more unread tokens than W.
    last[b] = std::clamp<int64_t>(count[b] - 1, 0, T - 1);
    for (int64_t i = b * T; i < b * T + T; i++) {
      positions[i] = at[b] - count[b] + i % T;
      tokens[i] = in[b * S + std::min(positions[i] + 1, S - 1)];
      const int64_t seen = std::clamp<int64_t>(positions[i] + 1, 0, n);
      std::fill(std::fill_n(&visible[i * n], seen, true), &visible[i * n] + n, false);
    }
  }
  const Tensor fused = linear(narrow(unread, T), fuse, fuse_scale, fuse_bias, {}, columns, SAME);
  return picked(head(tokens, fused, positions, positions, visible, table, table_norm, feature_norm, inverse, factor,
                     weights, parts, k, v, eps), last);
}

// The tree of T nodes that an EAGLE-3 head grows below the root, which stands at length [B] of text [B, S], on `depth`
// levels of `width` nodes: drafters/network.py: grow. last [B, 1, H]: see `catch_up`. first [B]: where the drafted rows
// begin, of n live slots. score_norm, ...: of the head's scores, see `normed_linear`; noise [B, > depth, V] at all ids;
// names [Vd]: the ids that the head knows. The rest is that of `head`.
Beam grow(const Tensor& last, const Tensor& text, const Tensor& length, const Tensor& first, int64_t n, int64_t T,
          int64_t depth, int64_t width, const Tensor& score_norm, const Tensor& packed, const Maybe& scale,
          const Maybe& bias, int64_t columns, const Maybe& noise, const Tensor& names, const Tensor& table,
          const Tensor& table_norm, const Tensor& feature_norm, const Tensor& inverse, double factor,
          const Tensors& weights, const std::vector<int64_t>& parts, const Tensors& k, const Tensors& v, double eps) {
  const Longs in(text), at(length), own(first);
  const int64_t B = last.size(0), count = width + depth * width * width;
  New<float> scores({B, count}), of_root({B, 1});  // of all candidates
  New<int64_t> tokens({B, count}), parents({B, count}), above({B, 1}), root({B});
  for (int64_t b = 0; b < B; b++)
    of_root[b] = 0, above[b] = -1, root[b] = in[b * in.size(1) + at[b]];
  // The beam: at first the root alone, which has no row among the drafted ones.
  Tensor feature = last, beam_scores = of_root, beam_flat = above, sees = New<bool>({B, 1, 0});
  for (int64_t level = 0, size = 0;; level++) {
    const int64_t rows = feature.size(1), more = rows * width;
    const Tensor logits = normed_linear(feature, score_norm, eps, packed, scale, bias, columns);
    const auto [likely, ids] = rank_(logits, noise ? Maybe(gathered(*noise, level, names)) : Maybe(), width, names);
    const Of<float> given(likely), before(beam_scores);
    const Longs id(ids), flat(beam_flat);
    New<float> children({B, more});
    for (int64_t b = 0; b < B; b++)
      for (int64_t i = 0; i < more; i++) {
        const int64_t to = b * count + size + i, from = b * rows + i / width;
        scores[to] = children[b * more + i] = before[from] + given[b * more + i];
        tokens[to] = id[b * more + i], parents[to] = flat[from];
      }
    if (level == depth) break;
    const auto [best, token, places, now, row] = advance(children, ids, sees, size);
    New<int64_t> positions({B, width}), slots({B, width});
    for (int64_t i = 0; i < B * width; i++)
      positions[i] = at[i / width] + level, slots[i] = own[i / width] + level * width + i % width;
    feature = head(token, picked(feature, row), positions, slots, see(first, now, n), table, table_norm, feature_norm,
                   inverse, factor, weights, parts, k, v, eps);
    beam_scores = best, beam_flat = places, sees = now, size += more;
  }
  return prune(scores, tokens, parents, root, T);
}

// Copy entries `source` [B, W] of every cache to `target` [B, W]. A row's are read before any is written. hd: the
// size of a head.
void move(const Tensors& k, const Tensors& v, int64_t hd, const Tensor& source, const Tensor& target) {
  const Tensor from = whole(source), to = whole(target);
  const int64_t B = from.size(0), W = from.size(1);
  const int64_t *f = longs(from), *t = longs(to);
  const auto move_one = [&](const Tensor& cache) {
    const int64_t item = cache.element_size(), size = hd * item, slot = cache.stride(1) * item;
    std::vector<char> kept(W * size);
    auto* base = static_cast<char*>(cache.mutable_data_ptr());
    for (int64_t b = 0; b < B; b++)
      for (int64_t h = 0; h < cache.size(2); h++) {
        char* head = base + (b * cache.stride(0) + h * cache.stride(2)) * item;
        for (int64_t i = b * W; i < b * W + W; i++)
          if (f[i] != t[i]) std::memcpy(&kept[i % W * size], head + f[i] * slot, size);
        for (int64_t i = b * W; i < b * W + W; i++)
          if (f[i] != t[i]) std::memcpy(head + t[i] * slot, &kept[i % W * size], size);
      }
  };
  for (size_t l = 0; l < k.size(); l++)
    if (cache(k[l]).in_bytes) move_bytes(cache(k[l]), cache(v[l]), k[l].size(2), hd, f, t, B, W);
    else move_one(k[l]), move_one(v[l]);
}

// Commit what a step or a prompt's end gives, see kernels/backend.py: commit. The caches k and v are moved to the path,
// none if it is where it belongs. The rest is that of `emit` and `hand_over`.
Tensor commit(const Tensor& tokens, const Tensor& count, const Tensor& path, const Maybe& features, const Tensors& k,
              const Tensors& v, int64_t hd, Tensor& text, Tensor& length, Tensor& done, Tensor& out,
              const Tensor& limit, const Tensor& stop_ids, const Maybe& where, bool more, Tensor& unread,
              Tensor& unread_count) {
  const Longs c(count), p(path), at(length);
  const Of<bool> over(done);
  const int64_t B = p.size(0), W = p.size(1);
  New<bool> moving({B});
  for (int64_t b = 0; b < B; b++) moving[b] = !over[b];
  if (!k.empty()) {
    New<int64_t> from({B, W}), to({B, W});
    for (int64_t i = 0; i < B * W; i++) {
      const int64_t b = i / W;
      to[i] = at[b] + i % W, from[i] = i % W < c[b] ? at[b] + p[i] : to[i];
    }
    move(k, v, hd, from, to);
  }
  const Tensor appended = emit(tokens, count, text, length, done, out, limit, stop_ids);
  hand_over(features, path, appended, where ? *where : moving, more, unread, unread_count);
  return appended;
}

// Logits [B, T, V] (float32) restricted to top-k and top-p, see `restrict_logits`.
Tensor restrict(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p) {
  const Tensor in = whole(logits), t = whole(temperature), k = whole(top_k), p = whole(top_p);
  Tensor out = empty(in.sizes().vec(), ScalarType::Float);
  restrict_logits(threads(), floats(in), in.size(0), in.size(1), in.size(2), floats(t), longs(k), floats(p),
                  out.mutable_data_ptr<float>());
  return out;
}

// Weight [N, K] -> [ceil(N/columns), K/per_word, columns, per_word].
// To `out` [blocks, words, columns, per_word], each byte with the bits of `flip` flipped.
void pack_(const Tensor& weight, bool paired, int64_t flip, Tensor out) {
  const Tensor in = whole(weight);
  const Side side{in.size(0), out.size(2), paired};
  pack(threads(), in.const_data_ptr(), side, out.size(1), out.size(3) * in.element_size(), flip * 0x01010101u,
       out.mutable_data_ptr());
}
void pack_nibbles_(const Tensor& weight, bool paired, Tensor out) {  // [blocks, words, columns / 2, per_word]
  const Tensor in = whole(weight);
  const Side side{in.size(0), 2 * out.size(2), paired};
  pack_nibbles(threads(), in.const_data_ptr<uint8_t>(), side, 2 * in.size(1), out.size(3),
               out.mutable_data_ptr<uint8_t>());
}

// The parts of a step, see kernels.h. What is not contiguous is copied; outputs are made here.
Tensor gumbel_(const Tensor& key, const Tensor& positions, const Tensor& temperature, int64_t V) {
  const Tensor k = whole(key), p = whole(positions), t = whole(temperature);
  Tensor out = empty({p.size(0), p.size(1), V}, t.scalar_type());
  gumbel(threads(), longs(k), longs(p), floats(t), p.size(0), p.size(1), V, out.mutable_data_ptr<float>());
  return out;
}

Tensor draw_(const Tensor& logits, const Maybe& noise, const Maybe& depth) {
  const Tensor in = whole(logits);
  const Maybe n = whole(noise), d = whole(depth);
  Tensor out = empty({in.size(0), in.size(1)}, ScalarType::Long);
  draw(threads(), floats(in), floats(n), longs(d), in.size(0), in.size(1),
       n ? n->size(1) : 0, in.size(2), out.mutable_data_ptr<int64_t>());
  return out;
}

}  // namespace eagle

// Of each operator, the function and its schema.
#define ON_TENSORS(X) \
  X(linear, "linear(Tensor x, Tensor packed, Tensor? scale, Tensor? bias, Tensor? residual, int columns, int" \
    " mode) -> Tensor") \
  X(attend, "attend(Tensor qkv, Tensor cosine, Tensor sine, Tensor? q_norm, Tensor? k_norm, float eps," \
    " Tensor(a!) k, Tensor(b!) v, Tensor slots, Tensor visible, int window, Tensor? sinks) -> Tensor") \
  X(delta_, "delta(Tensor mixed, Tensor rates, Tensor length, Tensor positions, Tensor local, Tensor(a!) state," \
    " Tensor(b!) start) -> Tensor") \
  X(experts, "experts(Tensor x, Tensor residual, Tensor router, Tensor? router_scale, Tensor? router_bias, Tensor gate_up," \
    " Tensor? gate_up_scale, Tensor? gate_up_bias, Tensor down, Tensor? down_scale, Tensor? down_bias, int bits, int mode)" \
    " -> Tensor") \
  X(rms_norm, "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor") \
  X(layers, "layers(Tensor x, Tensor cosine, Tensor sine, Tensor[] weights, int[] parts, Tensor(a!)[] k," \
    " Tensor(b!)[] v, Tensor slots, Tensor visible, float eps, int[] aux, Tensor? read) -> (Tensor, Tensor)") \
  X(head, "head(Tensor tokens, Tensor feature, Tensor positions, Tensor slots, Tensor visible, Tensor table, Tensor" \
    " table_norm, Tensor feature_norm, Tensor inverse, float factor, Tensor[] weights, int[] parts, Tensor(a!)[] k," \
    " Tensor(b!)[] v, float eps) -> Tensor") \
  X(target, "target(Tensor tokens, Tensor table, float scale, Tensor positions, Tensor inverse, float factor, Tensor[] weights," \
    " int[] parts, Tensor(a!)[] k, Tensor(b!)[] v, Tensor slots, Tensor visible, float eps, int[] aux) -> (Tensor," \
    " Tensor)") \
  X(verify, "verify(Tensor tokens, Tensor depth, Tensor sees, Tensor length, int n, Tensor table, float scale, Tensor inverse," \
    " float factor, Tensor[] weights, int[] parts, Tensor(a!)[] k, Tensor(b!)[] v, float eps, int[] aux) -> (Tensor," \
    " Tensor)") \
  X(catch_up, "catch_up(Tensor text, Tensor length, Tensor n_new, Tensor unread, int window, int n, Tensor fuse," \
    " Tensor? fuse_scale, Tensor? fuse_bias, int columns, Tensor table, Tensor table_norm, Tensor feature_norm," \
    " Tensor inverse, float factor, Tensor[] weights, int[] parts, Tensor(a!)[] k, Tensor(b!)[] v, float eps)" \
    " -> Tensor") \
  X(grow, "grow(Tensor last, Tensor text, Tensor length, Tensor first, int n, int nodes, int depth, int width," \
    " Tensor score_norm, Tensor packed, Tensor? scale, Tensor? bias, int columns, Tensor? noise, Tensor names," \
    " Tensor table, Tensor table_norm, Tensor feature_norm, Tensor inverse, float factor, Tensor[] weights, int[]" \
    " parts, Tensor(a!)[] k, Tensor(b!)[] v, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)") \
  X(normed_linear, "normed_linear(Tensor x, Tensor norm, float eps, Tensor packed, Tensor? scale, Tensor? bias," \
    " int columns) -> Tensor") \
  X(move, "move(Tensor(a!)[] k, Tensor(b!)[] v, int head_dim, Tensor source, Tensor target) -> ()") \
  X(restrict, "restrict(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p) -> Tensor") \
  X(pack_, "pack(Tensor weight, bool paired, int flip, Tensor(a!) out) -> ()") \
  X(pack_nibbles_, "pack_nibbles(Tensor weight, bool paired, Tensor(a!) out) -> ()") \
  X(gumbel_, "gumbel(Tensor key, Tensor positions, Tensor temperature, int vocabulary) -> Tensor") \
  X(draw_, "draw(Tensor logits, Tensor? noise, Tensor? depth) -> Tensor") \
  X(rank_, "rank(Tensor logits, Tensor? noise, int k, Tensor? names) -> (Tensor, Tensor)") \
  X(advance, "advance(Tensor scores, Tensor tokens, Tensor sees, int size) -> (Tensor, Tensor, Tensor, Tensor," \
    " Tensor)") \
  X(see, "see(Tensor length, Tensor local, int slots) -> Tensor") \
  X(prune, "prune(Tensor scores, Tensor tokens, Tensor parents, Tensor root, int nodes) -> (Tensor, Tensor," \
    " Tensor, Tensor, Tensor)") \
  X(join, "join(Tensor tokens, Tensor parent, Tensor scores, Tensor other_tokens, Tensor other_parent, Tensor" \
    " other_scores, int nodes) -> (Tensor, Tensor, Tensor, Tensor, Tensor)") \
  X(follow, "follow(Tensor text, Tensor length, int slots, Tensor chain, Tensor ahead, Tensor first, Tensor" \
    " further, int shortest) -> (Tensor, Tensor)") \
  X(accept, "accept(Tensor tokens, Tensor parent, Tensor depth, Tensor chosen, int window) -> (Tensor," \
    " Tensor, Tensor)") \
  X(commit, "commit(Tensor tokens, Tensor count, Tensor path, Tensor? features, Tensor(a!)[] k, Tensor(b!)[] v, int" \
    " head_dim, Tensor(c!) text, Tensor(d!) length, Tensor(e!) done, Tensor(f!) out, Tensor limit, Tensor stop_ids," \
    " Tensor? moving, bool more, Tensor(g!) unread, Tensor(h!) unread_count) -> Tensor") \
  X(angles_, "angles(Tensor positions, Tensor inverse, float factor) -> (Tensor, Tensor)")
#define OF_NUMBERS(X) \
  X(layout, "layout() -> int[]") \
  X(byte_blocks, "byte_blocks(int head_dim) -> int[]") \
  X(use_threads, "use_threads(int count) -> ()")
#define DEFINE(function, schema) m.def(schema);
#define IMPLEMENT(function, schema) m.impl(std::string(schema, std::strchr(schema, '(')).c_str(), TORCH_BOX(&eagle::function));
#define LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)  // these expand NAMESPACE
#define LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)

LIBRARY(NAMESPACE, m) { ON_TENSORS(DEFINE) OF_NUMBERS(DEFINE) }
LIBRARY_IMPL(NAMESPACE, CPU, m) { ON_TENSORS(IMPLEMENT) }
LIBRARY_IMPL(NAMESPACE, CompositeExplicitAutograd, m) { OF_NUMBERS(IMPLEMENT) }
