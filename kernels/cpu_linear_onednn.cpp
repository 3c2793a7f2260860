// Linears on oneDNN, where no kernel of ours serves: torch's operators, without a way through Python.

#include "cpu_linear_onednn.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <string_view>

namespace chunkc {
namespace {

at::Tensor pack(const at::Tensor& weight) {
  static const auto reorder =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("mkldnn::_reorder_linear_weight", "")
          .typed<at::Tensor(const at::Tensor&, std::optional<int64_t>)>();
  return reorder.call(weight.contiguous(), std::nullopt);  // no batch size: any number of rows
}

at::Tensor multiply(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  static const auto linear =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
          .typed<at::Tensor(
              const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::string_view,
              c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>)>();
  return linear.call(x, weight, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

}  // namespace
}  // namespace chunkc

extern "C" const chunkc::OneDNN* chunkc_onednn() {
  static const chunkc::OneDNN calls{chunkc::pack, chunkc::multiply};
  return &calls;
}
