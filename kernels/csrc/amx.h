// AMX: eight tiles of up to 16 rows of 64 bytes, and their products, which read blocks of packed weights directly. A
// process must request the tiles from Linux, see kernels/isa.py.
//
// Inline assembly, as GCC 12's intrinsics do not tell the compiler that they access memory.
#pragma once

namespace eagle {

inline void shape_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void release_tiles() { asm volatile("tilerelease"); }  // context switches save fewer registers then

template <int T>
inline void zero_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(stride) : "memory");
}
template <int T>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(to), "r"(stride) : "memory");
}
// SUM += A * B: pairs of bfloat16 to float32, or four bytes to int32. Bytes are signed except in A or B, see `Dot`.
template <Dot DOT, int SUM, int A, int B>
inline void dot_tiles() {
#define DOT_TILES(instruction) \
  asm volatile(instruction " %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B))
  if constexpr (DOT == Dot::PAIRS) DOT_TILES("tdpbf16ps");
  if constexpr (DOT == Dot::BYTES) DOT_TILES("tdpbssd");
  if constexpr (DOT == Dot::UNSIGNED_A) DOT_TILES("tdpbusd");
  if constexpr (DOT == Dot::UNSIGNED_B) DOT_TILES("tdpbsud");
#undef DOT_TILES
}

}  // namespace eagle
