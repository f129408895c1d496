// Rows listed roughly in the order of their addresses: those that are read at the same time then lie
// close together, which spares the translation of addresses where they are the host's
// (docs/decisions/sampling.md). Buckets are equal runs of positions. In a bucket rows come in any order, which
// nobody sees: each knows where its result goes.
#pragma once

#include "grid.cuh"

namespace dgl_mgpu {

struct Buckets {
  int64 shift;   // a bucket has 2^shift positions
  int64 number;  // a multiple of 4 * kThreads
  int* counts;   // rows of each, then their running sums: where its part of the list ends; behind
                 // them the length of the list

  // What is no row, and has position -1, is in the first.
  __device__ __forceinline__ int* Of(int64 at) const { return counts + (at < 0 ? 0 : at >> shift); }
  __device__ __forceinline__ void Count(int64 at) const { atomicAdd(Of(at), 1); }
  // A row's place in the list, when counts are running sums.
  __device__ __forceinline__ int TakePlace(int64 at) const { return atomicAdd(Of(at), -1) - 1; }

  // Makes counts running sums, on one block: each thread those of as many buckets, four at a time.
  template <int kThreads>
  __device__ __forceinline__ void Accumulate() const {
    struct alignas(16) Four {
      int counts[4];
    };
    const int64 num_fours = number / (4 * kThreads);
    Four* mine = reinterpret_cast<Four*>(counts) + threadIdx.x * num_fours;
    int64 here = 0;
#pragma unroll 8
    for (int64 i = 0; i < num_fours; ++i) {
      const Four four = mine[i];
      here += four.counts[0] + four.counts[1] + four.counts[2] + four.counts[3];
    }
    const Sum sum = block_sum<kThreads>(here);
    int running = static_cast<int>(sum.before);
#pragma unroll 8
    for (int64 i = 0; i < num_fours; ++i) {
      Four four = mine[i];
#pragma unroll
      for (int& count : four.counts) count = running += count;
      mine[i] = four;
    }
    if (threadIdx.x == 0) counts[number] = static_cast<int>(sum.total);
  }
};

}  // namespace dgl_mgpu
