#include "in_bytes.h"

namespace eagle {

std::vector<int64_t> byte_blocks(int64_t hd) {
  return {BLOCK_SLOTS, ByteBlock::key_bytes(hd), ByteBlock::value_bytes(hd)};
}

namespace {

// The same of one head of a sequence. byte(slot, i): the i-th of a slot's `size`.
template <class Byte>
void move_head(const Cache& cache, int64_t b, int64_t h, int64_t size, const int64_t* from, const int64_t* to,
               int64_t W, const Byte& byte) {
  std::vector<char> kept(W * size);
  std::vector<float> steps(W);
  for (int64_t i = 0; i < W; i++) {
    const ByteBlock slot(cache, b, from[i], h);
    steps[i] = slot.step();
    for (int64_t d = 0; d < size; d++) kept[i * size + d] = byte(slot, d);
  }
  for (int64_t i = 0; i < W; i++) {
    const ByteBlock slot(cache, b, to[i], h);
    slot.step() = steps[i];
    for (int64_t d = 0; d < size; d++) byte(slot, d) = kept[i * size + d];
  }
}

}  // namespace

void move_bytes(const Cache& k, const Cache& v, int64_t kv_heads, int64_t hd, const int64_t* from, const int64_t* to,
                int64_t B, int64_t W) {
  const int64_t words = ByteBlock::words(hd);
  for (int64_t b = 0; b < B; b++, from += W, to += W)
    for (int64_t h = 0; h < kv_heads; h++) {
      move_head(k, b, h, hd, from, to, W, [&](const ByteBlock& slot, int64_t d) -> char& {
        return slot.key(words)[d / BYTES_PER_WORD * ByteBlock::KEY_STRIDE + d % BYTES_PER_WORD];
      });
      move_head(v, b, h, hd, from, to, W, [](const ByteBlock& slot, int64_t d) -> char& { return slot.value(d); });
    }
}

}  // namespace eagle
