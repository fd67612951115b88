// The instructions of kernels/csrc/amx.h in software, in the order of Intel's definition, for processors without
// them. Where the instructions would fault, the program aborts.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace eagle {

struct SoftwareTile {
  int rows = 0, words = 0;
  uint32_t at[16][16] = {};
};
inline thread_local SoftwareTile tiles[8];  // per thread, like registers

inline void need(bool good, const char* what) {
  if (good) return;
  std::printf("tiles: %s\n", what);
  std::exit(2);
}
inline SoftwareTile& shaped(int t) {
  need(tiles[t].rows, "one is used that has no shape");
  return tiles[t];
}

inline void shape_tiles(const TileShapes& s) {
  need(s.palette == 1 && !s.start_row, "not palette 1");
  for (int t = 0; t < 16; t++) {
    need(t < 8 ? s.rows[t] <= 16 && s.row_bytes[t] <= 64 && s.row_bytes[t] % 4 == 0 : !s.rows[t] && !s.row_bytes[t],
         "larger than they are, or more");
    need(!s.rows[t] == !s.row_bytes[t], "rows without bytes");
    if (t < 8) tiles[t] = {s.rows[t], s.row_bytes[t] / 4};
  }
}
inline void release_tiles() {
  for (SoftwareTile& tile : tiles) tile = {};
}
template <int T>
void zero_tile() { std::memset(shaped(T).at, 0, sizeof tiles[T].at); }
template <int T>
void load_tile(const void* from, int64_t stride) {
  zero_tile<T>();
  for (int r = 0; r < tiles[T].rows; r++)
    std::memcpy(tiles[T].at[r], static_cast<const char*>(from) + r * stride, tiles[T].words * 4);
}
template <int T>
void store_tile(void* to, int64_t stride) {
  for (int r = 0; r < shaped(T).rows; r++)
    std::memcpy(static_cast<char*>(to) + r * stride, tiles[T].at[r], tiles[T].words * 4);
}

// Flush subnormals to 0, before and after each operation.
inline float flushed(float x) { return std::abs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float flushed(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return flushed(x);
}

template <int SUM, int A, int B>
SoftwareTile& matched() {
  const SoftwareTile &sum = shaped(SUM), &a = shaped(A), &b = shaped(B);
  need(sum.rows == a.rows && sum.words == b.words && a.words == b.rows, "shapes of a product");
  return tiles[SUM];
}
template <Dot DOT, int SUM, int A, int B>
void dot_tiles() {
  SoftwareTile& sum = matched<SUM, A, B>();
  const auto byte = [](uint32_t word, int i, bool sign) { return sign ? int8_t(word >> i) : int(uint8_t(word >> i)); };
  for (int m = 0; m < sum.rows; m++) {
    float apart[2][16] = {};
    for (int k = 0; k < tiles[A].words; k++)
      for (int n = 0; n < sum.words; n++) {
        const uint32_t a = tiles[A].at[m][k], b = tiles[B].at[k][n];
        if (DOT == Dot::PAIRS) {
          apart[0][n] = flushed(std::fma(flushed(a << 16), flushed(b << 16), apart[0][n]));
          apart[1][n] = flushed(std::fma(flushed(a & 0xFFFF0000u), flushed(b & 0xFFFF0000u), apart[1][n]));
        } else {
          for (int i = 0; i < 32; i += 8)
            sum.at[m][n] += byte(a, i, DOT != Dot::UNSIGNED_A) * byte(b, i, DOT != Dot::UNSIGNED_B);
        }
      }
    for (int n = 0; n < sum.words && DOT == Dot::PAIRS; n++) {
      const float all = flushed(flushed(sum.at[m][n]) + flushed(apart[0][n] + apart[1][n]));
      std::memcpy(&sum.at[m][n], &all, sizeof all);
    }
  }
}

}  // namespace eagle
