// Checks of what runs over a vocabulary: top-k and top-p, noise, the likeliest tokens. The other parts of a step
// have no vectors; tests/kernels/test_parts.py has them.
#pragma once

#include <tuple>

#include "testing.h"

inline void check_restrict(int64_t top_k, float top_p) {
  constexpr int64_t B = 3, T = 3, V = 300;
  Values<Fp32> logits = draws<Fp32>(B * T * V);
  for (float& logit : logits) logit *= 4;
  std::fill_n(logits.begin(), 7, 9.0f);  // ties
  const float warm[B] = {0.7f, 1.3f, 0};
  const std::vector<int64_t> k(B, top_k);
  const std::vector<float> p(B, top_p);
  Values<Fp32> expected = logits;
  for (int64_t row = 0; row < 2 * T; row++) {  // the third sequence is greedy
    float* x = &expected[row * V];
    std::vector<float> order(x, x + V);
    std::sort(order.rbegin(), order.rend());
    const float least = top_k ? order[top_k - 1] : order.back();
    double total = 0, above = 0;
    const auto mass = [&](float logit) { return std::exp(double(logit - order[0]) / warm[row / T]); };
    for (float logit : order) total += logit >= least ? mass(logit) : 0;
    float last = order[0];  // the least likely one that is needed
    for (int64_t i = 0; i < V && above < total * top_p && order[i] >= least; i++) above += mass(last = order[i]);
    for (int64_t i = 0; i < V; i++)
      if (x[i] < (top_p < 1 ? last : least)) x[i] = -INFINITY;
  }
  for (int threads : {1, 2, 3}) {
    Values<Fp32> out(logits.size());
    restrict_logits(threads, logits.data(), B, T, V, warm, k.data(), p.data(), out.data());
    check(same(out, expected), "restrict to %d and %g, %d threads", int(top_k), top_p, threads);
  }
}

// sampling/noise.py: gumbel, in double precision from the uniform numbers on.
inline void check_gumbel() {
  constexpr int64_t B = 2, W = 3, V = 9001;
  const int64_t key[B * 2] = {3, 0, 5, 256}, positions[B * W] = {0, 1, 2, 7, 8, 1 << 20};
  const float temperature[B] = {1.0f, 0.5f};
  const auto mix = [](uint32_t x) {
    x = (x ^ x >> 16) * 0x21F0AAADu;
    x = (x ^ x >> 15) * 0x735A2D97u;
    return x ^ x >> 15;
  };
  double apart = 0;
  Values<Fp32> first(B * W * V);
  for (int threads : {1, 2, 3}) {
    Values<Fp32> out(first.size());
    gumbel(threads, key, positions, temperature, B, W, V, out.data());
    if (threads == 1) first = out;
    check(same(out, first), "gumbel, %d threads: other bits", threads);
  }
  for (int64_t row = 0; row < B * W; row++)
    for (int64_t id = 0; id < V; id++) {
      const uint32_t low = key[row / W * 2], high = key[row / W * 2 + 1], position = positions[row];
      const uint32_t a = mix(mix(position + low) ^ high), b = mix(mix(position ^ high) + 0x5851F42Du + low);
      const float u = (float(mix(mix(uint32_t(id) * 0x1E3779B9u + a) ^ b)) + 0.5f) * 0x1p-32f;
      const double noise = -std::log(-std::log1p(-double(std::min(u, 1 - 0x1p-24f)))) * temperature[row / W];
      apart = std::max(apart, std::abs(first[row * V + id] - noise) / (std::abs(noise) + 0.5));
    }
  check(apart < 4e-6, "gumbel: off by %g", apart);
}

// The largest, and the k largest, of logits plus noise; the first of equal ones.
inline void check_draw_and_rank(int64_t V, int64_t k, bool noisy) {
  constexpr int64_t B = 2, T = 3, W = 4;
  Values<Fp32> logits = draws<Fp32>(B * T * V);
  const Values<Fp32> noise = draws<Fp32>(B * W * V);
  const std::vector<int64_t> depth{0, 1, 3, 0, 2, 2};
  logits[V / 2] = logits[V - 1] = noisy ? logits[V - 1] : 9.0f;
  std::vector<int64_t> best(B * T), ids(B * T * k);
  Values<Fp32> scores(B * T * k);
  for (int threads : {1, 3}) {
    draw(threads, logits.data(), noisy ? noise.data() : nullptr, depth.data(), B, T, W, V, best.data());
    rank(threads, logits.data(), noisy ? noise.data() : nullptr, nullptr, B * T, T, V, k, scores.data(), ids.data());
    bool drawn = true, ranked = true;
    double apart = 0;
    for (int64_t row = 0; row < B * T; row++) {
      // Those of the k largest that have `shift` added, by falling value and rising id.
      const auto order = [&](const float* shift, int64_t count) {
        std::vector<std::tuple<float, int64_t>> all;
        for (int64_t i = 0; i < V; i++) all.emplace_back(-(logits[row * V + i] + (noisy ? shift[i] : 0)), i);
        std::partial_sort(all.begin(), all.begin() + count, all.end());
        return all;
      };
      drawn &= best[row] == std::get<1>(order(&noise[(row / T * W + depth[row]) * V], 1)[0]);
      const auto all = order(&noise[row / T * V], k);
      double sum = 0;
      for (const auto& [value, id] : all) sum += std::exp(-double(value));
      for (int64_t i = 0; i < k; i++) {
        ranked &= ids[row * k + i] == std::get<1>(all[i]);
        apart = std::max(apart, std::abs(scores[row * k + i] - (-std::get<0>(all[i]) - std::log(sum))));
      }
    }
    check(drawn, "draw of %d, %d threads", int(V), threads);
    check(ranked && apart < 1e-5, "rank of %d, %d threads: scores off by %g", int(V), threads, apart);
  }
}
