#include "layers.h"

namespace eagle {
template struct Kernels<Fp32>;

std::vector<int64_t> layout() { return {BLOCK, Read<Bf16>::PER_WORD, BYTES_PER_WORD, WEIGHT_OFFSET, NIBBLES_PER_WORD}; }

std::vector<int64_t> byte_blocks(int64_t hd) {
  return {BLOCK_SLOTS, ByteBlock::key_bytes(hd), ByteBlock::value_bytes(hd)};
}
}  // namespace eagle
