// The parts of a step over a vocabulary (noise, the likeliest tokens), and packing.
// sampling/noise.py and kernels/backend.py define them. Sums over a vocabulary run over chunks of
// fixed size, added in order: the threads change nothing.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels.h"
#include "team.h"
#include "vectors.h"

namespace eagle {

namespace {

constexpr int64_t CHUNK = 4096;  // of a vocabulary, that a thread takes at a time
constexpr float LEAST = -std::numeric_limits<float>::infinity();

int64_t chunks_of(int64_t V) { return (V + CHUNK - 1) / CHUNK; }

// body(row, chunk, first, end): chunks of all rows, side by side. Then all have met.
template <class Body>
void by_chunks(int threads, int64_t rows, int64_t V, const Body& body) {
  const int64_t chunks = chunks_of(V);
  Team::run(threads, [&](const Team& team) {
    team.share(rows * chunks, [&](int64_t i) {
      body(i / chunks, i % chunks, i % chunks * CHUNK, std::min(V, (i % chunks + 1) * CHUNK));
    });
  });
}

Floats shifted(const float* logits, const float* noise, int64_t i, int64_t rest) {
  const Floats x = Fp32::get(logits + i, rest);
  return noise ? x + Fp32::get(noise + i, rest) : x;
}

// ln x for x > 0, to a relative 2e-7: x is 2^n * m with m in [sqrt(1/2), sqrt(2)).
Floats logarithm(Floats x) {
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

Words mixed(Words x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0x735A2D97u;
  return x ^ (x >> 15);
}
uint32_t mixed(uint32_t x) { return mixed(broadcast(x))[0]; }

}  // namespace

int64_t Side::row(int64_t block, int64_t column) const {
  const int64_t rows = paired ? N / 2 : N, row = block * width() + column % width();
  return row < rows ? column / width() * rows + row : -1;
}

void pack(int threads, const void* weight, const Side& side, int64_t words, int64_t size, uint32_t flip, void* out) {
  const auto run = [&](auto word) {
    using Word = decltype(word);
    constexpr int64_t TILE = 16;  // words of every row, whose cache lines stay
    const auto* from = static_cast<const Word*>(weight);
    const int64_t columns = side.columns;
    Team::run(threads, [&](const Team& team) {
      team.share(side.blocks(), [&](int64_t b) {
        Word* block = static_cast<Word*>(out) + b * words * columns;
        for (int64_t first = 0; first < words; first += TILE)
          for (int64_t c = 0; c < columns; c++) {
            const int64_t row = side.row(b, c), end = std::min(words, first + TILE);
            if (row < 0) for (int64_t k = first; k < end; k++) block[k * columns + c] = Word(flip);
            else for (int64_t k = first; k < end; k++) block[k * columns + c] = from[row * words + k] ^ Word(flip);
          }
      });
    });
  };
  if (size == 1) run(uint8_t());
  else if (size == 2) run(uint16_t());
  else run(uint32_t());
}

void pack_nibbles(int threads, const uint8_t* weight, const Side& side, int64_t K, int64_t per_word, uint8_t* out) {
  constexpr int64_t TILE = 64;  // bytes of every row
  const int64_t half = side.columns / 2, step = half * per_word;
  Team::run(threads, [&](const Team& team) {
    team.share(side.blocks(), [&](int64_t b) {
      uint8_t* block = out + b * K * half;
      for (int64_t first = 0; first < K / 2; first += TILE)
        for (int64_t c = 0; c < half; c++) {
          const int64_t low = side.row(b, c), high = side.row(b, c + half), end = std::min(K / 2, first + TILE);
          for (int64_t j = first; j < end; j++) {
            const int l = low < 0 ? 0x88 : weight[low * K / 2 + j], h = high < 0 ? 0x88 : weight[high * K / 2 + j];
            const int64_t k = 2 * j, next = k + 1;
            block[k / per_word * step + c * per_word + k % per_word] = uint8_t((l & 15) | (h & 15) << 4);
            block[next / per_word * step + c * per_word + next % per_word] = uint8_t(l >> 4 | (h & 0xF0));
          }
        }
    });
  });
}

void gumbel(int threads, const int64_t* key, const int64_t* positions, const float* temperature, int64_t B,
            int64_t W, int64_t V, float* out) {
  by_chunks(threads, B * W, V, [&](int64_t row, int64_t, int64_t first, int64_t end) {
    const uint32_t low = key[row / W * 2], high = key[row / W * 2 + 1], position = positions[row];
    const uint32_t a = mixed(mixed(position + low) ^ high), b = mixed(mixed(position ^ high) + 0x5851F42Du + low);
    const float scale = temperature[row / W];
    Words lanes{};
    for (int l = 0; l < LANES; l++) lanes[l] = l;
    for (int64_t i = first; i < end; i += LANES) {
      const Words bits = mixed(mixed((lanes + uint32_t(i)) * 0x1E3779B9u + a) ^ b);
      // Halves are exact as floats; of their sum, as of the whole number, the nearest float is taken.
      const Floats whole = to_floats((Ints)(bits >> 16)) * 65536.0f + to_floats((Ints)(bits & 0xFFFFu));
      Floats u = (whole + 0.5f) * 0x1p-32f;
      u = u < 1 - 0x1p-24f ? u : broadcast(1 - 0x1p-24f);
      // ln(1 - u) where 1 - u is rounded: scaled by what u was rounded to.
      const Floats rest = 1.0f - u, kept = 1.0f - rest;
      const Floats ratio = u / (kept > 0.0f ? kept : u);
      const Floats minus_log = kept > 0.0f ? -logarithm(rest) * ratio : u;
      Fp32::put(out + row * V + i, -logarithm(minus_log) * scale, end - i);
    }
  });
}

void draw(int threads, const float* logits, const float* noise, const int64_t* depth, int64_t B, int64_t T,
          int64_t W, int64_t V, int64_t* out) {
  const int64_t chunks = chunks_of(V);
  std::vector<Best> found(B * T * chunks);
  by_chunks(threads, B * T, V, [&](int64_t row, int64_t chunk, int64_t first, int64_t end) {
    const float* shift = noise ? noise + (row / T * W + (depth ? depth[row] : 0)) * V : nullptr;
    Floats most = broadcast(LEAST);
    Ints at = Ints{} + int32_t(first);
    for (int64_t i = first; i < end; i += LANES) {
      Floats x = shifted(logits + row * V, shift, i, end - i);
      if (end - i < LANES)
        for (int64_t l = end - i; l < LANES; l++) x[l] = LEAST;
      at = x > most ? Ints{} + int32_t(i) : at;
      most = x > most ? x : most;
    }
    Best best{LEAST, first};
    for (int l = 0; l < LANES; l++) {
      const Best one{most[l], at[l] + (most[l] > LEAST ? l : 0)};
      if (one.before(best)) best = one;
    }
    found[row * chunks + chunk] = best;
  });
  for (int64_t row = 0; row < B * T; row++) {
    Best best = found[row * chunks];
    for (int64_t chunk = 1; chunk < chunks; chunk++)
      if (found[row * chunks + chunk].before(best)) best = found[row * chunks + chunk];
    out[row] = best.id;
  }
}

void rank(int threads, const float* logits, const float* noise, const int64_t* names, int64_t rows, int64_t shared,
          int64_t V, int64_t k, float* scores, int64_t* ids) {
  struct Chunk {
    float most, sum;
    std::vector<Best> best;  // k at most, in order
  };
  const int64_t chunks = chunks_of(V);
  std::vector<Chunk> found(rows * chunks);
  by_chunks(threads, rows, V, [&](int64_t row, int64_t chunk, int64_t first, int64_t end) {
    const float *from = logits + row * V, *shift = noise ? noise + row / shared * V : nullptr;
    Chunk& mine = found[row * chunks + chunk];
    std::vector<Best>& best = mine.best;
    float least = LEAST;  // of the k best so far
    for (int64_t i = first; i < end; i += LANES) {
      const Floats x = shifted(from, shift, i, end - i);
      const Ints larger = x > least;
      int any = 0;
      for (int l = 0; l < LANES; l++) any |= larger[l];
      if (!any && int64_t(best.size()) == k) continue;
      for (int64_t l = 0; l < std::min<int64_t>(LANES, end - i); l++) {
        const Best one{x[l], i + l};
        if (int64_t(best.size()) == k) {
          if (!one.before(best.back())) continue;
          best.pop_back();
        }
        best.insert(std::upper_bound(best.begin(), best.end(), one, Best::first), one);
      }
      least = int64_t(best.size()) == k ? best.back().value : LEAST;
    }
    mine.most = best.front().value;
    Floats sum{};
    for (int64_t i = first; i < end; i += LANES) {
      Floats e = exponential(shifted(from, shift, i, end - i) - mine.most);
      if (end - i < LANES)
        for (int64_t l = end - i; l < LANES; l++) e[l] = 0;
      sum += e;
    }
    mine.sum = 0;
    for (int l = 0; l < LANES; l++) mine.sum += sum[l];
  });
  for (int64_t row = 0; row < rows; row++) {
    const Chunk* of_row = &found[row * chunks];
    std::vector<Best> best;
    float most = LEAST;
    double sum = 0;
    for (int64_t c = 0; c < chunks; c++) {
      best.insert(best.end(), of_row[c].best.begin(), of_row[c].best.end());
      most = std::max(most, of_row[c].most);
    }
    for (int64_t c = 0; c < chunks; c++) sum += of_row[c].sum * std::exp(double(of_row[c].most) - most);
    std::partial_sort(best.begin(), best.begin() + k, best.end(), Best::first);
    const float all = most + float(std::log(sum));
    for (int64_t i = 0; i < k; i++) {
      scores[row * k + i] = best[i].value - all;
      ids[row * k + i] = names ? names[best[i].id] : best[i].id;
    }
  }
}

void angles(const int64_t* positions, const float* inverse, float factor, int64_t rows, int64_t half,
            float* cosine, float* sine) {
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < half; i++) {
      const float angle = float(positions[row]) * inverse[i];
      cosine[row * half + i] = std::cos(angle) * factor, sine[row * half + i] = std::sin(angle) * factor;
    }
}

}  // namespace eagle
