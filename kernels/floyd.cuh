// Uniform sampling of distinct numbers by R. W. Floyd's algorithm, a draw a lane.
//
// The contract stands in dgl_mgpu/ops/sample.py: draw j falls on t in [0, i], i = degree - count
// + j; where t has been picked before, i is. Draw j collides exactly if an earlier draw fell on
// the same t, or t is the i of an earlier draw that collided. The second is a chain of lanes,
// followed by pointer jumping. (WholeGraph's Algorithm 1 sorts instead.)
#pragma once

#include "philox.cuh"

namespace dgl_mgpu {

// What a lane picks whose draw fell on `t`, of consecutive draws that the lanes of a group have.
// `first_last` is the i of the group's first draw; `taken` says that t was picked before the
// group. All lanes of the group, those of `mask`, call it together, those without a draw too.
template <int kLanes>
__device__ __forceinline__ int64 resolve_draws(uint32 mask, int lane, int64 first_last, int64 t,
                                               bool active, bool taken) {
  const uint32 earlier = mask & ((1u << (threadIdx.x % 32)) - 1);
  // Lanes without a draw must not equal each other or any draw.
  bool collides = (__match_any_sync(mask, active ? t : -1 - lane) & earlier) != 0 || taken;
  const int64 replaces = t - first_last;
  int follows = active && replaces >= 0 && replaces < lane ? static_cast<int>(replaces) : lane;
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const bool other = __shfl_sync(mask, static_cast<int>(collides), follows, kLanes);
    const int further = __shfl_sync(mask, follows, follows, kLanes);
    collides |= other;
    follows = further;
  }
  return collides ? first_last + lane : t;
}

}  // namespace dgl_mgpu
