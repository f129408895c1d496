// What the blocks of one launch share: sums over a block and over the grid, and a barrier.
#pragma once

#include "philox.cuh"

namespace dgl_mgpu {

constexpr uint32 kAllLanes = 0xffffffffu;

// A run of items [begin, end).
struct Run {
  int64 begin;
  int64 end;
};

// The block's share of `count` items, dealt out in runs.
__device__ __forceinline__ Run run_of_block(int64 count) {
  const int64 per_block = (count + gridDim.x - 1) / gridDim.x;
  const int64 begin = min(per_block * blockIdx.x, count);
  return {begin, min(begin + per_block, count)};
}

// A value's sum over the threads before this one, and over all threads of the block.
struct Sum {
  int64 before;
  int64 total;
};

// All threads of the block call it together.
template <int kThreads>
__device__ __forceinline__ Sum block_sum(int64 value) {
  __shared__ int64 sums[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64 inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int64 left = __shfl_up_sync(kAllLanes, inclusive, offset);
    if (lane >= offset) inclusive += left;
  }
  __syncthreads();  // the sums of an earlier call have been read
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  Sum sum{inclusive - value, 0};
#pragma unroll
  for (int other = 0; other < kThreads / 32; ++other) {
    if (other < warp) sum.before += sums[other];
    sum.total += sums[other];
  }
  return sum;
}

// The same for a value of each block: the sum over the blocks before this one, and over all.
template <int kThreads>
__device__ __forceinline__ Sum grid_sum(const int64* values) {
  int64 before = 0, total = 0;
  for (int block = threadIdx.x; block < gridDim.x; block += kThreads) {
    const int64 value = values[block];
    total += value;
    if (block < blockIdx.x) before += value;
  }
  const int64 all_before = block_sum<kThreads>(before).total;
  return {all_before, block_sum<kThreads>(total).total};
}

// What the blocks of a cooperative launch share. It is filled with ones before the first launch,
// and every launch leaves it so.
struct GridControl {
  uint64* words;  // barrier, blocks that are done, first bad place, overflow, sums of blocks…

  __device__ __forceinline__ uint64* bad() const { return words + 2; }
  __device__ __forceinline__ uint64* overflow() const { return words + 3; }
  __device__ __forceinline__ int64* sums() const { return reinterpret_cast<int64*>(words + 4); }
  __device__ __forceinline__ int64* more_sums() const { return sums() + gridDim.x; }

  // Every block calls it last. Nobody waits at a barrier then.
  __device__ __forceinline__ void Leave() const {
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      if (atomicAdd(reinterpret_cast<uint32*>(words + 1), 1u) == gridDim.x - 2) {
        for (int word = 0; word < 4; ++word) words[word] = ~0ull;
      }
    }
  }
};

// A barrier over all blocks of a cooperative launch.
struct GridBarrier {
  uint32* arrived;
  uint32 target = 0xffffffffu;

  __device__ __forceinline__ explicit GridBarrier(GridControl control)
      : arrived(reinterpret_cast<uint32*>(control.words)) {}

  __device__ __forceinline__ void Wait() {
    __syncthreads();
    if (threadIdx.x == 0) {
      target += gridDim.x;
      __threadfence();
      atomicAdd(arrived, 1u);
      while (static_cast<int>(*static_cast<volatile uint32*>(arrived) - target) < 0) {
        __nanosleep(32);
      }
      __threadfence();
    }
    __syncthreads();
  }
};

}  // namespace dgl_mgpu
