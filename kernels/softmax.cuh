// What softmaxes over the entries of rows share.
#pragma once

#include "number.cuh"

namespace dgl_mgpu {

template <typename Number>
__device__ __forceinline__ Number lowest() {
  return -static_cast<Number>(__uint_as_float(kFloatInfinity));
}

// The relative error of a power of -x is that of rounding x.
__device__ __forceinline__ float exponential_of(float value) {
#ifdef DGL_MGPU_EMULATED
  return expf(value);
#else
  return __expf(value);
#endif
}
__device__ __forceinline__ double exponential_of(double value) { return exp(value); }

// What scores are diminished by. All scores of a part may be minus infinity, but not of the whole
// row, or it becomes NaN: then its sum is 0.
template <typename Number>
__device__ __forceinline__ Number base_of(Number largest) {
  return largest == lowest<Number>() ? 0 : largest;
}

}  // namespace dgl_mgpu
