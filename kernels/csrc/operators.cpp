// The operators `torch.ops.NAMESPACE`: what they take and return. NAMESPACE is given to the compiler, as each
// instruction set has its own. The kernels are in files without PyTorch.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace eagle {

using at::Tensor;
using Maybe = std::optional<Tensor>;

// On how many threads the operators run: 0 as PyTorch's.
std::atomic<int64_t> own_threads{0};
inline int threads() { return own_threads ? int(own_threads) : at::get_num_threads(); }
void use_threads(int64_t count) { own_threads = count; }

inline const void* data(const Tensor& t) {  // nullptr for an absent weight, which is undefined or empty
  return t.defined() && t.numel() ? t.const_data_ptr() : nullptr;
}

// body(Kernels<E>()) with the dtype of x.
template <class Body>
inline void by_dtype(const Tensor& x, const Body& body) {
  if (x.scalar_type() == at::kFloat) body(Kernels<Fp32>());
  else body(Kernels<Bf16>());
}

inline Weight weight(const Tensor& t, const Tensor& scale) {
  const Weight::Format format = t.scalar_type() == at::kChar        ? Weight::INT8
                                : t.scalar_type() != at::kByte      ? Weight::WHOLE
                                : t.dim() == 3                      ? Weight::INT4
                                : scale.scalar_type() == at::kFloat ? Weight::W8A8
                                                                    : Weight::W4A8;
  const bool grouped = format == Weight::INT4 || format == Weight::W4A8;
  return {format, static_cast<const char*>(t.const_data_ptr()), data(scale), t.size(0), t.size(1),
          grouped ? scale.size(1) : 1, t.stride(0) * int64_t(t.element_size())};
}
inline Cache cache(const Tensor& t) { return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2)}; }

// Contiguous copies, where needed, and what the kernels are told of them.
struct Shared {
  const Tensor cosine, sine, slots, visible;
  const Rows rows;

  // x [B, T, ...], keys [B, S, kv_heads, hd].
  Shared(const Tensor& x, int64_t heads, const Tensor& keys, const Tensor& cosine, const Tensor& sine,
         const Tensor& slots, const Tensor& visible)
      : cosine(cosine.contiguous()), sine(sine.contiguous()), slots(slots.contiguous()),
        visible(visible.contiguous()),
        rows{x.size(0), x.size(1), heads, keys.size(2), keys.size(3), visible.size(2),
             this->cosine.const_data_ptr<float>(), this->sine.const_data_ptr<float>(),
             this->slots.const_data_ptr<int64_t>(), this->visible.const_data_ptr<bool>()} {}
};

enum Mode { SAME = 0, FLOAT32 = 1, GATED = 2 };  // as in Python

// x [..., K] times a packed weight with its scale, plus bias [N] (float32), plus residual [..., N], in x's
// dtype -> [..., N]; FLOAT32: in float32; GATED: see `Kernels::linear`.
Tensor linear(const Tensor& x, const Tensor& packed, const Maybe& scale, const Maybe& bias,
              const Maybe& residual, int64_t columns, int64_t mode) {
  const Tensor in = x.contiguous(), onto = residual ? residual->contiguous() : Tensor();
  auto shape = in.sizes().vec();
  shape.back() = columns;
  Tensor out = at::empty(shape, mode == FLOAT32 ? in.options().dtype(at::kFloat) : in.options());
  const Weight w = weight(packed, scale.value_or(Tensor()));
  const float* b = bias ? bias->const_data_ptr<float>() : nullptr;
  by_dtype(in, [&](auto kernels) {
    kernels.linear(threads(), data(in), out.numel() / columns, w, b, data(onto), mode == GATED,
                   mode == FLOAT32, columns, out.mutable_data_ptr());
  });
  return out;
}

// Attention: qkv [B, T, (nh + 2 nkv) * hd], caches k, v [B, S, nkv, hd] -> [B, T, nh * hd].
Tensor attend(const Tensor& qkv, const Tensor& cosine, const Tensor& sine, const Maybe& q_norm,
              const Maybe& k_norm, double eps, Tensor& k, Tensor& v, const Tensor& slots,
              const Tensor& visible) {
  const Tensor in = qkv.contiguous(), of_q = q_norm.value_or(Tensor()), of_k = k_norm.value_or(Tensor());
  const Shared shared(in, in.size(2) / k.size(3) - 2 * k.size(2), k, cosine, sine, slots, visible);
  const Rows& rows = shared.rows;
  Tensor out = at::empty({rows.B, rows.T, rows.heads * rows.hd}, in.options());
  const Norms norms{data(of_q), data(of_k), float(eps)};
  by_dtype(in, [&](auto kernels) {
    kernels.attend(threads(), rows, data(in), norms, cache(k), cache(v), out.mutable_data_ptr());
  });
  return out;
}

// Each row of x [..., H] over its root mean square, times weight [H].
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor in = x.contiguous();
  Tensor out = at::empty(in.sizes(), in.options());
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

// x [B, T, H] -> the residual stream after all layers, and those entering the layers `aux` (L: after all).
// read [B, T, inputs]: what the first layer's attention reads, if that is not x, normed.
std::tuple<Tensor, Tensor> layers(const Tensor& x, const Tensor& cosine, const Tensor& sine,
                                  at::TensorList weights, at::TensorList k, at::TensorList v,
                                  const Tensor& slots, const Tensor& visible, double eps,
                                  at::IntArrayRef aux, const Maybe& read) {
  const Tensor inputs = read ? read->contiguous() : Tensor();
  Tensor stream = x.clone(at::MemoryFormat::Contiguous);
  const int64_t H = x.size(2), L = k.size();
  Tensor features = at::empty({x.size(0), x.size(1), int64_t(aux.size()) * H}, x.options());
  std::vector<Layer> all;
  for (int64_t l = 0; l < L; l++) {
    const Tensor* w = &weights[l * PARTS];
    all.push_back({data(w[ATTN_NORM]), weight(w[WQKV], w[WQKV_SCALE]), static_cast<const float*>(data(w[BIAS])),
                   {data(w[Q_NORM]), data(w[K_NORM]), float(eps)}, weight(w[WO], w[WO_SCALE]), data(w[MLP_NORM]),
                   weight(w[GATE_UP], w[GATE_UP_SCALE]), weight(w[DOWN], w[DOWN_SCALE]), cache(k[l]), cache(v[l])});
  }
  by_dtype(x, [&](auto kernels) {
    const int64_t heads = kernels.inputs(all[0].wo) / k[0].size(3);
    const Shared shared(x, heads, k[0], cosine, sine, slots, visible);
    kernels.layers(threads(), shared.rows, H, all, eps, aux.vec(), data(inputs), stream.mutable_data_ptr(),
                   features.mutable_data_ptr());
  });
  return {stream, features};
}

// Copy entries `source` [B, W] of every cache [B, S, nkv, hd] to `target` [B, W]. A row's are read before any
// is written.
void move(at::TensorList caches, const Tensor& source, const Tensor& target) {
  const Tensor from = source.contiguous(), to = target.contiguous();
  const int64_t B = from.size(0), W = from.size(1);
  const auto *f = from.const_data_ptr<int64_t>(), *t = to.const_data_ptr<int64_t>();
  for (const Tensor& cache : caches) {
    const int64_t size = cache.size(3) * cache.element_size(), slot = cache.stride(1) * cache.element_size();
    std::vector<char> kept(W * size);
    auto* base = static_cast<char*>(cache.mutable_data_ptr());
    for (int64_t b = 0; b < B; b++)
      for (int64_t h = 0; h < cache.size(2); h++) {
        char* head = base + (b * cache.stride(0) + h * cache.stride(2)) * cache.element_size();
        for (int64_t i = 0; i < W; i++) std::memcpy(&kept[i * size], head + f[b * W + i] * slot, size);
        for (int64_t i = 0; i < W; i++) std::memcpy(head + t[b * W + i] * slot, &kept[i * size], size);
      }
  }
}

// Logits [B, T, V] (float32) restricted to top-k and top-p, see `restrict_logits`.
Tensor restrict(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p) {
  const Tensor in = logits.contiguous(), t = temperature.contiguous(), k = top_k.contiguous();
  const Tensor p = top_p.contiguous();
  Tensor out = at::empty(in.sizes(), in.options());
  restrict_logits(threads(), in.const_data_ptr<float>(), in.size(0), in.size(1), in.size(2),
                  t.const_data_ptr<float>(), k.const_data_ptr<int64_t>(), p.const_data_ptr<float>(),
                  out.mutable_data_ptr<float>());
  return out;
}

// Weight [N, K] -> [ceil(N/columns), K/per_word, columns, per_word].
Tensor pack_(const Tensor& weight, int64_t columns, int64_t per_word) {
  const Tensor in = weight.contiguous();
  const int64_t N = in.size(0), words = in.size(1) / per_word;
  Tensor out = at::empty({(N + columns - 1) / columns, words, columns, per_word}, in.options());
  pack(threads(), in.const_data_ptr(), N, words, per_word * in.element_size(), columns, out.mutable_data_ptr());
  return out;
}

const int64_t* longs(const Tensor& t) { return t.const_data_ptr<int64_t>(); }
const float* floats(const Tensor& t) { return t.numel() ? t.const_data_ptr<float>() : nullptr; }

// The parts of a step, see kernels.h. What is not contiguous is copied; outputs are made here.
Tensor gumbel_(const Tensor& key, const Tensor& positions, const Tensor& temperature, int64_t V) {
  const Tensor k = key.contiguous(), p = positions.contiguous(), t = temperature.contiguous();
  Tensor out = at::empty({p.size(0), p.size(1), V}, t.options());
  gumbel(threads(), longs(k), longs(p), floats(t), p.size(0), p.size(1), V, out.mutable_data_ptr<float>());
  return out;
}

Tensor draw_(const Tensor& logits, const Maybe& noise, const Maybe& depth) {
  const Tensor in = logits.contiguous(), n = noise ? noise->contiguous() : Tensor();
  const Tensor d = depth ? depth->contiguous() : at::zeros({in.size(0), in.size(1)}, at::kLong);
  Tensor out = at::empty({in.size(0), in.size(1)}, d.options());
  draw(threads(), floats(in), noise ? floats(n) : nullptr, longs(d), in.size(0), in.size(1),
       noise ? n.size(1) : 0, in.size(2), out.mutable_data_ptr<int64_t>());
  return out;
}

std::tuple<Tensor, Tensor> rank_(const Tensor& logits, const Maybe& noise, int64_t k) {
  const Tensor in = logits.contiguous(), n = noise ? noise->contiguous() : Tensor();
  Tensor scores = at::empty({in.size(0), in.size(1), k}, in.options());
  Tensor ids = at::empty(scores.sizes(), in.options().dtype(at::kLong));
  const int64_t rows = in.size(0) * in.size(1), shared = noise ? rows / (n.size(0) * n.size(1)) : 1;
  rank(threads(), floats(in), noise ? floats(n) : nullptr, rows, shared, in.size(2), k,
       scores.mutable_data_ptr<float>(), ids.mutable_data_ptr<int64_t>());
  return {scores, ids};
}

Tensor see_(const Tensor& length, const Tensor& local, int64_t n) {
  const Tensor l = length.contiguous(), in = local.contiguous();
  Tensor out = at::empty({in.size(0), in.size(1), n}, in.options());
  see(longs(l), in.const_data_ptr<bool>(), in.size(0), in.size(1), in.size(2), n, out.mutable_data_ptr<bool>());
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> prune_(const Tensor& scores, const Tensor& tokens,
                                                          const Tensor& parents, const Tensor& root, int64_t T) {
  const Tensor s = scores.contiguous(), t = tokens.contiguous(), p = parents.contiguous(), r = root.contiguous();
  const int64_t B = s.size(0);
  Tensor token = at::empty({B, T}, t.options()), parent = at::empty({B, T}, t.options());
  Tensor depth = at::empty({B, T}, t.options()), ancestors = at::empty({B, T, T}, t.options().dtype(at::kBool));
  Tensor of_paths = at::empty({B, T}, s.options());
  prune(floats(s), longs(t), longs(p), longs(r), B, s.size(1),
        {T, token.mutable_data_ptr<int64_t>(), parent.mutable_data_ptr<int64_t>(),
         depth.mutable_data_ptr<int64_t>(), ancestors.mutable_data_ptr<bool>(), of_paths.mutable_data_ptr<float>()});
  return {token, parent, depth, ancestors, of_paths};
}

std::tuple<Tensor, Tensor> accept_(const Tensor& tokens, const Tensor& parent, const Tensor& depth,
                                   const Tensor& chosen, int64_t W) {
  const Tensor t = tokens.contiguous(), p = parent.contiguous(), d = depth.contiguous(), c = chosen.contiguous();
  Tensor path = at::empty({t.size(0), W}, t.options()), count = at::empty({t.size(0)}, t.options());
  accept(longs(t), longs(p), longs(d), longs(c), t.size(0), t.size(1), W, path.mutable_data_ptr<int64_t>(),
         count.mutable_data_ptr<int64_t>());
  return {path, count};
}

Tensor emit_(const Tensor& tokens, const Tensor& count, Tensor& text, Tensor& length, Tensor& done, Tensor& out,
             const Tensor& limit, const Tensor& stop_ids) {
  const Tensor t = tokens.contiguous(), c = count.contiguous();
  Tensor appended = at::empty(c.sizes(), c.options());
  emit(longs(t), longs(c), t.size(0), t.size(1),
       {text.mutable_data_ptr<int64_t>(), text.size(1), length.mutable_data_ptr<int64_t>(),
        out.mutable_data_ptr<int64_t>(), out.size(1) - 3, longs(limit), longs(stop_ids), stop_ids.size(0),
        done.mutable_data_ptr<bool>()},
       appended.mutable_data_ptr<int64_t>());
  return appended;
}

std::tuple<Tensor, Tensor> angles_(const Tensor& positions, const Tensor& inverse, double factor) {
  const Tensor p = positions.contiguous(), f = inverse.contiguous();
  Tensor cosine = at::empty({p.size(0), p.size(1), f.size(0)}, f.options()), sine = at::empty_like(cosine);
  angles(longs(p), floats(f), factor, p.numel(), f.size(0), cosine.mutable_data_ptr<float>(),
         sine.mutable_data_ptr<float>());
  return {cosine, sine};
}

}  // namespace eagle

#define LIBRARY(name, m) TORCH_LIBRARY(name, m)  // these expand NAMESPACE
#define LIBRARY_IMPL(name, key, m) TORCH_LIBRARY_IMPL(name, key, m)

LIBRARY(NAMESPACE, m) {
  m.def("linear(Tensor x, Tensor packed, Tensor? scale, Tensor? bias, Tensor? residual,"
        " int columns, int mode) -> Tensor");
  m.def("attend(Tensor qkv, Tensor cosine, Tensor sine, Tensor? q_norm, Tensor? k_norm, float eps,"
        " Tensor(a!) k, Tensor(b!) v, Tensor slots, Tensor visible) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("layers(Tensor x, Tensor cosine, Tensor sine, Tensor[] weights, Tensor(a!)[] k, Tensor(b!)[] v,"
        " Tensor slots, Tensor visible, float eps, int[] aux, Tensor? read) -> (Tensor, Tensor)");
  m.def("move(Tensor(a!)[] caches, Tensor source, Tensor target) -> ()");
  m.def("restrict(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p) -> Tensor");
  m.def("pack(Tensor weight, int columns, int per_word) -> Tensor");
  m.def("gumbel(Tensor key, Tensor positions, Tensor temperature, int vocabulary) -> Tensor");
  m.def("draw(Tensor logits, Tensor? noise, Tensor? depth) -> Tensor");
  m.def("rank(Tensor logits, Tensor? noise, int k) -> (Tensor, Tensor)");
  m.def("see(Tensor length, Tensor local, int slots) -> Tensor");
  m.def("prune(Tensor scores, Tensor tokens, Tensor parents, Tensor root, int nodes)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("accept(Tensor tokens, Tensor parent, Tensor depth, Tensor chosen, int window) -> (Tensor, Tensor)");
  m.def("emit(Tensor tokens, Tensor count, Tensor(a!) text, Tensor(b!) length, Tensor(c!) done, Tensor(d!) out,"
        " Tensor limit, Tensor stop_ids) -> Tensor");
  m.def("angles(Tensor positions, Tensor inverse, float factor) -> (Tensor, Tensor)");
  m.def("layout() -> int[]");
  m.def("use_threads(int count) -> ()");
}

LIBRARY_IMPL(NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("layout", &eagle::layout);
  m.impl("use_threads", &eagle::use_threads);
}

LIBRARY_IMPL(NAMESPACE, CPU, m) {
  m.impl("linear", &eagle::linear);
  m.impl("attend", &eagle::attend);
  m.impl("rms_norm", &eagle::rms_norm);
  m.impl("layers", &eagle::layers);
  m.impl("move", &eagle::move);
  m.impl("restrict", &eagle::restrict);
  m.impl("pack", &eagle::pack_);
  m.impl("gumbel", &eagle::gumbel_);
  m.impl("draw", &eagle::draw_);
  m.impl("rank", &eagle::rank_);
  m.impl("see", &eagle::see_);
  m.impl("prune", &eagle::prune_);
  m.impl("accept", &eagle::accept_);
  m.impl("emit", &eagle::emit_);
  m.impl("angles", &eagle::angles_);
}
