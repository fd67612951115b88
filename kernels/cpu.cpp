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
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

using at::Tensor;
typedef float F __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
constexpr int LANES = 16;
constexpr int BLOCK = 2 * LANES;  // output columns of one packed block
constexpr int ROWS = 12;          // rows that share one load of the weights: their 24 sums stay in registers

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(void* p, F v) { std::memcpy(p, &v, sizeof v); }
inline F broadcast(float x) { return F{} + x; }
inline U broadcast(uint32_t x) { return U{} + x; }

inline F fma(F a, F b, F c) {
#ifdef __AVX512F__
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}
inline F even(U pairs) { return (F)(pairs << 16); }
inline F odd(U pairs) { return (F)(pairs & 0xFFFF0000u); }

// f(begin, end) on every thread's share of 0..count-1. Not at::parallel_for: that takes the thread count from the OpenMP
// runtime this file is linked to, which need not be the one torch.set_num_threads speaks to.
template <class Body>
inline void share_out(int64_t count, const Body& body) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), count);
  if (threads <= 1) return body(0, count);
#pragma omp parallel num_threads(threads)
  {
    const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
    body(count * me / all, count * (me + 1) / all);
  }
}

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
    std::memcpy(p, &half, std::min<int64_t>(count, LANES) * sizeof(Value));
  }
};
struct Fp32 {
  using Value = float;
  static constexpr int PER_WORD = 1;
  static inline F dot(F sum, U a, U b) { return fma((F)a, (F)b, sum); }
  static inline F get(const Value* p, int64_t count = LANES) {
    F x = {};
    std::memcpy(&x, p, std::min<int64_t>(count, LANES) * sizeof(Value));
    return x;
  }
  static inline void put(Value* p, F x, int64_t count = LANES) {
    std::memcpy(p, &x, std::min<int64_t>(count, LANES) * sizeof(Value));
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

// R rows of x [R, K] against one block of 32 columns [K words, 32]: sums [R, 32]. AHEAD: fetch the next block meanwhile.
template <class E, int R, bool AHEAD>
inline void block_product(const uint32_t* x, int64_t words, const uint32_t* w, float* sums) {
  F low[R] = {}, high[R] = {};
  for (int64_t k = 0; k < words; k++, w += BLOCK) {
    if constexpr (AHEAD) {
      __builtin_prefetch(w + words * BLOCK, 0, 2);
      __builtin_prefetch(w + words * BLOCK + LANES, 0, 2);
    }
    const U w0 = load<U>(w), w1 = load<U>(w + LANES);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const U value = broadcast(x[r * words + k]);
      low[r] = E::dot(low[r], w0, value);
      high[r] = E::dot(high[r], w1, value);
    }
  }
  for (int r = 0; r < R; r++) {
    store(sums + r * BLOCK, low[r]);
    store(sums + r * BLOCK + LANES, high[r]);
  }
}

template <class E, int R = ROWS>
inline void block_rows(int rows, const uint32_t* x, int64_t words, const uint32_t* w, bool ahead, float* sums) {
  if (rows < R) {
    if constexpr (R > 1) block_rows<E, R - 1>(rows, x, words, w, ahead, sums);
  } else if (R > 4 && ahead) {  // with few rows the processor's own prefetching keeps up
    block_product<E, R, true>(x, words, w, sums);
  } else {
    block_product<E, R, false>(x, words, w, sums);
  }
}

enum Mode { SAME = 0, FLOAT32 = 1, GATED = 2 };  // what `linear` makes of its sums, see there

template <class E, class Out>
void linear_into(const Tensor& x, const Tensor& packed, const float* bias, const typename Out::Value* residual, bool gated, Tensor& out) {
  const int64_t blocks = packed.size(0), words = packed.size(1), N = out.size(-1), M = out.numel() / N;
  const int64_t width = gated ? LANES : BLOCK;
  const auto* input = static_cast<const uint32_t*>(x.const_data_ptr());
  const auto* weight = static_cast<const uint32_t*>(packed.const_data_ptr());
  auto* output = static_cast<typename Out::Value*>(out.mutable_data_ptr());
  share_out(blocks, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[ROWS * BLOCK];
    for (int64_t b = begin; b < end; b++) {
      for (int64_t m = 0; m < M; m += ROWS) {
        const int rows = std::min<int64_t>(ROWS, M - m);
        block_rows<E>(rows, input + m * words, words, weight + b * words * BLOCK, m == 0, sums);
        for (int r = 0; r < rows; r++) {
          for (int64_t c = 0; c < width; c += LANES) {
            const int64_t column = b * width + c, place = (m + r) * N + column;
            if (column >= N) break;
            F sum = load<F>(sums + r * BLOCK + c);
            if (gated) sum = silu(sum) * load<F>(sums + r * BLOCK + LANES);
            if (bias) sum += Fp32::get(bias + column, N - column);
            if (residual) sum += Out::get(residual + place, N - column);
            Out::put(output + place, sum, N - column);
          }
        }
      }
    }
  });
}

// x [..., K] times a packed weight [blocks, K words, 32 (, 2)], plus bias [N], plus residual [..., N] -> [..., N].
// SAME and FLOAT32: in x's dtype or in float32. GATED: a block holds 16 gate and 16 up columns; silu(gate) * up comes out.
Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
              int64_t columns, int64_t mode) {
  const Tensor in = x.contiguous();
  auto shape = in.sizes().vec();
  shape.back() = columns;
  Tensor out = at::empty(shape, mode == FLOAT32 ? in.options().dtype(at::kFloat) : in.options());
  const float* b = bias ? bias->const_data_ptr<float>() : nullptr;
  const Tensor onto = residual ? residual->contiguous() : Tensor();
  const void* from = residual ? onto.const_data_ptr() : nullptr;
  if (in.scalar_type() == at::kFloat)
    linear_into<Fp32, Fp32>(in, packed, b, static_cast<const float*>(from), mode == GATED, out);
  else if (mode == FLOAT32)
    linear_into<Bf16, Fp32>(in, packed, b, static_cast<const float*>(from), false, out);
  else
    linear_into<Bf16, Bf16>(in, packed, b, static_cast<const uint16_t*>(from), mode == GATED, out);
  return out;
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

// Attention of up to 16 query rows, one per lane, over the n live slots of one key/value head.
template <class E>
struct Group {
  static constexpr int KEYS = 8;  // slots scored together: they share the loads of the queries
  int64_t n, head_dim, stride;    // stride: from one slot to the next, in values
  std::vector<uint32_t> queries;  // [head_dim words, 16]
  std::vector<uint16_t> seen;     // [n] bit r: row r attends to the slot
  std::vector<float> scores;      // [n, 16]

  Group(int64_t n, int64_t head_dim, int64_t stride)
      : n(n), head_dim(head_dim), stride(stride), queries(head_dim / E::PER_WORD * LANES), seen(n), scores(n * LANES) {}

  void set_row(int row, const typename E::Value* query, const bool* visible) {
    const int64_t words = head_dim / E::PER_WORD;
    for (int64_t w = 0; w < words; w++) std::memcpy(&queries[w * LANES + row], query + w * E::PER_WORD, 4);
    for (int64_t j = 0; j < n; j++) seen[j] |= uint16_t(visible[j]) << row;
  }
  void clear() {
    std::fill(seen.begin(), seen.end(), 0);
    std::fill(queries.begin(), queries.end(), 0);
  }

  // Softmax weights, unnormalised, into `scores`; returns their sums by lane.
  F weigh(const typename E::Value* keys, float scale) {
    const int64_t words = head_dim / E::PER_WORD;
    const U lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const F nothing = broadcast(-INFINITY);
    F most = nothing;
    for (int64_t j = 0; j < n; j += KEYS) {
      const int count = std::min<int64_t>(KEYS, n - j);
      const uint32_t* key[KEYS];
      bool any = false;
      for (int i = 0; i < KEYS; i++) {
        const int64_t slot = j + std::min(i, count - 1);
        key[i] = reinterpret_cast<const uint32_t*>(keys + slot * stride);
        any |= seen[slot] != 0;
      }
      if (!any) continue;
      F sum[KEYS] = {};
      for (int64_t w = 0; w < words; w++) {
        const U query = load<U>(&queries[w * LANES]);
#pragma GCC unroll 8
        for (int i = 0; i < KEYS; i++) sum[i] = E::dot(sum[i], query, broadcast(key[i][w]));
      }
      for (int i = 0; i < count; i++) {
        const U bits = (broadcast(uint32_t(seen[j + i])) >> lane) & 1u;
        const F score = bits != 0u ? sum[i] * scale : nothing;
        most = score > most ? score : most;
        store(&scores[(j + i) * LANES], score);
      }
    }
    F total = {};
    for (int64_t j = 0; j < n; j++) {
      if (!seen[j]) continue;
      const F score = load<F>(&scores[j * LANES]);
      const F weight = score == nothing ? F{} : exponential(score - most);
      total += weight;
      store(&scores[j * LANES], weight);
    }
    return total;
  }

  // R rows from `row` on, one chunk of 32 (bf16) or 16 (float) values of the head: sums over the slots.
  template <int R>
  void gather(const typename E::Value* values, int row, typename E::Value* const* out, const float* total) {
    constexpr int W = E::PER_WORD, CHUNK = W * LANES;
    for (int64_t d = 0; d < head_dim; d += CHUNK) {
      F sum[R][W] = {};
      for (int64_t j = 0; j < n; j++) {
        if (!seen[j]) continue;
        const U words = load<U>(values + j * stride + d);
        F value[W];
        if constexpr (W == 2) value[0] = even(words), value[1] = odd(words);
        else value[0] = (F)words;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
          for (int i = 0; i < W; i++) sum[r][i] = fma(broadcast(scores[j * LANES + row + r]), value[i], sum[r][i]);
      }
      for (int r = 0; r < R; r++) {
        const float share = total[row + r] > 0 ? 1.0f / total[row + r] : 0.0f;
        if constexpr (W == 2) {  // even and odd values were summed apart
          F low, high;
          for (int l = 0; l < LANES / 2; l++) {
            low[2 * l] = sum[r][0][l], low[2 * l + 1] = sum[r][1][l];
            high[2 * l] = sum[r][0][LANES / 2 + l], high[2 * l + 1] = sum[r][1][LANES / 2 + l];
          }
          E::put(out[row + r] + d, low * share);
          E::put(out[row + r] + d + LANES, high * share);
        } else {
          E::put(out[row + r] + d, sum[r][0] * share);
        }
      }
    }
  }
};

struct Heads {  // what `attend` works on
  Tensor qkv, cosine, sine, q_norm, k_norm, slots, visible, k, v, rotated, out;
  float eps;
};

template <class E>
void attend_into(Heads& t) {
  using Value = typename E::Value;
  const int64_t B = t.qkv.size(0), T = t.qkv.size(1), kv_heads = t.k.size(2), hd = t.k.size(3), n = t.visible.size(2);
  const int64_t heads = t.qkv.size(2) / hd - 2 * kv_heads, per_kv = heads / kv_heads, all = heads + 2 * kv_heads;
  const int64_t rows = per_kv * T, groups = (rows + LANES - 1) / LANES, units = B * kv_heads * groups;
  const auto* qkv = static_cast<const Value*>(t.qkv.const_data_ptr());
  const auto *cosine = t.cosine.const_data_ptr<float>(), *sine = t.sine.const_data_ptr<float>();
  const auto* q_norm = t.q_norm.defined() ? static_cast<const Value*>(t.q_norm.const_data_ptr()) : nullptr;
  const auto* k_norm = t.k_norm.defined() ? static_cast<const Value*>(t.k_norm.const_data_ptr()) : nullptr;
  const auto* slots = t.slots.const_data_ptr<int64_t>();
  const auto* sees = t.visible.const_data_ptr<bool>();
  auto* keys = static_cast<Value*>(t.k.mutable_data_ptr());
  auto* values = static_cast<Value*>(t.v.mutable_data_ptr());
  auto* rotated = static_cast<Value*>(t.rotated.mutable_data_ptr());
  auto* output = static_cast<Value*>(t.out.mutable_data_ptr());
  const int64_t stride = t.k.stride(1), sequence = t.k.stride(0);

  share_out(B * T, [&](int64_t begin, int64_t end) {  // rotate queries and keys, store keys and values
    for (int64_t row = begin; row < end; row++) {
      const int64_t place = row / T * sequence + slots[row] * stride;
      for (int64_t h = 0; h < heads + kv_heads; h++) {
        const bool query = h < heads;
        Value* to = query ? rotated + (row * heads + h) * hd : keys + place + (h - heads) * hd;
        rotate_head<E>(qkv + (row * all + h) * hd, cosine + row * hd / 2, sine + row * hd / 2, query ? q_norm : k_norm, t.eps, hd, to);
      }
      std::memcpy(values + place, qkv + (row * all + heads + kv_heads) * hd, kv_heads * hd * sizeof(Value));
    }
  });
  share_out(units, [&](int64_t begin, int64_t end) {
    Group<E> group(n, hd, stride);
    alignas(64) float total[LANES];
    for (int64_t unit = begin; unit < end; unit++) {
      const int64_t b = unit / (kv_heads * groups), kv = unit / groups % kv_heads, first = unit % groups * LANES;
      const int count = std::min<int64_t>(LANES, rows - first);
      Value* to[LANES];
      group.clear();
      for (int r = 0; r < count; r++) {
        const int64_t head = kv * per_kv + (first + r) / T, row = b * T + (first + r) % T;
        group.set_row(r, rotated + (row * heads + head) * hd, sees + row * n);
        to[r] = output + (row * heads + head) * hd;
      }
      const int64_t start = b * sequence + kv * hd;
      store(total, group.weigh(keys + start, 1.0f / std::sqrt(float(hd))));
      int r = 0;
      for (; r + 8 <= count; r += 8) group.template gather<8>(values + start, r, to, total);
      if (r + 4 <= count) group.template gather<4>(values + start, r, to, total), r += 4;
      if (r + 2 <= count) group.template gather<2>(values + start, r, to, total), r += 2;
      if (r < count) group.template gather<1>(values + start, r, to, total);
    }
  });
}

// Everything between wqkv and wo. qkv [B, T, (nh + 2 nkv) * hd]: q and k are normed (if there are weights [hd]) and rotated by
// cos, sin [B, T, hd/2]; k and v are stored at slots [B, T] of the caches k, v [B, S, nkv, hd]; then row t attends to slot
// j < n where visible [B, T, n] -> [B, T, nh * hd].
Tensor attend(const Tensor& qkv, const Tensor& cosine, const Tensor& sine, const std::optional<Tensor>& q_norm,
              const std::optional<Tensor>& k_norm, double eps, Tensor& k, Tensor& v, const Tensor& slots, const Tensor& visible) {
  const int64_t B = qkv.size(0), T = qkv.size(1), width = qkv.size(2) - 2 * k.size(2) * k.size(3);
  Heads t{qkv.contiguous(), cosine.contiguous(), sine.contiguous(), q_norm.value_or(Tensor()), k_norm.value_or(Tensor()),
          slots.contiguous(), visible.contiguous(), k, v, at::empty({B, T, width}, qkv.options()),
          at::empty({B, T, width}, qkv.options()), float(eps)};
  if (qkv.scalar_type() == at::kFloat) attend_into<Fp32>(t);
  else attend_into<Bf16>(t);
  return t.out;
}

template <class E>
void norm_into(const Tensor& x, const Tensor& weight, float eps, Tensor& out) {
  using Value = typename E::Value;
  const int64_t H = x.size(-1), M = x.numel() / H;
  const auto *input = static_cast<const Value*>(x.const_data_ptr()), *scale = static_cast<const Value*>(weight.const_data_ptr());
  auto* output = static_cast<Value*>(out.mutable_data_ptr());
  // One thread: waking the others takes longer than a few rows do.
  for (int64_t m = 0; m < M; m++) norm_row<E>(input + m * H, scale, H, eps, output + m * H);
}

// Each row of x [..., H] over its root mean square, times weight [H].
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor in = x.contiguous();
  Tensor out = at::empty(in.sizes(), in.options());
  if (in.scalar_type() == at::kFloat) norm_into<Fp32>(in, weight, eps, out);
  else norm_into<Bf16>(in, weight, eps, out);
  return out;
}

}  // namespace

TORCH_LIBRARY(eagle, m) {
  m.def("linear(Tensor x, Tensor packed, Tensor? bias, Tensor? residual, int columns, int mode) -> Tensor");
  m.def(
      "attend(Tensor qkv, Tensor cosine, Tensor sine, Tensor? q_norm, Tensor? k_norm, float eps, Tensor(a!) k, Tensor(b!) v,"
      " Tensor slots, Tensor visible) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
}

TORCH_LIBRARY_IMPL(eagle, CPU, m) {
  m.impl("linear", &linear);
  m.impl("attend", &attend);
  m.impl("rms_norm", &rms_norm);
}
