// What cpu_linear.cpp needs of oneDNN, as torch wraps it. Handles are lent, but for results.
#pragma once

#include "cpu_linear_epilogue.h"
#include "cpu_tensor.h"

namespace chunkc {

// A product with what is done around it, see fused_linear.py; null handles for what there is not.
struct OneDNNProduct {
  AtenTensorHandle x, weight, bias, norm_weight;
  double norm_eps;
  Activation activation;
  AtenTensorHandle residual;
  ScalarType out_dtype;
};

struct OneDNN {
  AtenTensorHandle (*pack)(AtenTensorHandle weight);
  AtenTensorHandle (*multiply)(const OneDNNProduct& product);
  AtenTensorHandle (*rows)(AtenTensorHandle weight, AtenTensorHandle numbers);  // of the weight, as they were
};

}  // namespace chunkc
