// Arithmetic that keeps subnormal floats: CuPy compiles with -ftz=true, which makes them zeros.
#pragma once

#include "philox.cuh"

namespace dgl_mgpu {

#ifndef DGL_MGPU_EMULATED
__device__ __forceinline__ double float_to_double(float value) {
  double wide;
  asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(value));
  return wide;
}

__device__ __forceinline__ float double_to_float(double value) {
  float narrow;
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(narrow) : "d"(value));
  return narrow;
}

__device__ __forceinline__ float product(float left, float right) {
  float both;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(both) : "f"(left), "f"(right));
  return both;
}
#else
__device__ __forceinline__ double float_to_double(float value) { return value; }
__device__ __forceinline__ float double_to_float(double value) { return static_cast<float>(value); }
__device__ __forceinline__ float product(float left, float right) { return left * right; }
#endif

}  // namespace dgl_mgpu
