// The kernels, put together from products, attention and norms. Included once for each dtype.
#pragma once

#include "attention.h"
#include "linear.h"

namespace eagle {

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
int64_t Kernels<E>::inputs(const Weight& w) { return inputs_of<Read<E>>(w); }

template <class E>
void Kernels<E>::linear(int threads, const void* x, int64_t M, const Weight& w, const void* residual, Gate gate,
                        bool to_float, int64_t N, void* out) {
  using X = Read<E>;
  constexpr bool widen = !std::is_same_v<X, E>;
  const int64_t K = inputs_of<X>(w);
  const auto* from = static_cast<const Value<E>*>(x);
  const Room<Value<X>> wide(widen ? M * K : 0);
  Rounded rounded(w.rounds() ? M : 0, K);
  Team::run(threads, [&](const Team& team) {
    const Value<X>* input;
    if constexpr (widen) as_read<E>(team, from, M, K, wide), input = wide;
    else input = from;
    const auto run = [&](auto o) {
      using Out = decltype(o);
      linear_part<X, Out>(team, input, {{0, M, 0}}, w, static_cast<const Value<Out>*>(residual), gate, N, rounded,
                          nullptr, static_cast<Value<Out>*>(out));
    };
    if (to_float) run(Fp32());
    else run(E());
  });
}

template <class E>
void Kernels<E>::attend(int threads, const Rows& rows, const void* qkv, const Attending& layer, void* out) {
  Pass pass(rows);
  const Room<Value<E>> rotated(rows.B * rows.T * rows.heads * rows.hd);
  Team::run(threads, [&](const Team& team) {
    pass.read_mask(team);  // `attention_part` meets before it is used
    attention_over<E, E>(layer.k)(team, pass, static_cast<const Value<E>*>(qkv), layer, rotated,
                                  static_cast<Value<E>*>(out));
  });
}

template <class E>
void Kernels<E>::rms_norm(const void* x, const float* weight, int64_t M, int64_t H, float eps, void* out,
                          int64_t stride) {
  auto *from = static_cast<const Value<E>*>(x);
  auto *to = static_cast<Value<E>*>(out);
  // One thread: waking the others takes longer than a few rows do.
  for (int64_t m = 0; m < M; m++) norm_row<E>(from + m * H, weight, H, eps, to + m * stride);
}

template <class E>
void Kernels<E>::scale(float factor, int64_t count, void* x) {
  auto* values = static_cast<Value<E>*>(x);
  for (int64_t i = 0; i < count; i += LANES) E::put(values + i, E::get(values + i, count - i) * factor, count - i);
}

// The MLP of a mixture. Each expert's weights are read once, for all rows that chose it: these are copied side by side,
// from the beginning of a tile on. A row's sum runs over its experts in the order of their scores.
template <class E>
struct Experts {
  using X = Read<E>;
  const int64_t M, H, used, rows;  // rows: of all portions, with what is empty between them
  const Room<Value<E>> scores;
  const Room<Value<X>> chosen_rows;
  const Room<Value<Fp32>> out, shares;
  const Room<int32_t> chosen;

  static int64_t room(const Mixture& mixture, int64_t M) {
    return M * mixture.used + std::min(mixture.experts, M * mixture.used) * (Rounded::TALL - 1);
  }
  Experts(const Mixture& mixture, int64_t M, int64_t H)
      : M(M), H(H), used(mixture.used), rows(room(mixture, M)), scores(M * mixture.experts), chosen_rows(rows * H),
        out(rows * H), shares(M * used), chosen(M * used) {}

  // The experts of row m, best first and of equal ones the first, and their shares.
  void choose(const Mixture& mixture, int64_t m) const {
    std::vector<Best> order(mixture.experts);
    for (int64_t e = 0; e < mixture.experts; e++) order[e] = {E::get(scores + m * mixture.experts + e, 1)[0], e};
    std::partial_sort(order.begin(), order.begin() + used, order.end());
    float total = 0;
    for (int64_t e = 0; e < (mixture.renormalise ? used : mixture.experts); e++)
      total += std::exp(order[e].value - order[0].value);
    for (int64_t a = 0; a < used; a++) {
      chosen[m * used + a] = order[a].id;
      shares[m * used + a] = std::exp(order[a].value - order[0].value) / total;
    }
  }

  // Add what the experts make of x [M, H] to `stream`. gated: room [rows, inner].
  void add(const Team& team, const Layer& w, const Value<X>* x, int64_t inner, Rounded& rounded, Value<X>* gated,
           Value<E>* stream) const {
    const Mixture& mixture = w.mixture;
    linear_part<X, E>(team, x, {{0, M, 0}}, mixture.router, nullptr, Gate::NONE, mixture.experts, rounded, nullptr,
                      scores);
    team.meet();
    team.share(M, [&](int64_t m) { choose(mixture, m); });
    team.meet();
    // Every thread finds the same portions and places.
    std::vector<int64_t> count(mixture.experts), place(M * used);
    for (int64_t i = 0; i < M * used; i++) place[i] = count[chosen[i]]++;
    Portions of_gate_up, of_down;
    std::vector<int64_t> first(mixture.experts);
    for (int64_t e = 0, at = 0; e < mixture.experts; e++) {
      if (!count[e]) continue;
      of_gate_up.push_back({at, count[e], w.gate_up.blocks / mixture.experts * e});
      of_down.push_back({at, count[e], w.down.blocks / mixture.experts * e});
      first[e] = at, at += tiles_of(count[e], Rounded::TALL) * Rounded::TALL;
    }
    for (int64_t i = 0; i < M * used; i++) place[i] += first[chosen[i]];
    team.share(M * used, [&](int64_t i) {
      std::memcpy(chosen_rows + place[i] * H, x + i / used * H, H * sizeof(Value<X>));
    });
    team.meet();
    linear_part<X, X>(team, chosen_rows, of_gate_up, w.gate_up, nullptr, w.gate, inner, rounded, &w.down, gated);
    team.meet();
    linear_part<X, Fp32>(team, gated, of_down, w.down, nullptr, Gate::NONE, H, rounded, nullptr, out);
    team.meet();
    team.share(M, [&](int64_t m) {
      for (int64_t h = 0; h < H; h += LANES) {
        Floats sum = E::get(stream + m * H + h, H - h);
        for (int64_t i = m * used; i < m * used + used; i++)
          sum = fma(Fp32::get(out + place[i] * H + h, H - h), broadcast(shares[i]), sum);
        E::put(stream + m * H + h, sum, H - h);
      }
    });
    team.meet();
  }
};

template <class E>
void Kernels<E>::experts(int threads, const void* x, int64_t M, int64_t H, const Layer& layer, void* stream) {
  using X = Read<E>;
  const Experts<E> experts(layer.mixture, M, H);
  const int64_t inner = inputs_of<X>(layer.down), most = std::max(M, experts.rows);
  Rounded rounded(layer.down.rounds() ? most : 0, std::max(H, inner));
  const Room<Value<X>> read(M * H), gated(most * inner);
  Team::run(threads, [&](const Team& team) {
    as_read<E>(team, static_cast<const Value<E>*>(x), M, H, read);
    experts.add(team, layer, read, inner, rounded, gated, static_cast<Value<E>*>(stream));
  });
}

template <class E>
void Kernels<E>::layers(int threads, const Rows& rows, int64_t H, std::span<const Layer> layers, float eps,
                        const std::vector<int64_t>& aux, const void* read, void* x, void* features) {
  using X = Read<E>;  // what goes into products is written as they read it
  Pass pass(rows);
  const int64_t M = rows.B * rows.T, width = rows.width(), inside = rows.heads * rows.hd;
  const Weight& down = layers[0].down;
  const int64_t inner = inputs_of<X>(down), L = layers.size(), A = aux.size();
  const int64_t first = inputs_of<X>(layers[0].wqkv);  // more than H if `read` is
  const Experts<E> experts(layers[0].mixture, M, H);
  const int64_t most = std::max(M, experts.rows);
  const bool rounds = down.rounds() || layers[0].wqkv.rounds();  // experts may be of another format
  Rounded rounded(rounds ? most : 0, std::max({first, inside, inner}));
  const Room<Value<E>> qkv(M * width), rotated(M * inside);
  const Room<Value<X>> normed(M * first), attended(M * inside), gated(most * inner);
  const Portions all{{0, M, 0}};
  const Room<Value<E>> added(layers[0].wo_norm ? M * H : 0);  // an output that is to be normed
  auto *stream = static_cast<Value<E>*>(x), *kept = static_cast<Value<E>*>(features);
  const auto norm = [&](const Team& team, const float* weight) {
    team.share(M, [&](int64_t m) { norm_row<E, X>(stream + m * H, weight, H, eps, normed + m * H); });
    team.meet();
  };
  // The product of an output layer, normed if there is a norm, onto the stream. Then all have met.
  const auto onto_stream = [&](const Team& team, const Value<X>* from, const Weight& w, const float* weight,
                               const Weight* after) {
    linear_part<X, E>(team, from, all, w, weight ? nullptr : stream, Gate::NONE, H, rounded, after,
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
      const Weight* inside_mlp = w.mixture.experts ? &w.mixture.router : &w.gate_up;
      keep(team, l);
      if (read && !l) as_read<E>(team, static_cast<const Value<E>*>(read), M, first, normed);
      else norm(team, w.attn_norm);
      linear_part<X, E>(team, normed, all, w.wqkv, nullptr, Gate::NONE, width, rounded, &w.wo, qkv);
      team.meet();
      attention_over<E, X>(w.attending.k)(team, pass, qkv, w.attending, rotated, attended);
      team.meet();
      onto_stream(team, attended, w.wo, w.wo_norm, inside_mlp);
      norm(team, w.mlp_norm);
      if (w.mixture.experts) {
        experts.add(team, w, normed, inner, rounded, gated, stream);
        continue;
      }
      linear_part<X, X>(team, normed, all, w.gate_up, nullptr, w.gate, inner, rounded, &w.down, gated);
      team.meet();
      onto_stream(team, gated, w.down, w.down_norm, next);
    }
    keep(team, L);
  });
}

}  // namespace eagle
