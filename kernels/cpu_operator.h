// Operators are registered through torch's stable interface: its headers take a second to read, those of the
// dispatcher more than five. What it hands over are torch's own tensors behind handles, which are taken for that here.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <utility>

namespace chunkc {

using Handle = torch::stable::Tensor;

inline at::Tensor& tensor_of(const Handle& handle) {
  return *reinterpret_cast<at::Tensor*>(handle.get());
}

inline std::optional<at::Tensor> tensor_of(const std::optional<Handle>& handle) {
  return handle ? std::optional<at::Tensor>(tensor_of(*handle)) : std::nullopt;
}

inline Handle handle_of(at::Tensor tensor) {
  return Handle(reinterpret_cast<AtenTensorHandle>(new at::Tensor(std::move(tensor))));
}

}  // namespace chunkc
