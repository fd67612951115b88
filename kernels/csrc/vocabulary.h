// Operations over the vocabulary: Gumbel noise, top-k and top-p, top-1 and top-k tokens. The reference
// implementations are in engine/sampling.py and engine/step.py. Sums are of integers, or run over chunks of fixed size
// and are added in order, so results do not depend on the number of threads.
#pragma once

#include "team.h"
#include "tensors.h"
#include "vectors.h"

namespace eagle {

constexpr int64_t CHUNK = 4096;  // tokens per task

inline int64_t chunks_of(int64_t V) { return (V + CHUNK - 1) / CHUNK; }

// Call body(row, chunk, first, end) for all chunks of all rows in parallel.
template <class Body>
void for_each_chunk(int64_t rows, int64_t V, const Body& body) {
  const int64_t chunks = chunks_of(V);
  Team::run(threads(), [&](const Team& team) {
    team.parallel_for(rows * chunks, [&](int64_t i) {
      body(i % rows, i / rows, i / rows * CHUNK, std::min(V, (i / rows + 1) * CHUNK));
    });
  });
}

inline Floats shifted(const float* logits, const float* noise, int64_t i, int64_t rest) {
  const Floats x = Fp32::get(logits + i, rest);
  return noise ? x + Fp32::get(noise + i, rest) : x;
}

// ln x for x > 0, with a relative error of 2e-7: x = 2^n * m, m in [sqrt(1/2), sqrt(2)).
inline Floats logarithm(Floats x) {
  const Ints bits = (Ints)x - 0x3F3504F3;
  const Ints n = bits >> 23;
  const Floats m = (Floats)((bits & 0x7FFFFF) + 0x3F3504F3) - 1.0f;
  Floats p = broadcast(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = fma(p, m, broadcast(c));
  const Floats square = m * m, e = to_floats(n);
  const Floats low = fma(e, broadcast(-2.12194440e-4f), p * m * square) - 0.5f * square;
  return fma(e, broadcast(0.693359375f), m + low);
}

inline Words hashed(Words x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0x735A2D97u;
  return x ^ (x >> 15);
}
inline uint32_t hashed(uint32_t x) { return hashed(broadcast(x))[0]; }

// Gumbel noise [B, W, V] for key [B, 2] and positions [B, W], times temperature [B] -> copies of the three, the
// noise. Rows of the previous result are reused: most positions of a draft recur in the next step.
std::tuple<Tensor, Tensor, Tensor, Numbers> gumbel(const Longs& key, const Longs& positions, const Numbers& temperature,
                                                   int64_t V, const Maybe& earlier_key, const Maybe& earlier_positions,
                                                   const Maybe& earlier_temperature, const Maybe& earlier) {
  const int64_t B = positions.size(0), W = positions.size(1);
  const int64_t known = earlier && earlier->size(0) == B && earlier->size(2) == V ? earlier->size(1) : 0;
  const int64_t *keys = longs(earlier_key), *known_positions = longs(earlier_positions);
  const float *scales = floats(earlier_temperature), *values = floats(earlier);
  const Numbers out({B, W, V});
  for_each_chunk(B * W, V, [&](int64_t row, int64_t, int64_t first, int64_t end) {
    const int64_t b = row / W;
    if (known && std::equal(keys + b * 2, keys + b * 2 + 2, &key[b * 2]) && scales[b] == temperature[b])
      for (int64_t same = b * known; same < (b + 1) * known; same++)
        if (known_positions[same] == positions[row]) {
          std::copy(values + same * V + first, values + same * V + end, &out[row * V + first]);
          return;
        }
    const uint32_t low = key[b * 2], high = key[b * 2 + 1], position = positions[row];
    const uint32_t salt = hashed(hashed(position + low) ^ high);
    const uint32_t salt2 = hashed(hashed(position ^ high) + 0x5851F42Du + low);
    const float scale = temperature[b];
    Words lanes{};
    for (int l = 0; l < LANES; l++) lanes[l] = l;
    for (int64_t i = first; i < end; i += LANES) {
      const Words bits = hashed(hashed((lanes + uint32_t(i)) * 0x1E3779B9u + salt) ^ salt2);
      // 16-bit halves are exact as floats; their sum is rounded once.
      const Floats whole = to_floats((Ints)(bits >> 16)) * 65536.0f + to_floats((Ints)(bits & 0xFFFFu));
      Floats u = (whole + 0.5f) * 0x1p-32f;
      u = u < 1 - 0x1p-24f ? u : broadcast(1 - 0x1p-24f);
      // -ln(1 - u), corrected for the rounding of 1 - u, which matters near 1.
      const Floats rest = 1.0f - u, lost = u - (1.0f - rest), minus_log = lost - logarithm(rest);
      Fp32::put(&out[row * V + i], -logarithm(minus_log) * scale, end - i);
    }
  });
  return {copy(key), copy(positions), copy(temperature), out};
}

// Argmax [B, T] of logits [B, T, V] plus noise [B, W, V], if any, at each token's depth [B, T] (default 0); -1 where a
// logit is NaN, or the largest is not finite.
Longs draw(const Numbers& logits, const Maybe& noise, const Maybe& depth) {
  const int64_t B = logits.size(0), T = logits.size(1), V = logits.size(2), chunks = chunks_of(V);
  const int64_t W = noise ? noise->size(1) : 0, *depths = longs(depth);
  const float* shifts = floats(noise);
  const Longs out({B, T});
  std::vector<Candidate> found(B * T * chunks);
  for_each_chunk(B * T, V, [&](int64_t row, int64_t chunk, int64_t first, int64_t end) {
    const float* shift = shifts ? shifts + (row / T * W + (depths ? depths[row] : 0)) * V : nullptr;
    Floats top = broadcast(NEG_INF);
    Ints at = Ints{} + int32_t(first), nan{};
    for (int64_t i = first; i < end; i += LANES) {
      Floats x = shifted(&logits[row * V], shift, i, end - i);
      if (end - i < LANES)
        for (int64_t l = end - i; l < LANES; l++) x[l] = NEG_INF;
      at = x > top ? Ints{} + int32_t(i) : at;
      top = x > top ? x : top;
      nan |= x != x;
    }
    Candidate best{sum_of_lanes(nan) ? -NEG_INF : NEG_INF, first};
    for (int l = 0; l < LANES; l++) {
      const Candidate one{top[l], at[l] + (top[l] > NEG_INF ? l : 0)};
      if (one < best) best = one;
    }
    found[row * chunks + chunk] = best;
  });
  for (int64_t row = 0; row < B * T; row++) {
    const Candidate best = *std::min_element(&found[row * chunks], &found[row * chunks] + chunks);
    out[row] = std::abs(best.value) < -NEG_INF ? best.id : -1;
  }
  return out;
}

// Top k of logits [B, R, V] plus noise [B, R or 1, V], if any -> log-probabilities, ids [B, R, k]. token_ids [V]: the
// token id of each column, if that is not its index.
std::tuple<Numbers, Longs> rank(const Numbers& logits, const Maybe& noise, int64_t k, const Maybe& token_ids) {
  const int64_t B = logits.size(0), R = logits.size(1), V = logits.size(2), rows = B * R;
  const int64_t shared = noise ? R / noise->size(1) : 1, *id_of = longs(token_ids);
  const float* shifts = floats(noise);
  const Numbers scores({B, R, k});
  const Longs ids({B, R, k});
  struct Chunk {
    float sum;
    std::vector<Candidate> best;  // at most k, in order
  };
  const int64_t chunks = chunks_of(V);
  std::vector<Chunk> found(rows * chunks);
  for_each_chunk(rows, V, [&](int64_t row, int64_t chunk, int64_t first, int64_t end) {
    const float *from = &logits[row * V], *shift = shifts ? shifts + row / shared * V : nullptr;
    Chunk& result = found[row * chunks + chunk];
    std::vector<Candidate>& best = result.best;
    float threshold = NEG_INF;  // the k-th best so far
    for (int64_t i = first; i < end; i += LANES) {
      const Floats x = shifted(from, shift, i, end - i);
      const Ints larger = x > threshold;  // -1 where true
      if (!sum_of_lanes(larger) && int64_t(best.size()) == k) continue;
      for (int64_t l = 0; l < std::min<int64_t>(LANES, end - i); l++) {
        const Candidate one{x[l], i + l};
        if (int64_t(best.size()) == k) {
          if (!(one < best.back())) continue;
          best.pop_back();
        }
        best.insert(std::upper_bound(best.begin(), best.end(), one), one);
      }
      threshold = int64_t(best.size()) == k ? best.back().value : NEG_INF;
    }
    const float peak = best.front().value;
    Floats sum{};
    for (int64_t i = first; i < end; i += LANES) {
      Floats e = exponential(shifted(from, shift, i, end - i) - peak);
      if (end - i < LANES)
        for (int64_t l = end - i; l < LANES; l++) e[l] = 0;
      sum += e;
    }
    result.sum = 0;
    for (int l = 0; l < LANES; l++) result.sum += sum[l];
  });
  for (int64_t row = 0; row < rows; row++) {
    const Chunk* of_row = &found[row * chunks];
    std::vector<Candidate> best;
    double sum = 0;
    for (int64_t c = 0; c < chunks; c++) best.insert(best.end(), of_row[c].best.begin(), of_row[c].best.end());
    std::partial_sort(best.begin(), best.begin() + k, best.end());
    const float peak = best[0].value;
    for (int64_t c = 0; c < chunks; c++) sum += of_row[c].sum * std::exp(double(of_row[c].best[0].value) - peak);
    const float log_sum = peak + float(std::log(sum));
    for (int64_t i = 0; i < k; i++) {
      scores[row * k + i] = best[i].value - log_sum;
      ids[row * k + i] = id_of ? id_of[best[i].id] : best[i].id;
    }
  }
  return {scores, ids};
}

// The largest t where the weights of keys >= t sum to at least `need`, found by radix selection from the top digit.
template <class WeightOf>
uint32_t highest_threshold(const std::vector<uint32_t>& keys, uint64_t need, const WeightOf& weight_of) {
  uint32_t found = 0;
  uint64_t above = 0;  // weight of the keys with larger leading digits
  for (const int shift : {21, 10, 0}) {
    const int bits = shift ? 11 : 10;
    uint64_t sums[2048] = {};
    for (size_t i = 0; i < keys.size(); i++)
      if (shift == 21 || keys[i] >> (shift + bits) == found >> (shift + bits))
        sums[keys[i] >> shift & ((1u << bits) - 1)] += weight_of(i);
    uint32_t digit = (1u << bits) - 1;
    while (digit && above + sums[digit] < need) above += sums[digit--];
    found |= digit << shift;
  }
  return found;
}

inline void restrict_row(const float* logits, int64_t V, float temperature, int64_t top_k, float top_p, float* out) {
  std::vector<uint32_t> keys(V);
  for (int64_t i = 0; i < V; i++) keys[i] = ordered_bits(logits[i] + 0.0f);  // -0 equals 0
  uint32_t threshold = 0;
  if (top_k > 0 && top_k < V) threshold = highest_threshold(keys, top_k, [](size_t) { return 1; });
  if (top_p < 1) {
    // Weights are integers, in 2^-32 of the top-1 token's weight, so sums are exact in any order.
    float peak = NEG_INF;
    for (int64_t i = 0; i < V; i++) peak = std::max(peak, logits[i]);
    std::vector<uint64_t> mass(V);
    uint64_t total = 0;
    for (int64_t i = 0; i < V; i += LANES) {
      const int64_t rest = V - i;
      alignas(64) float weights[LANES];
      store(weights, exponential((Fp32::get(logits + i, rest) - peak) / temperature) * 4294967296.0f);
      for (int64_t l = 0; l < std::min<int64_t>(LANES, rest); l++)
        if (keys[i + l] >= threshold) total += mass[i + l] = uint64_t(weights[l]);
    }
    const auto need = uint64_t(std::ceil(double(total) * double(top_p)));
    threshold = std::max(threshold, highest_threshold(keys, need, [&](size_t i) { return mass[i]; }));
  }
  for (int64_t i = 0; i < V; i++)
    out[i] = keys[i] >= threshold ? logits[i] : NEG_INF;
}

// Set logits [B, T, V] outside top-k (0: off) and then top-p (1: off) to -infinity, where the temperature is above 0.
// temperature, top_k, top_p [B]. Exact with ties, without sorting.
Numbers restrict(const Numbers& logits, const Numbers& temperature, const Longs& top_k, const Numbers& top_p) {
  const int64_t B = logits.size(0), T = logits.size(1), V = logits.size(2);
  const Numbers out({B, T, V});
  Team::run(threads(), [&](const Team& team) {
    team.parallel_for(B * T, [&](int64_t row) {
      const int64_t b = row / T;
      const float* from = &logits[row * V];
      if (temperature[b] > 0 && (top_k[b] > 0 || top_p[b] < 1))
        restrict_row(from, V, temperature[b], top_k[b], top_p[b], &out[row * V]);
      else std::copy(from, from + V, &out[row * V]);
    });
  });
  return out;
}

}  // namespace eagle
