// Operators, registered through torch's stable C interface. It hands arguments over on a stack, which are the body's from
// then on, and takes the result from its beginning.
//
// A library serves one dtype (see cpu_dtype.h), as a model has one, and compiling for others would only delay its start.
// The first library that a process loads registers the operators, and hands on what another one was loaded for.
#pragma once

#include "cpu_tensor.h"

#include <atomic>
#include <optional>

#define CHUNKC_EXPORT extern "C" __attribute__((visibility("default")))

namespace chunkc {

using Boxed = void (*)(StableIValue* stack, uint64_t num_arguments, uint64_t num_results);

inline AtenTensorHandle handle_on(StableIValue value) {
  return reinterpret_cast<AtenTensorHandle>(value);
}

// Takes the arguments from a stack, in their order.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}

  Tensor tensor() { return Tensor(handle_on(*next_++)); }
  int64_t integer() { return take<int64_t>(*next_++); }
  bool flag() { return take<bool>(*next_++); }
  double real() { return take<double>(*next_++); }
  ScalarType dtype() { return ScalarType(take<int32_t>(*next_++)); }
  std::optional<Tensor> optional_tensor() {
    const auto value = optional();
    return value ? std::optional<Tensor>(Tensor(handle_on(*value))) : std::nullopt;
  }
  std::optional<ScalarType> optional_dtype() {
    const auto value = optional();
    return value ? std::optional<ScalarType>(ScalarType(take<int32_t>(*value))) : std::nullopt;
  }

 private:
  template <typename T>
  static T take(StableIValue value) {
    T plain;
    std::memcpy(&plain, &value, sizeof(plain));
    return plain;
  }
  std::optional<StableIValue> optional() {
    auto* place = reinterpret_cast<StableIValue*>(*next_++);
    if (!place)
      return std::nullopt;
    const StableIValue value = *place;
#if defined(TORCH_VERSION_2_13_0) && TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
    torch_delete_stable_ivalue(place);
#else
    delete place;
#endif
    return value;
  }

  StableIValue* next_;
};

inline StableIValue value_of(Tensor tensor) {
  return reinterpret_cast<StableIValue>(tensor.release());
}

// Registers bodies for CPU tensors, for as long as the process lives.
struct Operator {
  const char* name;
  Boxed body;
};

inline bool register_operators(std::initializer_list<Operator> operators) {
  TorchLibraryHandle library;
  bool done = aoti_torch_library_init_impl("chunkc", "CPU", __FILE__, __LINE__, &library) == AOTI_TORCH_SUCCESS;
  for (const Operator& each : operators)
    done = done && torch_library_impl(library, each.name, each.body, TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS;
  return done;
}

}  // namespace chunkc
