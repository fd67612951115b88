#include "layers.h"

namespace eagle {
template struct Kernels<Fp32>;

std::vector<int64_t> layout() { return {BLOCK, Read<Bf16>::PER_WORD, BYTES_PER_WORD, WEIGHT_OFFSET, NIBBLES_PER_WORD}; }
}  // namespace eagle
