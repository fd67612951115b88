// The interface of the kernels: pointers and sizes, independent of PyTorch. operators.cpp calls them with its tensors.
//
// Every kernel is batch-invariant: a token's result has the same bits for any number of other tokens and of threads. So
// verifying a tree gives each node exactly the values of decoding without drafts, in every dtype.
#pragma once

#include <alloca.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace eagle {

// The layout of scales. NONE: a float per column for all inputs. FLOATS: the scales of a group, then its minima, if any.
// CODES: floats that `unit` groups share, then int8 factors of each group.
struct Records {
  enum Kind { NONE, FLOATS, CODES } kind = NONE;
  bool minima = false;
  int64_t unit = 1;
};

// A weight as packed by kernels/packed.py: pack: [blocks, steps, columns]. Quantized weights have scales [blocks,
// groups, columns]: float32 and one group (int8, w8a8), an exponent in a byte per group of inputs (mxfp4), or `Records`
// (w8a8, w6a8, w4a8). bias [blocks, columns], if any, is added to products first.
struct Weight {
  enum Format { WHOLE, INT8, MXFP4, W8A8, W4A8, W6A8 } format;
  const char* data;
  const void* scales;
  int64_t blocks, steps, groups, size;  // size: bytes of a block
  const float* bias = nullptr;
  Records records = {};  // layout of group scales, for weights that round x

  const char* block(int64_t b) const { return data + b * size; }
  bool rounds() const { return format >= W8A8; }  // x is rounded to int8
};

// A quantized matrix in the row-major layout of its file, see kernels/stored.py. units: float scales per row.
struct StoredTable {
  const uint8_t* weight;
  const float* scale;
  const int8_t* codes;
  int64_t inputs, bits, units, groups;
  bool minima;
};

// The keys or values of a layer [B, S, kv_heads, hd], with the strides of sequences, slots and heads in elements.
// Reading is fastest if the slots of a head are contiguous.
//
// is_int8: int8 with a float scale per head and slot, in blocks of slots (see kv_int8.h). `slot` is then the stride of
// blocks, and strides are in bytes.
struct Cache {
  void* data;
  int64_t sequence, slot, head, heads, item;  // heads: number of heads; item: bytes per element
  bool is_int8 = false;

  int64_t offset(int64_t b, int64_t s, int64_t h) const { return b * sequence + s * slot + h * head; }
};

// The inputs that all layers of a pass share: B sequences of T tokens, RoPE's cosines and sines [B, T, hd/2], the cache
// slots [B, T] of the tokens, and the mask over the first n slots [B, T, n].
struct PassArgs {
  int64_t B, T, heads, kv_heads, hd, n;
  const float *cosine, *sine;
  const int64_t* slots;
  const bool* visible;
  int64_t local = 0;  // offset of the angles of layers with a sliding window, if they have their own

  int64_t width() const { return (heads + 2 * kv_heads) * hd; }
};

// Attention's parameters of a layer: weights [hd] of the head norms, if any, its cache, its sliding window in slots (0:
// none), the sinks, if any: a score per query head that takes part in the softmax and has no value, and the soft cap of
// scores, if any.
struct AttentionLayer {
  const float *q_norm, *k_norm;
  float eps;
  Cache k, v;
  int64_t window = 0;
  const float* sinks = nullptr;
  float cap = 0;
};

// A mixture of experts. The blocks of all experts are concatenated in a layer's weights.
struct Mixture {
  Weight router;
  int64_t experts = 0, used = 0;  // used: experts per token
  bool renormalize = false;  // the weights of a token's experts sum to 1
  const float* weights = nullptr;  // [M, used], with `chosen` [M, used], if the caller routed the tokens
  const int64_t* chosen = nullptr;
};

enum class Gate { NONE, SILU = 2, GELU = 3, CLAMPED = 4 };  // of an MLP, numbered as in packed.py: GATES

// Weights of norms are [H]. wo_norm, down_norm: norms of the outputs of attention and of the MLP, if any.
struct Layer {
  const float* attn_norm;
  Weight wqkv;
  AttentionLayer attention;
  Weight wo;
  const float *wo_norm, *mlp_norm;
  Weight gate_up, down;
  const float* down_norm;
  Gate gate;
  Mixture mixture;
};

struct Fp32;  // dtypes, see vectors.h
struct Bf16;

// The kernels for x of dtype E.
template <class E>
struct Kernels {
  // The number of inputs of w.
  static int64_t inputs(const Weight& w);

  // x [M, inputs] times w, plus its bias, plus residual [M, N] -> out [M, N] in E. `to_float`: out is float32, without
  // residual. `gate`: half of a block's columns are gate, half up, and out is gate(gate) * up.
  static void linear(int threads, const void* x, int64_t M, const Weight& w, const void* residual, Gate gate,
                     bool to_float, int64_t N, void* out);

  // The rows `indices` [M] of a table, dequantized -> out [M, inputs].
  static void rows(const StoredTable& table, const int64_t* indices, int64_t M, void* out);

  // Everything between wqkv and wo: qkv [B, T, width] -> out [B, T, heads * hd]. Writes keys and values to the cache.
  static void attend(int threads, const PassArgs& args, const void* qkv, const AttentionLayer& layer, void* out);

  // Add the output of a layer's mixture of experts for x [M, H] to `stream` [M, H].
  static void experts(int threads, const void* x, int64_t M, int64_t H, const Layer& layer, void* stream);

  // RMSNorm of x [M, H] with weight [H] -> rows of `out` at `stride`.
  static void rms_norm(const void* x, const float* weight, int64_t M, int64_t H, float eps, void* out, int64_t stride);

  // Multiply x [count] by a factor in place.
  static void scale(float factor, int64_t count, void* x);

  // Run all layers on the residual stream x [B, T, H] in place. The streams entering the layers `aux` go to features
  // [B, T, aux, H]; the number of layers means the stream after the last one. `input` [B, T, inputs], if any, replaces
  // the normed stream as input of the first layer's attention.
  static void layers(int threads, const PassArgs& args, int64_t H, std::span<const Layer> layers, float eps,
                     const std::vector<int64_t>& aux, const void* input, void* x, void* features);
};

// The layout of an int8 cache: slots of a block, bytes of a block of keys and of a block of values.
std::vector<int64_t> int8_block_sizes(int64_t hd);

constexpr float NEG_INF = -std::numeric_limits<float>::infinity();
struct Candidate {
  float value;
  int64_t id;
  // Sorts the largest value first; ties go to the lower id.
  bool operator<(const Candidate& other) const { return value > other.value || (value == other.value && id < other.id); }
};

// The bits of a float, mapped to an integer with the same order; NaN is the largest.
inline uint32_t ordered_bits(float x) {
  if (x != x) return ~0u;
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The layout of packed weights, see kernels/cpu.py: Layout.
std::vector<int64_t> layout();

}  // namespace eagle
