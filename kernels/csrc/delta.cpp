// Gated delta nets over trees, as networks/hybrid.py defines them. A token's numbers come from the state at a boundary
// and from its own path, in the path's order and by the same code, whatever other tokens a pass has.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "team.h"

#define ONE_CODE __attribute__((noinline))  // inlined twice, sums could be rounded in two ways

namespace eagle {

namespace {

constexpr int64_t BLOCK = 16, LEVELS = 16, OPEN = BLOCK + LEVELS;  // as in networks/hybrid.py

int64_t base(int64_t position) { return position < LEVELS ? 0 : (position - LEVELS) / BLOCK * BLOCK; }

ONE_CODE float dot(const float* a, const float* b, int64_t n) {
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
ONE_CODE void add(float* to, float weight, const float* x, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] += weight * x[i];
}

// One head of one sequence.
class Head {
 public:
  Head(const Delta& d, int64_t b, int64_t h)
      : d(d), b(b), h(h), k((OPEN + d.T) * d.dk), u((OPEN + d.T) * d.dv), total(OPEN + d.T), q(d.dk), v(d.dv), read(d.dv) {}

  // Moves a state from `start` to the boundary of rows after `length` tokens. Returns that.
  int64_t advance(float* state, int64_t start, int64_t length) {
    for (; start < base(length); start += BLOCK) {
      for (int64_t i = 0; i < BLOCK; i++) token(state, start + i, i, i, nullptr, nullptr);
      step(state);
    }
    return start;
  }

  // The outputs of rows first ... first + count - 1, which come after `length` tokens; `state` is at their boundary
  // and may be moved on.
  void rows(float* state, int64_t start, int64_t length, int64_t first, int64_t count) {
    const int64_t* positions = d.positions + b * d.T + first;
    const int64_t last = base(*std::max_element(positions, positions + count));
    for (;; start += BLOCK) {
      const int64_t before = length - start;
      for (int64_t i = 0; i < before; i++) token(state, start + i, i, i, nullptr, nullptr);
      for (int64_t t = 0; t < count; t++) {
        const bool* sees = d.local + (b * d.T + first + t) * d.T + first;
        float* out = d.out + ((b * d.T + first + t) * d.nv + h) * d.dv;
        token(state, length + t, before + t, before, sees, base(positions[t]) == start ? out : nullptr);
      }
      if (start >= last) return;
      step(state);
    }
  }

 private:
  const Delta& d;
  const int64_t b, h;
  std::vector<float> k, u, total, q, v, read;  // k, u and the sum of g by the number of a token

  float get(int64_t slot, int64_t i) const {
    const int64_t at = (b * d.ring + slot % d.ring) * (2 * d.nk * d.dk + d.nv * d.dv) + i;
    if (!d.bf16) return static_cast<const float*>(d.mixed)[at];
    const uint32_t bits = uint32_t(static_cast<const uint16_t*>(d.mixed)[at]) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
  void key(int64_t slot, int64_t from, float scale, float* to) const {
    for (int64_t i = 0; i < d.dk; i++) to[i] = get(slot, from + i);
    const float length = std::sqrt(dot(to, to, d.dk) + 1e-6f);
    for (int64_t i = 0; i < d.dk; i++) to[i] = to[i] / length * scale;
  }
  void apply(const float* state, const float* x, float* to) const {
    std::fill(to, to + d.dv, 0.0f);
    for (int64_t i = 0; i < d.dk; i++) add(to, x[i], state + i * d.dv, d.dv);
  }

  // Token `me`, in this slot, sees the first `before` tokens, of those after them what `sees` says, and itself.
  ONE_CODE void token(const float* state, int64_t slot, int64_t me, int64_t before, const bool* sees, float* out) {
    const int64_t head = h / (d.nv / d.nk);
    const float* rates = d.rates + (b * d.ring + slot % d.ring) * 2 * d.nv;
    const float step = rates[d.nv + h];
    float *mine = &k[me * d.dk], *change = &u[me * d.dv];
    key(slot, (d.nk + head) * d.dk, 1, mine);
    for (int64_t i = 0; i < d.dv; i++) v[i] = get(slot, 2 * d.nk * d.dk + h * d.dv + i);
    const auto above = [&](int64_t i) { return i < before || (i < me && sees[i - before]); };
    int64_t parent = me - 1;
    while (parent >= 0 && !above(parent)) parent--;
    total[me] = (parent < 0 ? 0 : total[parent]) + rates[h];
    const float decay = std::exp(total[me]);
    apply(state, mine, read.data());
    for (int64_t i = 0; i < d.dv; i++) change[i] = step * (v[i] - decay * read[i]);
    for (int64_t i = 0; i < me; i++)
      if (above(i)) {
        const float near = step * std::exp(total[me] - total[i]) * dot(mine, &k[i * d.dk], d.dk);
        add(change, -near, &u[i * d.dv], d.dv);
      }
    if (!out) return;
    key(slot, head * d.dk, 1 / std::sqrt(float(d.dk)), q.data());
    apply(state, q.data(), out);
    for (int64_t i = 0; i < d.dv; i++) out[i] *= decay;
    for (int64_t i = 0; i <= me; i++)
      if (i == me || above(i))
        add(out, std::exp(total[me] - total[i]) * dot(q.data(), &k[i * d.dk], d.dk), &u[i * d.dv], d.dv);
  }

  // Moves a state over the first BLOCK tokens.
  ONE_CODE void step(float* state) const {
    const float decay = std::exp(total[BLOCK - 1]);
    for (int64_t i = 0; i < d.dk * d.dv; i++) state[i] *= decay;
    for (int64_t j = 0; j < BLOCK; j++) {
      const float fade = std::exp(total[BLOCK - 1] - total[j]);
      for (int64_t i = 0; i < d.dk; i++) add(state + i * d.dv, fade * k[j * d.dk + i], &u[j * d.dv], d.dv);
    }
  }
};

}  // namespace

void delta(int threads, const Delta& d) {
  const int64_t size = d.dk * d.dv;
  Team::run(threads, [&](const Team& team) {
    team.share(d.B * d.nv, [&](int64_t i) {
      const int64_t b = i / d.nv, length = d.length[b], *positions = d.positions + b * d.T;
      Head head(d, b, i % d.nv);
      float* kept = d.state + i * size;
      int64_t start = d.start[b];
      if (!length) start = 0, std::fill(kept, kept + size, 0.0f);
      start = head.advance(kept, start, length);
      std::vector<float> state(kept, kept + size);
      bool chain = true;
      for (int64_t t = 0; t < d.T; t++) chain &= positions[t] == length + t;
      const int64_t most = chain ? BLOCK : d.T;
      for (int64_t first = 0; first < d.T; first += most) {
        start = head.advance(state.data(), start, length + first);
        std::vector<float> moving(state);  // `rows` may move it on
        head.rows(moving.data(), start, length + first, first, std::min(most, d.T - first));
      }
    });
  });
  for (int64_t b = 0; b < d.B; b++) d.start[b] = std::max(d.length[b] ? d.start[b] : 0, base(d.length[b]));
}

}  // namespace eagle
