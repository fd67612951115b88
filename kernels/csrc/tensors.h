// PyTorch's tensors as the operators read and make them, and how an operator is registered: on PyTorch's stable
// interface, whose headers compile in a quarter of the time of others.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <optional>
#include <stdexcept>

#include "kernels.h"

namespace eagle {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

// On how many threads the operators run: 0 as PyTorch's.
inline std::atomic<int64_t> own_threads{0};
inline int threads() { return own_threads ? int(own_threads) : int(torch::stable::get_num_threads()); }

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

// A tensor without gaps: an input, copied if it has some.
struct Dense : Tensor {
  Dense(const Tensor& t) : Tensor(t.is_contiguous() ? t : torch::stable::contiguous(t)) {}
};
using Maybe = std::optional<Dense>;
// The values of an input without gaps, or of a new tensor of these sizes.
template <class T>
struct Of : Dense {
  static constexpr ScalarType TYPE = std::is_same_v<T, bool>      ? ScalarType::Bool
                                     : std::is_same_v<T, float>   ? ScalarType::Float
                                     : std::is_same_v<T, uint8_t> ? ScalarType::Byte
                                                                  : ScalarType::Long;
  T* const values;
  Of(const Tensor& t) : Dense(t), values(const_cast<T*>(const_data_ptr<T>())) {}
  explicit Of(const std::vector<int64_t>& sizes) : Of(empty(sizes, TYPE)) {}
  T& operator[](int64_t i) const { return values[i]; }
};
using Longs = Of<int64_t>;
using Numbers = Of<float>;
using Flags = Of<bool>;

inline const void* data(const Tensor& t) { return t.const_data_ptr(); }
inline const void* data(const Maybe& t) { return t ? data(*t) : nullptr; }
inline const float* floats(const Tensor* t) { return t ? t->const_data_ptr<float>() : nullptr; }
inline const float* floats(const Maybe& t) { return t ? floats(&*t) : nullptr; }
inline const int64_t* longs(const Maybe& t) { return t ? t->const_data_ptr<int64_t>() : nullptr; }

inline Tensor copy(const Tensor& x) {
  const Dense from(x);
  Tensor out = empty(from.sizes().vec(), from.scalar_type());
  std::memcpy(out.mutable_data_ptr(), data(from), from.numel() * from.element_size());
  return out;
}
// Rows of x [N, H] -> [B, T, H]: row(i) is the i-th.
template <class Row>
inline Tensor rows_of(const Dense& x, int64_t B, int64_t T, const Row& row) {
  const int64_t H = x.size(-1), size = H * int64_t(x.element_size());
  Tensor out = empty({B, T, H}, x.scalar_type());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  for (int64_t i = 0; i < B * T; i++) std::memcpy(to + i * size, (const char*)data(x) + row(i) * size, size);
  return out;
}
// Rows `index` [B, K] of each x [B, T, H] -> [B, K, H].
inline Tensor picked(const Tensor& x, const Longs& index) {
  const int64_t T = x.size(1), K = index.size(1);
  return rows_of(x, index.size(0), K, [&](int64_t i) { return i / K * T + index[i]; });
}

template <class T> constexpr bool IS_GROUP = false;
template <class... T> constexpr bool IS_GROUP<std::tuple<T...>> = true;

// Operators of functions. Arguments and results are numbers, tensors, lists of them, and groups (tuples) of these, flat in
// a schema: names of arguments stand at the functions. A `Tensor&` is written to.
template <auto F> struct Operator;
template <class Result, class... Arguments, Result (*F)(Arguments...)>
struct Operator<F> {
  static std::string schema(const std::string& name) {
    std::string arguments, results;
    (describe<Arguments>(arguments), ...);
    if constexpr (!std::is_void_v<Result>) describe<Result>(results);
    return name + "(" + arguments + ") -> (" + results + ")";
  }
  static void call(StableIValue* stack, uint64_t, uint64_t) {
    const StableIValue* next = stack;
    std::tuple<std::remove_cvref_t<Arguments>...> arguments{take<std::remove_cvref_t<Arguments>>(next)...};
    if constexpr (std::is_void_v<Result>) std::apply(F, arguments);
    else give(std::apply(F, arguments), stack);
  }

 private:
  template <class A>
  static void describe(std::string& words) {
    using T = std::remove_cvref_t<A>;
    if constexpr (IS_GROUP<T>) {
      [&]<class... E>(std::type_identity<std::tuple<E...>>) { (describe<E>(words), ...); }(std::type_identity<T>());
      return;
    }
    const std::string name = "x" + std::to_string(words.size());
    words += words.empty() ? "" : ", ";
    words += std::is_same_v<A, Tensor&>                ? "Tensor(" + name + "!)"
             : std::is_same_v<T, Tensors>              ? "Tensor[]"
             : std::is_same_v<T, std::vector<int64_t>> ? "int[]"
             : std::is_same_v<T, bool>                 ? "bool"
             : std::is_same_v<T, int64_t>              ? "int"
             : std::is_same_v<T, double>               ? "float"
             : std::is_same_v<T, Maybe>                ? "Tensor?"
                                                       : "Tensor";
    words += " " + name;
  }
  template <class T>
  static T take(const StableIValue*& next) {  // an argument from a stack
    if constexpr (IS_GROUP<T>)
      return [&]<class... E>(std::type_identity<std::tuple<E...>>) { return T{take<E>(next)...}; }(std::type_identity<T>());
    else if constexpr (std::is_base_of_v<Tensor, T>) return torch::stable::detail::to<Tensor>(*next++);
    else if constexpr (std::is_same_v<T, Maybe>) {
      const auto given = torch::stable::detail::to<std::optional<Tensor>>(*next++);
      return given ? Maybe(*given) : Maybe();
    } else return torch::stable::detail::to<T>(*next++);
  }
  template <class T>
  static void give(const T& result, StableIValue*& stack) {
    if constexpr (IS_GROUP<T>) std::apply([&](const auto&... each) { (give(each, stack), ...); }, result);
    else if constexpr (std::is_base_of_v<Tensor, T>) *stack++ = torch::stable::detail::from(Tensor(result));
    else *stack++ = torch::stable::detail::from(result);
  }
};

}  // namespace eagle
