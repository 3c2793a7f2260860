// What chunkc::fused_linear does around a product, in torch's operators: for products that oneDNN makes.
#pragma once

#include "cpu_linear_epilogue.h"

#include <ATen/core/Tensor.h>

#include <optional>

namespace chunkc {

using Given = std::optional<at::Tensor>;  // or nothing

// x, divided by the root of its mean square plus eps, times the norm's weight [K].
inline at::Tensor before(const at::Tensor& x, const Given& norm_weight, double norm_eps) {
  if (!norm_weight)
    return x;
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor mean = wide.mul(wide).mean({-1}, /*keepdim=*/true);
  return wide.mul(mean.add(norm_eps).rsqrt()).to(x.scalar_type()).mul(*norm_weight);
}

// The product with its gates opened and the residual added.
inline at::Tensor after(at::Tensor product, Activation activation, const Given& residual) {
  const at::ScalarType dtype = product.scalar_type();
  if (activation != Activation::kNone) {
    const int64_t half = product.size(-1) / 2;
    const at::Tensor gates = product.narrow(-1, 0, half).to(at::kFloat);
    const at::Tensor inner = activation == Activation::kSilu
        ? gates
        : gates.add(gates.pow(3).mul(0.044715)).mul(1.5957691216057308);  // see cpu_linear_epilogue.h
    product = gates.mul(inner.sigmoid()).mul(product.narrow(-1, half, half));
  }
  return residual ? product.add(*residual).to(dtype) : product.to(dtype);
}

}  // namespace chunkc
