// The exponentially distributed number of a draw, bit for bit as dgl_mgpu/ops/philox.py has it:
// there stand the formulas. The intrinsics round each operation on its own.
#pragma once

#include "philox.cuh"

namespace dgl_mgpu {

__device__ __forceinline__ double exponential(uint64 random) {
  const uint64 t = (random >> 12) << 1 | 1;
  const int zeros = __clzll(t);
  double m = __dmul_rn(static_cast<double>((t << zeros) >> 11), 0x1p-53);
  double exponent = static_cast<double>(zeros - 11);
  if (m < 0.7071067811865476) {
    m = __dmul_rn(m, 2.0);
    exponent = __dadd_rn(exponent, 1.0);
  }
  const double f = __ddiv_rn(__dadd_rn(m, -1.0), __dadd_rn(m, 1.0));
  const double square = __dmul_rn(f, f);
  double series = 0.0;
#pragma unroll
  for (int divisor = 21; divisor > 0; divisor -= 2) {
    series = __dadd_rn(__dmul_rn(series, square), 1.0 / divisor);
  }
  return __dadd_rn(__dmul_rn(exponent, 0.6931471805599453),
                   -__dmul_rn(__dmul_rn(2.0, f), series));
}

}  // namespace dgl_mgpu
