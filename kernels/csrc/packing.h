// Pack weights in the order in which products read them, see kernels/packed.py: pack.
#pragma once

#include <array>
#include <cstring>

#include "team.h"
#include "tensors.h"

namespace eagle {

// Call body(block, row_of) for each block of `columns` rows of a weight, on all threads. row_of(column): the weight's
// row; -1 beyond the last. paired: half of a block's columns come from the first half of the rows (gate), half from
// the second (up).
template <class Body>
void for_each_block(const Dense& weight, int64_t columns, bool paired, const Body& body) {
  const int64_t rows = weight.size(0) / (paired ? 2 : 1), width = columns / (paired ? 2 : 1);
  Team::run(threads(), [&](const Team& team) {
    team.parallel_for((rows + width - 1) / width, [&](int64_t b) {
      body(b, [=](int64_t column) {
        const int64_t row = b * width + column % width;
        return row < rows ? column / width * rows + row : -1;
      });
    });
  });
}

// Pack rows [N, words * per_word] to out [blocks, words, columns, per_word]; rows beyond N are zero. `flip` is XORed
// to each byte.
void pack(const Dense& weight, bool paired, int64_t flip, Tensor& out) {
  const int64_t words = out.size(1), columns = out.size(2), size = out.size(3) * weight.element_size();
  const auto run = [&](auto word) {
    using Word = decltype(word);
    constexpr int64_t TILE = 16;  // words of every row, which stay in cache
    const auto* from = static_cast<const Word*>(data(weight));
    auto* to = static_cast<Word*>(out.mutable_data_ptr());
    const Word flips = Word(flip * 0x01010101u);
    for_each_block(weight, columns, paired, [&](int64_t b, const auto& row_of) {
      Word* block = to + b * words * columns;
      for (int64_t first = 0; first < words; first += TILE)
        for (int64_t c = 0; c < columns; c++) {
          const int64_t row = row_of(c), end = std::min(words, first + TILE);
          for (int64_t k = first; k < end; k++) block[k * columns + c] = (row < 0 ? 0 : from[row * words + k]) ^ flips;
        }
    });
  };
  if (size == 1) run(uint8_t());
  else if (size == 2) run(uint16_t());
  else run(uint32_t());
}

template <int64_t N>
constexpr std::array<uint8_t, N> filled(uint8_t value) {
  std::array<uint8_t, N> all{};
  for (auto& one : all) one = value;
  return all;
}

// Write words of `per_word` values, `step` bytes apart.
inline void scatter_words(const uint8_t* values, int64_t count, int64_t per_word, uint8_t* to, int64_t step) {
  const auto run = [&](auto size) {  // a constant size: the copy becomes one instruction
    for (int64_t k = 0; k < count; k += size, to += step) std::memcpy(to, values + k, size);
  };
  if (per_word == 4) run(std::integral_constant<int64_t, 4>());
  else if (per_word == 2) run(std::integral_constant<int64_t, 2>());
  else run(per_word);
}

// Pack rows of 4-bit values, stored as in kernels/quantized.py (value + 8, two per byte), to out [blocks, words,
// columns / 2, per_word] bytes: in the low bits a value of the first half of the columns, in the high bits one of the
// second. Rows beyond the last are 8, which is zero.
void pack_nibbles(const Of<uint8_t>& weight, bool paired, Tensor& out) {
  constexpr int64_t TILE = 64;  // bytes of every row
  static constexpr auto ZEROS = filled<TILE>(0x88);
  const int64_t bytes = weight.size(1), half = out.size(2), per_word = out.size(3);
  auto* to = out.mutable_data_ptr<uint8_t>();
  for_each_block(weight, 2 * half, paired, [&](int64_t b, const auto& row_of) {
    for (int64_t first = 0; first < bytes; first += TILE)
      for (int64_t c = 0; c < half; c++) {
        const auto from = [&](int64_t row) { return row < 0 ? ZEROS.data() : &weight[row * bytes + first]; };
        const uint8_t *low = from(row_of(c)), *high = from(row_of(c + half));
        const int64_t count = std::min(bytes - first, TILE);
        uint8_t values[2 * TILE];  // a separate loop, which compilers vectorize
        for (int64_t j = 0; j < count; j++) {
          values[2 * j] = uint8_t((low[j] & 15) | high[j] << 4);
          values[2 * j + 1] = uint8_t(low[j] >> 4 | (high[j] & 0xF0));
        }
        uint8_t* first_word = to + 2 * (b * bytes + first) * half + c * per_word;
        scatter_words(values, 2 * count, per_word, first_word, half * per_word);
      }
  });
}

// Pack rows of 6-bit values, stored as in kernels/stored.py (value + 32, four in three bytes), to out [blocks, words,
// 3/4 columns, per_word] bytes: of each word the low four bits as `pack_nibbles` does, then the high two bits of each
// quarter of the columns. Rows beyond the last are 32, which is zero.
void pack_sixes(const Of<uint8_t>& weight, bool paired, Tensor& out) {
  static constexpr uint8_t ZEROS[] = {0, 0, 0xAA};
  constexpr int64_t TILE = 48;  // bytes of every row
  const int64_t bytes = weight.size(1), quarter = out.size(2) / 3, per_word = out.size(3);
  const int64_t step = out.size(2) * per_word;
  auto* to = out.mutable_data_ptr<uint8_t>();
  for_each_block(weight, 4 * quarter, paired, [&](int64_t b, const auto& row_of) {
    for (int64_t first = 0; first < bytes; first += TILE)
      for (int64_t c = 0; c < quarter; c++) {
        const int64_t count = std::min(bytes - first, TILE);
        uint8_t values[3][TILE / 3 * 4];
        const uint8_t* from[4];
        int64_t stride[4];
        for (int i = 0; i < 4; i++) {
          const int64_t row = row_of(c + i * quarter);
          from[i] = row < 0 ? ZEROS : &weight[row * bytes + first], stride[i] = row < 0 ? 0 : 1;
        }
        for (int64_t j = 0; j < count; j += 3)
          for (int i = 0; i < 4; i++) {
            const auto low = [&](int row) { return from[row][j * stride[row] + i / 2] >> i % 2 * 4 & 15; };
            const auto high = [&](int row) { return (from[row][j * stride[row] + 2] >> 2 * i & 3) << 2 * row; };
            const int64_t k = j / 3 * 4 + i;
            for (int part : {0, 1}) values[part][k] = uint8_t(low(part) | low(part + 2) << 4);
            values[2][k] = uint8_t(high(0) | high(1) | high(2) | high(3));
          }
        uint8_t* block = to + (b * out.size(1) + first / 3 * 4 / per_word) * step + c * per_word;
        for (int part : {0, 1, 2})
          scatter_words(values[part], count / 3 * 4, per_word, block + part * quarter * per_word, step);
      }
  });
}

}  // namespace eagle
