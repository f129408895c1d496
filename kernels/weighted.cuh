// Neighbour sampling by edge weight and by time: what its kernels share. The contract stands in
// dgl_mgpu/ops/sample_weighted.py.
//
// Three kernels: find the seeds' edges; weigh them (weigh.cu); then, after a prefix sum of the
// sample sizes, fill (sample_weighted.cu). A seed is a warp's work, one of many edges a whole
// block's: those are listed by the first kernel and dealt out before the others.
//
// Over several hops a node is sampled at the time of the seed that it was reached from. Its id is
// then that of a node at a time: node + number of the time * number of nodes. Otherwise
// `num_nodes` is 0, an id is the node's, and the time of the seed at a place has the same place.
#pragma once

#include "bounded.cuh"
#include "grid.cuh"
#include "weights.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
// Edges and picks by weight that a warp deals with alone.
constexpr int64 kWarpEdges = 1024;
constexpr int64 kWarpPicks = 32;
// Seeds that a block takes at a time.
constexpr int64 kSeedsTogether = 4 * kWarps;
// Edges that a block looks at between two looks at its candidates, and its room for those.
constexpr int kEdgesTogether = 2 * kThreads;
constexpr int kNearCandidates = 2048;

constexpr double kLargestDouble = 1.7976931348623157e308;
constexpr int64 kNone = 0x7fffffffffffffff;

// What is known of a seed: a row of an int64 tensor.
struct SeedEdges {
  int64 time;  // its number
  int64 segment;
  int64 first;
  int64 degree;
  int64 shift;     // from an edge's place to its id
  int64 positive;  // weights; where they are bad, -1 says that all are 0, -2 - e that e's is
  double largest;
};

// What the kernels of a call tell each other and the host; zeros at first.
struct Control {
  int64 bad_seed;    // the most seeds there can be less the first place that is no node
  int64 bad_weight;  // the same for bad weights
  uint64 total;      // edges of the sample
  int64 far;         // whether a block selects more edges than its shared memory holds
  uint64 hubs;       // seeds that are a block's work
  uint64 weighed;    // shares of the work taken, of each of two kernels
  uint64 filled;
  int64 end;  // the place after the sample's last edge
};

__device__ __forceinline__ bool is_hub(int64 degree, int64 fanout, bool replace) {
  return degree > kWarpEdges || (!replace && fanout > kWarpPicks && degree > fanout);
}

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(kAllLanes, value, lanes);
  return value;
}

// Deals out the seeds: hubs to blocks, then the others to warps.
template <typename OnHub, typename OnSeed>
__device__ __forceinline__ void deal(int64 num_seeds, const int64* hubs, int64 num_hubs,
                                     uint64* taken, OnHub on_hub, OnSeed on_seed) {
  __shared__ int64 next;
  const int64 shares = num_hubs + (num_seeds + kSeedsTogether - 1) / kSeedsTogether;
  for (;;) {
    __syncthreads();
    if (threadIdx.x == 0) next = static_cast<int64>(atomicAdd(taken, uint64{1}));
    __syncthreads();
    const int64 share = next;
    if (share >= shares) return;
    if (share < num_hubs) {
      on_hub(hubs[share]);
    } else {
      const int64 begin = (share - num_hubs) * kSeedsTogether;
      const int64 end = min(begin + kSeedsTogether, num_seeds);
      for (int64 place = begin + threadIdx.x / 32; place < end; place += kWarps) on_seed(place);
    }
  }
}

}  // namespace dgl_mgpu
