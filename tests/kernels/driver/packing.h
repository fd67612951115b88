// Random weights, packed by the rules of kernels/cpu.py. test_alone.py checks that these are the same.
#pragma once

#include "testing.h"

struct Packing {
  int64_t columns, bf16_per_word, bytes_per_word, byte_offset, nibbles_per_word;
};
inline const Packing& packing() {
  static const std::vector<int64_t> numbers = layout();
  static const Packing all{numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]};
  return all;
}
template <class T>
struct Matrix {  // [rows, K]
  int64_t rows, K;
  std::vector<T> values;
};
template <class T>
std::vector<T> pack(const Matrix<T>& m, int64_t w) {  // -> [blocks, K/w, columns, w]
  const int64_t c = packing().columns;
  std::vector<T> out((m.rows + c - 1) / c * c * m.K);
  for (int64_t n = 0; n < m.rows; n++)
    for (int64_t k = 0; k < m.K; k++)
      out[((n / c * (m.K / w) + k / w) * c + n % c) * w + k % w] = m.values[n * m.K + k];
  return out;
}
// Values of four bits less 8 -> [blocks, K/w, columns/2 * w].
inline std::vector<int8_t> pack_int4(const Matrix<int8_t>& m, int64_t w) {
  const std::vector<int8_t> bytes = pack(m, w);
  const int64_t half = packing().columns / 2 * w;
  std::vector<int8_t> out(bytes.size() / 2);
  for (int64_t i = 0; i < int64_t(out.size()); i++) {
    const int8_t* low = &bytes[i / half * 2 * half + i % half];
    out[i] = int8_t((low[0] + 8) | (low[half] + 8) << 4);
  }
  return out;
}
inline std::vector<int8_t> pack_bytes(const Matrix<int8_t>& m) {
  std::vector<int8_t> out = pack(m, packing().bytes_per_word);
  for (int8_t& byte : out) byte = int8_t(byte ^ packing().byte_offset);
  return out;
}
template <class T>
Matrix<T> interleave(const Matrix<T>& m) {  // gate above up -> half a block of each in turn
  const int64_t half = packing().columns / 2, N = m.rows / 2, blocks = (N + half - 1) / half;
  Matrix<T> out{blocks * 2 * half, m.K, std::vector<T>(blocks * 2 * half * m.K)};
  for (int64_t n = 0; n < N; n++)
    for (int64_t up = 0; up < 2; up++)
      std::copy_n(&m.values[(up * N + n) * m.K], m.K, &out.values[(n / half * 2 * half + up * half + n % half) * m.K]);
  return out;
}

template <class T>
std::vector<char> bytes_of(const std::vector<T>& values) {
  const char* from = reinterpret_cast<const char*>(values.data());
  return {from, from + values.size() * sizeof(T)};
}

// A random weight [N, K], packed for x in E, and the numbers that it stands for.
struct Packed {
  std::vector<char> data, scales, biases;
  Doubles numbers;  // [N, K], gate above up
  Weight weight;
};
template <class E>
Packed random_weight(Weight::Format format, int64_t N, int64_t K, bool gated = false) {
  using D = Dtype<E>;
  Packed p;
  p.numbers.resize(N * K);
  const auto whole = [&](const auto& m) { return gated ? interleave(m) : m; };
  int64_t steps = K * int64_t(sizeof(typename D::Value)) / 4, groups = 1;
  if (format == Weight::WHOLE) {
    const Matrix<typename D::Value> m{N, K, draws<E>(N * K)};
    std::transform(m.values.begin(), m.values.end(), p.numbers.begin(), D::get);
    p.data = bytes_of(pack(whole(m), K / steps));
  } else {
    const bool mxfp4 = format == Weight::MXFP4, four_bits = format == Weight::INT4 || format == Weight::W4A8 || mxfp4;
    const int64_t size = four_bits ? 32 : K, most = four_bits ? 8 : 127;
    Matrix<int8_t> q{N, K, std::vector<int8_t>(N * K)};
    groups = K / size;
    Matrix<float> scales{N, groups, draws<Fp32>(N * groups)};
    Matrix<uint16_t> rounded{N, groups, Values<Bf16>(N * groups)};
    Matrix<uint8_t> exponents{N, groups, std::vector<uint8_t>(N * groups)};
    for (size_t i = 0; i < scales.values.size(); i++) {
      exponents.values[i] = uint8_t(120 + source() % 12);
      if (mxfp4) scales.values[i] = std::ldexp(1.0f, exponents.values[i] - 127);
      rounded.values[i] = Dtype<Bf16>::of(scales.values[i]);
      if (four_bits) scales.values[i] = Dtype<Bf16>::get(rounded.values[i]);
    }
    for (int64_t i = 0; i < N * K; i++) {
      q.values[i] = int8_t(int64_t(source() % (2 * most)) - most);
      const int code = q.values[i] + 8, doubled[] = {0, 1, 2, 3, 4, 6, 8, 12};
      const double value = mxfp4 ? doubled[code & 7] * (code & 8 ? -0.5 : 0.5) : q.values[i];
      p.numbers[i] = value * scales.values[i / size];
    }
    const int64_t w = format == Weight::W8A8   ? packing().bytes_per_word
                      : format == Weight::W4A8 ? packing().nibbles_per_word
                      : std::is_same_v<E, Bf16> ? packing().bf16_per_word : 1;
    steps = K / w;
    p.data = bytes_of(format == Weight::W8A8 ? pack_bytes(whole(q))
                      : four_bits            ? pack_int4(whole(q), w) : pack(whole(q), w));
    p.scales = mxfp4 ? bytes_of(pack(whole(exponents), 1)) : four_bits ? bytes_of(pack(whole(rounded), 1)) : bytes_of(pack(whole(scales), 1));
  }
  const int64_t width = gated ? packing().columns / 2 : packing().columns;
  const int64_t blocks = ((gated ? N / 2 : N) + width - 1) / width;
  p.weight = {format, nullptr, nullptr, blocks, steps, groups, int64_t(p.data.size()) / blocks};
  return p;
}
inline const Weight& weight_of(Packed& p) {  // with where its numbers lie now
  p.weight.data = p.data.data(), p.weight.scales = p.scales.data();
  p.weight.bias = p.biases.empty() ? nullptr : reinterpret_cast<const float*>(p.biases.data());
  return p.weight;
}
inline Values<Fp32> add_bias(Packed& p, int64_t N, bool gated) {  // random [N], gate before up
  const Matrix<float> bias{N, 1, draws<Fp32>(N)};
  p.biases = bytes_of(pack(gated ? interleave(bias) : bias, 1));
  return bias.values;
}
