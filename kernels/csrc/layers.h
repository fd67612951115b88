// The kernels, put together from products, attention and norms. Included once for each dtype.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "attention.h"
#include "kernels.h"
#include "linear.h"
#include "norm.h"
#include "products.h"
#include "team.h"
#include "vectors.h"

namespace eagle {

// Room for values of E that is not set to anything.
template <class E>
struct Room {
  std::unique_ptr<Value<E>[]> data;
  explicit Room(int64_t size) : data(new Value<E>[size]) {}
  operator Value<E>*() const { return data.get(); }
};

// Rows of x [M, K] as products read them. Then all have met.
template <class E>
void as_read(const Team& team, const Value<E>* x, int64_t M, int64_t K, Value<Read<E>>* out) {
  team.share(M, [&](int64_t m) {
    for (int64_t k = m * K; k < (m + 1) * K; k += LANES)
      Read<E>::put(out + k, E::get(x + k, (m + 1) * K - k), (m + 1) * K - k);
  });
  team.meet();
}

// `attention_part` of a cache, as it is stored.
template <class E, class Out>
auto attention_over(const Cache& cache) {
  return cache.in_bytes ? attention_part<InBytes<E>, E, Out> : attention_part<InDtype<E>, E, Out>;
}

template <class E>
int64_t Kernels<E>::inputs(const Weight& w) {
  return inputs_of<Read<E>>(w);
}

template <class E>
void Kernels<E>::linear(int threads, const void* x, int64_t M, const Weight& w, const float* bias,
                        const void* residual, Gate gate, bool to_float, int64_t N, void* out) {
  using X = Read<E>;
  constexpr bool widen = !std::is_same_v<X, E>;
  const int64_t K = inputs_of<X>(w);
  const auto* from = static_cast<const Value<E>*>(x);
  const Room<X> wide(widen ? M * K : 0);
  Rounded rounded(w.rounds() ? M : 0, K);
  Team::run(threads, [&](const Team& team) {
    const Value<X>* input;
    if constexpr (widen) as_read<E>(team, from, M, K, wide), input = wide;
    else input = from;
    const auto run = [&](auto o) {
      using Out = decltype(o);
      linear_part<X, Out>(team, input, M, w, bias, static_cast<const Value<Out>*>(residual), gate, N, rounded,
                          nullptr, static_cast<Value<Out>*>(out));
    };
    if (to_float) run(Fp32());
    else run(E());
  });
}

template <class E>
void Kernels<E>::attend(int threads, const Rows& rows, const void* qkv, const Attending& layer, void* out) {
  Pass pass(rows);
  const Room<E> rotated(rows.B * rows.T * rows.heads * rows.hd);
  Team::run(threads, [&](const Team& team) {
    pass.read_mask(team);  // `attention_part` meets before it is used
    attention_over<E, E>(layer.k)(team, pass, static_cast<const Value<E>*>(qkv), layer, rotated,
                                  static_cast<Value<E>*>(out));
  });
}

template <class E>
void Kernels<E>::rms_norm(const void* x, const float* weight, int64_t M, int64_t H, float eps, void* out) {
  const auto* from = static_cast<const Value<E>*>(x);
  // One thread: waking the others takes longer than a few rows do.
  for (int64_t m = 0; m < M; m++) norm_row<E>(from + m * H, weight, H, eps, static_cast<Value<E>*>(out) + m * H);
}

template <class E>
void Kernels<E>::scale(float factor, int64_t count, void* x) {
  auto* values = static_cast<Value<E>*>(x);
  for (int64_t i = 0; i < count; i += LANES) E::put(values + i, E::get(values + i, count - i) * factor, count - i);
}

template <class E>
void Kernels<E>::beside(const int64_t* ids, const void* table, const float* table_norm, int64_t S, const void* x,
                        const float* x_norm, int64_t M, int64_t H, float eps, void* out) {
  const auto *rows = static_cast<const Value<E>*>(table), *from = static_cast<const Value<E>*>(x);
  for (int64_t m = 0; m < M; m++) {
    auto* to = static_cast<Value<E>*>(out) + m * (S + H);
    norm_row<E>(rows + ids[m] * S, table_norm, S, eps, to);
    norm_row<E>(from + m * H, x_norm, H, eps, to + S);
  }
}

template <class E>
void Kernels<E>::layers(int threads, const Rows& rows, int64_t H, const std::vector<Layer>& layers, float eps,
                        const std::vector<int64_t>& aux, const void* read, void* x, void* features) {
  using X = Read<E>;  // what goes into products is written as they read it
  Pass pass(rows);
  const int64_t M = rows.B * rows.T, width = rows.width(), inside = rows.heads * rows.hd;
  const Weight& down = layers[0].down;
  const int64_t inner = inputs_of<X>(down), L = layers.size(), A = aux.size();
  const int64_t first = inputs_of<X>(layers[0].wqkv);  // more than H if `read` is
  Rounded rounded(down.rounds() ? M : 0, std::max({first, inside, inner}));
  const Room<E> qkv(M * width), rotated(M * inside);
  const Room<X> normed(M * first), attended(M * inside), gated(M * inner);
  const Room<E> added(layers[0].wo_norm ? M * H : 0);  // an output that is to be normed
  auto *stream = static_cast<Value<E>*>(x), *kept = static_cast<Value<E>*>(features);
  const auto norm = [&](const Team& team, const float* weight) {
    team.share(M, [&](int64_t m) { norm_row<E, X>(stream + m * H, weight, H, eps, normed + m * H); });
    team.meet();
  };
  // The product of an output layer, normed if there is a norm, onto the stream. Then all have met.
  const auto onto_stream = [&](const Team& team, const Value<X>* from, const Weight& w, const float* weight,
                               const Weight* after) {
    linear_part<X, E>(team, from, M, w, nullptr, weight ? nullptr : stream, Gate::NONE, H, rounded, after,
                      weight ? added : stream);
    team.meet();
    if (!weight) return;
    team.share(M, [&](int64_t m) {
      Value<E>*from = added + m * H, *to = stream + m * H;
      norm_row<E>(from, weight, H, eps, from);
      for (int64_t i = 0; i < H; i += LANES) E::put(to + i, E::get(to + i, H - i) + E::get(from + i, H - i), H - i);
    });
    team.meet();
  };
  const auto keep = [&](const Team& team, int64_t layer) {
    for (int64_t i = 0; i < A; i++)
      if (aux[i] == layer)
        team.share(M, [&](int64_t m) {
          std::memcpy(kept + (m * A + i) * H, stream + m * H, H * sizeof(Value<E>));
        });
  };
  // One parallel region: the threads only wait for each other between the products.
  Team::run(threads, [&](const Team& team) {
    pass.read_mask(team);
    for (int64_t l = 0; l < L; l++) {
      const Layer& w = layers[l];
      const Weight* next = l + 1 < L ? &layers[l + 1].wqkv : nullptr;
      keep(team, l);
      if (read && !l) as_read<E>(team, static_cast<const Value<E>*>(read), M, first, normed);
      else norm(team, w.attn_norm);
      linear_part<X, E>(team, normed, M, w.wqkv, w.bias, nullptr, Gate::NONE, width, rounded, &w.wo, qkv);
      team.meet();
      attention_over<E, X>(w.attending.k)(team, pass, qkv, w.attending, rotated, attended);
      team.meet();
      onto_stream(team, attended, w.wo, w.wo_norm, &w.gate_up);
      norm(team, w.mlp_norm);
      linear_part<X, X>(team, normed, M, w.gate_up, nullptr, nullptr, w.gate, inner, rounded, &w.down, gated);
      team.meet();
      onto_stream(team, gated, w.down, w.down_norm, next);
    }
    keep(team, L);
  });
}

}  // namespace eagle
