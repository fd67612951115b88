// The check of attention over a cache in bytes.
#pragma once

#include "packing.h"
#include "scene.h"
#include "testing.h"

// A cache in bytes of one sequence, with keys and values of its own.
template <class E>
struct ByteCache {
  std::vector<char> keys, values;
  Cache k, v;

  ByteCache(const Values<E>& qkv, int64_t kv_heads, int64_t hd, int64_t n) {  // as many query heads
    const std::vector<int64_t> sizes = byte_blocks(hd);
    const int64_t blocks = (n + sizes[0] - 1) / sizes[0];
    keys.resize(kv_heads * blocks * sizes[1]), values.resize(kv_heads * blocks * sizes[2]);
    k = {keys.data(), 0, sizes[1], blocks * sizes[1], true}, v = {values.data(), 0, sizes[2], blocks * sizes[2], true};
    const Values<Fp32> cosine(n * hd / 2, 1), sine(n * hd / 2, 0);
    std::vector<int64_t> slots;
    std::vector<char> visible(n * n);
    for (int64_t i = 0; i < n; i++) slots.push_back(i), visible[i * n + i] = true;
    Values<E> out(n * kv_heads * hd);
    Kernels<E>::attend(1, {1, n, kv_heads, kv_heads, hd, n, cosine.data(), sine.data(), slots.data(),
                           reinterpret_cast<const bool*>(visible.data())}, qkv.data(),
                       {nullptr, nullptr, 0, k, v}, out.data());
  }
};

// Attention over keys and values in bytes, against that over rounded ones, and against its rows alone.
template <class E>
void check_bytes(int64_t T, int64_t heads, int64_t kv_heads, int64_t hd, int64_t n) {
  using D = Dtype<E>;
  const Scene scene(1, T, heads, kv_heads, hd, n);
  const int64_t width = scene.rows.width(), stride = kv_heads * hd;
  const Values<E> qkv = draws<E>(T * width), stored = draws<E>(n * 3 * stride);
  ByteCache<E> cache(stored, kv_heads, hd, n);
  const auto run = [&](int threads, const Rows& rows, const Values<E>& qkv) {
    Values<E> out(rows.T * heads * hd);
    Kernels<E>::attend(threads, rows, qkv.data(), {nullptr, nullptr, 0, cache.k, cache.v}, out.data());
    return out;
  };
  char name[99];
  std::snprintf(name, sizeof name, "%s attend in bytes %d, %d heads of %d", D::NAME, int(T), int(heads), int(hd));
  const Values<E> found = run(1, scene.rows, qkv);
  // Heads [.., hd] of keys and values, in steps of their largest / 127.
  const auto rounded = [&](Doubles head) {
    double most = 1e-30;
    for (double x : head) most = std::max(most, std::abs(x));
    for (double& x : head) x = std::nearbyint(x * 127 / most) * most / 127;
    return head;
  };
  const auto head_at = [&](const Values<E>& from, int64_t place, int64_t turn) {  // turn: of which row, -1: of none
    Doubles head(hd), out;
    std::transform(&from[place], &from[place] + hd, head.begin(), D::get);
    for (int64_t i = 0; turn >= 0 && i < hd; i++) {
      const double c = scene.cosine[turn * hd / 2 + i % (hd / 2)], s = scene.sine[turn * hd / 2 + i % (hd / 2)];
      out.push_back(i < hd / 2 ? head[i] * c - head[i + hd / 2] * s : head[i] * c + head[i - hd / 2] * s);
    }
    return turn < 0 ? head : out;
  };
  Doubles expected;
  for (int64_t row = 0; row < T; row++)
    for (int64_t h = 0; h < heads; h++) {
      const Doubles query = head_at(qkv, row * width + h * hd, row);
      const int64_t kv = h / (heads / kv_heads);
      Doubles sum(hd);
      double total = 0;
      for (int64_t j = 0; j < n; j++) {
        if (!scene.visible[row * n + j]) continue;
        const int64_t own = j - (n - T);  // the row that was stored there, if any
        const int64_t at = own >= 0 ? own * width + (heads + kv) * hd : j * 3 * stride + stride + kv * hd;
        const Doubles key = rounded(head_at(own >= 0 ? qkv : stored, at, own));
        const Doubles value = rounded(head_at(own >= 0 ? qkv : stored, at + stride, -1));
        double score = 0;
        for (int64_t i = 0; i < hd; i++) score += query[i] * key[i];
        const double weight = std::exp(score / std::sqrt(double(hd)));
        total += weight;
        for (int64_t i = 0; i < hd; i++) sum[i] += weight * value[i];
      }
      for (double value : sum) expected.push_back(value / total);
    }
  const double apart = error<E>(found, expected);
  check(apart <= (packing().bytes_per_word == 4 ? 0.05 : 0.012), "%s: off by %g", name, apart);
  for (int threads : {2, 3, 5})
    check(same(run(threads, scene.rows, qkv), found), "%s: %d threads", name, threads);
  for (int64_t t = 0; t < T; t++)
    check(same(run(1 + t % 3, scene.alone(t), part_of(qkv, t * width, width)),
               part_of(found, t * heads * hd, heads * hd)), "%s: row %d alone", name, int(t));
}
