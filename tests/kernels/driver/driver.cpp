// The kernels without PyTorch: processes records that test_standalone.py writes to a file, and checks that single rows
// and other numbers of threads give the same bits. Without a file, prints the layout of weights and caches.
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdio>

#include "kernels.h"

using namespace eagle;
using Bytes = std::vector<char>;

std::FILE* in;
int64_t number() {
  int64_t x;
  return std::fread(&x, sizeof x, 1, in) == 1 ? x : -1;
}
Bytes bytes() {
  Bytes read(number());
  return std::fread(read.data(), 1, read.size(), in) == read.size() ? read : Bytes();
}
template <class T>
T* of(Bytes& x) { return x.empty() ? nullptr : reinterpret_cast<T*>(x.data()); }
void write(const Bytes& x) { std::fwrite(x.data(), 1, x.size(), stdout); }

int records = 0, failures = 0;
void check(bool same, const char* what, int64_t which) {
  if (!same) failures++, std::fprintf(stderr, "record %d: other bits with %s %d\n", records, what, int(which));
}
Bytes part(const Bytes& all, int64_t first, int64_t count) { return {all.begin() + first, all.begin() + first + count}; }

template <class E>
void linear(int64_t item) {
  Weight w{};
  w.format = Weight::Format(number());
  w.blocks = number(), w.steps = number(), w.groups = number(), w.size = number();
  w.records.kind = Records::Kind(number()), w.records.minima = number(), w.records.unit = number();
  const int64_t K = number(), N = number(), M = number(), gate = number(), size = number() ? 4 : item;
  Bytes data = bytes(), scales = bytes(), bias = bytes(), x = bytes(), residual = bytes();
  w.data = of<char>(data), w.scales = of<char>(scales), w.bias = of<float>(bias);
  check(Kernels<E>::inputs(w) == K, "inputs", K);
  const auto run = [&](int threads, int64_t first, int64_t rows) {
    Bytes out(rows * N * size);
    Kernels<E>::linear(threads, &x[first * K * item], rows, w, residual.empty() ? nullptr : &residual[first * N * item],
                       Gate(gate), size != item, N, out.data());
    return out;
  };
  const Bytes all = run(1, 0, M);
  for (int64_t rows = 1; rows < M; rows++)
    check(run(1 + rows % 3, M - rows, rows) == part(all, (M - rows) * N * size, rows * N * size), "the last rows,", rows);
  write(all);
}

Bytes keys, values;  // of the latest record; the next one may continue with them
template <class E>
void attend(int64_t item) {
  PassArgs args{};
  args.B = number(), args.T = number(), args.heads = number(), args.kv_heads = number(), args.hd = number();
  args.n = number();
  AttentionLayer layer{};
  layer.eps = 1e-6f, layer.window = number();
  const bool is_int8 = number();
  for (Cache* cache : {&layer.k, &layer.v})
    cache->sequence = number(), cache->slot = number(), cache->head = number(), cache->is_int8 = is_int8;
  Bytes cosine = bytes(), sine = bytes(), slots = bytes(), visible = bytes(), qkv = bytes(), q_norm = bytes();
  Bytes k_norm = bytes(), sinks = bytes(), k = bytes(), v = bytes();
  if (!k.empty()) keys = k, values = v;
  layer.k.data = keys.data(), layer.v.data = values.data();
  layer.q_norm = of<float>(q_norm), layer.k_norm = of<float>(k_norm), layer.sinks = of<float>(sinks);
  args.cosine = of<float>(cosine), args.sine = of<float>(sine), args.slots = of<int64_t>(slots);
  args.visible = of<bool>(visible);
  const auto run = [&](int threads, const PassArgs& args, int64_t first) {
    Bytes out(args.B * args.T * args.heads * args.hd * item);
    Kernels<E>::attend(threads, args, &qkv[first * args.width() * item], layer, out.data());
    return out;
  };
  const Bytes all = run(1, args, 0);
  for (int threads : {2, 3, 5}) check(run(threads, args, 0) == all, "threads,", threads);
  for (int64_t t = 0; args.B == 1 && t < args.T; t++) {
    PassArgs one = args;
    one.T = 1, one.cosine += t * args.hd / 2, one.sine += t * args.hd / 2, one.slots += t, one.visible += t * args.n;
    const int64_t size = args.heads * args.hd * item;
    check(run(1 + t % 3, one, t) == part(all, t * size, size), "row", t);
  }
  write(all), write(keys), write(values);
}

int main(int count, char** arguments) {
#if defined(__x86_64__) && defined(__linux__)
  syscall(SYS_arch_prctl, 0x1023, 18);  // request AMX tiles from Linux, like kernels/isa.py
#endif
  if (count < 2) {
    for (int64_t x : layout()) std::printf("%d ", int(x));
    for (int64_t x : int8_block_sizes(64)) std::printf("%d ", int(x));
    return 0;
  }
  in = std::fopen(arguments[1], "rb");
  for (int64_t kind; (kind = number()) >= 0; records++) {
    const bool bf16 = number();
    if (kind == 0) bf16 ? linear<Bf16>(2) : linear<Fp32>(4);
    else bf16 ? attend<Bf16>(2) : attend<Fp32>(4);
  }
  return failures != 0;
}
