// The products of a pass on a CPU: linear layers, attention over the live prefix, RMS norm.
//
// Every kernel here is row-invariant: what it computes for one row depends on that row's inputs only, bit for bit, not on
// how many rows are computed with it nor on how many threads. Sums run over the inner index in ascending order, and a slot
// that a row does not see adds nothing. A drafted tree verified in one pass therefore gives each node exactly the numbers
// that plain decoding would, in any dtype.
//
// Inner loops are written on 64-byte vectors of 32-bit words: a word is one float, or a pair of bfloat16 that one AVX512
// instruction multiplies and adds in float32. Without that instruction the compiler splits the vectors as it must.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <alloca.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace {

using at::Tensor;
typedef float F __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
constexpr int LANES = 16;
constexpr int BLOCK = 2 * LANES;  // output columns of one packed block
constexpr int64_t SLOTS = 128;    // cache slots that one thread scores at a time
#ifdef __AVX512F__
constexpr int ROWS = 12;          // rows that share one load of the weights: their 24 sums stay in registers
#else
constexpr int ROWS = 4;           // half as many registers of half the size
#endif

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(void* p, F v) { std::memcpy(p, &v, sizeof v); }
inline F broadcast(float x) { return x - F{}; }  // not F{} + x, which would have to turn -0 into 0
inline U broadcast(uint32_t x) { return U{} + x; }

// One rounding where the processor can, and then always: the compiler may not choose (-ffp-contract=off), or two
// instantiations of one loop would differ.
inline F fma(F a, F b, F c) {
#if defined(__AVX512F__)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  __m256 x[2], y[2], z[2];
  std::memcpy(x, &a, sizeof a), std::memcpy(y, &b, sizeof b), std::memcpy(z, &c, sizeof c);
  z[0] = _mm256_fmadd_ps(x[0], y[0], z[0]), z[1] = _mm256_fmadd_ps(x[1], y[1], z[1]);
  return load<F>(z);
#elif defined(__FP_FAST_FMAF)
  for (int l = 0; l < LANES; l++) c[l] = __builtin_fmaf(a[l], b[l], c[l]);
  return c;
#else
  return a * b + c;
#endif
}
inline F even(U pairs) { return (F)(pairs << 16); }
inline F odd(U pairs) { return (F)(pairs & 0xFFFF0000u); }

// The threads of one operator. Not at::parallel_for: that takes the thread count from the OpenMP runtime this file is
// linked to, which need not be the one torch.set_num_threads speaks to.
struct Team {
  // What is left of a thread's share: the first in the high half, behind the last in the low one.
  struct alignas(64) Left {
    std::atomic<uint64_t> range{0};
  };
  int64_t me, all;
  Left* left;

  template <class Body>
  static void run(const Body& body) {
    const int threads = at::get_num_threads();
    std::vector<Left> left(threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    body(Team{omp_get_thread_num(), omp_get_num_threads(), left.data()});
  }
  // Wait until all have come here.
  void meet() const {
#pragma omp barrier
  }
  // body(i) for this thread's share of 0..count-1, consecutive ones.
  template <class Body>
  void share(int64_t count, const Body& body) const {
    for (int64_t i = count * me / all; i < count * (me + 1) / all; i++) body(i);
  }
  // The same, but who is done takes from the end of what another has left; `last`: the last of this thread's own share, though
  // another may have it. All must meet before and after.
  template <class Body>
  void deal(int64_t count, const Body& body) const {
    const uint64_t first = count * me / all, end = count * (me + 1) / all;
    left[me].range = first << 32 | end;
    for (int64_t other = 0; other < all; other++) {
      std::atomic<uint64_t>& range = left[(me + other) % all].range;
      for (uint64_t had = range; (had >> 32) + (other > 0) < (had & 0xFFFFFFFF);)  // the last one stays with its owner
        if (range.compare_exchange_weak(had, other ? had - 1 : had + (uint64_t(1) << 32))) {
          const uint64_t i = other ? (had & 0xFFFFFFFF) - 1 : had >> 32;
          body(i, i + 1 == end);
          had = range;
        }
    }
  }
};

typedef uint16_t Half __attribute__((vector_size(32)));

// What a dtype is to the loops below. `dot` multiplies words and adds them to float sums; `get` and `put` move up to 16
// values to floats and back, rounding to nearest, ties to even.
struct Bf16 {
  using Value = uint16_t;
  static constexpr int PER_WORD = 2;
  static inline F dot(F sum, U a, U b) {
#ifdef __AVX512BF16__
    return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return fma(odd(a), odd(b), fma(even(a), even(b), sum));
#endif
  }
  static inline F get(const Value* p, int64_t count = LANES) {
    Half half = {};
    if (count >= LANES) half = load<Half>(p);
    else std::memcpy(&half, p, count * sizeof(Value));
    return (F)(__builtin_convertvector(half, U) << 16);
  }
  static inline void put(Value* p, F x, int64_t count = LANES) {
    const U bits = (U)x;
    const U rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const U nan = U{} + 0x7FC0u;
    const Half half = __builtin_convertvector(x == x ? rounded : nan, Half);
    if (count >= LANES) std::memcpy(p, &half, sizeof half);  // a copy of variable size is a call
    else std::memcpy(p, &half, count * sizeof(Value));
  }
};
struct Fp32 {
  using Value = float;
  static constexpr int PER_WORD = 1;
  static inline F dot(F sum, U a, U b) { return fma((F)a, (F)b, sum); }
  static inline F get(const Value* p, int64_t count = LANES) {
    if (count >= LANES) return load<F>(p);
    F x = {};
    std::memcpy(&x, p, count * sizeof(Value));
    return x;
  }
  static inline void put(Value* p, F x, int64_t count = LANES) {
    if (count >= LANES) store(p, x);
    else std::memcpy(p, &x, count * sizeof(Value));
  }
};

// e^x for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2], relative error below 2e-7. Below -87 it is 0.
inline F exponential(F x) {
  const I n = __builtin_convertvector(x * 1.44269504f - 0.5f, I);  // truncation towards zero rounds to nearest for x <= 0
  const F n_rounded = __builtin_convertvector(n, F);
  F r = fma(n_rounded, broadcast(-0.693359375f), x);
  r = fma(n_rounded, broadcast(2.12194440e-4f), r);
  F p = broadcast(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, broadcast(c));
  const F scaled = p * (F)((n + 127) << 23);
  return x < -87.0f ? F{} : scaled;
}
inline F silu(F x) {
  const F e = exponential(x < 0.0f ? x : -x);
  return x * (x < 0.0f ? e : broadcast(1.0f)) / (e + 1.0f);
}

// How the 32 weights of a block at one word of K are stored: BYTES of them, unpacked to two vectors of E's words.
template <class E>
struct Whole {
  static constexpr int64_t BYTES = 2 * sizeof(U);
  static inline void unpack(const char* p, U& w0, U& w1) { w0 = load<U>(p), w1 = load<U>(p + sizeof(U)); }
};

typedef int8_t Bytes __attribute__((vector_size(16)));

// Written out: GCC takes conversions of bytes apart, value by value, ten times slower.
inline F floats(Bytes bytes) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif defined(__AVX2__)
  __m256 x[2] = {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)bytes)),
                 _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)bytes, 8)))};
  return load<F>(x);
#else
  return __builtin_convertvector(bytes, F);
#endif
}
inline F floats(const char* p) { return floats(load<Bytes>(p)); }

template <class E>
struct Int8;  // one byte each, in the order of E's values
template <>
struct Int8<Fp32> {
  static constexpr int64_t BYTES = BLOCK;
  static inline void unpack(const char* p, U& w0, U& w1) { w0 = (U)floats(p), w1 = (U)floats(p + LANES); }
};
template <>
struct Int8<Bf16> {
  static constexpr int64_t BYTES = 2 * BLOCK;
  static inline U pairs(const char* p) {  // 32 bytes -> 16 pairs; a byte is exact in bfloat16
#ifdef __AVX512BF16__
    return (U)_mm512_cvtne2ps_pbh((__m512)floats(p + LANES), (__m512)floats(p));
#else
    Half bytes = load<Half>(p);
    const U both = __builtin_convertvector(bytes, U);
    const F even = __builtin_convertvector(((I)(both << 24)) >> 24, F), odd = __builtin_convertvector(((I)(both << 16)) >> 24, F);
    return ((U)even >> 16) | ((U)odd & 0xFFFF0000u);
#endif
  }
  static inline void unpack(const char* p, U& w0, U& w1) { w0 = pairs(p), w1 = pairs(p + BLOCK); }
};

template <class E>
struct Int4;  // four bits each, 8 more than the value: the low ones of all bytes make the first vector, the high ones the second
template <>
struct Int4<Fp32> {
  static constexpr int64_t BYTES = LANES;
  static inline void unpack(const char* p, U& w0, U& w1) {
    const Bytes both = load<Bytes>(p);
    w0 = (U)(floats(both & 15) - 8.0f), w1 = (U)(floats((both >> 4) & 15) - 8.0f);
  }
};
template <>
struct Int4<Bf16> {
  static constexpr int64_t BYTES = BLOCK;
  static inline void unpack(const char* p, U& w0, U& w1) {
#ifdef __AVX512BW__
    static const uint16_t values[32] = {0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0,      0x3F80, 0x4000,
                                        0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};  // -8 ... 7 in bfloat16
    const __m512i table = _mm512_loadu_si512(values), both = _mm512_cvtepu8_epi16(load<__m256i>(p));
    w0 = (U)_mm512_permutexvar_epi16(_mm512_and_si512(both, _mm512_set1_epi16(15)), table);
    w1 = (U)_mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table);
#else
    const U both = __builtin_convertvector(load<Half>(p), U);  // bytes 2c and 2c + 1: column c's pair, low and high nibbles
    const auto value = [&](int shift) { return __builtin_convertvector((I)((both >> shift) & 15u) - 8, F); };
    w0 = ((U)value(0) >> 16) | ((U)value(8) & 0xFFFF0000u), w1 = ((U)value(4) >> 16) | ((U)value(12) & 0xFFFF0000u);
#endif
  }
};

// A weight as `kernels.pack` lays it out: [blocks, K words, 32 columns], with scales [blocks, groups, 32] if it is quantised:
// float32 and one group (int8, w8a8), or bfloat16 and a group for every so many inputs (int4). w8a8: a word is four bytes, 128
// more than the values, and x is rounded to bytes too.
struct Packed {
  enum Format { WHOLE, INT8, INT4, W8A8 } format;
  const char* data;
  const void* scales;
  int64_t blocks, words, groups, size;  // size: bytes of a block

  Packed(const Tensor& t, const Tensor& scale)
      : format(t.scalar_type() == at::kChar ? INT8 : t.scalar_type() != at::kByte ? WHOLE : t.dim() == 4 ? W8A8 : INT4),
        data(static_cast<const char*>(t.const_data_ptr())), scales(format == WHOLE ? nullptr : scale.const_data_ptr()), blocks(t.size(0)),
        words(t.size(1)), groups(format == INT4 ? scale.size(1) : 1), size(t.stride(0) * t.element_size()) {}

  const char* block(int64_t b) const { return data + b * size; }
  // K, the values of a row of x.
  template <class E>
  int64_t inputs() const { return words * (format == W8A8 ? 4 : E::PER_WORD); }
};

constexpr int64_t GROUP = 64;  // inputs that share a scale when x is rounded to bytes, as in quantized.py

// Four products of a byte 0..255 and one -128..127 in each lane, added to sums: exact.
inline I dot_bytes(I sum, U weights, U values) {
#if defined(__AVX512VNNI__)
  return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)values);
#elif defined(__AVXVNNI__)
  __m256i s[2], w[2], v[2];
  std::memcpy(s, &sum, sizeof sum), std::memcpy(w, &weights, sizeof weights), std::memcpy(v, &values, sizeof values);
  for (int i = 0; i < 2; i++) s[i] = _mm256_dpbusd_avx_epi32(s[i], w[i], v[i]);
  return load<I>(s);
#else
  for (int shift = 0; shift < 32; shift += 8) sum += (I)((weights >> shift) & 255u) * ((I)(values << (24 - shift)) >> 24);
  return sum;
#endif
}

inline int32_t lanes_most(I x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)x);
#else
  int32_t most = x[0];
  for (int l = 1; l < LANES; l++) most = std::max(most, x[l]);
  return most;
#endif
}
inline int32_t lanes_sum(I x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t sum = 0;
  for (int l = 0; l < LANES; l++) sum += x[l];
  return sum;
#endif
}

// Rows are taken ROWS at a time; the last ones with the next loop that is large enough.
inline int lanes(int64_t rows) { return rows == 1 ? 1 : rows == 2 ? 2 : rows <= 4 && ROWS > 4 ? 4 : rows <= 8 && ROWS > 8 ? 8 : ROWS; }

// Rows of x rounded to bytes, in tiles of ROWS: words [K/4, lanes], so that one address serves all rows; and of every 64 inputs,
// the last ones may be fewer, the scale and -128 times their sum (what the 128 added to the weights comes to) [groups, lanes].
struct Rounded {
  std::vector<uint32_t> words;
  std::vector<float> scales;
  std::vector<int32_t> offsets;
  static int64_t groups(int64_t K) { return (K + GROUP - 1) / GROUP; }

  // Room for M rows of at most K values.
  Rounded(int64_t M, int64_t K)
      : words((M + ROWS - 1) / ROWS * ROWS * K / 4), scales((M + ROWS - 1) / ROWS * ROWS * groups(K)), offsets(scales.size()) {}

  // Each thread its share of x [M, K], whole groups of a tile: what threads write lies apart. Then all meet.
  template <class E>
  void round(const Team& team, const typename E::Value* x, int64_t M, int64_t K) {
    team.share((M + ROWS - 1) / ROWS * groups(K), [&](int64_t item) {
      const int64_t tile = item / groups(K) * ROWS, g = item % groups(K), from = g * GROUP, size = std::min(GROUP, K - from);
      const int64_t rows = std::min<int64_t>(ROWS, M - tile), all = lanes(rows);
      for (int64_t r = 0; r < rows; r++) {
        const int64_t place = tile * groups(K) + g * all + r;
        uint32_t q[GROUP / 4];
        group<E>(x + (tile + r) * K + from, size, q, scales[place], offsets[place]);
        uint32_t* to = &words[tile * K / 4 + from / 4 * all + r];
        for (int64_t k = 0; k < size / 4; k++) to[k * all] = q[k];
      }
    });
    team.meet();
  }

  // `size` values, at most 64 -> as many bytes q, the nearest to x in steps of the largest / 127.
  template <class E>
  static void group(const typename E::Value* x, int64_t size, uint32_t* q, float& scale, int32_t& offset) {
    const F nearest = broadcast(12582912.0f);  // 1.5 * 2^23: a float this large has no fraction, adding rounds to even
    F value[GROUP / LANES];
    I most = {}, sum = {};
#pragma GCC unroll 4
    for (int64_t i = 0; i < GROUP; i += LANES) {
      const F v = value[i / LANES] = i + LANES <= size ? E::get(x + i) : i < size ? E::get(x + i, size - i) : F{};
      const I bits = (I)v & 0x7FFFFFFF;  // magnitudes are ordered as their bits are, and what is not a number is above all
      most = bits > most ? bits : most;
    }
    const int32_t largest = lanes_most(most);
    std::memcpy(&scale, &largest, sizeof scale);
    scale /= 127.0f;
    const F inverse = broadcast(scale > 1e-30f ? 1.0f / scale : 0.0f);
#pragma GCC unroll 4
    for (int64_t i = 0; i < GROUP; i += LANES) {
      const I rounded = (I)(value[i / LANES] * inverse + nearest) - (I)nearest;
      sum += rounded;
#if defined(__AVX512F__)
      const Bytes narrow = (Bytes)_mm512_cvtepi32_epi8((__m512i)rounded);
#else
      const Bytes narrow = __builtin_convertvector(rounded, Bytes);
#endif
      std::memcpy(q + i / 4, &narrow, sizeof narrow);
    }
    offset = -128 * lanes_sum(sum);
  }
};

// Fetch the BYTES at `next`, and go on.
template <int64_t BYTES>
inline void fetch(const char*& next) {
  __builtin_prefetch(next, 0, 2);
  if constexpr (BYTES > 64) __builtin_prefetch(next + 64, 0, 2);
  next += BYTES;
}

// `block_product` of the tile of rounded rows from m on: integer sums within a group, exact; across groups in ascending order.
template <int R>
__attribute__((noinline)) void rounded_product(const Rounded& x, int64_t m, const Packed& w, int64_t b, const char* next, float* sums) {
  constexpr int64_t BYTES = 2 * sizeof(U), WORDS = GROUP / 4;
  const char* p = w.block(b);
  const int64_t groups = Rounded::groups(4 * w.words);
  const uint32_t* value = &x.words[m * w.words];
  const float* scales = &x.scales[m * groups];
  const int32_t* offsets = &x.offsets[m * groups];
  for (int64_t g = 0; g < groups; g++) {
    I low[R], high[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) low[r] = high[r] = I{} + offsets[g * R + r];
    for (const char* end = p + std::min(WORDS, w.words - g * WORDS) * BYTES; p < end; p += BYTES, value += R) {
      fetch<BYTES>(next);
      const U w0 = load<U>(p), w1 = load<U>(p + sizeof(U));
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const U one = broadcast(value[r]);
        low[r] = dot_bytes(low[r], w0, one);
        high[r] = dot_bytes(high[r], w1, one);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const F scale = broadcast(scales[g * R + r]);
      float* sum = sums + r * BLOCK;
      store(sum, fma(__builtin_convertvector(low[r], F), scale, g ? load<F>(sum) : F{}));
      store(sum + LANES, fma(__builtin_convertvector(high[r], F), scale, g ? load<F>(sum + LANES) : F{}));
    }
  }
  const float* scale = static_cast<const float*>(w.scales) + b * BLOCK;
  for (int r = 0; r < R; r++)
    for (int64_t c = 0; c < BLOCK; c += LANES) store(sums + r * BLOCK + c, load<F>(sums + r * BLOCK + c) * load<F>(scale + c));
}

// Up to R rows of x [rows, K words] against block b of w: sums [R, 32]. Fetches what lies at `next` meanwhile.
template <class E, template <class> class Weights, int R>
__attribute__((noinline)) void block_product(const uint32_t* x, int rows, const Packed& w, int64_t b, const char* next, float* sums) {
  constexpr int64_t BYTES = Weights<E>::BYTES;
  const char* p = w.block(b);
  const uint32_t* row[R];
  for (int r = 0; r < R; r++) row[r] = x + std::min(r, rows - 1) * w.words;
  const int64_t group = w.words / w.groups;
  for (int64_t g = 0; g < w.groups; g++) {
    F low[R] = {}, high[R] = {};
    for (int64_t k = g * group; k < (g + 1) * group; k++, p += BYTES) {
      fetch<BYTES>(next);
      U w0, w1;
      Weights<E>::unpack(p, w0, w1);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const U value = broadcast(row[r][k]);
        low[r] = E::dot(low[r], w0, value);
        high[r] = E::dot(high[r], w1, value);
      }
    }
    if (w.format == Packed::INT8) {
      const float* scale = static_cast<const float*>(w.scales) + b * BLOCK;
      for (int r = 0; r < R; r++) low[r] *= load<F>(scale), high[r] *= load<F>(scale + LANES);
    } else if (w.format == Packed::INT4) {
      const uint16_t* scale = static_cast<const uint16_t*>(w.scales) + (b * w.groups + g) * BLOCK;
      const F s0 = Bf16::get(scale), s1 = Bf16::get(scale + LANES);
      for (int r = 0; r < R; r++) {
        low[r] = fma(low[r], s0, g ? load<F>(sums + r * BLOCK) : F{});
        high[r] = fma(high[r], s1, g ? load<F>(sums + r * BLOCK + LANES) : F{});
      }
    }
    for (int r = 0; r < R; r++) {
      store(sums + r * BLOCK, low[r]);
      store(sums + r * BLOCK + LANES, high[r]);
    }
  }
}

// product(R) with the loop for so many rows.
template <class Product>
inline void by_rows(int rows, const Product& product) {
  using std::integral_constant;
  switch (lanes(rows)) {
    case 1: return product(integral_constant<int, 1>());
    case 2: return product(integral_constant<int, 2>());
    case 4: return product(integral_constant<int, 4>());
    case 8: return product(integral_constant<int, ROWS < 8 ? ROWS : 8>());
    default: return product(integral_constant<int, ROWS>());
  }
}

template <class E, template <class> class Weights>
inline void block_rows(const uint32_t* x, int rows, const Packed& w, int64_t b, const char* next, float* sums) {
  by_rows(rows, [&](auto R) { block_product<E, Weights, R>(x, rows, w, b, next, sums); });
}
inline void rounded_rows(const Rounded& x, int64_t m, int rows, const Packed& w, int64_t b, const char* next, float* sums) {
  by_rows(rows, [&](auto R) { rounded_product<R>(x, m, w, b, next, sums); });
}

// x [M, K] times w -> out [M, N], plus bias [N], plus residual [M, N], which may be `out` itself. `gated`: a block holds 16
// gate and 16 up columns; silu(gate) * up comes out. `rounded`: room for x as bytes, if w is W8A8. `after`: the weight that is
// read next, if any.
template <class E, class Out>
void linear_part(const Team& team, const void* x, int64_t M, const Packed& w, const float* bias, const typename Out::Value* residual,
                 bool gated, int64_t N, Rounded& rounded, const Packed* after, typename Out::Value* out) {
  const auto* input = static_cast<const uint32_t*>(x);
  if (w.format == Packed::W8A8) rounded.round<E>(team, static_cast<const typename E::Value*>(x), M, w.inputs<E>());
  const int64_t width = gated ? LANES : BLOCK;
  const auto product = w.format == Packed::INT8 ? block_rows<E, Int8> : w.format == Packed::INT4 ? block_rows<E, Int4> : block_rows<E, Whole>;
  alignas(64) float sums[ROWS * BLOCK];
  const Packed& then = after ? *after : w;
  const char* first_after = then.block(then.blocks * team.me / team.all);
  team.deal(w.blocks, [&](int64_t b, bool last) {
    for (int64_t m = 0; m < M; m += ROWS) {
      const int rows = std::min<int64_t>(ROWS, M - m);
      const char* next = m ? w.block(b) : last ? first_after : w.block(b + 1);
      if (w.format == Packed::W8A8) rounded_rows(rounded, m, rows, w, b, next, sums);
      else product(input + m * w.words, rows, w, b, next, sums);
      for (int r = 0; r < rows; r++) {
        for (int64_t c = 0; c < width; c += LANES) {
          const int64_t column = b * width + c, place = (m + r) * N + column;
          if (column >= N) break;
          F sum = load<F>(sums + r * BLOCK + c);
          if (gated) sum = silu(sum) * load<F>(sums + r * BLOCK + LANES);
          if (bias) sum += Fp32::get(bias + column, N - column);
          if (residual) sum += Out::get(residual + place, N - column);
          Out::put(out + place, sum, N - column);
        }
      }
    }
  });
}

// Row [size] over its root mean square, times weight [size], into `out`, through floats only.
template <class E>
inline void norm_row(const typename E::Value* row, const typename E::Value* weight, int64_t size, float eps, typename E::Value* out) {
  F part = {};
  for (int64_t i = 0; i < size; i += LANES) {
    const F x = E::get(row + i, size - i);
    part = fma(x, x, part);
  }
  float sum = 0;
  for (int l = 0; l < LANES; l++) sum += part[l];
  const float share = 1.0f / std::sqrt(sum / float(size) + eps);
  for (int64_t i = 0; i < size; i += LANES)
    E::put(out + i, E::get(row + i, size - i) * share * E::get(weight + i, size - i), size - i);
}

// A head [size] rotated by cos, sin [size / 2] in pairs (i, i + size/2), into `out`. Normed first if there is a weight.
template <class E>
inline void rotate_head(const typename E::Value* head, const float* cosine, const float* sine, const typename E::Value* norm, float eps,
                        int64_t size, typename E::Value* out) {
  using Value = typename E::Value;
  Value* normed = static_cast<Value*>(alloca(size * sizeof(Value)));
  if (norm) norm_row<E>(head, norm, size, eps, normed), head = normed;
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t rest = half - i;
    const F a = E::get(head + i, rest), b = E::get(head + half + i, rest), c = Fp32::get(cosine + i, rest), s = Fp32::get(sine + i, rest);
    E::put(out + i, a * c - b * s, rest);
    E::put(out + half + i, fma(b, c, a * s), rest);
  }
}

// What every layer of a pass shares: B sequences of T rows each, their rotations, cache slots and mask. The heads that share
// a key/value head make per_kv * T query rows, taken in groups of up to 16, one per lane.
struct Rows {
  int64_t B, T, heads, kv_heads, hd, per_kv, groups, n;
  const float *cosine, *sine;
  const int64_t* slots;
  const bool* visible;
  bool split;                               // whether there are too few units for a thread to take whole ones
  mutable std::vector<float> scores, totals;  // of all units, if so
  std::vector<std::vector<int32_t>> live;   // by sequence and group: the slots that one of its rows attends to
  std::vector<std::vector<uint16_t>> seen;  // and for each of them, bit r: row r does

  Rows(int64_t B, int64_t T, int64_t heads, int64_t kv_heads, int64_t hd, const Tensor& cosine, const Tensor& sine, const Tensor& slots,
       const Tensor& visible)
      : B(B), T(T), heads(heads), kv_heads(kv_heads), hd(hd), per_kv(heads / kv_heads), groups((per_kv * T + LANES - 1) / LANES),
        n(visible.size(2)), cosine(cosine.const_data_ptr<float>()), sine(sine.const_data_ptr<float>()),
        slots(slots.const_data_ptr<int64_t>()), visible(visible.const_data_ptr<bool>()), live(B * groups), seen(B * groups) {
    split = at::get_num_threads() > 1 && units() < 4 * at::get_num_threads();
    if (split) scores.resize(units() * n * LANES), totals.resize(units() * LANES);
  }

  int64_t units() const { return B * kv_heads * groups; }
  float* scores_of(int64_t unit) const { return &scores[unit * n * LANES]; }
  int64_t width() const { return (heads + 2 * kv_heads) * hd; }
  int group_size(int64_t group) const { return std::min<int64_t>(LANES, per_kv * T - group * LANES); }
  // Which query head and which row of the pass the r-th row of a group is.
  int64_t head_of(int64_t kv, int64_t group, int r) const { return kv * per_kv + (group * LANES + r) / T; }
  int64_t row_of(int64_t b, int64_t group, int r) const { return b * T + (group * LANES + r) % T; }

  void read_mask(const Team& team) {
    team.share(B * groups, [&](int64_t unit) {
      std::vector<uint16_t> bits(n);
      for (int r = 0; r < group_size(unit % groups); r++) {
        const bool* row = visible + row_of(unit / groups, unit % groups, r) * n;
        for (int64_t j = 0; j < n; j++) bits[j] |= uint16_t(row[j]) << r;
      }
      for (int64_t j = 0; j < n; j++)
        if (bits[j]) live[unit].push_back(j), seen[unit].push_back(bits[j]);
    });
  }
};

// Scores, softmax weights and weighted values of one group of query rows.
template <class E>
struct Group {
  using Value = typename E::Value;
  static constexpr int W = E::PER_WORD;
  static constexpr int KEYS = 8;    // slots scored together: they share the loads of the queries
  static constexpr int AHEAD = 32;  // how many slots ahead of use their rows are fetched
  const std::vector<int32_t>& live;
  const std::vector<uint16_t>& seen;
  const int64_t hd, stride;  // stride: from one slot to the next, in values
  uint32_t* queries;         // [hd words, 16]
  float* scores;             // [live, 16]

  // Products of all queries [words, 16] with KEYS keys -> sums [KEYS, 16]. A function of its own: everything it touches in the
  // loop is in registers.
  __attribute__((noinline)) static void products(const uint32_t* queries, const uint32_t* const* key, int64_t words, float* sums) {
    const uint32_t *k0 = key[0], *k1 = key[1], *k2 = key[2], *k3 = key[3], *k4 = key[4], *k5 = key[5], *k6 = key[6], *k7 = key[7];
    F s0 = {}, s1 = {}, s2 = {}, s3 = {}, s4 = {}, s5 = {}, s6 = {}, s7 = {};
    for (int64_t w = 0; w < words; w++) {
      const U query = load<U>(queries + w * LANES);
      s0 = E::dot(s0, query, broadcast(k0[w])), s1 = E::dot(s1, query, broadcast(k1[w]));
      s2 = E::dot(s2, query, broadcast(k2[w])), s3 = E::dot(s3, query, broadcast(k3[w]));
      s4 = E::dot(s4, query, broadcast(k4[w])), s5 = E::dot(s5, query, broadcast(k5[w]));
      s6 = E::dot(s6, query, broadcast(k6[w])), s7 = E::dot(s7, query, broadcast(k7[w]));
    }
    store(sums, s0), store(sums + LANES, s1), store(sums + 2 * LANES, s2), store(sums + 3 * LANES, s3);
    store(sums + 4 * LANES, s4), store(sums + 5 * LANES, s5), store(sums + 6 * LANES, s6), store(sums + 7 * LANES, s7);
  }

  // Scores of the live slots `from` to `to`.
  void score(const Value* keys, float scale, int64_t from, int64_t to) {
    const int64_t words = hd / E::PER_WORD;
    const U lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    alignas(64) float sums[KEYS * LANES];
    for (int64_t j = from; j < to; j += KEYS) {
      const uint32_t* key[KEYS];
      for (int i = 0; i < KEYS; i++) key[i] = reinterpret_cast<const uint32_t*>(keys + live[std::min(j + i, to - 1)] * stride);
      for (int i = 0; i < KEYS; i++)  // rows of one head lie apart: the processor does not foresee them
        for (int64_t w = 0; w < words; w += LANES) __builtin_prefetch(keys + live[std::min(j + i + AHEAD, to - 1)] * stride + w * E::PER_WORD);
      products(queries, key, words, sums);
      for (int i = 0; i < KEYS && j + i < to; i++) {
        const U bits = (broadcast(uint32_t(seen[j + i])) >> lane) & 1u;
        store(scores + (j + i) * LANES, bits != 0u ? load<F>(sums + i * LANES) * scale : broadcast(-INFINITY));
      }
    }
  }

  // Scores become softmax weights, unnormalised; returns their sums by lane.
  F weigh() {
    const int64_t count = live.size();
    const F nothing = broadcast(-INFINITY);
    F most = nothing, total = {};
    for (int64_t j = 0; j < count; j++) {
      const F score = load<F>(scores + j * LANES);
      most = score > most ? score : most;
    }
    for (int64_t j = 0; j < count; j++) {
      const F score = load<F>(scores + j * LANES);
      const F weight = score == nothing ? F{} : exponential(score - most);
      total += weight;
      store(scores + j * LANES, weight);
    }
    return total;
  }

  // The weighted values of R rows from `row` on, over `total`: one vector's worth of the head, from d on.
  // The last part of a head may be less than a vector: then not WHOLE.
  template <int R, bool WHOLE>
  void gather(const Value* values, int64_t d, int row, Value* const* out, const float* total) {
    const int64_t count = live.size(), rest = hd - d;
    F sum[R][W] = {};
    for (int64_t j = 0; j < count; j++) {
      __builtin_prefetch(values + live[std::min(j + AHEAD, count - 1)] * stride + d);
      U words = {};
      if constexpr (WHOLE) words = load<U>(values + live[j] * stride + d);
      else std::memcpy(&words, values + live[j] * stride + d, rest * sizeof(Value));
      F value[W];
      if constexpr (W == 2) value[0] = even(words), value[1] = odd(words);
      else value[0] = (F)words;
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int i = 0; i < W; i++) sum[r][i] = fma(broadcast(scores[j * LANES + row + r]), value[i], sum[r][i]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const float share = total[row + r] > 0 ? 1.0f / total[row + r] : 0.0f;
      if constexpr (W == 2) {  // even and odd values were summed apart
        F low, high;
        for (int l = 0; l < LANES / 2; l++) {
          low[2 * l] = sum[r][0][l], low[2 * l + 1] = sum[r][1][l];
          high[2 * l] = sum[r][0][LANES / 2 + l], high[2 * l + 1] = sum[r][1][LANES / 2 + l];
        }
        E::put(out[row + r] + d, low * share, rest);
        if (rest > LANES) E::put(out[row + r] + d + LANES, high * share, rest - LANES);
      } else {
        E::put(out[row + r] + d, sum[r][0] * share, rest);
      }
    }
  }

  // The same for `rows` rows, ROWS_AT_ONCE in a pass over the values.
  static constexpr int ROWS_AT_ONCE = 8;
  template <int R = ROWS_AT_ONCE>
  void gather_rows(int rows, const Value* values, int64_t d, int row, Value* const* out, const float* total) {
    if (rows >= R) {
      if (hd - d >= W * LANES) gather<R, true>(values, d, row, out, total);
      else gather<R, false>(values, d, row, out, total);
      if (rows > R) gather_rows<ROWS_AT_ONCE>(rows - R, values, d, row + R, out, total);
    } else if constexpr (R > 1) {
      gather_rows<R - 1>(rows, values, d, row, out, total);
    }
  }
};

// Everything between wqkv and wo for one layer: rotate queries and keys (into `rotated` and the cache), store the values,
// attend. qkv [B*T, width], rotated and out [B*T, heads*hd], keys and values [B, S, kv_heads, hd] with these strides.
template <class E>
void attention_part(const Team& team, const Rows& rows, const typename E::Value* qkv, const typename E::Value* q_norm,
                    const typename E::Value* k_norm, float eps, typename E::Value* keys, typename E::Value* values, int64_t sequence,
                    int64_t stride, typename E::Value* rotated, typename E::Value* out) {
  using Value = typename E::Value;
  const int64_t heads = rows.heads, kv_heads = rows.kv_heads, hd = rows.hd;
  team.share(rows.B * rows.T, [&](int64_t row) {
    const Value* from = qkv + row * rows.width();
    const int64_t place = row / rows.T * sequence + rows.slots[row] * stride;
    for (int64_t h = 0; h < heads + kv_heads; h++) {
      const bool query = h < heads;
      Value* to = query ? rotated + (row * heads + h) * hd : keys + place + (h - heads) * hd;
      rotate_head<E>(from + h * hd, rows.cosine + row * hd / 2, rows.sine + row * hd / 2, query ? q_norm : k_norm, eps, hd, to);
    }
    std::memcpy(values + place, from + (heads + kv_heads) * hd, kv_heads * hd * sizeof(Value));
  });
  team.meet();
  const int64_t words = hd / E::PER_WORD, units = rows.units(), vector = E::PER_WORD * LANES, parts = (hd + vector - 1) / vector;
  const float scale = 1.0f / std::sqrt(float(hd));
  std::vector<uint32_t> queries(words * LANES);
  Value* to[LANES];
  // What a unit, one group of rows of one key/value head, works on. `fill`: with its queries.
  const auto group_of = [&](int64_t unit, float* scores, bool fill) {
    const int64_t b = unit / (kv_heads * rows.groups), kv = unit / rows.groups % kv_heads, group = unit % rows.groups;
    for (int r = 0; r < rows.group_size(group); r++) {
      const int64_t place = (rows.row_of(b, group, r) * heads + rows.head_of(kv, group, r)) * hd;
      for (int64_t w = 0; fill && w < words; w++) std::memcpy(&queries[w * LANES + r], rotated + place + w * E::PER_WORD, 4);
      to[r] = out + place;
    }
    const int64_t mask = b * rows.groups + group;
    return Group<E>{rows.live[mask], rows.seen[mask], hd, stride, queries.data(), scores};
  };
  const auto start = [&](int64_t unit) { return unit / (kv_heads * rows.groups) * sequence + unit / rows.groups % kv_heads * hd; };
  const auto size = [&](int64_t unit) { return rows.group_size(unit % rows.groups); };

  if (!rows.split) {  // enough units for all threads: each does its own, the scores stay in its cache
    std::vector<float> scores(rows.n * LANES);
    alignas(64) float total[LANES];
    team.share(units, [&](int64_t unit) {
      Group<E> g = group_of(unit, scores.data(), true);
      g.score(keys + start(unit), scale, 0, g.live.size());
      store(total, g.weigh());
      for (int64_t d = 0; d < hd; d += vector) g.gather_rows(size(unit), values + start(unit), d, 0, to, total);
    });
    return;
  }
  // Few units, as in plain decoding: the threads share the slots when scoring and the parts of a head when gathering.
  const int64_t pieces = (rows.n + SLOTS - 1) / SLOTS;
  team.share(units * pieces, [&](int64_t item) {
    Group<E> g = group_of(item / pieces, rows.scores_of(item / pieces), true);
    const int64_t from = item % pieces * SLOTS, count = g.live.size();
    if (from < count) g.score(keys + start(item / pieces), scale, from, std::min(from + SLOTS, count));
  });
  team.meet();
  team.share(units, [&](int64_t unit) { store(&rows.totals[unit * LANES], group_of(unit, rows.scores_of(unit), false).weigh()); });
  team.meet();
  team.share(units * parts, [&](int64_t item) {
    const int64_t unit = item / parts;
    group_of(unit, rows.scores_of(unit), false)
        .gather_rows(size(unit), values + start(unit), item % parts * vector, 0, to, &rows.totals[unit * LANES]);
  });
}

// ---- operators --------------------------------------------------------------------------------------------------------

template <class E>
inline const typename E::Value* data(const Tensor& t) {  // nullptr for an absent weight, which comes as an empty tensor
  return t.defined() && t.numel() ? static_cast<const typename E::Value*>(t.const_data_ptr()) : nullptr;
}
template <class E>
inline typename E::Value* mutable_data(const Tensor& t) {
  return static_cast<typename E::Value*>(t.mutable_data_ptr());
}

enum Mode { SAME = 0, FLOAT32 = 1, GATED = 2 };

// x [..., K] times a packed weight with its scale, plus bias [N] (float32), plus residual [..., N] -> [..., N], in x's dtype; FLOAT32: in
// float32; GATED: see `linear_part`.
Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scale, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& residual, int64_t columns, int64_t mode) {
  const Tensor in = x.contiguous(), onto = residual ? residual->contiguous() : Tensor();
  auto shape = in.sizes().vec();
  shape.back() = columns;
  Tensor out = at::empty(shape, mode == FLOAT32 ? in.options().dtype(at::kFloat) : in.options());
  const Packed w(packed, scale.value_or(Tensor()));
  const float* b = bias ? bias->const_data_ptr<float>() : nullptr;
  const int64_t M = out.numel() / columns;
  const void* from = in.const_data_ptr();
  Rounded rounded(w.format == Packed::W8A8 ? M : 0, in.size(-1));
  Team::run([&](const Team& team) {
    if (in.scalar_type() == at::kFloat)
      linear_part<Fp32, Fp32>(team, from, M, w, b, data<Fp32>(onto), mode == GATED, columns, rounded, nullptr, mutable_data<Fp32>(out));
    else if (mode == FLOAT32)
      linear_part<Bf16, Fp32>(team, from, M, w, b, data<Fp32>(onto), false, columns, rounded, nullptr, mutable_data<Fp32>(out));
    else
      linear_part<Bf16, Bf16>(team, from, M, w, b, data<Bf16>(onto), mode == GATED, columns, rounded, nullptr, mutable_data<Bf16>(out));
  });
  return out;
}

// qkv [B, T, (nh + 2 nkv) * hd] -> [B, T, nh * hd]: `attention_part` of one layer with caches k, v [B, S, nkv, hd].
Tensor attend(const Tensor& qkv, const Tensor& cosine, const Tensor& sine, const std::optional<Tensor>& q_norm,
              const std::optional<Tensor>& k_norm, double eps, Tensor& k, Tensor& v, const Tensor& slots, const Tensor& visible) {
  const Tensor in = qkv.contiguous(), c = cosine.contiguous(), s = sine.contiguous(), at_slots = slots.contiguous(), mask = visible.contiguous();
  const int64_t B = in.size(0), T = in.size(1), hd = k.size(3), heads = in.size(2) / hd - 2 * k.size(2);
  Rows rows(B, T, heads, k.size(2), hd, c, s, at_slots, mask);
  Tensor out = at::empty({B, T, heads * hd}, in.options()), rotated = at::empty(out.sizes(), in.options());
  Team::run([&](const Team& team) {
    rows.read_mask(team);  // `attention_part` meets before it is used
    const auto part = [&](auto e) {
      using E = decltype(e);
      attention_part<E>(team, rows, data<E>(in), data<E>(q_norm.value_or(Tensor())), data<E>(k_norm.value_or(Tensor())), eps,
                        mutable_data<E>(k), mutable_data<E>(v), k.stride(0), k.stride(1), mutable_data<E>(rotated), mutable_data<E>(out));
    };
    if (in.scalar_type() == at::kFloat) part(Fp32());
    else part(Bf16());
  });
  return out;
}

// Each row of x [..., H] over its root mean square, times weight [H].
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor in = x.contiguous();
  Tensor out = at::empty(in.sizes(), in.options());
  const int64_t H = in.size(-1);
  const auto rows = [&](auto e) {
    using E = decltype(e);
    // One thread: waking the others takes longer than a few rows do.
    for (int64_t m = 0; m < in.numel() / H; m++) norm_row<E>(data<E>(in) + m * H, data<E>(weight), H, eps, mutable_data<E>(out) + m * H);
  };
  if (in.scalar_type() == at::kFloat) rows(Fp32());
  else rows(Bf16());
  return out;
}

// Of a layer: attn_norm, wqkv, its scale and bias, q_norm, k_norm, wo, its scale, mlp_norm, gate_up and scale, down and scale.
constexpr int WEIGHTS = 13;

// All layers of a target on x [B, T, H] -> (the residual stream behind them, those entering the layers `aux` side by side).
// One parallel region: the threads only wait for each other between the products.
template <class E>
void layers_into(const Tensor& x, Rows& rows, at::TensorList weights, at::TensorList k, at::TensorList v, float eps, at::IntArrayRef aux,
                 const Tensor& features) {
  using Value = typename E::Value;
  const int64_t M = rows.B * rows.T, H = x.size(-1), L = k.size(), width = rows.width(), inside = rows.heads * rows.hd;
  const Packed down(weights[WEIGHTS - 2], weights[WEIGHTS - 1]);
  const int64_t inner = down.inputs<E>();
  Rounded rounded(down.format == Packed::W8A8 ? M : 0, std::max({H, inside, inner}));
  const auto scratch = [&](int64_t columns) { return at::empty({M, columns}, x.options()); };
  const Tensor normed = scratch(H), qkv = scratch(width), rotated = scratch(inside), attended = scratch(inside), gated = scratch(inner);
  Value *stream = mutable_data<E>(x), *n = mutable_data<E>(normed), *q = mutable_data<E>(qkv), *a = mutable_data<E>(attended),
        *g = mutable_data<E>(gated);
  const auto norm = [&](const Team& team, const Tensor& weight) {
    team.share(M, [&](int64_t m) { norm_row<E>(stream + m * H, data<E>(weight), H, eps, n + m * H); });
    team.meet();
  };
  const auto keep = [&](const Team& team, int64_t layer) {
    for (size_t i = 0; i < aux.size(); i++)
      if (aux[i] == layer)
        team.share(M, [&](int64_t m) {
          std::memcpy(mutable_data<E>(features) + (m * aux.size() + i) * H, stream + m * H, H * sizeof(Value));
        });
  };
  Team::run([&](const Team& team) {
    rows.read_mask(team);
    for (int64_t l = 0; l < L; l++) {
      const Tensor* w = &weights[l * WEIGHTS];
      const Packed wqkv(w[1], w[2]), wo(w[6], w[7]), gate_up(w[9], w[10]), down(w[11], w[12]);
      const Packed next = l + 1 < L ? Packed(w[WEIGHTS + 1], w[WEIGHTS + 2]) : wqkv;
      keep(team, l);
      norm(team, w[0]);
      linear_part<E, E>(team, n, M, wqkv, data<Fp32>(w[3]), nullptr, false, width, rounded, &wo, q);
      team.meet();
      attention_part<E>(team, rows, q, data<E>(w[4]), data<E>(w[5]), eps, mutable_data<E>(k[l]), mutable_data<E>(v[l]), k[l].stride(0),
                        k[l].stride(1), mutable_data<E>(rotated), a);
      team.meet();
      linear_part<E, E>(team, a, M, wo, nullptr, stream, false, H, rounded, &gate_up, stream);
      team.meet();
      norm(team, w[8]);
      linear_part<E, E>(team, n, M, gate_up, nullptr, nullptr, true, inner, rounded, &down, g);
      team.meet();
      linear_part<E, E>(team, g, M, down, nullptr, stream, false, H, rounded, l + 1 < L ? &next : nullptr, stream);
      team.meet();
    }
    keep(team, L);
  });
}

std::tuple<Tensor, Tensor> layers(const Tensor& x, const Tensor& cosine, const Tensor& sine, at::TensorList weights, at::TensorList k,
                                  at::TensorList v, const Tensor& slots, const Tensor& visible, double eps, at::IntArrayRef aux) {
  const Tensor c = cosine.contiguous(), s = sine.contiguous(), at_slots = slots.contiguous(), mask = visible.contiguous();
  Tensor stream = x.clone(at::MemoryFormat::Contiguous);
  const int64_t B = x.size(0), T = x.size(1), H = x.size(2), hd = k[0].size(3);
  const Packed wo(weights[6], weights[7]);
  const int64_t heads = (x.scalar_type() == at::kFloat ? wo.inputs<Fp32>() : wo.inputs<Bf16>()) / hd;
  Rows rows(B, T, heads, k[0].size(2), hd, c, s, at_slots, mask);
  Tensor features = at::empty({B, T, int64_t(aux.size()) * H}, x.options());
  if (x.scalar_type() == at::kFloat) layers_into<Fp32>(stream, rows, weights, k, v, eps, aux, features);
  else layers_into<Bf16>(stream, rows, weights, k, v, eps, aux, features);
  return {stream, features};
}

// Copy entries `source` [B, W] of every cache [B, S, nkv, hd] to `target` [B, W]; all of a row's are read before any is written.
void move(at::TensorList caches, const Tensor& source, const Tensor& target) {
  const Tensor from = source.contiguous(), to = target.contiguous();
  const int64_t B = from.size(0), W = from.size(1);
  const auto *f = from.const_data_ptr<int64_t>(), *t = to.const_data_ptr<int64_t>();
  for (const Tensor& cache : caches) {
    const int64_t size = cache.stride(1) * cache.element_size();
    std::vector<char> kept(W * size);
    auto* base = static_cast<char*>(cache.mutable_data_ptr());
    for (int64_t b = 0; b < B; b++) {
      char* sequence = base + b * cache.stride(0) * cache.element_size();
      for (int64_t i = 0; i < W; i++) std::memcpy(&kept[i * size], sequence + f[b * W + i] * size, size);
      for (int64_t i = 0; i < W; i++) std::memcpy(sequence + t[b * W + i] * size, &kept[i * size], size);
    }
  }
}

}  // namespace

TORCH_LIBRARY(eagle, m) {
  m.def("linear(Tensor x, Tensor packed, Tensor? scale, Tensor? bias, Tensor? residual, int columns, int mode) -> Tensor");
  m.def(
      "attend(Tensor qkv, Tensor cosine, Tensor sine, Tensor? q_norm, Tensor? k_norm, float eps, Tensor(a!) k, Tensor(b!) v,"
      " Tensor slots, Tensor visible) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def(
      "layers(Tensor x, Tensor cosine, Tensor sine, Tensor[] weights, Tensor(a!)[] k, Tensor(b!)[] v, Tensor slots, Tensor visible,"
      " float eps, int[] aux) -> (Tensor, Tensor)");
  m.def("move(Tensor(a!)[] caches, Tensor source, Tensor target) -> ()");
}

TORCH_LIBRARY_IMPL(eagle, CPU, m) {
  m.impl("linear", &linear);
  m.impl("attend", &attend);
  m.impl("rms_norm", &rms_norm);
  m.impl("layers", &layers);
  m.impl("move", &move);
}
