// The operators `torch.ops.NAMESPACE`: what they take and return. NAMESPACE is given to the compiler, as each
// instruction set has its own. The kernels are in files without PyTorch.
//
// They are written on PyTorch's stable interface: its headers compile in a quarter of the time of others.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace eagle {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using Maybe = std::optional<Tensor>;

// On how many threads the operators run: 0 as PyTorch's.
std::atomic<int64_t> own_threads{0};
inline int threads() { return own_threads ? int(own_threads) : int(torch::stable::get_num_threads()); }
void use_threads(int64_t count) { own_threads = count; }

inline const void* data(const Tensor& t) { return t.const_data_ptr(); }
inline const void* data(const Tensor* t) { return t ? data(*t) : nullptr; }
inline const void* data(const Maybe& t) { return t ? data(*t) : nullptr; }
inline const float* floats(const Tensor& t) { return t.const_data_ptr<float>(); }
inline const float* floats(const Maybe& t) { return t ? floats(*t) : nullptr; }
inline const int64_t* longs(const Tensor& t) { return t.const_data_ptr<int64_t>(); }

inline Tensor whole(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }
inline Maybe whole(const Maybe& t) { return t ? Maybe(whole(*t)) : Maybe(); }

// Not `torch::stable::empty`, which looks an operator up by its name.
inline Tensor empty(const std::vector<int64_t>& sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  AtenTensorHandle made;
  const int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  if (aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), code, aoti_torch_device_type_cpu(),
                               0, &made))
    throw std::runtime_error("there is no memory for what a kernel computes");
  return Tensor(made);
}
inline Tensor copy(const Tensor& x) {
  Tensor out = empty(x.sizes().vec(), x.scalar_type());
  std::memcpy(out.mutable_data_ptr(), x.const_data_ptr(), x.numel() * x.element_size());
  return out;
}

// body(Kernels<E>()) with the dtype of x.
template <class Body>
inline void by_dtype(const Tensor& x, const Body& body) {
  if (x.scalar_type() == ScalarType::Float) body(Kernels<Fp32>());
  else body(Kernels<Bf16>());
}

inline Weight weight(const Tensor& t, const Tensor* scale) {
  const ScalarType type = t.scalar_type();
  const Weight::Format format = type == ScalarType::Char                    ? Weight::INT8
                                : type != ScalarType::Byte                  ? Weight::WHOLE
                                : t.dim() == 3                              ? Weight::INT4
                                : scale->scalar_type() == ScalarType::Float ? Weight::W8A8
                                                                            : Weight::W4A8;
  const bool grouped = format == Weight::INT4 || format == Weight::W4A8;
  return {format, static_cast<const char*>(t.const_data_ptr()), data(scale), t.size(0), t.size(1),
          grouped ? scale->size(1) : 1, t.stride(0) * int64_t(t.element_size())};
}
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
        rows{x.size(0), x.size(1), heads, keys.size(2), 2 * cosine.size(2), visible.size(2),
             floats(this->cosine), floats(this->sine), longs(this->slots), this->visible.const_data_ptr<bool>()} {}
};

enum Mode { SAME = 0, FLOAT32 = 1, GATED = 2 };  // as in Python

// x [..., K] times a packed weight with its scale, plus bias [N] (float32), plus residual [..., N], in x's
// dtype -> [..., N]; FLOAT32: in float32; GATED: see `Kernels::linear`.
Tensor linear(const Tensor& x, const Tensor& packed, const Maybe& scale, const Maybe& bias,
              const Maybe& residual, int64_t columns, int64_t mode) {
  const Tensor in = whole(x);
  const Maybe onto = whole(residual);
  auto shape = in.sizes().vec();
  shape.back() = columns;
  Tensor out = empty(shape, mode == FLOAT32 ? ScalarType::Float : in.scalar_type());
  const Weight w = weight(packed, scale ? &*scale : nullptr);
  by_dtype(in, [&](auto kernels) {
    kernels.linear(threads(), data(in), out.numel() / columns, w, floats(bias), data(onto), mode == GATED,
                   mode == FLOAT32, columns, out.mutable_data_ptr());
  });
  return out;
}

// Attention: qkv [B, T, (nh + 2 nkv) * hd], caches k, v as `Shared` has them -> [B, T, nh * hd].
Tensor attend(const Tensor& qkv, const Tensor& cosine, const Tensor& sine, const Maybe& q_norm,
              const Maybe& k_norm, double eps, Tensor& k, Tensor& v, const Tensor& slots,
              const Tensor& visible) {
  const Tensor in = whole(qkv);
  const Shared shared(in, in.size(2) / (2 * cosine.size(2)) - 2 * k.size(2), k, cosine, sine, slots, visible);
  const Rows& rows = shared.rows;
  Tensor out = empty({rows.B, rows.T, rows.heads * rows.hd}, in.scalar_type());
  const Norms norms{data(q_norm), data(k_norm), float(eps)};
  by_dtype(in, [&](auto kernels) {
    kernels.attend(threads(), rows, data(in), norms, cache(k), cache(v), out.mutable_data_ptr());
  });
  return out;
}

// Each row of x [..., H] over its root mean square, times weight [H].
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor in = whole(x);
  Tensor out = empty(in.sizes().vec(), in.scalar_type());
  const int64_t H = in.size(-1);
  by_dtype(in, [&](auto kernels) {
    kernels.rms_norm(data(in), data(weight), in.numel() / H, H, eps, out.mutable_data_ptr());
  });
  return out;
}

enum Part {  // of a layer's weights, as in Python
  ATTN_NORM, WQKV, WQKV_SCALE, BIAS, Q_NORM, K_NORM, WO, WO_SCALE,
  MLP_NORM, GATE_UP, GATE_UP_SCALE, DOWN, DOWN_SCALE, PARTS
};

std::vector<Layer> layers_of(const Tensors& weights, const std::vector<int64_t>& parts, const Tensors& k,
                             const Tensors& v, double eps) {
  std::vector<Layer> all;
  const Tensor* next = weights.data();
  for (size_t l = 0; l < k.size(); l++) {
    const Tensor* w[PARTS];
    for (int part = 0; part < PARTS; part++) w[part] = parts[l] >> part & 1 ? next++ : nullptr;
    all.push_back({data(w[ATTN_NORM]), weight(*w[WQKV], w[WQKV_SCALE]), static_cast<const float*>(data(w[BIAS])),
                   {data(w[Q_NORM]), data(w[K_NORM]), float(eps)}, weight(*w[WO], w[WO_SCALE]), data(w[MLP_NORM]),
                   weight(*w[GATE_UP], w[GATE_UP_SCALE]), weight(*w[DOWN], w[DOWN_SCALE]),
                   cache(k[l]), cache(v[l])});
  }
  return all;
}

// x [B, T, H] -> the residual stream after all layers, and those entering the layers `aux` (L: after all).
// read [B, T, inputs]: what the first layer's attention reads, if that is not x, normed. weights: of each layer
// those that it has, in the order of `Part`; parts: a layer's have the bits set that have their numbers.
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
    const int64_t heads = kernels.inputs(all[0].wo) / (2 * cosine.size(2));
    const Shared shared(x, heads, k[0], cosine, sine, slots, visible);
    kernels.layers(threads(), shared.rows, H, all, eps, aux, data(inputs), stream.mutable_data_ptr(),
                   features.mutable_data_ptr());
  });
  return {stream, features};
}

// A pass of an EAGLE-3 head, as networks/eagle.py: run_head has it, over tokens [B, T] and features [B, T, H] -> the
// residual stream. inverse: of the rotation's frequencies. The rest is that of `layers`.
Tensor head(const Tensor& tokens, const Tensor& table, const Tensor& table_norm, const Tensor& feature,
            const Tensor& feature_norm, const Tensor& positions, const Tensor& inverse, double factor,
            const Tensors& weights, const std::vector<int64_t>& parts, const Tensors& k, const Tensors& v,
            const Tensor& slots, const Tensor& visible, double eps) {
  const Tensor ids = whole(tokens), in = whole(feature), at = whole(positions);
  const int64_t B = in.size(0), T = in.size(1), H = in.size(2), S = table.size(1), half = inverse.size(0);
  Tensor cosine = empty({B, T, half}, ScalarType::Float), sine = empty({B, T, half}, ScalarType::Float);
  angles(longs(at), floats(inverse), float(factor), B * T, half, cosine.mutable_data_ptr<float>(),
         sine.mutable_data_ptr<float>());
  Tensor read = empty({B, T, S + H}, in.scalar_type()), stream = copy(in);
  const std::vector<Layer> all = layers_of(weights, parts, k, v, eps);
  by_dtype(in, [&](auto kernels) {
    const Shared shared(in, kernels.inputs(all[0].wo) / (2 * half), k[0], cosine, sine, slots, visible);
    kernels.beside(longs(ids), data(table), data(table_norm), S, data(in), data(feature_norm), B * T, H, float(eps),
                   read.mutable_data_ptr());
    kernels.layers(threads(), shared.rows, H, all, eps, {}, data(read), stream.mutable_data_ptr(), nullptr);
  });
  return stream;
}

// x [..., K], each row as `rms_norm` has it, times a packed weight -> float32 [..., N].
Tensor normed_linear(const Tensor& x, const Tensor& norm, double eps, const Tensor& packed, const Maybe& scale,
                     const Maybe& bias, int64_t columns) {
  return linear(rms_norm(x, norm, eps), packed, scale, bias, {}, columns, FLOAT32);
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
        for (int64_t i = 0; i < W; i++) std::memcpy(&kept[i * size], head + f[b * W + i] * slot, size);
        for (int64_t i = 0; i < W; i++) std::memcpy(head + t[b * W + i] * slot, &kept[i * size], size);
      }
  };
  for (size_t l = 0; l < k.size(); l++)
    if (cache(k[l]).in_bytes) move_bytes(cache(k[l]), cache(v[l]), k[l].size(2), hd, f, t, B, W);
    else move_one(k[l]), move_one(v[l]);
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
  const Maybe n = whole(noise);
  const std::vector<int64_t> rows(depth ? 0 : in.size(0) * in.size(1));
  const Maybe d = whole(depth);
  Tensor out = empty({in.size(0), in.size(1)}, ScalarType::Long);
  draw(threads(), floats(in), floats(n), d ? longs(*d) : rows.data(), in.size(0), in.size(1),
       n ? n->size(1) : 0, in.size(2), out.mutable_data_ptr<int64_t>());
  return out;
}

std::tuple<Tensor, Tensor> rank_(const Tensor& logits, const Maybe& noise, int64_t k, const Maybe& names) {
  const Tensor in = whole(logits);
  const Maybe n = whole(noise);
  Tensor scores = empty({in.size(0), in.size(1), k}, in.scalar_type());
  Tensor ids = empty(scores.sizes().vec(), ScalarType::Long);
  const int64_t rows = in.size(0) * in.size(1), shared = n ? rows / (n->size(0) * n->size(1)) : 1;
  rank(threads(), floats(in), floats(n), names ? longs(*names) : nullptr, rows, shared, in.size(2), k,
       scores.mutable_data_ptr<float>(), ids.mutable_data_ptr<int64_t>());
  return {scores, ids};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> advance_(const Tensor& scores, const Tensor& tokens,
                                                            const Tensor& sees, int64_t size) {
  const Tensor s = whole(scores), t = whole(tokens), before = whole(sees);
  const int64_t B = before.size(0), k = before.size(1), seen = before.size(2);
  Tensor best = empty({B, k}, s.scalar_type()), token = empty({B, k}, t.scalar_type());
  Tensor flat = empty({B, k}, t.scalar_type()), row = empty({B, k}, t.scalar_type());
  Tensor now = empty({B, k, seen + k}, ScalarType::Bool);
  advance(floats(s), longs(t), before.const_data_ptr<bool>(), B, k, seen, size,
          {best.mutable_data_ptr<float>(), token.mutable_data_ptr<int64_t>(), flat.mutable_data_ptr<int64_t>(),
           row.mutable_data_ptr<int64_t>(), now.mutable_data_ptr<bool>()});
  return {best, token, flat, now, row};
}
Tensor see_(const Tensor& length, const Tensor& local, int64_t n) {
  const Tensor l = whole(length), in = whole(local);
  Tensor out = empty({in.size(0), in.size(1), n}, in.scalar_type());
  see(longs(l), in.const_data_ptr<bool>(), in.size(0), in.size(1), in.size(2), n, out.mutable_data_ptr<bool>());
  return out;
}

struct TreeTensors {  // the fields of a tree of T nodes
  Tensor tokens, parent, depth, ancestors, scores;
  TreeTensors(int64_t B, int64_t T)
      : tokens(empty({B, T}, ScalarType::Long)), parent(empty({B, T}, ScalarType::Long)),
        depth(empty({B, T}, ScalarType::Long)), ancestors(empty({B, T, T}, ScalarType::Bool)),
        scores(empty({B, T}, ScalarType::Float)) {}
  TreeOut out() {
    return {tokens.size(1), tokens.mutable_data_ptr<int64_t>(), parent.mutable_data_ptr<int64_t>(),
            depth.mutable_data_ptr<int64_t>(), ancestors.mutable_data_ptr<bool>(), scores.mutable_data_ptr<float>()};
  }
  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> fields() { return {tokens, parent, depth, ancestors, scores}; }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> prune_(const Tensor& scores, const Tensor& tokens,
                                                          const Tensor& parents, const Tensor& root, int64_t T) {
  const Tensor s = whole(scores), t = whole(tokens), p = whole(parents), r = whole(root);
  TreeTensors tree(s.size(0), T);
  prune(floats(s), longs(t), longs(p), longs(r), s.size(0), s.size(1), tree.out());
  return tree.fields();
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> join_(const Tensor& tokens, const Tensor& parent,
                                                         const Tensor& scores, const Tensor& other_tokens,
                                                         const Tensor& other_parent, const Tensor& other_scores,
                                                         int64_t T) {
  const Tensor t = whole(tokens), p = whole(parent), s = whole(scores);
  const Tensor ot = whole(other_tokens), op = whole(other_parent), os = whole(other_scores);
  TreeTensors tree(t.size(0), T);
  join({longs(t), longs(p), floats(s), t.size(1)}, {longs(ot), longs(op), floats(os), ot.size(1)}, t.size(0),
       tree.out());
  return tree.fields();
}

std::tuple<Tensor, Tensor> follow_(const Tensor& text, const Tensor& length, int64_t n, const Tensor& chain,
                                   const Tensor& ahead, const Tensor& first, const Tensor& further,
                                   int64_t shortest) {
  const Tensor in = whole(text), l = whole(length), c = whole(chain), a = whole(ahead);
  const Tensor once = whole(first), more = whole(further);
  const int64_t B = in.size(0), T = c.size(0) + 1;
  Tensor tokens = empty({B, T}, ScalarType::Long), likely = empty({B, T}, ScalarType::Float);
  follow(longs(in), longs(l), B, in.size(1), n,
         {longs(c), longs(a), floats(once), floats(more), T, shortest, once.size(0) - 1},
         tokens.mutable_data_ptr<int64_t>(), likely.mutable_data_ptr<float>());
  return {tokens, likely};
}

std::tuple<Tensor, Tensor> accept_(const Tensor& tokens, const Tensor& parent, const Tensor& depth,
                                   const Tensor& chosen, int64_t W) {
  const Tensor t = whole(tokens), p = whole(parent), d = whole(depth), c = whole(chosen);
  Tensor path = empty({t.size(0), W}, t.scalar_type()), count = empty({t.size(0)}, t.scalar_type());
  accept(longs(t), longs(p), longs(d), longs(c), t.size(0), t.size(1), W, path.mutable_data_ptr<int64_t>(),
         count.mutable_data_ptr<int64_t>());
  return {path, count};
}

Tensor emit_(const Tensor& tokens, const Tensor& count, Tensor& text, Tensor& length, Tensor& done, Tensor& out,
             const Tensor& limit, const Tensor& stop_ids) {
  const Tensor t = whole(tokens), c = whole(count);
  Tensor appended = empty(c.sizes().vec(), c.scalar_type());
  emit(longs(t), longs(c), t.size(0), t.size(1),
       {text.mutable_data_ptr<int64_t>(), text.size(1), length.mutable_data_ptr<int64_t>(),
        out.mutable_data_ptr<int64_t>(), out.size(1) - 3, longs(limit), longs(stop_ids), stop_ids.size(0),
        done.mutable_data_ptr<bool>()},
       appended.mutable_data_ptr<int64_t>());
  return appended;
}

void hand_over_(const Maybe& features, const Tensor& path, const Tensor& count, const Tensor& moving, bool more,
                Tensor& unread, Tensor& unread_count) {
  const Maybe in = whole(features);
  const Tensor p = whole(path), c = whole(count), m = whole(moving);
  hand_over(static_cast<const char*>(data(in)), longs(p), longs(c), m.const_data_ptr<bool>(), more, p.size(0),
            in ? in->size(1) : 0, p.size(1), unread.size(2) * int64_t(unread.element_size()),
            {static_cast<char*>(unread.mutable_data_ptr()), unread.size(1), unread_count.mutable_data_ptr<int64_t>()});
}

std::tuple<Tensor, Tensor> angles_(const Tensor& positions, const Tensor& inverse, double factor) {
  const Tensor p = whole(positions), f = whole(inverse);
  const std::vector<int64_t> shape{p.size(0), p.size(1), f.size(0)};
  Tensor cosine = empty(shape, ScalarType::Float), sine = empty(shape, ScalarType::Float);
  angles(longs(p), floats(f), factor, p.numel(), f.size(0), cosine.mutable_data_ptr<float>(),
         sine.mutable_data_ptr<float>());
  return {cosine, sine};
}

}  // namespace eagle

#define LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)  // these expand NAMESPACE
#define LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)

LIBRARY(NAMESPACE, m) {
  m.def("linear(Tensor x, Tensor packed, Tensor? scale, Tensor? bias, Tensor? residual,"
        " int columns, int mode) -> Tensor");
  m.def("attend(Tensor qkv, Tensor cosine, Tensor sine, Tensor? q_norm, Tensor? k_norm, float eps,"
        " Tensor(a!) k, Tensor(b!) v, Tensor slots, Tensor visible) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("layers(Tensor x, Tensor cosine, Tensor sine, Tensor[] weights, int[] parts, Tensor(a!)[] k,"
        " Tensor(b!)[] v, Tensor slots, Tensor visible, float eps, int[] aux, Tensor? read) -> (Tensor, Tensor)");
  m.def("head(Tensor tokens, Tensor table, Tensor table_norm, Tensor feature, Tensor feature_norm,"
        " Tensor positions, Tensor inverse, float factor, Tensor[] weights, int[] parts, Tensor(a!)[] k,"
        " Tensor(b!)[] v, Tensor slots, Tensor visible, float eps) -> Tensor");
  m.def("normed_linear(Tensor x, Tensor norm, float eps, Tensor packed, Tensor? scale, Tensor? bias, int columns)"
        " -> Tensor");
  m.def("move(Tensor(a!)[] k, Tensor(b!)[] v, int head_dim, Tensor source, Tensor target) -> ()");
  m.def("byte_blocks(int head_dim) -> int[]");
  m.def("restrict(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p) -> Tensor");
  m.def("pack(Tensor weight, bool paired, int flip, Tensor(a!) out) -> ()");
  m.def("pack_nibbles(Tensor weight, bool paired, Tensor(a!) out) -> ()");
  m.def("gumbel(Tensor key, Tensor positions, Tensor temperature, int vocabulary) -> Tensor");
  m.def("draw(Tensor logits, Tensor? noise, Tensor? depth) -> Tensor");
  m.def("rank(Tensor logits, Tensor? noise, int k, Tensor? names) -> (Tensor, Tensor)");
  m.def("advance(Tensor scores, Tensor tokens, Tensor sees, int size)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("see(Tensor length, Tensor local, int slots) -> Tensor");
  m.def("prune(Tensor scores, Tensor tokens, Tensor parents, Tensor root, int nodes)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("join(Tensor tokens, Tensor parent, Tensor scores, Tensor other_tokens, Tensor other_parent,"
        " Tensor other_scores, int nodes) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("follow(Tensor text, Tensor length, int slots, Tensor chain, Tensor ahead, Tensor first, Tensor further,"
        " int shortest) -> (Tensor, Tensor)");
  m.def("accept(Tensor tokens, Tensor parent, Tensor depth, Tensor chosen, int window) -> (Tensor, Tensor)");
  m.def("emit(Tensor tokens, Tensor count, Tensor(a!) text, Tensor(b!) length, Tensor(c!) done, Tensor(d!) out,"
        " Tensor limit, Tensor stop_ids) -> Tensor");
  m.def("hand_over(Tensor? features, Tensor path, Tensor count, Tensor moving, bool more, Tensor(a!) unread,"
        " Tensor(b!) unread_count) -> ()");
  m.def("angles(Tensor positions, Tensor inverse, float factor) -> (Tensor, Tensor)");
  m.def("layout() -> int[]");
  m.def("use_threads(int count) -> ()");
}

LIBRARY_IMPL(NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("layout", TORCH_BOX(&eagle::layout));
  m.impl("byte_blocks", TORCH_BOX(&eagle::byte_blocks));
  m.impl("use_threads", TORCH_BOX(&eagle::use_threads));
}

LIBRARY_IMPL(NAMESPACE, CPU, m) {
  m.impl("linear", TORCH_BOX(&eagle::linear));
  m.impl("attend", TORCH_BOX(&eagle::attend));
  m.impl("rms_norm", TORCH_BOX(&eagle::rms_norm));
  m.impl("layers", TORCH_BOX(&eagle::layers));
  m.impl("head", TORCH_BOX(&eagle::head));
  m.impl("normed_linear", TORCH_BOX(&eagle::normed_linear));
  m.impl("move", TORCH_BOX(&eagle::move));
  m.impl("restrict", TORCH_BOX(&eagle::restrict));
  m.impl("pack", TORCH_BOX(&eagle::pack_));
  m.impl("pack_nibbles", TORCH_BOX(&eagle::pack_nibbles_));
  m.impl("gumbel", TORCH_BOX(&eagle::gumbel_));
  m.impl("draw", TORCH_BOX(&eagle::draw_));
  m.impl("rank", TORCH_BOX(&eagle::rank_));
  m.impl("advance", TORCH_BOX(&eagle::advance_));
  m.impl("see", TORCH_BOX(&eagle::see_));
  m.impl("prune", TORCH_BOX(&eagle::prune_));
  m.impl("join", TORCH_BOX(&eagle::join_));
  m.impl("follow", TORCH_BOX(&eagle::follow_));
  m.impl("accept", TORCH_BOX(&eagle::accept_));
  m.impl("emit", TORCH_BOX(&eagle::emit_));
  m.impl("hand_over", TORCH_BOX(&eagle::hand_over_));
  m.impl("angles", TORCH_BOX(&eagle::angles_));
}
