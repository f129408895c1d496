// Numbers that the host does not wait for: it knows a bound, and a kernel reads what an earlier one
// of the same stream found.
#pragma once

#include "philox.cuh"

namespace dgl_mgpu {

// A number of at most `most`: what `exact` points to, or `most` itself where that is null or less.
__device__ __forceinline__ int64 count_of(int64 most, const int64* exact) {
  return exact == nullptr || *exact > most ? most : *exact;
}

// Where something begins: what `start` points to, or 0 where that is null.
__device__ __forceinline__ int64 begin_of(const int64* start) {
  return start == nullptr ? 0 : *start;
}

}  // namespace dgl_mgpu
