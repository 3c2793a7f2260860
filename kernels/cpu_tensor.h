// Torch's tensors through its stable C interface, whose headers take a third of the time to read that those of
// at::Tensor take. The names are those of at::Tensor; nothing checks that a pointer has the tensor's dtype.
#pragma once

#include "cpu_check.h"

#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace chunkc {

inline void check_torch(AOTITorchError error, const char* what) {
  CHUNKC_CHECK(error == AOTI_TORCH_SUCCESS, "torch could not ", what);
}

class Tensor {
 public:
  Tensor() = default;
  // Takes the handle over.
  explicit Tensor(AtenTensorHandle owned) : handle_(owned) {
    int64_t* sizes = nullptr;
    int32_t dtype = 0;
    aoti_torch_get_dim(handle_, &dim_), aoti_torch_get_sizes(handle_, &sizes), aoti_torch_get_dtype(handle_, &dtype);
    sizes_ = sizes, dtype_ = ScalarType(dtype);
  }
  // The same tensor, once more.
  Tensor(const Tensor& other) : Tensor() {
    if (other.handle_)
      *this = Tensor(other.new_handle());
  }
  Tensor(Tensor&& other) noexcept : Tensor() { swap(other); }
  Tensor& operator=(Tensor other) noexcept {
    swap(other);
    return *this;
  }
  ~Tensor() {
    if (handle_)
      aoti_torch_delete_tensor_object(handle_);
  }

  bool defined() const { return handle_; }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  int64_t dim() const { return dim_; }
  Sizes sizes() const { return {sizes_, dim_}; }
  int64_t size(int64_t i) const { return sizes_[i < 0 ? i + dim_ : i]; }
  int64_t stride(int64_t i) const {
    if (!strides_) {
      int64_t* strides = nullptr;
      check_torch(aoti_torch_get_strides(handle_, &strides), "tell a tensor's strides");
      strides_ = strides;
    }
    return strides_[i < 0 ? i + dim_ : i];
  }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t size : sizes())
      count *= size;
    return count;
  }
  ScalarType scalar_type() const { return dtype_; }
  bool is_contiguous() const {
    bool is = false;
    aoti_torch_is_contiguous(handle_, &is);
    return is;
  }
  const void* const_data_ptr() const {
    const void* data = nullptr;
    check_torch(torch_get_const_data_ptr(handle_, &data), "tell where a tensor lies");
    return data;
  }
  void* mutable_data_ptr() const {
    void* data = nullptr;
    check_torch(torch_get_mutable_data_ptr(handle_, &data), "tell where a tensor lies");
    return data;
  }
  template <typename T>
  const T* const_data_ptr() const {
    return static_cast<const T*>(const_data_ptr());
  }
  template <typename T>
  T* mutable_data_ptr() const {
    return static_cast<T*>(mutable_data_ptr());
  }

  // These two give the tensor itself where it is so already.
  Tensor contiguous() const {
    if (is_contiguous())
      return *this;
    StableIValue stack[2] = {value_of(new_handle()), value_of(aoti_torch_memory_format_contiguous_format())};
    check_torch(torch_call_dispatcher("aten::contiguous", "", stack, TORCH_ABI_VERSION), "lay a tensor out anew");
    return Tensor(reinterpret_cast<AtenTensorHandle>(stack[0]));
  }
  Tensor to(ScalarType dtype) const {
    if (scalar_type() == dtype)
      return *this;
    StableIValue stack[5] = {value_of(new_handle()), value_of(int32_t(dtype)), value_of(false), value_of(false), 0};
    check_torch(torch_call_dispatcher("aten::to", "dtype", stack, TORCH_ABI_VERSION), "convert a tensor");
    return Tensor(reinterpret_cast<AtenTensorHandle>(stack[0]));
  }

 private:
  template <typename T>
  static StableIValue value_of(T plain) {
    StableIValue value = 0;
    std::memcpy(&value, &plain, sizeof(plain));
    return value;
  }
  AtenTensorHandle new_handle() const {
    AtenTensorHandle handle = nullptr;
    check_torch(aoti_torch_new_tensor_handle(handle_, &handle), "share a tensor");
    return handle;
  }
  void swap(Tensor& other) noexcept {
    std::swap(handle_, other.handle_), std::swap(dim_, other.dim_), std::swap(sizes_, other.sizes_);
    std::swap(strides_, other.strides_), std::swap(dtype_, other.dtype_);
  }

  AtenTensorHandle handle_ = nullptr;
  int64_t dim_ = 0;
  const int64_t* sizes_ = nullptr;
  mutable const int64_t* strides_ = nullptr;  // once they were asked for: oneDNN's tensors have none
  ScalarType dtype_{};
};

inline Tensor empty_cpu(const std::vector<int64_t>& sizes, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;)
    strides[i] = stride, stride *= std::max<int64_t>(sizes[i], 1);
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = aoti_torch_empty_strided(
      sizes.size(), sizes.data(), strides.data(), int32_t(dtype), aoti_torch_device_type_cpu(), 0, &handle);
  check_torch(error, "allocate a result");
  return Tensor(handle);
}

}  // namespace chunkc
