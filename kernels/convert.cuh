// Values of one element type as those of another, bit for bit as torch's `.to(dtype)` has them: by
// way of float, unless the wanted type is double, and rounded to nearest even.
#pragma once

#include "subnormal.cuh"

namespace dgl_mgpu {

// Floats of 16 and 8 bits by their bits: a sign, then exponent and mantissa.
struct Float16 {
  unsigned short bits;
};
struct BFloat16 {
  unsigned short bits;
};
struct Float8E4M3 {  // e4m3fn: one NaN, no infinity
  unsigned char bits;
};
struct Float8E5M2 {
  unsigned char bits;
};

// The exponents of two types differ by their bias alone, for subnormals too, so that a product
// with a power of two puts it right, exactly.
template <int kBits, int kMantissa, int kBias>
__device__ __forceinline__ float widened(uint32 bits) {
  const uint32 magnitude = bits & ((1u << (kBits - 1)) - 1);
  const uint32 sign = bits >> (kBits - 1) << 31;
  const float scale = __uint_as_float(static_cast<uint32>(254 - kBias) << 23);
  const float value = product(__uint_as_float(magnitude << (23 - kMantissa)), scale);
  return __uint_as_float(__float_as_uint(value) | sign);
}

// What is neither infinite nor NaN has an exponent below the largest.
constexpr uint32 kFloatInfinity = 0x7f800000u;

__device__ __forceinline__ float to_float(Float16 value) {
  const uint32 bits = value.bits;
  if ((bits & 0x7c00) == 0x7c00) {
    return __uint_as_float((bits & 0x8000) << 16 | kFloatInfinity | (bits & 0x3ff) << 13);
  }
  return widened<16, 10, 15>(bits);
}
__device__ __forceinline__ float to_float(BFloat16 value) {
  return __uint_as_float(static_cast<uint32>(value.bits) << 16);
}
__device__ __forceinline__ float to_float(Float8E4M3 value) {
  const uint32 bits = value.bits;
  if ((bits & 0x7f) == 0x7f) return __uint_as_float((bits & 0x80) << 24 | 0x7fc00000u);
  return widened<8, 3, 7>(bits);
}
__device__ __forceinline__ float to_float(Float8E5M2 value) {
  // The upper half of a Float16.
  return to_float(Float16{static_cast<unsigned short>(value.bits << 8)});
}
__device__ __forceinline__ float to_float(double value) { return double_to_float(value); }
template <typename Number>
__device__ __forceinline__ float to_float(Number value) {
  return static_cast<float>(value);
}

__device__ __forceinline__ double to_double(double value) { return value; }
__device__ __forceinline__ double to_double(int64 value) { return static_cast<double>(value); }
__device__ __forceinline__ double to_double(int value) { return value; }
template <typename Stored>
__device__ __forceinline__ double to_double(Stored value) {
  return float_to_double(to_float(value));  // exact for all others
}

__device__ __forceinline__ void narrow(float value, float* to) { *to = value; }
__device__ __forceinline__ void narrow(float value, BFloat16* to) {
  const uint32 bits = __float_as_uint(value);
  const bool is_nan = (bits & 0x7fffffff) > kFloatInfinity;
  const uint32 rounded = bits + 0x7fff + (bits >> 16 & 1);
  to->bits = static_cast<unsigned short>(is_nan ? 0x7fc0 : rounded >> 16);
}
__device__ __forceinline__ void narrow(float value, Float16* to) {
  constexpr uint32 kOverflow = 143u << 23;  // 2^16, as floats' bits
  constexpr uint32 kNormal = 113u << 23;    // 2^-14, from which on a Float16 is normal
  const uint32 bits = __float_as_uint(value);
  const uint32 magnitude = bits & 0x7fffffff;
  uint32 half;
  if (magnitude >= kOverflow) {
    half = magnitude > kFloatInfinity ? 0x7e00 : 0x7c00;
  } else if (magnitude < kNormal) {
    // The unit in the last place of 0.5 is that of subnormals: the sum is rounded there.
    half = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - __float_as_uint(0.5f);
  } else {
    half = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  to->bits = static_cast<unsigned short>(half | (bits >> 31 << 15));
}

template <typename Stored, typename Wanted>
__device__ __forceinline__ void convert(Stored value, Wanted* to) {
  narrow(to_float(value), to);
}
template <typename Stored>
__device__ __forceinline__ void convert(Stored value, double* to) {
  *to = to_double(value);
}

}  // namespace dgl_mgpu
