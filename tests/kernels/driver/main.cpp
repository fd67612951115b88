// The kernels without PyTorch: each against a plain loop in double precision, and bit for bit against itself with
// fewer rows and other threads. With the argument `packing` it prints how it packs weights instead, with `rounded`
// products of w8a8. test_alone.py compiles and runs this.
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "bytes.h"
#include "packing.h"
#include "scene.h"
#include "testing.h"

namespace {

const char* const NAMES[] = {"whole", "int8", "int4", "mxfp4", "w8a8", "w4a8"};

// Every `group` of a row in steps of their largest / 127, in floats as kernels/quantized.py has it.
template <class E>
void round_inputs(Doubles& x, int64_t K, int64_t group) {
  for (int64_t row = 0; row < int64_t(x.size()); row += K)
    for (int64_t k = 0; k < K; k += group) {
      float most = 0;
      const int64_t end = row + std::min(K, k + group);
      for (int64_t i = row + k; i < end; i++) most = std::max(most, std::abs(float(x[i])));
      const float scale = most / 127.0f, inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
      for (int64_t i = row + k; i < end; i++) x[i] = double(std::nearbyint(float(x[i]) * inverse)) * scale;
    }
}

int64_t most_rows = 13;  // more than share one load of the weights; two tiles have 32

template <class E>
void check_linear(Weight::Format format, bool gated, int64_t N, int64_t K) {
  const int64_t M = most_rows;
  Packed packed = random_weight<E>(format, gated ? 2 * N : N, K, gated);
  const Weight w = weight_of(packed);
  Values<E> x = draws<E>(M * K);
  std::fill_n(x.begin(), 64, typename Dtype<E>::Value(0));
  const Values<Fp32> bias = add_bias(packed, gated ? 2 * N : N, gated);
  const Weight with_bias = weight_of(packed);
  const Gate gate = gated ? Gate::SILU : Gate::NONE;
  const Values<E> residual = draws<E>(M * N);
  Doubles read(M * K), plain(M * N), biased(M * N);
  std::transform(x.begin(), x.end(), read.begin(), Dtype<E>::get);
  if (w.rounds()) round_inputs<E>(read, K, format == Weight::W8A8 ? 64 : K / w.groups);
  const auto dot = [&](int64_t m, int64_t n) {
    double sum = 0;
    for (int64_t k = 0; k < K; k++) sum += read[m * K + k] * packed.numbers[n * K + k];
    return sum;
  };
  for (int64_t m = 0; m < M; m++)
    for (int64_t n = 0; n < N; n++) {
      const double sum = dot(m, n), up = gated ? dot(m, N + n) : 0;
      const auto silu = [](double x) { return x / (1 + std::exp(-x)); };
      plain[m * N + n] = gated ? silu(sum) * up : sum;
      biased[m * N + n] = gated ? silu(sum + bias[n]) * (up + bias[N + n]) : sum + bias[n];
    }
  check(Kernels<E>::inputs(w) == K, "%s %s: inputs", Dtype<E>::NAME, NAMES[format]);

  const auto compare = [&]<class Out>(Dtype<Out>, const char* name, const Weight& w, const Values<E>& onto) {
    Doubles expected = w.bias ? biased : plain;
    for (int64_t i = 0; i < M * N; i++) expected[i] += onto.empty() ? 0 : Dtype<E>::get(onto[i]);
    const auto run = [&](int threads, int64_t first, int64_t rows) {
      Values<Out> out(rows * N);
      Kernels<E>::linear(threads, &x[first * K], rows, w, onto.empty() ? nullptr : &onto[first * N], gate,
                         !std::is_same_v<Out, E>, N, out.data());
      return out;
    };
    const char *dtype = Dtype<E>::NAME, *gated_or = gated ? "gated " : "", *format_name = NAMES[format];
    const Values<Out> all = run(1, 0, M);
    const double apart = error<Out>(all, expected);
    check(apart <= Dtype<Out>::ERROR, "%s %s %s%s: off by %g", dtype, format_name, gated_or, name, apart);
    for (int64_t rows = 1; rows < M; rows++)
      check(same(run(1 + rows * 3 / M, M - rows, rows), part_of(all, (M - rows) * N, rows * N)),
            "%s %s %s%s: the last %d rows alone differ", dtype, format_name, gated_or, name, int(rows));
  };
  compare(Dtype<E>(), "alone", w, {});
  compare(Dtype<E>(), "with bias and residual", with_bias, residual);
  if (!gated) compare(Dtype<Fp32>(), "to float32", with_bias, {});
}

Doubles rms_norm(const Doubles& x, const Values<Fp32>& weight, double eps) {  // x [..., H]
  const int64_t H = weight.size();
  Doubles out(x.size());
  for (int64_t row = 0; row < int64_t(x.size()); row += H) {
    double sum = 0;
    for (int64_t i = 0; i < H; i++) sum += x[row + i] * x[row + i];
    const double share = 1 / std::sqrt(sum / H + eps);
    for (int64_t i = 0; i < H; i++) out[row + i] = x[row + i] * share * weight[i];
  }
  return out;
}

template <class E>
void check_rms_norm(int64_t H) {
  const Values<E> x = draws<E>(5 * H);
  const Values<Fp32> weight = draws<Fp32>(H);
  Values<E> out(5 * H);
  Doubles read(x.size());
  std::transform(x.begin(), x.end(), read.begin(), Dtype<E>::get);
  Kernels<E>::rms_norm(x.data(), weight.data(), 5, H, 1e-5f, out.data(), H);
  const double apart = error<E>(out, rms_norm(read, weight, 1e-5));
  check(apart <= Dtype<E>::ERROR, "%s rms_norm of %d: off by %g", Dtype<E>::NAME, int(H), apart);
}

template <class E>
void check_attend(int64_t B, int64_t T, int64_t heads, int64_t kv_heads, int64_t hd, int64_t n, bool normed,
                  bool sinks = false) {
  using D = Dtype<E>;
  const Scene scene(B, T, heads, kv_heads, hd, n);
  const Rows& rows = scene.rows;
  const int64_t S = n + 3, stride = kv_heads * hd, width = rows.width();
  const Values<E> qkv = draws<E>(B * T * width), keys = draws<E>(B * S * stride), values = draws<E>(B * S * stride);
  const Values<Fp32> q_norm = draws<Fp32>(hd), k_norm = draws<Fp32>(hd);
  const Values<Fp32> sink = draws<Fp32>(heads);
  Values<E> k = keys, v = values;
  const Attending layer{normed ? q_norm.data() : nullptr, normed ? k_norm.data() : nullptr, 1e-5f,
                        {k.data(), S * stride, stride, hd}, {v.data(), S * stride, stride, hd}, 0,
                        sinks ? sink.data() : nullptr};
  const auto run = [&](int threads, const Rows& rows, const Values<E>& qkv) {
    Values<E> out(rows.B * rows.T * heads * hd);
    Kernels<E>::attend(threads, rows, qkv.data(), layer, out.data());
    return out;
  };
  char name[99];
  std::snprintf(name, sizeof name, "%s attend %dx%d, %d heads of %d", D::NAME, int(B), int(T), int(heads), int(hd));
  const Values<E> found = run(1, rows, qkv);
  // Queries [B*T, heads, hd] and keys as they should be, and what is stored.
  Doubles rotated, stored_keys;
  Values<E> cached;
  for (int64_t row = 0; row < B * T; row++)
    for (int64_t h = 0; h < heads + kv_heads; h++) {
      Doubles head(hd);
      std::transform(&qkv[row * width + h * hd], &qkv[row * width + (h + 1) * hd], head.begin(), D::get);
      if (normed) head = rms_norm(head, h < heads ? q_norm : k_norm, 1e-5);
      Doubles& to = h < heads ? rotated : stored_keys;
      for (int64_t i = 0; i < hd; i++) {
        const double c = scene.cosine[row * hd / 2 + i % (hd / 2)], s = scene.sine[row * hd / 2 + i % (hd / 2)];
        to.push_back(i < hd / 2 ? head[i] * c - head[i + hd / 2] * s : head[i] * c + head[i - hd / 2] * s);
      }
      const int64_t place = (row / T * S + scene.slots[row]) * stride + (h - heads) * hd;
      if (h >= heads) cached.insert(cached.end(), &k[place], &k[place + hd]);
    }
  const double keys_apart = error<E>(cached, stored_keys);
  check(keys_apart <= D::ERROR, "%s: stored keys are off by %g", name, keys_apart);
  for (int64_t b = 0, row = 0; b < B; b++)
    for (int64_t t = 0; t < T; t++, row++)
      check(!std::memcmp(&v[(b * S + scene.slots[row]) * stride], &qkv[(row + 1) * width - stride],
                         stride * sizeof v[0]), "%s: stored values of row %d", name, int(row));
  Doubles expected;
  for (int64_t row = 0; row < B * T; row++)
    for (int64_t h = 0; h < heads; h++) {
      const int64_t cache = row / T * S * stride + h / (heads / kv_heads) * hd;
      Doubles sum(hd);
      double total = sinks ? std::exp(double(sink[h])) : 0;
      for (int64_t j = 0; j < n; j++) {
        if (!scene.visible[row * n + j]) continue;
        double score = 0;
        for (int64_t i = 0; i < hd; i++)
          score += rotated[(row * heads + h) * hd + i] * D::get(k[cache + j * stride + i]);
        const double weight = std::exp(score / std::sqrt(double(hd)));
        total += weight;
        for (int64_t i = 0; i < hd; i++) sum[i] += weight * D::get(v[cache + j * stride + i]);
      }
      for (double value : sum) expected.push_back(value / total);
    }
  const double apart = error<E>(found, expected);
  check(apart <= 2 * D::ERROR, "%s: off by %g", name, apart);
  for (int threads : {2, 3, 5}) check(same(run(threads, rows, qkv), found), "%s: %d threads", name, threads);
  for (int64_t t = 0; B == 1 && t < T; t++)
    check(same(run(1 + t % 3, scene.alone(t), part_of(qkv, t * width, width)),
               part_of(found, t * heads * hd, heads * hd)), "%s: row %d alone", name, int(t));
}

// All layers at once are the kernels one after the other, and a tree is its rows one by one, bit for bit.
template <class E>
void check_layers(Weight::Format format) {
  constexpr int64_t T = 7, heads = 4, kv_heads = 2, hd = 16, n = 140, H = heads * hd, inner = 96, L = 2;
  constexpr int64_t stride = kv_heads * hd;
  const Scene scene(1, T, heads, kv_heads, hd, n);
  const Rows& rows = scene.rows;
  const int64_t width = rows.width();
  struct Weights {
    Values<Fp32> attn_norm, mlp_norm, q_norm, k_norm, sinks;
    Values<E> k, v;
    Packed wqkv, wo, gate_up, down;
  };
  std::vector<Weights> weights(L);
  for (Weights& w : weights) {
    w.attn_norm = draws<Fp32>(H), w.mlp_norm = draws<Fp32>(H), w.q_norm = draws<Fp32>(hd);
    w.k_norm = draws<Fp32>(hd), w.sinks = draws<Fp32>(heads);
    w.k = draws<E>(n * stride), w.v = draws<E>(n * stride);
    w.wqkv = random_weight<E>(format, width, H), w.wo = random_weight<E>(format, H, H);
    w.gate_up = random_weight<E>(format, 2 * inner, H, true), w.down = random_weight<E>(format, H, inner);
    add_bias(w.wqkv, width, false), add_bias(w.wo, H, false), add_bias(w.gate_up, 2 * inner, true);
  }
  const auto layers_of = [&](std::vector<Weights>& all) {
    std::vector<Layer> layers;
    for (Weights& w : all)
      layers.push_back({w.attn_norm.data(), weight_of(w.wqkv),
                        {w.q_norm.data(), w.k_norm.data(), 1e-5f, {w.k.data(), n * stride, stride, hd},
                         {w.v.data(), n * stride, stride, hd}, 0, w.sinks.data()},
                        weight_of(w.wo), nullptr, w.mlp_norm.data(), weight_of(w.gate_up), weight_of(w.down), nullptr,
                        Gate::CLAMPED, {}});
    return layers;
  };
  const Values<E> x = draws<E>(T * H);
  std::vector<Weights> once = weights;
  Values<E> expected = x, read, features(T * 2 * H), normed(T * H), qkv(T * width), attended(T * H), gated(T * inner);
  const auto keep = [&](int64_t which) {
    for (int64_t t = 0; t < T; t++) std::copy_n(&expected[t * H], H, &features[(t * 2 + which) * H]);
  };
  const auto linear = [&](const Values<E>& x, const Weight& w, Gate gate, bool onto, Values<E>& out) {
    Kernels<E>::linear(1, x.data(), T, w, onto ? out.data() : nullptr, gate, false, out.size() / T, out.data());
  };
  for (const Layer& l : layers_of(once)) {
    if (l.attending.k.data == once[1].k.data()) keep(0);
    Kernels<E>::rms_norm(expected.data(), l.attn_norm, T, H, 1e-5f, normed.data(), H);
    if (read.empty()) read = normed;
    linear(normed, l.wqkv, Gate::NONE, false, qkv);
    Kernels<E>::attend(1, rows, qkv.data(), l.attending, attended.data());
    linear(attended, l.wo, Gate::NONE, true, expected);
    Kernels<E>::rms_norm(expected.data(), l.mlp_norm, T, H, 1e-5f, normed.data(), H);
    linear(normed, l.gate_up, l.gate, false, gated);
    linear(gated, l.down, Gate::NONE, true, expected);
  }
  keep(1);
  for (bool together : {true, false})
    for (int threads : {1, 2, 3}) {
      std::vector<Weights> mine = weights;
      Values<E> out = x, kept(T * 2 * H);
      const std::vector<Layer> layers = layers_of(mine);
      const void* own = threads == 2 ? read.data() : nullptr;  // what the first layer would read anyway
      if (together) Kernels<E>::layers(threads, rows, H, layers, 1e-5f, {1, L}, own, out.data(), kept.data());
      for (int64_t t = 0; !together && t < T; t++)
        Kernels<E>::layers(threads, scene.alone(t), H, layers, 1e-5f, {1, L}, nullptr, &out[t * H], &kept[t * 2 * H]);
      bool caches = true;
      for (int64_t l = 0; l < L; l++) caches &= same(mine[l].k, once[l].k) && same(mine[l].v, once[l].v);
      check(same(out, expected) && same(kept, features) && caches, "%s layers, %s, %s, %d threads: other bits",
            Dtype<E>::NAME, NAMES[format], together ? "all rows" : "row by row", threads);
    }
}

template <class T>
void print(const char* name, const std::vector<T>& values) {
  std::printf("%s ", name);
  for (char byte : bytes_of(values)) std::printf("%02x", uint8_t(byte));
  std::puts("");
}

// For test_alone.py, which packs the same numbers with kernels/cpu.py.
void print_packing() {
  const auto [columns, bf16_per_word, bytes_per_word, byte_offset, nibbles_per_word] = packing();
  std::printf("layout %d %d %d %d %d\n", int(columns), int(bf16_per_word), int(bytes_per_word), int(byte_offset),
              int(nibbles_per_word));
  Matrix<int8_t> m{74, 8, {}};
  for (int i = 0; i < 74 * 8; i++) m.values.push_back(int8_t(i * 7 % 16 - 8));
  print("pack", pack(m, bf16_per_word));
  print("pack_int4", pack_int4(m, bf16_per_word));
  print("pack_w4a8", pack_int4(m, nibbles_per_word));
  print("pack_bytes", pack_bytes(m));
  print("pack_scale", pack(m, 1));
  print("gated", pack(interleave(m), bf16_per_word));
  print("gated_int4", pack_int4(interleave(m), bf16_per_word));
  print("gated_scale", pack(interleave(m), 1));
}

// Of x that is rounded, whose sums are exact: the same for every instruction set that adds once to what it has multiplied.
template <class E>
void print_rounded(Weight::Format format, int64_t K) {
  constexpr int64_t N = 45;
  Packed packed = random_weight<E>(format, N, K);
  const Values<E> x = draws<E>(40 * K);
  for (int64_t rows : {1, 7, 8, 17, 40}) {
    Values<Fp32> out(rows * N);
    Kernels<E>::linear(2, x.data(), rows, weight_of(packed), nullptr, Gate::NONE, true, N, out.data());
    print(Dtype<E>::NAME, out);
  }
}

template <class E>
void check_dtype() {
  const auto FORMATS = {Weight::WHOLE, Weight::INT8, Weight::INT4, Weight::MXFP4, Weight::W8A8, Weight::W4A8};
  for (Weight::Format format : FORMATS)
    for (bool gated : {false, true}) check_linear<E>(format, gated, gated ? 21 : 45, 96);
  for (Weight::Format format : {Weight::WHOLE, Weight::INT8, Weight::W8A8})
    check_linear<E>(format, false, 33, 100);  // a part of 64 inputs, and an odd number of words
  for (int64_t size : {1, 50, 576}) check_rms_norm<E>(size);
  check_attend<E>(1, 1, 4, 4, 32, 5, false), check_attend<E>(2, 7, 6, 2, 64, 70, false);
  check_attend<E>(1, 9, 6, 2, 64, 300, true, true), check_attend<E>(3, 5, 8, 1, 128, 33, true);
  check_attend<E>(1, 5, 3, 1, 100, 140, false), check_attend<E>(1, 2, 2, 2, 6, 9, true);
  check_bytes<E>(9, 6, 2, 64, 300), check_bytes<E>(5, 4, 4, 20, 140), check_bytes<E>(7, 8, 1, 6, 40);
  for (Weight::Format format : FORMATS) check_layers<E>(format);
}

// Of Linux, as kernels/isa.py does. Where there are none, it refuses.
void ask_for_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  syscall(SYS_arch_prctl, 0x1023, 18);
#endif
}

}  // namespace

int main(int count, char** arguments) {
  ask_for_tiles();
  if (count > 1 && !std::strcmp(arguments[1], "packing")) return print_packing(), 0;
  if (count > 1 && !std::strcmp(arguments[1], "rounded")) {
    print_rounded<Fp32>(Weight::W8A8, 100), print_rounded<Bf16>(Weight::W8A8, 100);
    print_rounded<Fp32>(Weight::W4A8, 96), print_rounded<Bf16>(Weight::W4A8, 96);
    return 0;
  }
  if (count > 1) most_rows = std::atoi(arguments[1]);
  check_dtype<Fp32>();
  check_dtype<Bf16>();
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures != 0;
}
