// Numbers as they are stored and as one computes with them: half types in float.
#pragma once

#include "convert.cuh"

namespace dgl_mgpu {

template <typename Stored>
struct Computed {
  using Type = float;
};
template <>
struct Computed<double> {
  using Type = double;
};

__device__ __forceinline__ double number(double stored) { return stored; }
__device__ __forceinline__ float number(float stored) { return stored; }
__device__ __forceinline__ float number(BFloat16 stored) { return to_float(stored); }
__device__ __forceinline__ float number(Float16 stored) {
#ifdef DGL_MGPU_EMULATED
  return to_float(stored);
#else
  float wide;  // one instruction, where to_float takes ten
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(stored.bits));
  return wide;
#endif
}

__device__ __forceinline__ void store(double value, double* to) { *to = value; }
__device__ __forceinline__ void store(float value, float* to) { *to = value; }
__device__ __forceinline__ void store(float value, BFloat16* to) { narrow(value, to); }
__device__ __forceinline__ void store(float value, Float16* to) {
#ifdef DGL_MGPU_EMULATED
  narrow(value, to);
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(value));
#endif
}

}  // namespace dgl_mgpu
