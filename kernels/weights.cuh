// Weights and times of edges: the contract stands in dgl_mgpu/ops/sample_weighted.py.
#pragma once

#include "ggms.cuh"
#include "subnormal.cuh"

namespace dgl_mgpu {

// How a value is stored, as dgl_mgpu/ops/sample_weighted_cuda.py numbers it. A mask is 0 or not.
enum Stored : int64 { kNothing, kMask, kInt32, kInt64, kFloat32, kFloat64 };

// A scalar of every edge id, behind tiers.
struct EdgeValues {
  const int64* tiers;
  int64 num_tiers;
  const int64* pointers;
  Positions positions;
  int64 stored;

  // Address of an edge's value, of `bytes` bytes.
  __device__ __forceinline__ int64 Find(int64 edge, int bytes) const {
    const Rows<int> rows{tiers, static_cast<int>(num_tiers), nullptr};
    const Place place = rows.Find(positions.Of(edge));
    return pointers[place.segment] + place.row * bytes;
  }
};

template <typename Element>
__device__ __forceinline__ Element load(int64 address) {
  return *reinterpret_cast<const Element*>(address);
}

// What an edge weighs for a seed.
struct EdgeWeights {
  EdgeValues weights;  // none where all weights are 1
  EdgeValues times;    // none where all edges are in time
  const void* until;   // seeds' times, int64 or double as the edges' are integers or not

  // Whether an edge is no later than time number `time` of the seeds'.
  __device__ __forceinline__ bool InTime(int64 edge, int64 time) const {
    if (times.stored == kNothing) return true;
    const bool wide = times.stored == kInt64 || times.stored == kFloat64;
    const int64 at = times.Find(edge, wide ? 8 : 4);
    if (times.stored == kInt32 || times.stored == kInt64) {
      return (wide ? load<int64>(at) : load<int>(at)) <= static_cast<const int64*>(until)[time];
    }
    return (wide ? load<double>(at) : float_to_double(load<float>(at))) <=
           static_cast<const double*>(until)[time];
  }

  // Weight of an edge that is in time.
  __device__ __forceinline__ double Weight(int64 edge) const {
    if (weights.stored == kNothing) return 1.0;
    const int64 at =
        weights.Find(edge, weights.stored == kMask ? 1 : weights.stored == kFloat32 ? 4 : 8);
    if (weights.stored == kMask) return load<unsigned char>(at) != 0 ? 1.0 : 0.0;
    return weights.stored == kFloat32 ? float_to_double(load<float>(at)) : load<double>(at);
  }

  // The contract's W: the weight relative to the node's largest, as an integer up to 2^32.
  __device__ __forceinline__ uint64 Scaled(int64 edge, int64 time, double largest) const {
    const double weight = InTime(edge, time) ? Weight(edge) : 0.0;
    if (weight == 0.0) return 0;
    const double scaled = __dmul_rn(__ddiv_rn(weight, largest), 4294967296.0);
    return scaled < 1.0 ? 1 : static_cast<uint64>(scaled);
  }
};

}  // namespace dgl_mgpu
