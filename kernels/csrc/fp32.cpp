#include "layers.h"

namespace eagle {
template struct Kernels<Fp32>;

std::vector<int64_t> layout() { return {BLOCK, Input<Bf16>::PER_WORD, BYTES_PER_WORD, WEIGHT_OFFSET, NIBBLES_PER_WORD}; }

std::vector<int64_t> int8_block_sizes(int64_t hd) {
  return {BLOCK_SLOTS, Int8Block::key_bytes(hd), Int8Block::value_bytes(hd)};
}
}  // namespace eagle
