// What cpu_linear.cpp needs of oneDNN, as torch wraps it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace chunkc {

struct OneDNN {
  at::Tensor (*pack)(const at::Tensor& weight);
  at::Tensor (*multiply)(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);
};

}  // namespace chunkc
