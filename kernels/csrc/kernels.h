// What the kernels take: pointers and sizes, nothing of PyTorch. operators.cpp calls them with its tensors.
//
// Every kernel is row-invariant: what it computes for one row depends on that row's inputs only, bit for bit,
// not on how many rows are computed with it nor on how many threads. A drafted tree verified in one pass
// therefore gives each node exactly the numbers that plain decoding would, in any dtype.
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

// A weight as kernels/packed.py: pack lays it out: [blocks, steps, columns], with scales
// [blocks, groups, columns] if it is quantised: float32 and one group (int8, w8a8), or a group for every so many
// inputs, bfloat16 (int4, w4a8) or an exponent in a byte (mxfp4). bias [blocks, columns], if there is one, is added to
// products before all else.
struct Weight {
  enum Format { WHOLE, INT8, INT4, MXFP4, W8A8, W4A8 } format;
  const char* data;
  const void* scales;
  int64_t blocks, steps, groups, size;  // size: bytes of a block
  const float* bias = nullptr;

  const char* block(int64_t b) const { return data + b * size; }
  bool rounds() const { return format == W8A8 || format == W4A8; }  // x, to bytes
};

// The keys or values of a layer [B, S, kv_heads, hd]. Strides in values, from sequence to sequence, from slot to
// slot and from head to head. Reading is fastest where the slots of a head lie side by side.
//
// In bytes: int8 with a float scale for each head of a slot, in blocks of so many slots (see in_bytes.h). `slot` is
// then the stride from block to block, and strides are in bytes.
struct Cache {
  void* data;
  int64_t sequence, slot, head, heads, item;  // heads: how many; item: bytes of one element
  bool in_bytes = false;

  int64_t place(int64_t b, int64_t s, int64_t h) const { return b * sequence + s * slot + h * head; }
};

// What every layer of a pass shares: B sequences of T rows each, the angles of their rotations [B, T, hd/2], the
// slots [B, T] that they are stored at, and which of the first n slots each row attends to [B, T, n].
struct Rows {
  int64_t B, T, heads, kv_heads, hd, n;
  const float *cosine, *sine;
  const int64_t* slots;
  const bool* visible;
  int64_t local = 0;  // where the angles of layers with a window begin, if they have others

  int64_t width() const { return (heads + 2 * kv_heads) * hd; }
};

// What attention has of a layer: norms of its heads, if they have weights [hd], its cache, and its window: the last
// so many of the slots that a row attends to; 0: all. sinks, if it has them: a score of each query head, which takes its
// share of the softmax and has no value.
struct Attending {
  const float *q_norm, *k_norm;
  float eps;
  Cache k, v;
  int64_t window = 0;
  const float* sinks = nullptr;
};

// A mixture: each row goes to `used` experts, whose blocks stand one after the other in a layer's weights.
struct Mixture {
  Weight router;
  int64_t experts = 0, used = 0;
  bool renormalise = false;  // the shares of a row's experts sum to 1
};

enum class Gate { NONE, SILU = 2, GELU = 3, CLAMPED = 4 };  // of an MLP, numbered as in Python

// Weights of norms are [H]. wo_norm, down_norm: of the outputs of attention and of the MLP, if they are normed.
struct Layer {
  const float* attn_norm;
  Weight wqkv;
  Attending attending;
  Weight wo;
  const float *wo_norm, *mlp_norm;
  Weight gate_up, down;
  const float* down_norm;
  Gate gate;
  Mixture mixture;
};

struct Fp32;  // dtypes, see vectors.h
struct Bf16;

// For x of dtype E, on so many threads.
template <class E>
struct Kernels {
  // The values of a row that w is to be multiplied by.
  static int64_t inputs(const Weight& w);

  // x [M, inputs] times w, plus its bias, plus residual [M, N], in E -> out [M, N]. `to_float`: out is float32
  // and there is no residual. `gate`: if any, a block holds as many gate as up columns, and gate(gate) * up comes out.
  static void linear(int threads, const void* x, int64_t M, const Weight& w, const void* residual, Gate gate,
                     bool to_float, int64_t N, void* out);

  // Everything between wqkv and wo: qkv [B, T, width] -> out [B, T, heads * hd]. Keys and values are stored.
  static void attend(int threads, const Rows& rows, const void* qkv, const Attending& layer, void* out);

  // Add to `stream` [M, H] what the mixture of a layer makes of x [M, H].
  static void experts(int threads, const void* x, int64_t M, int64_t H, const Layer& layer, void* stream);

  // Each row of x [M, H] over its root mean square, times weight [H] -> rows of `out`, which are `stride` apart.
  static void rms_norm(const void* x, const float* weight, int64_t M, int64_t H, float eps, void* out, int64_t stride);

  // x [count] times a factor, in place.
  static void scale(float factor, int64_t count, void* x);

  // All layers on x [B, T, H], in place. The streams entering the layers `aux` go side by side into features
  // [B, T, aux, H]; the number of layers stands for the stream after the last one. `read`: what the first layer's
  // attention reads [B, T, its inputs], if that is not x, normed.
  static void layers(int threads, const Rows& rows, int64_t H, std::span<const Layer> layers, float eps,
                     const std::vector<int64_t>& aux, const void* read, void* x, void* features);
};

// Of a cache in bytes with heads of this size: slots in a block, bytes of a block of keys and of one of values.
std::vector<int64_t> byte_blocks(int64_t hd);

constexpr float LEAST = -std::numeric_limits<float>::infinity();
struct Best {  // of a vocabulary's tokens, or of candidates
  float value;
  int64_t id;
  // Larger first; of equal ones the first.
  bool operator<(const Best& other) const { return value > other.value || (value == other.value && id < other.id); }
};

// A float as an integer in the same order.
inline uint32_t ordered(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// What weights are packed for: columns of a block; inputs in a word of an int8 or int4 weight for x in bfloat16;
// those in a word of w8a8, and what is added to its values; those in a word of w4a8.
std::vector<int64_t> layout();

}  // namespace eagle
