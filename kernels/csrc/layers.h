// The kernels of whole layers, from products, attention and norms. Included once per dtype.
#pragma once

#include "attention.h"
#include "linear.h"

namespace eagle {

// Convert x [M, K] to the input type of products. Ends with a barrier.
template <class E>
void convert_inputs(const Team& team, const Value<E>* x, int64_t M, int64_t K, Value<Input<E>>* out) {
  team.parallel_for(M, [&](int64_t m) {
    for (int64_t k = m * K; k < (m + 1) * K; k += LANES)
      Input<E>::put(out + k, E::get(x + k, (m + 1) * K - k), (m + 1) * K - k);
  });
  team.barrier();
}

template <class E, class Out>
auto attention_over(const Cache& cache) {
  return cache.is_int8 ? attention_part<Int8KV<E>, E, Out> : attention_part<DtypeKV<E>, E, Out>;
}

template <class E>
int64_t Kernels<E>::inputs(const Weight& w) { return inputs_of<Input<E>>(w); }

template <class E>
void Kernels<E>::linear(int threads, const void* x, int64_t M, const Weight& w, const void* residual, Gate gate,
                        bool to_float, int64_t N, void* out) {
  using X = Input<E>;
  constexpr bool widen = !std::is_same_v<X, E>;
  const int64_t K = inputs_of<X>(w);
  const auto* from = static_cast<const Value<E>*>(x);
  const Buffer<Value<X>> wide(widen ? M * K : 0);
  Rounded rounded(w.rounds() ? M : 0, K);
  Team::run(threads, [&](const Team& team) {
    const Value<X>* input;
    if constexpr (widen) convert_inputs<E>(team, from, M, K, wide), input = wide;
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

// Row n of a stored table, dequantized -> out [K], as kernels/stored.py: numbers.
inline void stored_row(const StoredTable& t, int64_t n, float* out) {
  const int64_t count = 1 + t.minima, group = t.inputs / t.groups;
  const uint8_t* bytes = t.weight + n * t.inputs * t.bits / 8;
  for (int64_t g = 0; g < t.groups; g++) {
    float scale[2] = {};
    for (int64_t i = 0; i < count; i++) {
      scale[i] = t.scale[(n * count + i) * t.units + g * t.units / t.groups];
      if (t.codes) scale[i] *= float(t.codes[(n * count + i) * t.groups + g]);
    }
    for (int64_t k = g * group; k < (g + 1) * group; k++) {
      const uint8_t* four = bytes + k / 4 * 3;  // values of 6 bits
      const int q = t.bits == 8   ? int8_t(bytes[k])
                    : t.bits == 4 ? (bytes[k / 2] >> k % 2 * 4 & 15) - (t.minima ? 0 : 8)
                                  : ((four[k % 4 / 2] >> k % 2 * 4 & 15) | (four[2] >> k % 4 * 2 & 3) << 4) - 32;
      const float product = float(q) * scale[0];
      out[k] = t.minima ? product - scale[1] : product;
    }
  }
}

template <class E>
void Kernels<E>::rows(const StoredTable& table, const int64_t* indices, int64_t M, void* out) {
  const int64_t K = table.inputs;
  const Buffer<Value<Fp32>> row(K);
  for (int64_t m = 0; m < M; m++) {
    stored_row(table, indices[m], row);
    auto* to = static_cast<Value<E>*>(out) + m * K;
    for (int64_t k = 0; k < K; k += LANES) E::put(to + k, Fp32::get(row + k, K - k), K - k);
  }
}

template <class E>
void Kernels<E>::attend(int threads, const PassArgs& args, const void* qkv, const AttentionLayer& layer, void* out) {
  Pass pass(args);
  const Buffer<Value<E>> rotated(args.B * args.T * args.heads * args.hd);
  Team::run(threads, [&](const Team& team) {
    pass.read_mask(team);  // `attention_part` has a barrier before it is read
    attention_over<E, E>(layer.k)(team, pass, static_cast<const Value<E>*>(qkv), layer, rotated,
                                  static_cast<Value<E>*>(out));
  });
}

template <class E>
void Kernels<E>::rms_norm(const void* x, const float* weight, int64_t M, int64_t H, float eps, void* out,
                          int64_t stride) {
  auto *from = static_cast<const Value<E>*>(x);
  auto *to = static_cast<Value<E>*>(out);
  // On one thread: waking the others takes longer than a few rows.
  for (int64_t m = 0; m < M; m++) norm_row<E>(from + m * H, weight, H, eps, to + m * stride);
}

template <class E>
void Kernels<E>::scale(float factor, int64_t count, void* x) {
  auto* values = static_cast<Value<E>*>(x);
  for (int64_t i = 0; i < count; i += LANES) E::put(values + i, E::get(values + i, count - i) * factor, count - i);
}

// The MLP of a mixture of experts. Each expert's weights are read once for all tokens routed to it, which are copied to
// consecutive rows, from the start of a tile. A token's sum runs over its experts in the order of their scores.
template <class E>
struct Experts {
  using X = Input<E>;
  const int64_t M, H, used, rows;  // rows: of all portions, with the padding between them
  const Buffer<Value<E>> scores;
  const Buffer<Value<X>> routed;
  const Buffer<Value<Fp32>> out, weights;
  const Buffer<int32_t> chosen;

  static int64_t padded_rows(const Mixture& mixture, int64_t M) {
    return M * mixture.used + std::min(mixture.experts, M * mixture.used) * (Rounded::MAX_ROWS - 1);
  }
  Experts(const Mixture& mixture, int64_t M, int64_t H)
      : M(M), H(H), used(mixture.used), rows(padded_rows(mixture, M)), scores(M * mixture.experts), routed(rows * H),
        out(rows * H), weights(M * used), chosen(M * used) {}

  // Choose the experts of token m, best first, and their weights. Ties go to the lower index.
  void choose(const Mixture& mixture, int64_t m) const {
    for (int64_t i = m * used; mixture.chosen && i < m * used + used; i++)
      chosen[i] = mixture.chosen[i], weights[i] = mixture.weights[i];
    if (mixture.chosen) return;
    std::vector<Candidate> order(mixture.experts);
    for (int64_t e = 0; e < mixture.experts; e++) order[e] = {E::get(scores + m * mixture.experts + e, 1)[0], e};
    std::partial_sort(order.begin(), order.begin() + used, order.end());
    float total = 0;
    for (int64_t e = 0; e < (mixture.renormalize ? used : mixture.experts); e++)
      total += std::exp(order[e].value - order[0].value);
    for (int64_t a = 0; a < used; a++) {
      chosen[m * used + a] = order[a].id;
      weights[m * used + a] = std::exp(order[a].value - order[0].value) / total;
    }
  }

  // Add the experts' output for x [M, H] to `stream`. gated: scratch [rows, inner].
  void add(const Team& team, const Layer& w, const Value<X>* x, int64_t inner, Rounded& rounded, Value<X>* gated,
           Value<E>* stream) const {
    const Mixture& mixture = w.mixture;
    if (!mixture.chosen) {
      linear_part<X, E>(team, x, {{0, M, 0}}, mixture.router, nullptr, Gate::NONE, mixture.experts, rounded, nullptr,
                        scores);
      team.barrier();
    }
    team.parallel_for(M, [&](int64_t m) { choose(mixture, m); });
    team.barrier();
    // Every thread computes the same portions and indices.
    std::vector<int64_t> count(mixture.experts), index(M * used);
    for (int64_t i = 0; i < M * used; i++) index[i] = count[chosen[i]]++;
    Portions gate_up_rows, down_rows;
    std::vector<int64_t> first(mixture.experts);
    for (int64_t e = 0, at = 0; e < mixture.experts; e++) {
      if (!count[e]) continue;
      gate_up_rows.push_back({at, count[e], w.gate_up.blocks / mixture.experts * e});
      down_rows.push_back({at, count[e], w.down.blocks / mixture.experts * e});
      first[e] = at, at += tiles_of(count[e], Rounded::MAX_ROWS) * Rounded::MAX_ROWS;
    }
    for (int64_t i = 0; i < M * used; i++) index[i] += first[chosen[i]];
    team.parallel_for(M * used, [&](int64_t i) {
      std::memcpy(routed + index[i] * H, x + i / used * H, H * sizeof(Value<X>));
    });
    team.barrier();
    linear_part<X, X>(team, routed, gate_up_rows, w.gate_up, nullptr, w.gate, inner, rounded, &w.down, gated);
    team.barrier();
    linear_part<X, Fp32>(team, gated, down_rows, w.down, nullptr, Gate::NONE, H, rounded, nullptr, out);
    team.barrier();
    team.parallel_for(M, [&](int64_t m) {
      for (int64_t h = 0; h < H; h += LANES) {
        Floats sum = E::get(stream + m * H + h, H - h);
        for (int64_t i = m * used; i < m * used + used; i++)
          sum = fma(Fp32::get(out + index[i] * H + h, H - h), broadcast(weights[i]), sum);
        E::put(stream + m * H + h, sum, H - h);
      }
    });
    team.barrier();
  }
};

template <class E>
void Kernels<E>::experts(int threads, const void* x, int64_t M, int64_t H, const Layer& layer, void* stream) {
  using X = Input<E>;
  const Experts<E> experts(layer.mixture, M, H);
  const int64_t inner = inputs_of<X>(layer.down), max_rows = std::max(M, experts.rows);
  Rounded rounded(layer.down.rounds() ? max_rows : 0, std::max(H, inner));
  const Buffer<Value<X>> input(M * H), gated(max_rows * inner);
  Team::run(threads, [&](const Team& team) {
    convert_inputs<E>(team, static_cast<const Value<E>*>(x), M, H, input);
    experts.add(team, layer, input, inner, rounded, gated, static_cast<Value<E>*>(stream));
  });
}

template <class E>
void Kernels<E>::layers(int threads, const PassArgs& args, int64_t H, std::span<const Layer> layers, float eps,
                        const std::vector<int64_t>& aux, const void* input, void* x, void* features) {
  using X = Input<E>;  // inputs of products are written in their type
  Pass pass(args);
  const int64_t M = args.B * args.T, width = args.width(), inside = args.heads * args.hd;
  const Weight& down = layers[0].down;
  const int64_t inner = inputs_of<X>(down), L = layers.size(), A = aux.size();
  const int64_t first = inputs_of<X>(layers[0].wqkv);  // more than H if `input` is given
  const Experts<E> experts(layers[0].mixture, M, H);
  const int64_t max_rows = std::max(M, experts.rows);
  const bool rounds = down.rounds() || layers[0].wqkv.rounds();  // experts may have another format
  Rounded rounded(rounds ? max_rows : 0, std::max({first, inside, inner}));
  const Buffer<Value<E>> qkv(M * width), rotated(M * inside);
  const Buffer<Value<X>> normed(M * first), attended(M * inside), gated(max_rows * inner);
  const Portions all{{0, M, 0}};
  const Buffer<Value<E>> added(layers[0].wo_norm ? M * H : 0);  // an output before its norm
  auto *stream = static_cast<Value<E>*>(x), *aux_features = static_cast<Value<E>*>(features);
  const auto norm = [&](const Team& team, const float* weight) {
    team.parallel_for(M, [&](int64_t m) { norm_row<E, X>(stream + m * H, weight, H, eps, normed + m * H); });
    team.barrier();
  };
  // Add the product of an output layer, normed if there is a norm, to the stream. Ends with a barrier.
  const auto add_to_stream = [&](const Team& team, const Value<X>* from, const Weight& w, const float* weight,
                               const Weight* after) {
    linear_part<X, E>(team, from, all, w, weight ? nullptr : stream, Gate::NONE, H, rounded, after,
                      weight ? added : stream);
    team.barrier();
    if (!weight) return;
    team.parallel_for(M, [&](int64_t m) {
      Value<E>*from = added + m * H, *to = stream + m * H;
      norm_row<E>(from, weight, H, eps, from);
      for (int64_t i = 0; i < H; i += LANES) E::put(to + i, E::get(to + i, H - i) + E::get(from + i, H - i), H - i);
    });
    team.barrier();
  };
  const auto store_features = [&](const Team& team, int64_t layer) {
    for (int64_t i = 0; i < A; i++)
      if (aux[i] == layer)
        team.parallel_for(M, [&](int64_t m) {
          std::memcpy(aux_features + (m * A + i) * H, stream + m * H, H * sizeof(Value<E>));
        });
  };
  // One parallel region, with barriers between the products.
  Team::run(threads, [&](const Team& team) {
    pass.read_mask(team);
    for (int64_t l = 0; l < L; l++) {
      const Layer& w = layers[l];
      const Weight* next = l + 1 < L ? &layers[l + 1].wqkv : nullptr;
      const Weight* mlp_weight = w.mixture.experts ? &w.mixture.router : &w.gate_up;
      store_features(team, l);
      if (input && !l) convert_inputs<E>(team, static_cast<const Value<E>*>(input), M, first, normed);
      else norm(team, w.attn_norm);
      linear_part<X, E>(team, normed, all, w.wqkv, nullptr, Gate::NONE, width, rounded, &w.wo, qkv);
      team.barrier();
      attention_over<E, X>(w.attention.k)(team, pass, qkv, w.attention, rotated, attended);
      team.barrier();
      add_to_stream(team, attended, w.wo, w.wo_norm, mlp_weight);
      norm(team, w.mlp_norm);
      if (w.mixture.experts) {
        experts.add(team, w, normed, inner, rounded, gated, stream);
        continue;
      }
      linear_part<X, X>(team, normed, all, w.gate_up, nullptr, w.gate, inner, rounded, &w.down, gated);
      team.barrier();
      add_to_stream(team, gated, w.down, w.down_norm, next);
    }
    store_features(team, L);
  });
}

}  // namespace eagle
