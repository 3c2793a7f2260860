// Linears on oneDNN, where no kernel of ours serves: torch's operators, without a way through Python.

#include "cpu_linear_onednn.h"
#include "cpu_linear_plain.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <string_view>

namespace chunkc {
namespace {

static_assert(int(at::kInt) == int(kInt) && int(at::kLong) == int(kLong) && int(at::kHalf) == int(kHalf));
static_assert(int(at::kFloat) == int(kFloat) && int(at::kBFloat16) == int(kBFloat16));

// A handle is where torch's own tensor lies.
const at::Tensor& tensor_at(AtenTensorHandle handle) {
  return *reinterpret_cast<const at::Tensor*>(handle);
}

Given given_at(AtenTensorHandle handle) {
  return handle ? Given(tensor_at(handle)) : std::nullopt;
}

AtenTensorHandle handle_of(at::Tensor tensor) {
  return reinterpret_cast<AtenTensorHandle>(new at::Tensor(std::move(tensor)));
}

AtenTensorHandle pack(AtenTensorHandle weight) {
  static const auto reorder =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("mkldnn::_reorder_linear_weight", "")
          .typed<at::Tensor(const at::Tensor&, std::optional<int64_t>)>();
  return handle_of(reorder.call(tensor_at(weight).contiguous(), std::nullopt));  // no batch size: any number of rows
}

AtenTensorHandle multiply(const OneDNNProduct& p) {
  static const auto linear =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
          .typed<at::Tensor(
              const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::string_view,
              c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>)>();
  const at::Tensor product = linear.call(
      before(tensor_at(p.x), given_at(p.norm_weight), p.norm_eps), tensor_at(p.weight), given_at(p.bias), "none",
      c10::List<std::optional<at::Scalar>>(), "");
  const at::Tensor result = after(product, p.activation, given_at(p.residual));
  return handle_of(result.to(at::ScalarType(p.out_dtype)));
}

AtenTensorHandle rows(AtenTensorHandle weight, AtenTensorHandle numbers) {
  const at::Tensor& which = tensor_at(numbers);
  std::vector<int64_t> shape = which.sizes().vec();
  const at::Tensor plain = tensor_at(weight).to_dense();
  shape.push_back(plain.size(1));
  return handle_of(plain.index_select(0, which.reshape(-1)).reshape(shape));
}

}  // namespace
}  // namespace chunkc

extern "C" const chunkc::OneDNN* chunkc_onednn() {
  static const chunkc::OneDNN calls{chunkc::pack, chunkc::multiply, chunkc::rows};
  return &calls;
}
