#include "layers.h"

namespace eagle {
template struct Kernels<Bf16>;
}  // namespace eagle
