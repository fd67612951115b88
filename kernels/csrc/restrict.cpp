// Top-k and top-p as masks over logits, as sampling/restrict.py has them: no sort, exact ties.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels.h"
#include "team.h"
#include "vectors.h"

namespace eagle {

namespace {

// The largest t for which the weights of keys >= t sum up to at least `need`: digit by digit, from the top.
template <class WeightOf>
uint32_t highest_threshold(const std::vector<uint32_t>& keys, uint64_t need, const WeightOf& weight_of) {
  uint32_t found = 0;
  uint64_t above = 0;  // weight of keys whose digits so far are larger
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

void restrict_row(const float* logits, int64_t V, float temperature, int64_t top_k, float top_p, float* out) {
  std::vector<uint32_t> keys(V);
  for (int64_t i = 0; i < V; i++) keys[i] = ordered(logits[i] + 0.0f);  // -0 and 0 are tied
  uint32_t least = 0;
  if (top_k > 0 && top_k < V) least = highest_threshold(keys, top_k, [](size_t) { return 1; });
  if (top_p < 1) {
    // In whole 2^-32 of the likeliest token's weight: such sums do not depend on the order.
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < V; i++) most = std::max(most, logits[i] / temperature);
    std::vector<uint64_t> mass(V);
    uint64_t total = 0;
    for (int64_t i = 0; i < V; i += LANES) {
      const int64_t rest = V - i;
      alignas(64) float weights[LANES];
      store(weights, exponential(Fp32::get(logits + i, rest) / temperature - most) * 4294967296.0f);
      for (int64_t l = 0; l < std::min<int64_t>(LANES, rest); l++)
        if (keys[i + l] >= least) total += mass[i + l] = uint64_t(weights[l]);
    }
    const auto need = uint64_t(std::ceil(double(total) * double(top_p)));
    least = std::max(least, highest_threshold(keys, need, [&](size_t i) { return mass[i]; }));
  }
  for (int64_t i = 0; i < V; i++)
    out[i] = keys[i] >= least ? logits[i] : -std::numeric_limits<float>::infinity();
}

}  // namespace

void restrict_logits(int threads, const float* logits, int64_t B, int64_t T, int64_t V, const float* temperature,
                     const int64_t* top_k, const float* top_p, float* out) {
  Team::run(threads, [&](const Team& team) {
    team.share(B * T, [&](int64_t row) {
      const int64_t b = row / T;
      const float *from = logits + row * V;
      const float warm = temperature[b];
      if (warm > 0 && (top_k[b] > 0 || top_p[b] < 1))
        restrict_row(from, V, warm, top_k[b], top_p[b], out + row * V);
      else std::copy(from, from + V, out + row * V);
    });
  });
}

}  // namespace eagle
