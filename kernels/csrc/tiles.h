// Scratch memory, products with tiles that are packed during a pass, and transpositions.
#pragma once

#include "products.h"

namespace eagle {

// Scratch memory of a thread. Buffers are freed in reverse order, so a stack serves them; malloc would take 5 % of a
// step. Buffers that do not fit come from malloc.
struct BufferStack {
  static constexpr size_t SIZE = 8 << 20;
  char* const base = static_cast<char*>(std::aligned_alloc(64, SIZE));
  size_t used = 0;
  ~BufferStack() { std::free(base); }
};
inline thread_local BufferStack buffer_stack;

// `count` values, aligned to cache lines.
template <class T>
struct Buffer {
  const size_t size;
  T* const data;
  explicit Buffer(int64_t count) : size((count * sizeof(T) + 63) / 64 * 64), data(static_cast<T*>(allocate(size))) {
    if (size && !data) throw std::bad_alloc();
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() {
    const auto* at = (const char*)data;
    if (at >= buffer_stack.base && at < buffer_stack.base + BufferStack::SIZE) buffer_stack.used -= size;
    else std::free(data);
  }
  operator T*() const { return data; }

 private:
  static void* allocate(size_t size) {
    if (!size) return nullptr;
    if (!buffer_stack.base || size > BufferStack::SIZE - buffer_stack.used) return std::aligned_alloc(64, size);
    buffer_stack.used += size;
    return buffer_stack.base + buffer_stack.used - size;
  }
};

// Memory to prefetch in small steps.
struct PrefetchRange {
  const char *next = nullptr, *end = nullptr;
  void step() {
    if (next < end) __builtin_prefetch(next, 0, 2), __builtin_prefetch(next + 64, 0, 2), next += 128;
  }
};

// Whether products of X with tiles run on AMX. Then all do, as AMX sums in another order; rows are padded with zeros
// to a multiple of TILE_WORDS words.
template <class X> constexpr bool TILED = TILE_ROWS && std::is_same_v<X, Bf16>;
template <class X>
constexpr int64_t tile_words(int64_t words) { return TILED<X> ? whole_tiles(words) : words; }

// The storage of a tile of X.
template <class X> struct Columns : Vectors<4, load<Words>> {};

// Multiply rows of a, word k of row r at a[r * ROW + k * STEP], by a tile b [words, BLOCK] -> sums [rows, BLOCK] at
// `stride`. add: add to sums. R >= rows; rows beyond `rows` are read and ignored. Sums run over the words in
// ascending order for any R.
template <class X, int ROW, int STEP, int R>
[[gnu::noinline]] void tile_product(const uint32_t* a, int rows, const char* b, int64_t words, bool add,
                                    float* sums, int64_t stride, PrefetchRange& prefetch) {
  Floats sum[R][VECTORS];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++)
      sum[r][v] = add && r < rows ? load<Floats>(sums + r * stride + v * LANES) : Floats{};
  PrefetchRange range = prefetch;
  constexpr int64_t BYTES = Columns<X>::BYTES;
  for (const char* end = b + words * BYTES; b < end; b += BYTES, a += STEP) {
    range.step();
    Words columns[VECTORS];
    Columns<X>::unpack(b, 0, columns);
    multiply(sum, columns, [&](int r) { return a[r * ROW]; }, X::dot);
  }
  prefetch = range;
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
    if (r < rows)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) store(sums + r * stride + v * LANES, sum[r][v]);
}

// Lanes LANE... of the concatenation of a and b.
template <int... LANE, class Vector>
inline Vector pick(Vector a, Vector b) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, LANE...);
#else  // GCC before 12
  return __builtin_shuffle(a, b, Vector{LANE...});
#endif
}

// Transpose LANES vectors. Each of log2(LANES) steps swaps the off-diagonal quarters of every square of 2 * HALF.
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

// Interleave the 16-bit lanes of a and b: the lower half to a, the upper half to b.
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
