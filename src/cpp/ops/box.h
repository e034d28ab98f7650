// AGOQ_BOX: registers a function with the stable ABI, and refuses argument types that the ABI would mangle silently.
#pragma once

#include <type_traits>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

namespace agoq::ops {

// The schema types `float` and `int` arrive as double and int64_t: a `float` parameter would receive 0.0 and an int32_t
// would be cut. A `str` arrives as a StringHandle: the headers' conversion to std::string leaks it (torch 2.13).
template <class T>
inline constexpr bool boxable = !std::is_same_v<T, float> && !std::is_same_v<T, std::string> &&
                                !(std::is_integral_v<T> && !std::is_same_v<T, bool> && sizeof(T) != 8);

template <class R, class... Args>
constexpr bool all_boxable(R (*)(Args...)) {
  return (boxable<std::remove_cvref_t<Args>> && ...);
}

} // namespace agoq::ops

#define AGOQ_BOX(function)                                                                                       \
  (static_cast<void (*)(StableIValue*, uint64_t, uint64_t)>([] {                                                 \
    static_assert(agoq::ops::all_boxable(function), "ops take double, int64_t, bool, StringHandle and tensors"); \
    return TORCH_BOX(function);                                                                                  \
  }()))
