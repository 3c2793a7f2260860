// chunkc::packed_linear on CPU: x [..., K] times a packed weight [N, K] transposed, plus bias [N], in x's dtype or in
// float32. And chunkc::fused_linear, which does what comes before and after in the same go, and chunkc::linear_argmax,
// which keeps the largest of each row.
//
// Own kernels serve float32 where there is AVX512, and bfloat16 where there are its dot products but no matrix
// registers (AMX), which oneDNN uses and we do not. oneDNN serves the rest.

#include "cpu_dtype.h"
#include "cpu_linear_epilogue.h"
#include "cpu_linear_memory.h"
#include "cpu_linear_norm.h"
#include "cpu_linear_onednn.h"
#include "cpu_linear_product.h"
#include "cpu_linear_registry.h"
#include "cpu_operator.h"

#include <optional>
#include <utility>
#include <vector>

namespace chunkc {
namespace {

struct Weight {
  ScalarType dtype;
  int64_t in_features, out_features;
  bool gated;
  Memory memory;  // in our layout, or
  Tensor opaque;  // in oneDNN's, where the rows of a gated one lie as they did
};

Registry<Weight>& registry() {
  static Registry<Weight>& weights = *new Registry<Weight>(place_of(kElement));  // never destroyed: threads may outlive main
  return weights;
}

// Whether a kernel of ours serves this library's dtype.
#if !defined(CHUNKC_AVX512) || defined(CHUNKC_FLOAT16)
#define CHUNKC_OWN_LINEAR 0
#elif defined(CHUNKC_FLOAT32)
#define CHUNKC_OWN_LINEAR 1
#elif defined(__AVX512BF16__) && defined(__AVX512VL__) && !defined(__AMX_BF16__)
#define CHUNKC_OWN_LINEAR 1
#else
#define CHUNKC_OWN_LINEAR 0
#endif

#if CHUNKC_OWN_LINEAR
using T = Element;

Layout layout_of(const Weight& weight) {
  return Layout::of<T>(weight.in_features, weight.out_features, weight.gated);
}
#endif

// Calls of oneDNN, in a library of their own: they need headers that take longer to read than all of this to compile.
OneDNN onednn{};

int64_t pack_linear_weight(const Tensor& tensor, bool own, bool consumed, bool gated) {
  CHUNKC_CHECK_VALUE(tensor.dim() == 2, "packed_linear: a weight is [N, K], not ", tensor.sizes());
  CHUNKC_CHECK_VALUE(
      !gated || tensor.size(0) % (2 * kTurn) == 0, "packed_linear: half the rows of a gated weight [", tensor.size(0),
      ", K] are no multiple of ", kTurn);
  CHUNKC_CHECK(
      tensor.scalar_type() == kElement, "packed_linear: nothing is loaded for a weight of ", tensor.scalar_type(),
      ": call chunkc.kernels.packed_linear.load(torch.", tensor.scalar_type(), ")");
  auto weight = std::make_unique<Weight>();
  weight->dtype = tensor.scalar_type();
  weight->out_features = tensor.size(0), weight->in_features = tensor.size(1), weight->gated = gated;
  if (own && CHUNKC_OWN_LINEAR) {
#if CHUNKC_OWN_LINEAR
    const Layout layout = layout_of(*weight);
    weight->memory = Memory::allocate(layout.bytes());
    pack<T>(tensor, layout, weight->memory.data(), consumed);
#endif
  } else {
    CHUNKC_CHECK(onednn.pack, "packed_linear: oneDNN's library is not loaded");
    weight->opaque = Tensor(onednn.pack(tensor.get()));
  }
  return registry().add(std::move(weight));
}

// What is done before and after a product, each of it or nothing.
struct Around {
  std::optional<Tensor> norm_weight;  // [K]: x is divided by the root of its mean square plus eps, times this
  double norm_eps = 0;
  Activation activation = Activation::kNone;
  std::optional<Tensor> residual;  // of the result's shape
};

Tensor multiply_by_onednn(
    const Tensor& x, const Weight& weight, const std::optional<Tensor>& bias, ScalarType out_dtype,
    const Around& around) {
  const auto given = [](const std::optional<Tensor>& tensor) { return tensor ? tensor->get() : nullptr; };
  return Tensor(onednn.multiply(
      {x.get(), weight.opaque.get(), given(bias), given(around.norm_weight), around.norm_eps, around.activation,
       given(around.residual), out_dtype}));
}

#if CHUNKC_OWN_LINEAR
// Elements from one row of x [..., K] to the next; -1 where it is not the same everywhere, or a row's elements do not lie
// side by side.
int64_t stride_of_rows(const Tensor& x) {
  if (x.size(-1) > 1 && x.stride(-1) != 1)
    return -1;
  int64_t stride = -1, next = -1;  // of the rows, and what the next dim's must be
  for (int64_t i = x.dim() - 2; i >= 0; --i) {
    if (x.size(i) == 1)
      continue;
    if (next >= 0 && x.stride(i) != next)
      return -1;
    stride = next >= 0 ? stride : x.stride(i);
    next = x.stride(i) * x.size(i);
  }
  return stride < 0 ? x.size(-1) : stride;
}

// Into `out` [..., N], of x's dtype or float32, or, where there is none, `best` [M].
void multiply_by_own(
    const Tensor& x, const Weight& weight, const std::optional<Tensor>& bias, const Around& around, const Tensor& out,
    Best* best) {
  // rows at any distance, as long as it is one distance
  int64_t num_rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i)
    num_rows *= x.size(i);
  if (num_rows == 0 || weight.out_features == 0)
    return;
  const Tensor rows = stride_of_rows(x) >= 0 ? x : x.contiguous();
  const auto plain = [](const std::optional<Tensor>& given) { return given ? given->contiguous() : Tensor(); };
  const Tensor added = plain(bias), norm_weight = plain(around.norm_weight), residual = plain(around.residual);
  Product<T> p;
  p.x = rows.const_data_ptr<T>();
  p.rows = num_rows;
  p.x_stride = stride_of_rows(rows);
  Tensor normalised;
  if (norm_weight.defined()) {
    normalised = empty_cpu({num_rows, weight.in_features}, x.scalar_type());
    normalise(
        p.x, p.x_stride, num_rows, weight.in_features, norm_weight.const_data_ptr<T>(), float(around.norm_eps),
        normalised.mutable_data_ptr<T>());
    p.x = normalised.const_data_ptr<T>(), p.x_stride = weight.in_features;
  }
  p.layout = layout_of(weight);
  p.weight = weight.memory.data();
  p.bias = bias ? added.const_data_ptr<T>() : nullptr;
  p.out = out.defined() ? out.mutable_data_ptr() : nullptr;
  p.wide = out.defined() && out.scalar_type() != x.scalar_type();
  p.epilogue = {around.activation, residual.defined() ? residual.const_data_ptr<T>() : nullptr};
  p.best = best;
  multiply(p);
}

Tensor multiply_by_own(
    const Tensor& x, const Weight& weight, const std::optional<Tensor>& bias, ScalarType out_dtype,
    const Around& around) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = weight.out_features / (weight.gated ? 2 : 1);
  const Tensor out = empty_cpu(shape, out_dtype);
  multiply_by_own(x, weight, bias, around, out, nullptr);
  return out;
}
#endif

int64_t number_of(const Tensor& handle) {
  CHUNKC_CHECK_TYPE(
      handle.scalar_type() == kLong && handle.numel() == 1, "packed_linear: a handle is one int64 number");
  return *handle.const_data_ptr<int64_t>();
}

const Weight& present(const Weight* weight, int64_t number) {
  CHUNKC_CHECK(
      weight, "packed_linear: the packed weight ", number,
      " is gone; keep its PackedWeight as long as the graph runs");
  return *weight;
}

// Rows `numbers` of the packed weight, as they were.
Tensor packed_rows(const Tensor& numbers, const Tensor& handle, int64_t in_features, ScalarType dtype) {
  const int64_t number = number_of(handle);
  const auto borrowed = registry().find(number);
  const Weight& weight = present(borrowed.get(), number);
  CHUNKC_CHECK_TYPE(
      numbers.scalar_type() == kLong || numbers.scalar_type() == kInt,
      "packed_rows: rows are named by int64 or int32, not ", numbers.scalar_type());
  CHUNKC_CHECK_VALUE(
      in_features == weight.in_features && dtype == weight.dtype, "packed_rows: the weight's rows are [",
      weight.in_features, "] of ", weight.dtype);
#if CHUNKC_OWN_LINEAR
  if (!weight.opaque.defined()) {
    std::vector<int64_t> shape(numbers.sizes().begin(), numbers.sizes().end());
    shape.push_back(in_features);
    const Tensor out = empty_cpu(shape, dtype);
    const Tensor which = numbers.to(kLong).contiguous();
    unpack<T>(
        weight.memory.data(), layout_of(weight), which.const_data_ptr<int64_t>(), which.numel(),
        out.mutable_data_ptr<T>());
    return out;
  }
#endif
  return Tensor(onednn.rows(weight.opaque.get(), numbers.get()));
}

// Whether x [..., K] and bias fit the weight; `name` is the operator's.
void check_operands(
    const char* name, const Tensor& x, const Weight& weight, const std::optional<Tensor>& bias) {
  CHUNKC_CHECK_VALUE(
      x.dim() >= 1 && x.size(-1) == weight.in_features, name, ": x ", x.sizes(), " does not fit a weight [",
      weight.out_features, ", ", weight.in_features, "]");
  CHUNKC_CHECK_TYPE(
      x.scalar_type() == weight.dtype && (!bias || bias->scalar_type() == weight.dtype), name,
      ": x and bias must have the weight's dtype, ", weight.dtype);
  CHUNKC_CHECK_VALUE(
      !bias || (bias->dim() == 1 && bias->size(0) == weight.out_features), name, ": bias must be [N]");
}

void check_norm(const char* name, const Weight& weight, const std::optional<Tensor>& norm_weight) {
  CHUNKC_CHECK_TYPE(
      !norm_weight || norm_weight->scalar_type() == weight.dtype, name,
      ": the norm's weight must have the weight's dtype, ", weight.dtype);
  CHUNKC_CHECK_VALUE(
      !norm_weight || (norm_weight->dim() == 1 && norm_weight->size(0) == weight.in_features), name,
      ": the norm's weight must be [K]");
}

Tensor packed_linear(
    const Tensor& x, const Tensor& handle, const std::optional<Tensor>& bias, int64_t out_features,
    std::optional<ScalarType> wanted) {
  const ScalarType out_dtype = wanted.value_or(x.scalar_type());
  const int64_t number = number_of(handle);
  const auto borrowed = registry().find(number);
  const Weight& weight = present(borrowed.get(), number);
  check_operands("packed_linear", x, weight, bias);
  CHUNKC_CHECK_VALUE(
      out_features == weight.out_features && !weight.gated, "packed_linear: ", out_features,
      " columns do not fit a ", weight.gated ? "gated " : "", "weight [", weight.out_features, ", ",
      weight.in_features, "]");
  CHUNKC_CHECK_TYPE(
      out_dtype == x.scalar_type() || out_dtype == kFloat, "packed_linear: results are ", x.scalar_type(),
      " as x is, or float32, not ", out_dtype);
#if CHUNKC_OWN_LINEAR
  if (!weight.opaque.defined())
    return multiply_by_own(x, weight, bias, out_dtype, {});
#endif
  return multiply_by_onednn(x, weight, bias, out_dtype, {});
}

Tensor fused_linear(
    const Tensor& x, const Tensor& handle, const std::optional<Tensor>& bias, int64_t out_features,
    const Around& around) {
  const int64_t number = number_of(handle);
  const auto borrowed = registry().find(number);
  const Weight& weight = present(borrowed.get(), number);
  check_operands("fused_linear", x, weight, bias);
  CHUNKC_CHECK_VALUE(
      weight.gated == (around.activation != Activation::kNone),
      "fused_linear: a gated weight needs an activation, and another has none");
  CHUNKC_CHECK_VALUE(
      out_features == weight.out_features / (weight.gated ? 2 : 1), "fused_linear: ", out_features,
      " columns do not fit a weight [", weight.out_features, ", ", weight.in_features, "]");
  check_norm("fused_linear", weight, around.norm_weight);
  CHUNKC_CHECK_TYPE(
      !around.residual || around.residual->scalar_type() == weight.dtype,
      "fused_linear: the residual must have the weight's dtype, ", weight.dtype);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = out_features;
  const auto has_shape = [&](const Sizes& sizes) {
    return std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end());
  };
  CHUNKC_CHECK_VALUE(
      !around.residual || has_shape(around.residual->sizes()),
      "fused_linear: the residual must have the result's shape");
#if CHUNKC_OWN_LINEAR
  if (!weight.opaque.defined())
    return multiply_by_own(x, weight, bias, x.scalar_type(), around);
#endif
  return multiply_by_onednn(x, weight, bias, x.scalar_type(), around);
}

// The largest of each row's sums, float32 [...], and its column, int64 [...]: of the first of equals, or of a NaN.
std::pair<Tensor, Tensor> linear_argmax(
    const Tensor& x, const Tensor& handle, const std::optional<Tensor>& bias, int64_t out_features,
    const std::optional<Tensor>& norm_weight, double norm_eps) {
  const int64_t number = number_of(handle);
  const auto borrowed = registry().find(number);
  const Weight& weight = present(borrowed.get(), number);
  check_operands("linear_argmax", x, weight, bias);
  check_norm("linear_argmax", weight, norm_weight);
  CHUNKC_CHECK_VALUE(
      out_features == weight.out_features && !weight.gated && out_features > 0, "linear_argmax: ", out_features,
      " columns do not fit a ", weight.gated ? "gated " : "", "weight [", weight.out_features, ", ",
      weight.in_features, "]");
  const Around around{norm_weight, norm_eps, Activation::kNone, std::nullopt};
  const std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end() - 1);
  const Tensor columns = empty_cpu(shape, kLong), values = empty_cpu(shape, kFloat);
  std::vector<Best> best(columns.numel());
  bool is_found = false;
#if CHUNKC_OWN_LINEAR
  if (!weight.opaque.defined()) {
    multiply_by_own(x, weight, bias, around, {}, best.data());
    is_found = true;
  }
#endif
  if (!is_found) {
    const Tensor sums = multiply_by_onednn(x, weight, bias, kFloat, around).contiguous();
    const float* sum = sums.const_data_ptr<float>();
    for (Best& row : best)
      for (int64_t column = 0; column < out_features; ++column)
        row.take({*sum++, column});
  }
  for (size_t row = 0; row < best.size(); ++row) {
    columns.mutable_data_ptr<int64_t>()[row] = best[row].column;
    values.mutable_data_ptr<float>()[row] = best[row].value;
  }
  return {columns, values};
}

void boxed_pack_linear_weight(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  const Tensor weight = in.tensor();
  const bool own = in.flag(), consumed = in.flag(), gated = in.flag();
  stack[0] = StableIValue(pack_linear_weight(weight, own, consumed, gated));
}

void boxed_packed_linear(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  const Tensor x = in.tensor(), handle = in.tensor();
  const std::optional<Tensor> bias = in.optional_tensor();
  const int64_t out_features = in.integer();
  stack[0] = value_of(packed_linear(x, handle, bias, out_features, in.optional_dtype()));
}

void boxed_fused_linear(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  const Tensor x = in.tensor(), handle = in.tensor();
  const std::optional<Tensor> bias = in.optional_tensor();
  const int64_t out_features = in.integer();
  Around around;
  around.norm_weight = in.optional_tensor(), around.norm_eps = in.real();
  const int64_t activation = in.integer();
  around.residual = in.optional_tensor();
  CHUNKC_CHECK_VALUE(
      activation >= 0 && activation <= int64_t(Activation::kGeluTanh), "fused_linear: there is no activation ",
      activation);
  around.activation = Activation(activation);
  stack[0] = value_of(fused_linear(x, handle, bias, out_features, around));
}

void boxed_linear_argmax(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  const Tensor x = in.tensor(), handle = in.tensor();
  const std::optional<Tensor> bias = in.optional_tensor();
  const int64_t out_features = in.integer();
  const std::optional<Tensor> norm_weight = in.optional_tensor();
  const auto [columns, values] = linear_argmax(x, handle, bias, out_features, norm_weight, in.real());
  stack[0] = value_of(columns), stack[1] = value_of(values);
}

void boxed_packed_rows(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  const Tensor numbers = in.tensor(), handle = in.tensor();
  const int64_t in_features = in.integer();
  stack[0] = value_of(packed_rows(numbers, handle, in_features, in.dtype()));
}

constexpr int kOperators = 5;
constexpr Boxed own_bodies[kOperators] = {
    boxed_pack_linear_weight, boxed_packed_linear, boxed_fused_linear, boxed_packed_rows, boxed_linear_argmax};
std::atomic<const Boxed*> bodies[kDtypes] = {};

// The place of the library that packs a weight, or packed the one with a handle.
int place_of_call(bool packs, const StableIValue* stack) {
  AtenTensorHandle tensor = handle_on(stack[packs ? 0 : 1]);
  int32_t dtype = 0;
  aoti_torch_get_dtype(tensor, &dtype);
  if (packs)
    return place_of(ScalarType(dtype));
  int64_t numel = 0;
  const void* data = nullptr;
  aoti_torch_get_numel(tensor, &numel), torch_get_const_data_ptr(tensor, &data);
  const bool is_handle = ScalarType(dtype) == kLong && numel == 1;
  return is_handle ? Registry<Weight>::place_of(*static_cast<const int64_t*>(data)) : -1;
}

// The body of the library that a call is for, or this one's, which says that there is none.
template <int OPERATOR>
void hand_on(StableIValue* stack, uint64_t num_arguments, uint64_t num_results) {
  const int place = place_of_call(OPERATOR == 0, stack);
  const Boxed* theirs = place < 0 || place >= kDtypes ? nullptr : bodies[place].load();
  (theirs ? theirs : own_bodies)[OPERATOR](stack, num_arguments, num_results);
}

}  // namespace
}  // namespace chunkc

// This library's bodies, and the place of its dtype.
CHUNKC_EXPORT const chunkc::Boxed* chunkc_linear_bodies() {
  return chunkc::own_bodies;
}

CHUNKC_EXPORT int chunkc_linear_place() {
  return chunkc::place_of(chunkc::kElement);
}

// Has this library register the operators.
CHUNKC_EXPORT bool chunkc_register_linears() {
  return chunkc::register_operators({
      {"_pack_linear_weight", chunkc::hand_on<0>},
      {"packed_linear", chunkc::hand_on<1>},
      {"fused_linear", chunkc::hand_on<2>},
      {"packed_rows", chunkc::hand_on<3>},
      {"linear_argmax", chunkc::hand_on<4>},
  });
}

// Has the library that registered the operators hand calls on.
CHUNKC_EXPORT void chunkc_serve_linears(int place, const chunkc::Boxed* bodies) {
  chunkc::bodies[place] = bodies;
}

CHUNKC_EXPORT bool chunkc_has_own_linear() {
  return CHUNKC_OWN_LINEAR;
}

// Not an operator: it is called when the garbage is collected, whatever torch is doing then.
CHUNKC_EXPORT void chunkc_free_linear_weight(int64_t number) {
  chunkc::registry().remove(number);
}

// Given by cpu_linear_onednn.cpp once it is loaded.
CHUNKC_EXPORT void chunkc_use_onednn(const chunkc::OneDNN* calls) {
  chunkc::onednn = *calls;
}
