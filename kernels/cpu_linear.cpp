// chunkc::packed_linear on CPU: x [..., K] times a packed weight [N, K] transposed, plus bias [N], in x's dtype or in
// float32. And chunkc::fused_linear, which does what comes before and after in the same go, and chunkc::linear_argmax,
// which keeps the largest of each row.
//
// Own kernels serve float32 where there is AVX512, and bfloat16 where there are its dot products but no matrix
// registers (AMX), which oneDNN uses and we do not. oneDNN serves the rest.

#include "cpu_linear_epilogue.h"
#include "cpu_linear_memory.h"
#include "cpu_linear_norm.h"
#include "cpu_linear_onednn.h"
#include "cpu_linear_plain.h"
#include "cpu_linear_product.h"
#include "cpu_linear_registry.h"
#include "cpu_operator.h"

#include <ATen/EmptyTensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace chunkc {
namespace {

struct Weight {
  at::ScalarType dtype;
  int64_t in_features, out_features;
  bool gated;
  Memory memory;  // in our layout, or
  at::Tensor opaque;  // in oneDNN's, where the rows of a gated one lie as they did
};

Registry<Weight>& registry() {
  static Registry<Weight>& weights = *new Registry<Weight>;  // never destroyed: threads may outlive main
  return weights;
}

bool has_own_kernel([[maybe_unused]] at::ScalarType dtype) {
#if defined(CHUNKC_AVX512)
  if (dtype == at::kFloat)
    return true;
#if defined(__AVX512BF16__) && defined(__AVX512VL__) && !defined(__AMX_BF16__)
  if (dtype == at::kBFloat16)
    return true;
#endif
#endif
  return false;
}

// Calls f with a zero of the C++ type of a dtype that has_own_kernel.
template <typename F>
void with_type(at::ScalarType dtype, const F& f) {
  if (dtype == at::kFloat)
    f(0.0f);
  else
    f(c10::BFloat16(0.0f));
}

#if defined(CHUNKC_AVX512)
template <typename T>
Layout layout_of(const Weight& weight) {
  return Layout::of<T>(weight.in_features, weight.out_features, weight.gated);
}
#endif

// Calls of oneDNN, in a library of their own: they need headers that take longer to read than all of this to compile.
OneDNN onednn{};

int64_t pack_linear_weight(const at::Tensor& tensor, bool own, bool consumed, bool gated) {
  TORCH_CHECK_VALUE(tensor.dim() == 2, "packed_linear: a weight is [N, K], not ", tensor.sizes());
  TORCH_CHECK_VALUE(
      !gated || tensor.size(0) % (2 * kTurn) == 0, "packed_linear: half the rows of a gated weight [", tensor.size(0),
      ", K] are no multiple of ", kTurn);
  auto weight = std::make_unique<Weight>();
  weight->dtype = tensor.scalar_type();
  weight->out_features = tensor.size(0), weight->in_features = tensor.size(1), weight->gated = gated;
  if (own && has_own_kernel(weight->dtype)) {
#if defined(CHUNKC_AVX512)
    with_type(weight->dtype, [&](auto zero) {
      using T = decltype(zero);
      const Layout layout = layout_of<T>(*weight);
      weight->memory = Memory::allocate(layout.bytes());
      pack<T>(tensor, layout, weight->memory.data(), consumed);
    });
#endif
  } else {
    TORCH_CHECK(onednn.pack, "packed_linear: oneDNN's library is not loaded");
    weight->opaque = onednn.pack(tensor);
  }
  return registry().add(std::move(weight));
}

#if defined(CHUNKC_AVX512)
// Into `out` [..., N], of x's dtype or float32, or, where there is none, `best` [M].
void multiply_by_own(
    const at::Tensor& x, const Weight& weight, const std::optional<at::Tensor>& bias, const Around& around,
    const at::Tensor& out, Best* best) {
  // rows at any distance, as long as it is one distance
  const int64_t num_rows = c10::multiply_integers(x.sizes().begin(), x.sizes().end() - 1);
  at::Tensor rows = x;
  if (!x.is_contiguous()) {
    rows = x.reshape({num_rows, weight.in_features});
    rows = rows.stride(1) == 1 ? rows : rows.contiguous();
  }
  const auto plain = [](const std::optional<at::Tensor>& given) { return given ? given->contiguous() : at::Tensor(); };
  const at::Tensor added = plain(bias), norm_weight = plain(around.norm_weight), residual = plain(around.residual);
  if (num_rows == 0 || weight.out_features == 0)
    return;
  with_type(weight.dtype, [&](auto zero) {
    using T = decltype(zero);
    Product<T> p;
    p.x = rows.const_data_ptr<T>();
    p.rows = num_rows;
    p.x_stride = rows.is_contiguous() ? weight.in_features : rows.stride(0);
    at::Tensor normalised;
    if (norm_weight.defined()) {
      normalised = at::detail::empty_cpu({num_rows, weight.in_features}, x.options());
      normalise(
          p.x, p.x_stride, num_rows, weight.in_features, norm_weight.const_data_ptr<T>(), float(around.norm_eps),
          normalised.mutable_data_ptr<T>());
      p.x = normalised.const_data_ptr<T>(), p.x_stride = weight.in_features;
    }
    p.layout = layout_of<T>(weight);
    p.weight = weight.memory.data();
    p.bias = bias ? added.const_data_ptr<T>() : nullptr;
    p.out = out.defined() ? out.mutable_data_ptr() : nullptr;
    p.wide = out.defined() && out.scalar_type() != x.scalar_type();
    p.epilogue = {around.activation, residual.defined() ? residual.const_data_ptr<T>() : nullptr};
    p.best = best;
    multiply(p);
  });
}

at::Tensor multiply_by_own(
    const at::Tensor& x, const Weight& weight, const std::optional<at::Tensor>& bias, at::ScalarType out_dtype,
    const Around& around) {
  at::DimVector shape(x.sizes());
  shape.back() = weight.out_features / (weight.gated ? 2 : 1);
  const at::Tensor out = at::detail::empty_cpu(shape, x.options().dtype(out_dtype));
  multiply_by_own(x, weight, bias, around, out, nullptr);
  return out;
}
#endif

int64_t number_of(const at::Tensor& handle) {
  TORCH_CHECK_TYPE(
      handle.scalar_type() == at::kLong && handle.numel() == 1, "packed_linear: a handle is one int64 number");
  return *handle.const_data_ptr<int64_t>();
}

const Weight& present(const Weight* weight, int64_t number) {
  TORCH_CHECK(
      weight, "packed_linear: the packed weight ", number,
      " is gone; keep its PackedWeight as long as the graph runs");
  return *weight;
}

// Rows `numbers` of the packed weight, as they were.
at::Tensor packed_rows(const at::Tensor& numbers, const at::Tensor& handle, int64_t in_features, at::ScalarType dtype) {
  const int64_t number = number_of(handle);
  const auto borrowed = registry().find(number);
  const Weight& weight = present(borrowed.get(), number);
  TORCH_CHECK_VALUE(
      in_features == weight.in_features && dtype == weight.dtype, "packed_rows: the weight's rows are [",
      weight.in_features, "] of ", weight.dtype);
#if defined(CHUNKC_AVX512)
  if (!weight.opaque.defined()) {
    at::DimVector shape(numbers.sizes());
    shape.push_back(in_features);
    const at::Tensor out = at::detail::empty_cpu(shape, at::TensorOptions().dtype(dtype));
    const at::Tensor which = numbers.to(at::kLong).contiguous();
    with_type(dtype, [&](auto zero) {
      using T = decltype(zero);
      unpack<T>(
          weight.memory.data(), layout_of<T>(weight), which.const_data_ptr<int64_t>(), which.numel(),
          out.data_ptr<T>());
    });
    return out;
  }
#endif
  at::DimVector shape(numbers.sizes());
  shape.push_back(in_features);
  return weight.opaque.to_dense().index_select(0, numbers.reshape(-1)).reshape(shape);
}

// Whether x [..., K] and bias fit the weight; `name` is the operator's.
void check_operands(
    const char* name, const at::Tensor& x, const Weight& weight, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK_VALUE(
      x.dim() >= 1 && x.size(-1) == weight.in_features, name, ": x ", x.sizes(), " does not fit a weight [",
      weight.out_features, ", ", weight.in_features, "]");
  TORCH_CHECK_TYPE(
      x.scalar_type() == weight.dtype && (!bias || bias->scalar_type() == weight.dtype), name,
      ": x and bias must have the weight's dtype, ", weight.dtype);
  TORCH_CHECK_VALUE(
      !bias || (bias->dim() == 1 && bias->size(0) == weight.out_features), name, ": bias must be [N]");
}

void check_norm(const char* name, const Weight& weight, const std::optional<at::Tensor>& norm_weight) {
  TORCH_CHECK_TYPE(
      !norm_weight || norm_weight->scalar_type() == weight.dtype, name, ": the norm's weight must have the weight's ",
      "dtype, ", weight.dtype);
  TORCH_CHECK_VALUE(
      !norm_weight || (norm_weight->dim() == 1 && norm_weight->size(0) == weight.in_features), name,
      ": the norm's weight must be [K]");
}

at::Tensor packed_linear(
    const at::Tensor& x, const at::Tensor& handle, const std::optional<at::Tensor>& bias, int64_t out_features,
    std::optional<at::ScalarType> wanted) {
  const at::ScalarType out_dtype = wanted.value_or(x.scalar_type());
  const int64_t number = number_of(handle);
  const auto borrowed = registry().find(number);
  const Weight& weight = present(borrowed.get(), number);
  check_operands("packed_linear", x, weight, bias);
  TORCH_CHECK_VALUE(
      out_features == weight.out_features && !weight.gated, "packed_linear: ", out_features,
      " columns do not fit a ", weight.gated ? "gated " : "", "weight [", weight.out_features, ", ",
      weight.in_features, "]");
  TORCH_CHECK_TYPE(
      out_dtype == x.scalar_type() || out_dtype == at::kFloat, "packed_linear: results are ", x.scalar_type(),
      " as x is, or float32, not ", out_dtype);
#if defined(CHUNKC_AVX512)
  if (!weight.opaque.defined())
    return multiply_by_own(x, weight, bias, out_dtype, {});
#endif
  return onednn.multiply(x, weight.opaque, bias).to(out_dtype);
}

at::Tensor fused_linear(
    const at::Tensor& x, const at::Tensor& handle, const std::optional<at::Tensor>& bias, int64_t out_features,
    const Around& around) {
  const int64_t number = number_of(handle);
  const auto borrowed = registry().find(number);
  const Weight& weight = present(borrowed.get(), number);
  check_operands("fused_linear", x, weight, bias);
  TORCH_CHECK_VALUE(
      weight.gated == (around.activation != Activation::kNone),
      "fused_linear: a gated weight needs an activation, and another has none");
  TORCH_CHECK_VALUE(
      out_features == weight.out_features / (weight.gated ? 2 : 1), "fused_linear: ", out_features,
      " columns do not fit a weight [", weight.out_features, ", ", weight.in_features, "]");
  check_norm("fused_linear", weight, around.norm_weight);
  TORCH_CHECK_TYPE(
      !around.residual || around.residual->scalar_type() == weight.dtype, "fused_linear: the residual must have the weight's dtype, ", weight.dtype);
  at::DimVector shape(x.sizes());
  shape.back() = out_features;
  TORCH_CHECK_VALUE(
      !around.residual || around.residual->sizes() == at::IntArrayRef(shape),
      "fused_linear: the residual must have the result's shape");
#if defined(CHUNKC_AVX512)
  if (!weight.opaque.defined())
    return multiply_by_own(x, weight, bias, x.scalar_type(), around);
#endif
  return after(around, onednn.multiply(before(around, x), weight.opaque, bias));
}

// The largest of each row's sums, float32, and its column: (int64 [...], float32 [...]).
std::tuple<at::Tensor, at::Tensor> linear_argmax(
    const at::Tensor& x, const at::Tensor& handle, const std::optional<at::Tensor>& bias, int64_t out_features,
    const std::optional<at::Tensor>& norm_weight, double norm_eps) {
  const int64_t number = number_of(handle);
  const auto borrowed = registry().find(number);
  const Weight& weight = present(borrowed.get(), number);
  check_operands("linear_argmax", x, weight, bias);
  check_norm("linear_argmax", weight, norm_weight);
  TORCH_CHECK_VALUE(
      out_features == weight.out_features && !weight.gated && out_features > 0, "linear_argmax: ", out_features,
      " columns do not fit a ", weight.gated ? "gated " : "", "weight [", weight.out_features, ", ",
      weight.in_features, "]");
  const at::DimVector shape(x.sizes().begin(), x.sizes().end() - 1);
  const Around around{norm_weight, norm_eps, Activation::kNone, std::nullopt};
#if defined(CHUNKC_AVX512)
  if (!weight.opaque.defined()) {
    const at::Tensor columns = at::detail::empty_cpu(shape, at::TensorOptions().dtype(at::kLong));
    const at::Tensor values = at::detail::empty_cpu(shape, at::TensorOptions().dtype(at::kFloat));
    std::vector<Best> best(columns.numel());
    multiply_by_own(x, weight, bias, around, {}, best.data());
    for (size_t row = 0; row < best.size(); ++row) {
      columns.mutable_data_ptr<int64_t>()[row] = best[row].column;
      values.mutable_data_ptr<float>()[row] = best[row].value;
    }
    return {columns, values};
  }
#endif
  const at::Tensor sums = onednn.multiply(before(around, x), weight.opaque, bias).to(at::kFloat);
  const at::Tensor columns = sums.argmax(-1);
  return {columns, sums.gather(-1, columns.unsqueeze(-1)).squeeze(-1)};
}

int64_t boxed_pack_linear_weight(const Handle& weight, bool own, bool consumed, bool gated) {
  return pack_linear_weight(tensor_of(weight), own, consumed, gated);
}

Handle boxed_packed_linear(
    const Handle& x, const Handle& handle, const std::optional<Handle>& bias, int64_t out_features,
    std::optional<at::ScalarType> out_dtype) {
  return handle_of(packed_linear(tensor_of(x), tensor_of(handle), tensor_of(bias), out_features, out_dtype));
}

Handle boxed_fused_linear(
    const Handle& x, const Handle& handle, const std::optional<Handle>& bias, int64_t out_features,
    const std::optional<Handle>& norm_weight, double norm_eps, int64_t activation,
    const std::optional<Handle>& residual) {
  TORCH_CHECK_VALUE(
      activation >= 0 && activation <= int64_t(Activation::kGeluTanh), "fused_linear: there is no activation ",
      activation);
  return handle_of(fused_linear(
      tensor_of(x), tensor_of(handle), tensor_of(bias), out_features,
      {tensor_of(norm_weight), norm_eps, Activation(activation), tensor_of(residual)}));
}

std::tuple<Handle, Handle> boxed_linear_argmax(
    const Handle& x, const Handle& handle, const std::optional<Handle>& bias, int64_t out_features,
    const std::optional<Handle>& norm_weight, double norm_eps) {
  const auto [columns, values] = linear_argmax(
      tensor_of(x), tensor_of(handle), tensor_of(bias), out_features, tensor_of(norm_weight), norm_eps);
  return {handle_of(columns), handle_of(values)};
}

Handle boxed_packed_rows(const Handle& numbers, const Handle& handle, int64_t in_features, at::ScalarType dtype) {
  return handle_of(packed_rows(tensor_of(numbers), tensor_of(handle), in_features, dtype));
}

STABLE_TORCH_LIBRARY_IMPL(chunkc, CPU, m) {
  m.impl("packed_linear", TORCH_BOX(&boxed_packed_linear));
  m.impl("fused_linear", TORCH_BOX(&boxed_fused_linear));
  m.impl("linear_argmax", TORCH_BOX(&boxed_linear_argmax));
  m.impl("packed_rows", TORCH_BOX(&boxed_packed_rows));
  m.impl("_pack_linear_weight", TORCH_BOX(&boxed_pack_linear_weight));
}

}  // namespace
}  // namespace chunkc

extern "C" bool chunkc_has_own_linear(bool is_bfloat16) {
  return chunkc::has_own_kernel(is_bfloat16 ? at::kBFloat16 : at::kFloat);
}

// Not an operator: it is called when the garbage is collected, whatever torch is doing then.
extern "C" void chunkc_free_linear_weight(int64_t number) {
  chunkc::registry().remove(number);
}

// Given by cpu_linear_onednn.cpp once it is loaded.
extern "C" void chunkc_use_onednn(const chunkc::OneDNN* calls) {
  chunkc::onednn = *calls;
}
