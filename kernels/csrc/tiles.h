// Products with tiles that are made while a pass runs, and what brings vectors to the layout of a tile.
#pragma once

#include "products.h"

namespace eagle {

// The rooms of a thread end in the reverse order of their beginnings. So they come from one stack: malloc would take a
// twentieth of a step. What it does not hold comes from malloc.
struct RoomStack {
  static constexpr size_t SIZE = 8 << 20;
  char* const base = static_cast<char*>(std::aligned_alloc(64, SIZE));
  size_t used = 0;
  ~RoomStack() { std::free(base); }
};
inline thread_local RoomStack rooms;

// Room for `count` values that begins where a line of the processor's cache does: vectors in it cross no line.
template <class T>
struct Room {
  const size_t size;
  T* const data;
  explicit Room(int64_t count) : size((count * sizeof(T) + 63) / 64 * 64), data(static_cast<T*>(take(size))) {
    if (size && !data) throw std::bad_alloc();
  }
  Room(const Room&) = delete;
  ~Room() {
    if (const auto* at = (const char*)data; at >= rooms.base && at < rooms.base + RoomStack::SIZE) rooms.used -= size;
    else std::free(data);
  }
  operator T*() const { return data; }

 private:
  static void* take(size_t size) {
    if (!size) return nullptr;
    if (!rooms.base || size > RoomStack::SIZE - rooms.used) return std::aligned_alloc(64, size);
    rooms.used += size;
    return rooms.base + rooms.used - size;
  }
};

// The memory that is read next, fetched a little at a time.
struct Ahead {
  const char *next = nullptr, *end = nullptr;
  void step() {
    if (next < end) __builtin_prefetch(next, 0, 2), __builtin_prefetch(next + 64, 0, 2), next += 128;
  }
};

// Whether products of X with tiles go through AMX: all of them, as their sums have an order of their own. They then have
// TILE_WORDS words, or a multiple of it, with zeros at the end.
template <class X> constexpr bool TILED = TILE_ROWS && std::is_same_v<X, Bf16>;
template <class X>
constexpr int64_t tile_words(int64_t words) { return TILED<X> ? whole_tiles(words) : words; }

// How a tile is stored that X multiplies.
template <class X> struct Columns : Vectors<4, load<Words>> {};

// Rows of a, word k of row r at a[r * ROW + k * STEP], times a tile b [words, BLOCK] -> sums [rows, BLOCK],
// `stride` apart, or added to them. Up to R rows; those from `rows` on are read and not kept. A sum runs over
// the words in ascending order, whatever R is.
template <class X, int ROW, int STEP, int R>
[[gnu::noinline]] void tile_product(const uint32_t* a, int rows, const char* b, int64_t words, bool add,
                                    float* sums, int64_t stride, Ahead& ahead) {
  Floats sum[R][VECTORS];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++)
      sum[r][v] = add && r < rows ? load<Floats>(sums + r * stride + v * LANES) : Floats{};
  Ahead here = ahead;
  constexpr int64_t BYTES = Columns<X>::BYTES;
  for (const char* end = b + words * BYTES; b < end; b += BYTES, a += STEP) {
    here.step();
    Words columns[VECTORS];
    Columns<X>::unpack(b, 0, columns);
    multiply(sum, columns, [&](int r) { return a[r * ROW]; }, X::dot);
  }
  ahead = here;
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
    if (r < rows)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) store(sums + r * stride + v * LANES, sum[r][v]);
}

// Lanes LANE... of a and b, those of b numbered after those of a.
template <int... LANE, class Vector>
inline Vector pick(Vector a, Vector b) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, LANE...);
#else  // GCC before 12
  return __builtin_shuffle(a, b, Vector{LANE...});
#endif
}

// LANES vectors, transposed. Each of log2(LANES) steps lets the off-diagonal quarters of every square of
// 2 * HALF change places.
template <int HALF, size_t... L>
inline void transpose(Words* rows, std::index_sequence<L...> lanes) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) {
    if (i & HALF) continue;
    const Words a = rows[i], b = rows[i + HALF];
    rows[i] = pick<(L & HALF ? LANES + L - HALF : L)...>(a, b);
    rows[i + HALF] = pick<(L & HALF ? LANES + L : L + HALF)...>(a, b);
  }
  if constexpr (HALF > 1) transpose<HALF / 2>(rows, lanes);
}
inline void transpose(Words* rows) { transpose<LANES / 2>(rows, std::make_index_sequence<LANES>()); }

// Pairs of the i-th 16 bits of a and those of b: for the lower half of all i into a, for the upper into b.
template <size_t... I>
inline void zip(Words& a, Words& b, std::index_sequence<I...>) {
  typedef uint16_t Shorts __attribute__((vector_size(4 * LANES)));
  constexpr int ALL = 2 * LANES;
  const Shorts x = (Shorts)a, y = (Shorts)b;
  a = (Words)pick<(I / 2 + I % 2 * ALL)...>(x, y);
  b = (Words)pick<(I / 2 + I % 2 * ALL + LANES)...>(x, y);
}
inline void zip(Words& a, Words& b) { zip(a, b, std::make_index_sequence<2 * LANES>()); }

}  // namespace eagle
