// Neighbour sampling by edge weight and by time: finding and weighing the seeds' edges.
// weighted.cuh says how the kernels share the work.
#include "weighted.cuh"

namespace dgl_mgpu {

template <typename Node, typename Id, typename Position>
__global__ void __launch_bounds__(kThreads)
    find(const Node* seeds, int64 most_seeds, const int64* exact_seeds, int64 num_nodes,
         const int64* tiers, int64 num_tiers, const int64* pointers, const Position* position,
         int64 num_rows, int64 fanout, int64 replace, SeedEdges* ranges, int64* hubs,
         Control* control) {
  const int64 num_seeds = count_of(most_seeds, exact_seeds);
  const Graph<Id, Position> graph{{tiers, static_cast<int>(num_tiers), position}, pointers};
  const int64 step = static_cast<int64>(gridDim.x) * kThreads;
  for (int64 place = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x; place < num_seeds;
       place += step) {
    const int64 time = num_nodes > 0 ? seeds[place] / num_nodes : place;
    const int64 node = seeds[place] - time * num_nodes;
    int64 segment = 0, first = 0, degree = 0, shift = 0;
    if (node < 0 || node >= num_rows) {
      atomicMax(&control->bad_seed, most_seeds - place);
    } else {
      const auto edges = graph.Find(node);
      segment = (edges.base - pointers) / 3;
      first = edges.begin;
      degree = edges.size();
      shift = edges.shift;
    }
    ranges[place] = {time, segment, first, degree, shift, 0, 0.0};
    if (is_hub(degree, fanout, replace)) hubs[atomicAdd(&control->hubs, uint64{1})] = place;
  }
}

// Weights of some edges of a seed.
struct Weighed {
  int64 in_time;
  int64 positive;
  int64 bad;  // the first edge whose weight is
  double largest;

  __device__ __forceinline__ Weighed OverWarp() const {
    Weighed all{warp_sum(in_time), warp_sum(positive), bad, largest};
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      all.bad = min(all.bad, __shfl_xor_sync(kAllLanes, all.bad, lanes));
      all.largest = max(all.largest, __shfl_xor_sync(kAllLanes, all.largest, lanes));
    }
    return all;
  }

  __device__ __forceinline__ Weighed OverBlock() const {
    __shared__ Weighed parts[kWarps];
    const int lane = threadIdx.x % 32;
    const Weighed warps = OverWarp();
    if (lane == 0) parts[threadIdx.x / 32] = warps;
    __syncthreads();
    return (lane < kWarps ? parts[lane] : Weighed{0, 0, kNone, 0.0}).OverWarp();
  }
};

// Every `step`-th edge of a seed from number `start`.
template <typename Edges>
__device__ __forceinline__ Weighed weigh_edges(const EdgeWeights& weights, const Edges& edges,
                                               int64 time, int start, int step) {
  Weighed sum{0, 0, kNone, 0.0};
#pragma unroll 2
  for (int64 i = start; i < edges.size(); i += step) {
    const int64 edge = edges.edge(i);
    if (!weights.InTime(edge, time)) continue;
    const double weight = weights.Weight(edge);
    ++sum.in_time;
    if (0.0 <= weight && weight <= kLargestDouble) {
      sum.positive += weight > 0.0;
      sum.largest = max(sum.largest, weight);
    } else {
      sum.bad = min(sum.bad, i);
    }
  }
  return sum;
}

// Writes the size of each sample to `indptr[1:]`, for a prefix sum.
template <typename Id>
__global__ void __launch_bounds__(kThreads)
    weigh(int64 most_seeds, const int64* exact_seeds, const int64* pointers,
          const EdgeWeights weights, int64 fanout, int64 replace, SeedEdges* ranges,
          const int64* hubs, int64* indptr, Control* control) {
  const int64 num_seeds = count_of(most_seeds, exact_seeds);
  const auto edges_of = [&](const SeedEdges& seed) {
    return typename Graph<Id, int>::Span{pointers + 3 * seed.segment, seed.first,
                                         seed.first + seed.degree, seed.shift};
  };
  uint64 total = 0;
  const auto conclude = [&](int64 place, const Weighed& sum) {
    int64 positive = sum.positive;
    if (sum.bad != kNone) {
      positive = -2 - static_cast<int64>(edges_of(ranges[place]).edge(sum.bad));
    } else if (sum.in_time > 0 && positive == 0 && weights.weights.stored != kMask) {
      positive = -1;
    }
    if (positive < 0) atomicMax(&control->bad_weight, most_seeds - place);
    int64 size = max(positive, int64{0});
    if (replace) {
      size = size > 0 ? fanout : 0;
    } else if (fanout >= 0 && size > fanout) {
      size = fanout;
      if (fanout + kEdgesTogether > kNearCandidates) atomicMax(&control->far, int64{1});
    }
    ranges[place].positive = positive;
    ranges[place].largest = sum.largest;
    indptr[place + 1] = size;
    total += size;
  };
  deal(
      num_seeds, hubs, static_cast<int64>(control->hubs), &control->weighed,
      [&](int64 place) {
        const SeedEdges seed = ranges[place];
        const Weighed sum =
            weigh_edges(weights, edges_of(seed), seed.time, threadIdx.x, kThreads).OverBlock();
        if (threadIdx.x == 0) conclude(place, sum);
      },
      [&](int64 place) {
        const SeedEdges seed = ranges[place];
        if (is_hub(seed.degree, fanout, replace)) return;
        const Weighed sum =
            weigh_edges(weights, edges_of(seed), seed.time, threadIdx.x % 32, 32).OverWarp();
        if (threadIdx.x % 32 == 0) conclude(place, sum);
      });
  if (total > 0) atomicAdd(&control->total, total);
}

}  // namespace dgl_mgpu
