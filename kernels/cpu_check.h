// Errors that Python raises as its own: RuntimeError, ValueError, TypeError or IndexError. Like torch's TORCH_CHECK, whose
// messages are put together by templates: those took longer to compile than what is checked.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <initializer_list>
#include <string>

namespace chunkc {

// As torch numbers its dtypes.
enum class ScalarType : int32_t { kInt = 3, kLong = 4, kHalf = 5, kFloat = 6, kBFloat16 = 15 };
constexpr ScalarType kInt = ScalarType::kInt, kLong = ScalarType::kLong, kHalf = ScalarType::kHalf;
constexpr ScalarType kFloat = ScalarType::kFloat, kBFloat16 = ScalarType::kBFloat16;

inline const char* name_of(ScalarType dtype) {
  switch (dtype) {
    case kInt: return "int32";
    case kLong: return "int64";
    case kHalf: return "float16";
    case kFloat: return "float32";
    case kBFloat16: return "bfloat16";
  }
  return "another dtype";
}

// Sizes of a tensor, which outlives this.
struct Sizes {
  const int64_t* data;
  int64_t count;

  const int64_t* begin() const { return data; }
  const int64_t* end() const { return data + count; }
};

// A part of a message.
struct Part {
  const char* text = nullptr;
  int64_t number = 0;
  Sizes sizes{nullptr, 0};

  Part(const char* text) : text(text) {}
  Part(ScalarType dtype) : text(name_of(dtype)) {}
  Part(int64_t number) : number(number) {}
  Part(Sizes sizes) : number(-1), sizes(sizes) {}
};

enum class Failure { kRuntime, kValue, kType, kIndex };

[[noreturn, gnu::cold, gnu::noinline]] inline void fail(
    Failure failure, const char* function, const char* file, uint32_t line, std::initializer_list<Part> parts) {
  std::string message;
  for (const Part& part : parts) {
    if (part.text) {
      message += part.text;
    } else if (!part.sizes.data) {
      message += std::to_string(part.number);
    } else {
      const char* before = "[";
      for (int64_t size : part.sizes)
        message += before + std::to_string(size), before = ", ";
      message += part.sizes.count ? "]" : "[]";
    }
  }
  const c10::SourceLocation where{function, file, line};
  switch (failure) {
    case Failure::kValue: throw c10::ValueError(where, message);
    case Failure::kType: throw c10::TypeError(where, message);
    case Failure::kIndex: throw c10::IndexError(where, message);
    default: throw c10::Error(where, message);
  }
}

}  // namespace chunkc

#define CHUNKC_CHECK_AS(failure, condition, ...)                                               \
  do {                                                                                         \
    if (!(condition)) [[unlikely]]                                                             \
      ::chunkc::fail(::chunkc::Failure::failure, __func__, __FILE__, __LINE__, {__VA_ARGS__}); \
  } while (false)
#define CHUNKC_CHECK(condition, ...) CHUNKC_CHECK_AS(kRuntime, condition, __VA_ARGS__)
#define CHUNKC_CHECK_VALUE(condition, ...) CHUNKC_CHECK_AS(kValue, condition, __VA_ARGS__)
#define CHUNKC_CHECK_TYPE(condition, ...) CHUNKC_CHECK_AS(kType, condition, __VA_ARGS__)
#define CHUNKC_CHECK_INDEX(condition, ...) CHUNKC_CHECK_AS(kIndex, condition, __VA_ARGS__)
