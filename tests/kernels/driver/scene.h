// Rows of a pass, and which slots they see.
#pragma once

#include "testing.h"

// T rows of B sequences at the end of n slots; each sees some slots, and of its sequence's rows those up to itself.
struct Scene {
  Rows rows;
  Values<Fp32> cosine, sine;
  std::vector<int64_t> slots;
  std::vector<char> visible;

  Scene(int64_t B, int64_t T, int64_t heads, int64_t kv_heads, int64_t hd, int64_t n) : visible(B * T * n) {
    for (int64_t row = 0; row < B * T; row++) {
      const int64_t own = n - T + row % T;
      slots.push_back(own);
      for (int64_t j = 0; j <= own; j++) visible[row * n + j] = j == own || draw_normal() > -0.5;
      for (int64_t i = 0; i < hd / 2; i++) {
        const double angle = draw_normal() * 3;
        cosine.push_back(float(std::cos(angle))), sine.push_back(float(std::sin(angle)));
      }
    }
    rows = {B, T, heads, kv_heads, hd, n, cosine.data(), sine.data(), slots.data(),
            reinterpret_cast<const bool*>(visible.data())};
  }
  // The t-th row of a scene of one sequence, alone.
  Rows alone(int64_t t) const {
    Rows one = rows;
    one.T = 1, one.cosine += t * rows.hd / 2, one.sine += t * rows.hd / 2, one.slots += t, one.visible += t * rows.n;
    return one;
  }
};
