// What the kernels take: pointers and sizes, nothing of PyTorch. operators.cpp calls them with its tensors.
//
// Every kernel is row-invariant: what it computes for one row depends on that row's inputs only, bit for bit,
// not on how many rows are computed with it nor on how many threads. A drafted tree verified in one pass
// therefore gives each node exactly the numbers that plain decoding would, in any dtype.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
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
  int64_t sequence, slot, head;
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

enum class Gate { NONE, SILU, GELU, CLAMPED };  // of an MLP

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

  // Each row of x [M, H] over its root mean square, times weight [H].
  static void rms_norm(const void* x, const float* weight, int64_t M, int64_t H, float eps, void* out);

  // x [count] times a factor, in place.
  static void scale(float factor, int64_t count, void* x);

  // What the first layer of an EAGLE-3 head reads: rows `ids` [M] of table [.., S] and x [M, H], each as `rms_norm`
  // has it, side by side -> out [M, S + H].
  static void beside(const int64_t* ids, const void* table, const float* table_norm, int64_t S, const void* x,
                     const float* x_norm, int64_t M, int64_t H, float eps, void* out);

  // All layers on x [B, T, H], in place. The streams entering the layers `aux` go side by side into features
  // [B, T, aux, H]; the number of layers stands for the stream after the last one. `read`: what the first layer's
  // attention reads [B, T, its inputs], if that is not x, normed.
  static void layers(int threads, const Rows& rows, int64_t H, const std::vector<Layer>& layers, float eps,
                     const std::vector<int64_t>& aux, const void* read, void* x, void* features);
};

// Of a cache in bytes with heads of this size: slots in a block, bytes of a block of keys and of one of values.
std::vector<int64_t> byte_blocks(int64_t hd);

// Copy slots `from` [B, W] of a layer's cache in bytes to slots `to` [B, W]. All are read before any is written.
void move_bytes(const Cache& k, const Cache& v, int64_t kv_heads, int64_t hd, const int64_t* from, const int64_t* to,
                int64_t B, int64_t W);

// Logits [B, T, V] outside top-k (0: off), then outside top-p (1: off) of what remains, become -infinity, where
// the temperature is above 0: temperature, top_k and top_p are [B].
void restrict_logits(int threads, const float* logits, int64_t B, int64_t T, int64_t V, const float* temperature,
                     const int64_t* top_k, const float* top_p, float* out);

// Rows of gated delta nets, see operators.cpp: delta_. nk heads of keys of size dk, nv of values of size dv.
struct Delta {
  int64_t B, T, nk, nv, dk, dv, ring;
  bool bf16;  // `mixed`; else float32
  const void* mixed;
  const float* rates;
  const int64_t *length, *positions;
  const bool* local;
  float* state;
  int64_t* start;
  float* out;
};
void delta(int threads, const Delta& d);

// Which of N rows lie side by side in a packed block. paired: half of a block's columns are of the first half of the
// rows (gate), the others of the second (up).
struct Side {
  int64_t N, columns;
  bool paired;
  int64_t blocks() const { return ((paired ? N / 2 : N) + width() - 1) / width(); }
  int64_t width() const { return paired ? columns / 2 : columns; }
  int64_t row(int64_t block, int64_t column) const;  // -1: there is none
};

// Rows of `words` words each -> [blocks, words, columns] of them, zero for the rows that are missing, with some bits
// flipped. size: bytes of a word, 1, 2 or 4.
void pack(int threads, const void* weight, const Side& side, int64_t words, int64_t size, uint32_t flip, void* out);
// Rows of K values in 4 bits, 8 more than the value and two in a byte, as kernels/quantized.py stores them -> [blocks,
// K / per_word, columns / 2, per_word] bytes, each with a value of the first half of the columns, and in its high bits
// one of the second; 8 for the rows that are missing.
void pack_nibbles(int threads, const uint8_t* weight, const Side& side, int64_t K, int64_t per_word, uint8_t* out);

// temperature [B] times standard Gumbel noise [B, W, V] for key [B, 2] and positions [B, W].
void gumbel(int threads, const int64_t* key, const int64_t* positions, const float* temperature, int64_t B,
            int64_t W, int64_t V, float* out);

// The largest of logits [B, T, V] plus, if there is noise [B, W, V], that of a row's depth [B, T] (0 without it)
// -> ids [B, T].
void draw(int threads, const float* logits, const float* noise, const int64_t* depth, int64_t B, int64_t T,
          int64_t W, int64_t V, int64_t* out);

// The k largest of logits [rows, V], best first -> log-probabilities, ids [rows, k]. Each V numbers of noise, if
// there is any, are added to `shared` rows. names [V]: what stands for an id, if not it itself.
void rank(int threads, const float* logits, const float* noise, const int64_t* names, int64_t rows, int64_t shared,
          int64_t V, int64_t k, float* scores, int64_t* ids);

struct Best {  // of a vocabulary's tokens, or of candidates
  float value;
  int64_t id;
  // Larger first; of equal ones the first.
  bool before(const Best& other) const { return value > other.value || (value == other.value && id < other.id); }
  static bool first(const Best& one, const Best& other) { return one.before(other); }
};

// A float as an integer in the same order.
inline uint32_t ordered(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Cosines and sines [rows, half] of positions [rows] times inverse frequencies [half], times factor.
void angles(const int64_t* positions, const float* inverse, float factor, int64_t rows, int64_t half,
            float* cosine, float* sine);

// What weights are packed for: columns of a block; inputs in a word of an int8 or int4 weight for x in bfloat16;
// those in a word of w8a8, and what is added to its values; those in a word of w4a8.
std::vector<int64_t> layout();

}  // namespace eagle
