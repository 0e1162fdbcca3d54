// Element types, tensor views and the status that every kernel returns. No framework, no ISA code.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

namespace regatta {

enum class DType : uint8_t { kFloat32, kBFloat16, kFloat16, kInt8, kUInt8, kInt32, kInt64 };

inline const char* dtype_name(DType dtype) {
  constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "int8",
                                    "uint8",   "int32",    "int64"};
  return kNames[static_cast<int>(dtype)];
}

inline int64_t dtype_size(DType dtype) {
  constexpr int64_t kSizes[] = {4, 2, 2, 1, 1, 4, 8};
  return kSizes[static_cast<int>(dtype)];
}

inline bool is_activation_dtype(DType dtype) { return dtype <= DType::kFloat16; }

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct DTypeOf<bf16> {
  static constexpr DType value = DType::kBFloat16;
};
template <>
struct DTypeOf<fp16> {
  static constexpr DType value = DType::kFloat16;
};

// One contiguous row-major tensor, as a kernel sees it.
struct TensorView {
  static constexpr int kMaxRank = 6;
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int rank = 0;
  int64_t shape[kMaxRank] = {};
};

// "[2, 896, 32]"
inline std::string shape_string(const TensorView& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.rank; ++i) {
    text += (i ? ", " : "") + std::to_string(tensor.shape[i]);
  }
  return text + "]";
}

// Ends the function that it stands in with the status of an expression that is not ok.
#define REGATTA_RETURN_IF_ERROR(...) \
  if (Status returned = (__VA_ARGS__); !returned.ok()) return returned

// What a kernel returns: empty message = done. Kernels do not throw; csrc/paddle turns a message
// into an exception. A message says what was got, what is allowed and what to do.
class [[nodiscard]] Status {
 public:
  Status() = default;
  static Status error(std::string message) {
    Status status;
    status.message_ = std::move(message);
    return status;
  }
  bool ok() const { return message_.empty(); }
  const std::string& message() const { return message_; }

 private:
  std::string message_;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float to_float(fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  uint32_t bits;
  float value;
  if (magnitude >= 0x7c00u) {  // inf, nan
    bits = sign | 0x7f800000u | (magnitude & 0x3ffu) << 13;
  } else if (magnitude >= 0x400u) {
    bits = sign | ((magnitude << 13) + (112u << 23));
  } else {  // subnormal: magnitude * 2^-24 is exact in float
    value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  }
  std::memcpy(&value, &bits, 4);
  return value;
}

inline void from_float(float x, float* out) { *out = x; }

// Round to nearest even; a NaN stays one (its quiet bit is set).
inline void from_float(float x, bf16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    out->bits = static_cast<uint16_t>(bits >> 16 | 0x40u);
  } else {
    out->bits = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
}

inline void from_float(float x, fp16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) {
    out->bits = static_cast<uint16_t>(sign | 0x7e00u);
  } else if (bits >= 0x47800000u) {  // 65536 and more
    out->bits = static_cast<uint16_t>(sign | 0x7c00u);
  } else if (bits < 0x38800000u) {  // below 2^-14: let the float adder round to multiples of 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    out->bits = static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  } else {  // 65520..65536 carries into infinity, as it should
    out->bits =
        static_cast<uint16_t>(sign | (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13);
  }
}

}  // namespace regatta
