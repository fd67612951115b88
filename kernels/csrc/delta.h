// Gated DeltaNet over trees, see families/hybrid.py. Batch-invariant: a token's result is computed from
// the state at a boundary and from its path, in the path's order and by the same code.
#pragma once

#include "team.h"
#include "tensors.h"

#define NOINLINE __attribute__((noinline))  // inlined copies could round sums differently

namespace eagle {

// One of nv value heads (size dv) of a sequence; there are nk key heads (size dk).
struct DeltaHead {
  static constexpr int64_t BLOCK = 16, LEVELS = 16, OPEN = BLOCK + LEVELS;  // as in families/hybrid.py
  static int64_t base(int64_t position) { return position < LEVELS ? 0 : (position - LEVELS) / BLOCK * BLOCK; }

  const Numbers &rates, &outputs;
  const Longs& all_positions;
  const Flags& local;
  const void* mixed;
  const bool bf16;  // whether `mixed` is bfloat16; otherwise float32
  const bool corrected;  // false for Mamba-2: no delta rule, no norms of queries and keys
  const int64_t T, ring, nk, nv, dk, dv, b, h;
  std::vector<float> k, u, total, q, v, read;  // k, u and total (the sum of g): by token

  // Advance a state from `start` to the boundary of tokens after `length`. Returns the boundary.
  int64_t advance(float* state, int64_t start, int64_t length) {
    for (; start < base(length); start += BLOCK) {
      for (int64_t i = 0; i < BLOCK; i++) token(state, start + i, i, i, nullptr, nullptr);
      step(state);
    }
    return start;
  }

  // Write the outputs of tokens first ... first + count - 1, which follow `length` tokens. `state` is at their
  // boundary and may be advanced.
  void rows(float* state, int64_t start, int64_t length, int64_t first, int64_t count) {
    const int64_t* positions = &all_positions[b * T + first];
    const int64_t last = base(*std::max_element(positions, positions + count));
    for (;; start += BLOCK) {
      const int64_t before = length - start;
      for (int64_t i = 0; i < before; i++) token(state, start + i, i, i, nullptr, nullptr);
      for (int64_t t = 0; t < count; t++) {
        const bool* visible = &local[(b * T + first + t) * T + first];
        float* out = &outputs[((b * T + first + t) * nv + h) * dv];
        token(state, length + t, before + t, before, visible, base(positions[t]) == start ? out : nullptr);
      }
      if (start >= last) return;
      step(state);
    }
  }

  NOINLINE static float dot(const float* a, const float* b, int64_t n) {
    constexpr int64_t W = 16;
    float sums[W] = {};
    int64_t i = 0;
    for (; i + W <= n; i += W)
      for (int64_t j = 0; j < W; j++) sums[j] += a[i + j] * b[i + j];
    for (int64_t j = 0; i + j < n; j++) sums[j] += a[i + j] * b[i + j];
    for (int64_t half = W / 2; half; half /= 2)
      for (int64_t j = 0; j < half; j++) sums[j] += sums[j + half];
    return sums[0];
  }
  NOINLINE static void add(float* to, float weight, const float* x, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] += weight * x[i];
  }
  float get(int64_t slot, int64_t i) const {
    const int64_t at = (b * ring + slot % ring) * (2 * nk * dk + nv * dv) + i;
    if (!bf16) return static_cast<const float*>(mixed)[at];
    return std::bit_cast<float>(uint32_t(static_cast<const uint16_t*>(mixed)[at]) << 16);
  }
  void key(int64_t slot, int64_t from, float scale, float* to) const {
    for (int64_t i = 0; i < dk; i++) to[i] = get(slot, from + i);
    if (!corrected) return;
    const float length = std::sqrt(dot(to, to, dk) + 1e-6f);
    for (int64_t i = 0; i < dk; i++) to[i] = to[i] / length * scale;
  }
  void apply(const float* state, const float* x, float* to) const {
    std::fill(to, to + dv, 0.0f);
    for (int64_t i = 0; i < dk; i++) add(to, x[i], state + i * dv, dv);
  }

  // Compute token `me`. It attends to the first `before` tokens, to later ones in `visible`, and to
  // itself.
  NOINLINE void token(const float* state, int64_t slot, int64_t me, int64_t before, const bool* visible, float* out) {
    const int64_t head = h / (nv / nk);
    const float* rate = &rates[(b * ring + slot % ring) * 2 * nv];
    const float step = rate[nv + h];
    float *own_key = &k[me * dk], *change = &u[me * dv];
    key(slot, (nk + head) * dk, 1, own_key);
    for (int64_t i = 0; i < dv; i++) v[i] = get(slot, 2 * nk * dk + h * dv + i);
    const auto attends = [&](int64_t i) { return i < before || (i < me && visible[i - before]); };
    int64_t parent = me - 1;
    while (parent >= 0 && !attends(parent)) parent--;
    total[me] = (parent < 0 ? 0 : total[parent]) + rate[h];
    const float decay = std::exp(total[me]);
    if (corrected) apply(state, own_key, read.data());
    for (int64_t i = 0; i < dv; i++) change[i] = step * (corrected ? v[i] - decay * read[i] : v[i]);
    for (int64_t i = 0; corrected && i < me; i++)
      if (attends(i)) {
        const float weight = step * std::exp(total[me] - total[i]) * dot(own_key, &k[i * dk], dk);
        add(change, -weight, &u[i * dv], dv);
      }
    if (!out) return;
    key(slot, head * dk, 1 / std::sqrt(float(dk)), q.data());
    apply(state, q.data(), out);
    for (int64_t i = 0; i < dv; i++) out[i] *= decay;
    for (int64_t i = 0; i <= me; i++)
      if (i == me || attends(i))
        add(out, std::exp(total[me] - total[i]) * dot(q.data(), &k[i * dk], dk), &u[i * dv], dv);
  }

  // Advance a state by the first BLOCK tokens.
  NOINLINE void step(float* state) const {
    const float decay = std::exp(total[BLOCK - 1]);
    for (int64_t i = 0; i < dk * dv; i++) state[i] *= decay;
    for (int64_t j = 0; j < BLOCK; j++) {
      const float fade = std::exp(total[BLOCK - 1] - total[j]);
      for (int64_t i = 0; i < dk; i++) add(state + i * dv, fade * k[j * dk + i], &u[j * dv], dv);
    }
  }
};

// Run the heads of a DeltaNet layer on tokens in slots length [B] ... -> [B, T, nv, dv] (float32). Ring buffers `mixed` [B,
// ring, 2 nk dk + nv dv] and `rates` [B, ring, 2 nv] have their inputs already. Advances states [B, nv, dk, dv]
// (float32) and their boundaries start [B]. positions [B, T], local [B, T, T].
Numbers delta(const Dense& mixed, const Numbers& rates, const Longs& length, const Longs& positions, const Flags& local,
              Tensor& states, Tensor& start, bool corrected) {
  const int64_t B = positions.size(0), T = positions.size(1), nv = states.size(1), dk = states.size(2);
  const int64_t dv = states.size(3), size = dk * dv;
  const int64_t ring = mixed.size(1), nk = (mixed.size(2) - nv * dv) / (2 * dk), open = DeltaHead::OPEN + T;
  const bool is_bf16 = mixed.scalar_type() != ScalarType::Float;
  const Numbers out({B, T, nv, dv});
  const auto zeros = [](int64_t size) { return std::vector<float>(size); };
  auto* at = start.mutable_data_ptr<int64_t>();
  auto* all_states = states.mutable_data_ptr<float>();
  Team::run(threads(), [&](const Team& team) {
    team.parallel_for(B * nv, [&](int64_t i) {
      const int64_t b = i / nv, before = length[b];
      DeltaHead head{rates, out, positions, local, data(mixed), is_bf16, corrected, T, ring, nk, nv, dk, dv, b, i % nv,
                     zeros(open * dk), zeros(open * dv), zeros(open), zeros(dk), zeros(dv), zeros(dv)};
      float* committed = all_states + i * size;
      int64_t from = at[b];
      if (!before) from = 0, std::fill(committed, committed + size, 0.0f);
      from = head.advance(committed, from, before);
      std::vector<float> state(committed, committed + size);
      bool chain = true;
      for (int64_t t = 0; t < T; t++) chain &= positions[b * T + t] == before + t;
      const int64_t max_count = chain ? DeltaHead::BLOCK : T;
      for (int64_t first = 0; first < T; first += max_count) {
        from = head.advance(state.data(), from, before + first);
        std::vector<float> moving(state);  // `rows` may advance it
        head.rows(moving.data(), from, before + first, first, std::min(max_count, T - first));
      }
    });
  });
  for (int64_t b = 0; b < B; b++) at[b] = std::max(length[b] ? at[b] : 0, DeltaHead::base(length[b]));
  return out;
}

}  // namespace eagle
