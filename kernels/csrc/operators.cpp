// The operators `torch.ops.eagle`: what they take and return, and which loops they run; whole layers too.
//
// Every kernel is row-invariant: what it computes for one row depends on that row's inputs only, bit for bit,
// not on how many rows are computed with it nor on how many threads. A drafted tree verified in one pass
// therefore gives each node exactly the numbers that plain decoding would, in any dtype.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "attention.h"
#include "norm.h"
#include "products.h"
#include "team.h"
#include "vectors.h"

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

template <class E>
inline const Value<E>* data(const Tensor& t) {  // nullptr for an absent weight, which is an empty tensor
  return t.defined() && t.numel() ? static_cast<const Value<E>*>(t.const_data_ptr()) : nullptr;
}
template <class E>
inline Value<E>* mutable_data(const Tensor& t) {
  return static_cast<Value<E>*>(t.mutable_data_ptr());
}

// body(E()) with what the dtype of x is to the loops.
template <class Body>
inline void by_dtype(const Tensor& x, const Body& body) {
  if (x.scalar_type() == at::kFloat) body(Fp32());
  else body(Bf16());
}

enum Mode { SAME = 0, FLOAT32 = 1, GATED = 2 };  // as in Python

// x [..., K] times a packed weight with its scale, plus bias [N] (float32), plus residual [..., N], in x's
// dtype -> [..., N]; FLOAT32: in float32; GATED: see `linear_part`.
Tensor linear(const Tensor& x, const Tensor& packed, const Maybe& scale, const Maybe& bias,
              const Maybe& residual, int64_t columns, int64_t mode) {
  const Tensor in = x.contiguous(), onto = residual ? residual->contiguous() : Tensor();
  auto shape = in.sizes().vec();
  shape.back() = columns;
  Tensor out = at::empty(shape, mode == FLOAT32 ? in.options().dtype(at::kFloat) : in.options());
  const Packed w(packed, scale.value_or(Tensor()));
  const float* b = bias ? bias->const_data_ptr<float>() : nullptr;
  const int64_t M = out.numel() / columns;
  Rounded rounded(w.format == Packed::W8A8 ? M : 0, in.size(-1));
  const auto run = [&](auto e, auto o) {
    using Out = decltype(o);
    Team::run([&](const Team& team) {
      linear_part<decltype(e), Out>(team, in.const_data_ptr(), M, w, b, data<Out>(onto), mode == GATED,
                                    columns, rounded, nullptr, mutable_data<Out>(out));
    });
  };
  if (in.scalar_type() == at::kFloat) run(Fp32(), Fp32());
  else if (mode == FLOAT32) run(Bf16(), Fp32());
  else run(Bf16(), Bf16());
  return out;
}

// `attention_part` of a layer: qkv [B, T, (nh + 2 nkv) * hd], caches k, v [B, S, nkv, hd] -> [B, T, nh * hd].
Tensor attend(const Tensor& qkv, const Tensor& cosine, const Tensor& sine, const Maybe& q_norm,
              const Maybe& k_norm, double eps, Tensor& k, Tensor& v, const Tensor& slots,
              const Tensor& visible) {
  const Tensor in = qkv.contiguous(), of_q = q_norm.value_or(Tensor()), of_k = k_norm.value_or(Tensor());
  Pass pass(in, in.size(2) / k.size(3) - 2 * k.size(2), k, cosine, sine, slots, visible);
  Tensor out = at::empty({pass.B, pass.T, pass.heads * pass.hd}, in.options());
  const Tensor rotated = at::empty(out.sizes(), in.options());
  by_dtype(in, [&](auto e) {
    using E = decltype(e);
    Team::run([&](const Team& team) {
      pass.read_mask(team);  // `attention_part` meets before it is used
      attention_part<E>(team, pass, data<E>(in), data<E>(of_q), data<E>(of_k), eps, k, v,
                        mutable_data<E>(rotated), mutable_data<E>(out));
    });
  });
  return out;
}

// Each row of x [..., H] over its root mean square, times weight [H].
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor in = x.contiguous();
  Tensor out = at::empty(in.sizes(), in.options());
  const int64_t H = in.size(-1);
  by_dtype(in, [&](auto e) {
    using E = decltype(e);
    // One thread: waking the others takes longer than a few rows do.
    for (int64_t i = 0; i < in.numel(); i += H)
      norm_row<E>(data<E>(in) + i, data<E>(weight), H, eps, mutable_data<E>(out) + i);
  });
  return out;
}

enum Weight {  // of a layer
  ATTN_NORM, WQKV, WQKV_SCALE, BIAS, Q_NORM, K_NORM, WO, WO_SCALE,
  MLP_NORM, GATE_UP, GATE_UP_SCALE, DOWN, DOWN_SCALE, WEIGHTS
};

// All layers of a target on x [B, T, H], in place, and those entering the layers `aux` side by side into
// `features`. One parallel region: the threads only wait for each other between the products.
template <class E>
void layers_into(const Tensor& x, Pass& pass, at::TensorList weights, at::TensorList k, at::TensorList v,
                 float eps, at::IntArrayRef aux, const Tensor& features) {
  const int64_t M = pass.B * pass.T, H = x.size(-1), L = k.size();
  const int64_t width = pass.width(), inside = pass.heads * pass.hd;
  const Packed down(weights[DOWN], weights[DOWN_SCALE]);
  const int64_t inner = down.inputs<E>();
  Rounded rounded(down.format == Packed::W8A8 ? M : 0, std::max({H, inside, inner}));
  const auto scratch = [&](int64_t columns) { return at::empty({M, columns}, x.options()); };
  const Tensor normed = scratch(H), qkv = scratch(width), gated = scratch(inner);
  const Tensor rotated = scratch(inside), attended = scratch(inside);
  Value<E> *stream = mutable_data<E>(x), *n = mutable_data<E>(normed), *q = mutable_data<E>(qkv);
  Value<E> *r = mutable_data<E>(rotated), *a = mutable_data<E>(attended), *g = mutable_data<E>(gated);
  const auto norm = [&](const Team& team, const Tensor& weight) {
    team.share(M, [&](int64_t m) { norm_row<E>(stream + m * H, data<E>(weight), H, eps, n + m * H); });
    team.meet();
  };
  const auto keep = [&](const Team& team, int64_t layer) {
    for (size_t i = 0; i < aux.size(); i++)
      if (aux[i] == layer)
        team.share(M, [&](int64_t m) {
          Value<E>* to = mutable_data<E>(features) + (m * aux.size() + i) * H;
          std::memcpy(to, stream + m * H, H * sizeof(Value<E>));
        });
  };
  Team::run([&](const Team& team) {
    pass.read_mask(team);
    for (int64_t l = 0; l < L; l++) {
      const bool last = l + 1 == L;
      const Tensor *w = &weights[l * WEIGHTS], *following = last ? w : w + WEIGHTS;
      const Packed wqkv(w[WQKV], w[WQKV_SCALE]), wo(w[WO], w[WO_SCALE]), down(w[DOWN], w[DOWN_SCALE]);
      const Packed gate_up(w[GATE_UP], w[GATE_UP_SCALE]), next(following[WQKV], following[WQKV_SCALE]);
      keep(team, l);
      norm(team, w[ATTN_NORM]);
      linear_part<E, E>(team, n, M, wqkv, data<Fp32>(w[BIAS]), nullptr, false, width, rounded, &wo, q);
      team.meet();
      attention_part<E>(team, pass, q, data<E>(w[Q_NORM]), data<E>(w[K_NORM]), eps, k[l], v[l], r, a);
      team.meet();
      linear_part<E, E>(team, a, M, wo, nullptr, stream, false, H, rounded, &gate_up, stream);
      team.meet();
      norm(team, w[MLP_NORM]);
      linear_part<E, E>(team, n, M, gate_up, nullptr, nullptr, true, inner, rounded, &down, g);
      team.meet();
      linear_part<E, E>(team, g, M, down, nullptr, stream, false, H, rounded, last ? nullptr : &next, stream);
      team.meet();
    }
    keep(team, L);
  });
}

// x [B, T, H] -> the residual stream after all layers, and those entering the layers `aux` (L: after all).
std::tuple<Tensor, Tensor> layers(const Tensor& x, const Tensor& cosine, const Tensor& sine,
                                  at::TensorList weights, at::TensorList k, at::TensorList v,
                                  const Tensor& slots, const Tensor& visible, double eps,
                                  at::IntArrayRef aux) {
  Tensor stream = x.clone(at::MemoryFormat::Contiguous);
  Tensor features = at::empty({x.size(0), x.size(1), int64_t(aux.size()) * x.size(2)}, x.options());
  by_dtype(x, [&](auto e) {
    using E = decltype(e);
    const int64_t heads = Packed(weights[WO], weights[WO_SCALE]).template inputs<E>() / k[0].size(3);
    Pass pass(x, heads, k[0], cosine, sine, slots, visible);
    layers_into<E>(stream, pass, weights, k, v, eps, aux, features);
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
    const int64_t size = cache.stride(1) * cache.element_size();
    std::vector<char> kept(W * size);
    auto* base = static_cast<char*>(cache.mutable_data_ptr());
    for (int64_t b = 0; b < B; b++) {
      char* sequence = base + b * cache.stride(0) * cache.element_size();
      for (int64_t i = 0; i < W; i++) std::memcpy(&kept[i * size], sequence + f[b * W + i] * size, size);
      for (int64_t i = 0; i < W; i++) std::memcpy(sequence + t[b * W + i] * size, &kept[i * size], size);
    }
  }
}

}  // namespace

TORCH_LIBRARY(eagle, m) {
  m.def("linear(Tensor x, Tensor packed, Tensor? scale, Tensor? bias, Tensor? residual,"
        " int columns, int mode) -> Tensor");
  m.def("attend(Tensor qkv, Tensor cosine, Tensor sine, Tensor? q_norm, Tensor? k_norm, float eps,"
        " Tensor(a!) k, Tensor(b!) v, Tensor slots, Tensor visible) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("layers(Tensor x, Tensor cosine, Tensor sine, Tensor[] weights, Tensor(a!)[] k, Tensor(b!)[] v,"
        " Tensor slots, Tensor visible, float eps, int[] aux) -> (Tensor, Tensor)");
  m.def("move(Tensor(a!)[] caches, Tensor source, Tensor target) -> ()");
}

TORCH_LIBRARY_IMPL(eagle, CPU, m) {
  m.impl("linear", &linear);
  m.impl("attend", &attend);
  m.impl("rms_norm", &rms_norm);
  m.impl("layers", &layers);
  m.impl("move", &move);
}
