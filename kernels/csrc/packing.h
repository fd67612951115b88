// Pack weights in the order in which products read them, see kernels/packed.py: pack.
#pragma once

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

// Pack rows of 4-bit values, stored as in kernels/quantized.py (value + 8, two per byte), to out [blocks, words,
// columns / 2, per_word] bytes: in the low bits a value of the first half of the columns, in the high bits one of the
// second. Rows beyond the last are 8, which is zero.
void pack_nibbles(const Of<uint8_t>& weight, bool paired, Tensor& out) {
  constexpr int64_t TILE = 64;  // bytes of every row
  const int64_t bytes = weight.size(1), half = out.size(2), per_word = out.size(3), step = half * per_word;
  auto* to = out.mutable_data_ptr<uint8_t>();
  for_each_block(weight, 2 * half, paired, [&](int64_t b, const auto& row_of) {
    uint8_t* block = to + b * 2 * bytes * half;
    for (int64_t first = 0; first < bytes; first += TILE)
      for (int64_t c = 0; c < half; c++) {
        const int64_t low = row_of(c), high = row_of(c + half), end = std::min(bytes, first + TILE);
        for (int64_t j = first; j < end; j++) {
          const int l = low < 0 ? 0x88 : weight[low * bytes + j], h = high < 0 ? 0x88 : weight[high * bytes + j];
          const int64_t k = 2 * j, next = k + 1;
          block[k / per_word * step + c * per_word + k % per_word] = uint8_t((l & 15) | (h & 15) << 4);
          block[next / per_word * step + c * per_word + next % per_word] = uint8_t(l >> 4 | (h & 0xF0));
        }
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
    uint8_t* block = to + b * out.size(1) * step;
    for (int64_t first = 0; first < bytes; first += TILE)
      for (int64_t c = 0; c < quarter; c++)
        for (int64_t j = first; j < std::min(bytes, first + TILE); j += 3) {
          const uint8_t* from[4];
          for (int i = 0; i < 4; i++) {
            const int64_t row = row_of(c + i * quarter);
            from[i] = row < 0 ? ZEROS : &weight[row * bytes + j];
          }
          for (int64_t i = 0; i < 4; i++) {
            const int64_t k = j / 3 * 4 + i;
            uint8_t* word = block + k / per_word * step + c * per_word + k % per_word;
            const auto low = [&](int row) { return from[row][i / 2] >> i % 2 * 4 & 15; };
            const auto high = [&](int row) { return (from[row][2] >> 2 * i & 3) << 2 * row; };
            for (int half : {0, 1}) word[half * quarter * per_word] = uint8_t(low(half) | low(half + 2) << 4);
            word[2 * quarter * per_word] = uint8_t(high(0) | high(1) | high(2) | high(3));
          }
        }
  });
}

}  // namespace eagle
