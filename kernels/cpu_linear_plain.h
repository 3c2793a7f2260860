// What chunkc::fused_linear does around a product, in torch's operators: for products that oneDNN makes.
#pragma once

#include "cpu_linear_epilogue.h"

#include <ATen/core/Tensor.h>

#include <optional>

namespace chunkc {

// What is done before and after a product, each of it or nothing.
struct Around {
  std::optional<at::Tensor> norm_weight;  // [K]: x is divided by the root of its mean square plus eps, times this
  double norm_eps = 0;
  Activation activation = Activation::kNone;
  std::optional<at::Tensor> residual;  // of the result's shape
};

inline at::Tensor before(const Around& around, const at::Tensor& x) {
  if (!around.norm_weight)
    return x;
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor mean = wide.mul(wide).mean({-1}, /*keepdim=*/true);
  return wide.mul(mean.add(around.norm_eps).rsqrt()).to(x.scalar_type()).mul(*around.norm_weight);
}

inline at::Tensor after(const Around& around, at::Tensor product) {
  const at::ScalarType dtype = product.scalar_type();
  if (around.activation != Activation::kNone) {
    const int64_t half = product.size(-1) / 2;
    const at::Tensor gates = product.narrow(-1, 0, half).to(at::kFloat);
    const at::Tensor inner = around.activation == Activation::kSilu
        ? gates
        : gates.add(gates.pow(3).mul(0.044715)).mul(1.5957691216057308);  // see cpu_linear_epilogue.h
    product = gates.mul(inner.sigmoid()).mul(product.narrow(-1, half, half));
  }
  return around.residual ? product.add(*around.residual).to(dtype) : product.to(dtype);
}

}  // namespace chunkc
