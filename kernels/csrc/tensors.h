// PyTorch's tensors as the operators read and make them, on PyTorch's stable interface: its headers compile in a
// quarter of the time of others.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace eagle {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using Maybe = std::optional<Tensor>;

inline const void* data(const Tensor& t) { return t.const_data_ptr(); }
inline const void* data(const Tensor* t) { return t ? data(*t) : nullptr; }
inline const void* data(const Maybe& t) { return t ? data(*t) : nullptr; }
inline const float* floats(const Tensor& t) { return t.const_data_ptr<float>(); }
inline const float* floats(const Tensor* t) { return t ? floats(*t) : nullptr; }
inline const float* floats(const Maybe& t) { return t ? floats(*t) : nullptr; }
inline const int64_t* longs(const Tensor& t) { return t.const_data_ptr<int64_t>(); }
inline const int64_t* longs(const Maybe& t) { return t ? longs(*t) : nullptr; }

inline Tensor whole(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }
inline Maybe whole(const Maybe& t) { return t ? Maybe(whole(*t)) : Maybe(); }

// Not `torch::stable::empty`, which looks an operator up by its name.
inline Tensor empty(const std::vector<int64_t>& sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  AtenTensorHandle made;
  const int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  if (aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), code, aoti_torch_device_type_cpu(),
                               0, &made))
    throw std::runtime_error("there is no memory for what a kernel computes");
  return Tensor(made);
}
inline Tensor copy(const Tensor& x) {
  Tensor out = empty(x.sizes().vec(), x.scalar_type());
  std::memcpy(out.mutable_data_ptr(), x.const_data_ptr(), x.numel() * x.element_size());
  return out;
}

// Rows of x [N, H] -> [B, T, H]: row(i) is the i-th.
template <class Row>
inline Tensor rows_of(const Tensor& x, int64_t B, int64_t T, const Row& row) {
  const Tensor from = whole(x);
  const int64_t H = from.size(-1), size = H * int64_t(from.element_size());
  Tensor out = empty({B, T, H}, from.scalar_type());
  const auto* source = static_cast<const char*>(data(from));
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  for (int64_t i = 0; i < B * T; i++) std::memcpy(to + i * size, source + row(i) * size, size);
  return out;
}
// The first T rows of each x [B, R, F].
inline Tensor narrow(const Tensor& x, int64_t T) {
  Tensor all = x;
  return torch::stable::narrow(all, 1, 0, T);
}
// The contiguous values of an input, copied if they are not.
template <class T>
struct Of {
  const Tensor tensor;
  const T* const values;
  explicit Of(const Tensor& t) : tensor(whole(t)), values(tensor.const_data_ptr<T>()) {}
  const T& operator[](int64_t i) const { return values[i]; }
  int64_t size(int64_t dim) const { return tensor.size(dim); }
};
using Longs = Of<int64_t>;

// A new tensor of int64, float or bool, and its values.
template <class T>
struct New {
  static constexpr ScalarType TYPE = std::is_same_v<T, bool>    ? ScalarType::Bool
                                     : std::is_same_v<T, float> ? ScalarType::Float
                                                                : ScalarType::Long;
  Tensor tensor;
  T* const values;
  explicit New(const std::vector<int64_t>& sizes)
      : tensor(empty(sizes, TYPE)), values(tensor.template mutable_data_ptr<T>()) {}
  T& operator[](int64_t i) { return values[i]; }
  operator Tensor() const { return tensor; }
};

// Rows `index` [B, K] of each x [B, T, H] -> [B, K, H].
inline Tensor picked(const Tensor& x, const Tensor& index) {
  const Longs at(index);
  const int64_t T = x.size(1), K = at.size(1);
  return rows_of(x, at.size(0), K, [&](int64_t i) { return i / K * T + at[i]; });
}
// Values `names` [N] of row `index` of each x [B, T, V] -> [B, 1, N].
inline Tensor gathered(const Tensor& x, int64_t index, const Tensor& names) {
  const Of<float> from(x);
  const Longs of(names);
  const int64_t B = from.size(0), N = of.size(0);
  New<float> out({B, 1, N});
  for (int64_t b = 0; b < B; b++) {
    const float* row = &from[(b * from.size(1) + index) * from.size(2)];
    for (int64_t i = 0; i < N; i++) out[b * N + i] = row[of[i]];
  }
  return out;
}

}  // namespace eagle
