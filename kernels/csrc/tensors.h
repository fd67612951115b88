// Tensors of the operators, and how operators are registered, on PyTorch's stable ABI. Its headers compile in a
// quarter of the time of the others.
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

// Number of threads of the operators; 0: torch.get_num_threads().
inline std::atomic<int64_t> requested_threads{0};
inline int threads() { return requested_threads ? int(requested_threads) : int(torch::stable::get_num_threads()); }

// `torch::stable::empty` would look up an operator by its name.
inline Tensor empty(const std::vector<int64_t>& sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  AtenTensorHandle handle;
  const int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  if (aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), code, aoti_torch_device_type_cpu(),
                               0, &handle))
    throw std::runtime_error("out of memory for the output of a kernel");
  return Tensor(handle);
}

// A contiguous tensor, copied from the input if that is not contiguous.
struct Dense : Tensor {
  Dense(const Tensor& t) : Tensor(t.is_contiguous() ? t : torch::stable::contiguous(t)) {}
};
using Maybe = std::optional<Dense>;
// A contiguous tensor with typed access: an input, or a new tensor of these sizes.
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
// Gather rows of x [N, H] -> [B, T, H]. row(i): the index of the i-th.
template <class Row>
inline Tensor gather_rows(const Dense& x, int64_t B, int64_t T, const Row& row) {
  const int64_t H = x.size(-1), size = H * int64_t(x.element_size());
  Tensor out = empty({B, T, H}, x.scalar_type());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  for (int64_t i = 0; i < B * T; i++) std::memcpy(to + i * size, (const char*)data(x) + row(i) * size, size);
  return out;
}
// Gather the tokens `index` [B, K] of x [B, T, H] -> [B, K, H].
inline Tensor gather_tokens(const Tensor& x, const Longs& index) {
  const int64_t T = x.size(1), K = index.size(1);
  return gather_rows(x, index.size(0), K, [&](int64_t i) { return i / K * T + index[i]; });
}

template <class T> constexpr bool IS_TUPLE = false;
template <class... T> constexpr bool IS_TUPLE<std::tuple<T...>> = true;

// Wrap a function as an operator. Arguments and results are numbers, tensors, lists of them, and tuples of these,
// which a schema lists flat. A `Tensor&` is an output.
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
    std::tuple<std::remove_cvref_t<Arguments>...> arguments{pop<std::remove_cvref_t<Arguments>>(next)...};
    if constexpr (std::is_void_v<Result>) std::apply(F, arguments);
    else push(std::apply(F, arguments), stack);
  }

 private:
  template <class A>
  static void describe(std::string& schema) {
    using T = std::remove_cvref_t<A>;
    if constexpr (IS_TUPLE<T>) {
      [&]<class... E>(std::type_identity<std::tuple<E...>>) { (describe<E>(schema), ...); }(std::type_identity<T>());
      return;
    }
    const std::string name = "x" + std::to_string(schema.size());
    schema += schema.empty() ? "" : ", ";
    schema += std::is_same_v<A, Tensor&>                ? "Tensor(" + name + "!)"
             : std::is_same_v<T, Tensors>              ? "Tensor[]"
             : std::is_same_v<T, std::vector<int64_t>> ? "int[]"
             : std::is_same_v<T, bool>                 ? "bool"
             : std::is_same_v<T, int64_t>              ? "int"
             : std::is_same_v<T, double>               ? "float"
             : std::is_same_v<T, Maybe>                ? "Tensor?"
                                                       : "Tensor";
    schema += " " + name;
  }
  template <class T>
  static T pop(const StableIValue*& next) {
    if constexpr (IS_TUPLE<T>)
      return [&]<class... E>(std::type_identity<std::tuple<E...>>) { return T{pop<E>(next)...}; }(std::type_identity<T>());
    else if constexpr (std::is_base_of_v<Tensor, T>) return torch::stable::detail::to<Tensor>(*next++);
    else if constexpr (std::is_same_v<T, Maybe>) {
      const auto tensor = torch::stable::detail::to<std::optional<Tensor>>(*next++);
      return tensor ? Maybe(*tensor) : Maybe();
    } else return torch::stable::detail::to<T>(*next++);
  }
  template <class T>
  static void push(const T& result, StableIValue*& stack) {
    if constexpr (IS_TUPLE<T>) std::apply([&](const auto&... each) { (push(each, stack), ...); }, result);
    else if constexpr (std::is_base_of_v<Tensor, T>) *stack++ = torch::stable::detail::from(Tensor(result));
    else *stack++ = torch::stable::detail::from(result);
  }
};

}  // namespace eagle
