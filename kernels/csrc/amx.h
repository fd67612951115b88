// AMX: eight tiles of up to 16 rows of 64 bytes, and products of them, which read a block of a packed weight as
// it lies. Linux gives a process the tiles if it asks for them, as kernels/isa.py does.
//
// Not Intel's intrinsics: GCC 12's do not tell the compiler that they read or write memory.
#pragma once

namespace eagle {

inline void shape_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void release_tiles() { asm volatile("tilerelease"); }  // from here on a thread has fewer registers to save

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
// SUM += A times B: pairs of bfloat16, added to floats, or fours of bytes, with a sign but in A or B, to integers.
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
