// Neighbour sampling by edge weight and by time: drawing and selecting edges once they are
// weighed. weighted.cuh says how the kernels share the work.
#include "exponential.cuh"
#include "weighted.cuh"

namespace dgl_mgpu {

constexpr double kNever = kLargestDouble;  // no key is as large

// An edge of a seed that may be among those of the smallest keys.
struct Candidate {
  double key;
  int64 edge;

  __device__ __forceinline__ bool IsBefore(const Candidate& other) const {
    return key < other.key || (key == other.key && edge < other.edge);
  }
};

// Sorts as a block, in room for a power of 2 candidates (Batcher's bitonic network).
__device__ void sort_candidates(Candidate* candidates, int64 count) {
  int64 size = 1;
  while (size < count) size *= 2;
  for (int64 i = count + threadIdx.x; i < size; i += kThreads) candidates[i] = {kNever, kNone};
  __syncthreads();
  for (int64 width = 2; width <= size; width *= 2) {
    for (int64 stride = width / 2; stride > 0; stride /= 2) {
      for (int64 i = threadIdx.x; i < size / 2; i += kThreads) {
        const int64 low = 2 * i - (i & (stride - 1));
        const Candidate left = candidates[low], right = candidates[low + stride];
        if (right.IsBefore(left) == ((low & width) == 0)) {
          candidates[low] = right;
          candidates[low + stride] = left;
        }
      }
      __syncthreads();
    }
  }
}

// A seed's sample of `count` edges, which goes to the places from `to` on.
template <typename Id, typename Neighbor>
struct Sampler {
  const EdgeWeights& weights;
  typename Graph<Id, int>::Span edges;
  int64 time;
  uint64 node;
  uint64 key;
  double largest;
  int64 to;
  int64 count;
  int64 num_sources;
  Neighbor* neighbors;
  Id* eids;

  __device__ __forceinline__ void Take(int64 number, int64 i) const {
    neighbors[to + number] = static_cast<Neighbor>(edges.neighbors()[i] + time * num_sources);
    eids[to + number] = edges.edge(i);
  }

  __device__ __forceinline__ uint64 Draw(int64 number) const {
    const Draws both = philox(node, static_cast<uint32>(number >> 1), kSampleStream, key);
    return number & 1 ? both.second : both.first;
  }

  __device__ __forceinline__ bool IsPositive(int64 i) const {
    const int64 edge = edges.edge(i);
    return weights.InTime(edge, time) && weights.Weight(edge) > 0.0;
  }

  __device__ __forceinline__ uint64 Scaled(int64 i) const {
    return weights.Scaled(edges.edge(i), time, largest);
  }

  __device__ __forceinline__ double Key(int64 i) const {
    const uint64 scaled = i < edges.size() ? Scaled(i) : 0;
    if (scaled == 0) return kNever;
    return __ddiv_rn(exponential(Draw(i)), static_cast<double>(scaled));
  }

  // ---- By a warp ----

  // Takes the edges [begin, end) of positive weight, from place `number` of the sample on.
  __device__ __forceinline__ void TakePositive(int64 begin, int64 end, int64 number) const {
    const int lane = threadIdx.x % 32;
    for (int64 start = begin; start < end; start += 32) {
      const int64 i = start + lane;
      const bool taken = i < end && IsPositive(i);
      const uint32 all = __ballot_sync(kAllLanes, taken);
      if (taken) Take(number + __popc(all & ((1u << lane) - 1)), i);
      number += __popc(all);
    }
  }

  // The first edge of [begin, end) whose inclusive prefix sum of W exceeds the lane's point,
  // with `sum` the W of the edges before.
  __device__ __forceinline__ int64 EdgeAt(uint64 point, bool sought, int64 begin, int64 end,
                                          uint64 sum) const {
    const int lane = threadIdx.x % 32;
    int64 edge = begin;
    for (int64 start = begin; __any_sync(kAllLanes, sought) && start < end; start += 32) {
      uint64 upto = start + lane < end ? Scaled(start + lane) : 0;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const uint64 left = __shfl_up_sync(kAllLanes, upto, offset);
        if (lane >= offset) upto += left;
      }
      upto += sum;
      sum = __shfl_sync(kAllLanes, upto, 31);
      const bool here = sought && point < sum;
      if (!__any_sync(kAllLanes, here)) continue;
      int before = 0;  // lanes whose sum does not exceed the point
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        if (__shfl_sync(kAllLanes, upto, before + lanes - 1) <= point) before += lanes;
      }
      if (here) edge = start + before;
      sought = sought && !here;
    }
    return edge;
  }

  __device__ __forceinline__ void DrawByWarp() const {
    const int lane = threadIdx.x % 32;
    uint64 sum = 0;
    for (int64 i = lane; i < edges.size(); i += 32) sum += Scaled(i);
    sum = warp_sum(sum);
    for (int64 start = 0; start < count; start += 32) {
      const int64 number = start + lane;
      const bool active = number < count;
      const uint64 point = active ? below(Draw(number), sum) : 0;
      const int64 i = EdgeAt(point, active, 0, edges.size(), 0);
      if (active) Take(number, i);
    }
  }

  // Lane k holds the edge of the k-th smallest key; a smaller one moves those after it up.
  __device__ __forceinline__ void SelectByWarp() const {
    const int lane = threadIdx.x % 32;
    Candidate held{kNever, 0};
    double bound = kNever;
    for (int64 start = 0; start < edges.size(); start += 32) {
      const double own = Key(start + lane);
      for (uint32 better = __ballot_sync(kAllLanes, own < bound); better; better &= better - 1) {
        const int from = __ffs(better) - 1;
        const double added = __shfl_sync(kAllLanes, own, from);
        const double left_key = __shfl_up_sync(kAllLanes, held.key, 1);
        const int64 left_edge = __shfl_up_sync(kAllLanes, held.edge, 1);
        if (held.key > added) {
          const bool here = lane == 0 || left_key <= added;
          held = here ? Candidate{added, start + from} : Candidate{left_key, left_edge};
        }
      }
      bound = __shfl_sync(kAllLanes, held.key, static_cast<int>(count) - 1);
    }
    if (lane < count) Take(lane, held.edge);
  }

  // ---- By a block; not inlined, so that they take no registers from what warps do ----

  // A hub's edges fall into as many runs as a block has threads; a run is a warp's work.
  __device__ __forceinline__ Run RunOf(int64 number) const {
    const int64 length = (edges.size() + 32 * kThreads - 1) / (32 * kThreads) * 32;
    return {min(number * length, edges.size()), min((number + 1) * length, edges.size())};
  }

  // Sums a value of the edges over the runs before each; returns the sum over all.
  template <typename Value>
  __device__ __forceinline__ int64 SumRuns(int64* before, Value value) const {
    for (int number = threadIdx.x / 32; number < kThreads; number += kWarps) {
      const Run run = RunOf(number);
      int64 sum = 0;
#pragma unroll 4
      for (int64 i = run.begin + threadIdx.x % 32; i < run.end; i += 32) sum += value(i);
      sum = warp_sum(sum);
      if (threadIdx.x % 32 == 0) before[number] = sum;
    }
    __syncthreads();
    const Sum sum = block_sum<kThreads>(before[threadIdx.x]);
    before[threadIdx.x] = sum.before;
    __syncthreads();
    return sum.total;
  }

  __device__ __attribute__((noinline)) void TakePositiveByBlock(int64* before) const {
    SumRuns(before, [&](int64 i) { return static_cast<int64>(IsPositive(i)); });
    for (int number = threadIdx.x / 32; number < kThreads; number += kWarps) {
      const Run run = RunOf(number);
      TakePositive(run.begin, run.end, before[number]);
    }
  }

  __device__ __attribute__((noinline)) void DrawByBlock(int64* before) const {
    const uint64 sum = SumRuns(before, [&](int64 i) { return static_cast<int64>(Scaled(i)); });
    for (int64 number = threadIdx.x / 32; number < count; number += kWarps) {
      const uint64 point = below(Draw(number), sum);
      int low = 0, high = kThreads;  // the last run whose sum before does not exceed the point
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (static_cast<uint64>(before[middle]) <= point) {
          low = middle;
        } else {
          high = middle;
        }
      }
      const Run run = RunOf(low);
      const int64 i = EdgeAt(point, true, run.begin, run.end, before[low]);
      if (threadIdx.x % 32 == 0) Take(number, i);
    }
  }

  // Keeps what is below the `count`-th smallest key so far, until there is no room for more. The
  // room holds a power of 2 candidates, at least `count` + kEdgesTogether.
  __device__ __attribute__((noinline)) void SelectByBlock(Candidate* candidates, int64 room) const {
    __shared__ int held;
    if (threadIdx.x == 0) held = 0;
    __syncthreads();
    double bound = kNever;
    for (int64 start = 0; start < edges.size(); start += kEdgesTogether) {
      double own[kEdgesTogether / kThreads];
#pragma unroll
      for (int k = 0; k < kEdgesTogether / kThreads; ++k) {
        own[k] = Key(start + k * kThreads + threadIdx.x);
      }
#pragma unroll
      for (int k = 0; k < kEdgesTogether / kThreads; ++k) {
        if (own[k] < bound) {
          candidates[atomicAdd(&held, 1)] = {own[k], start + k * kThreads + threadIdx.x};
        }
      }
      __syncthreads();
      const int64 kept = held;
      if (kept + kEdgesTogether > room || start + kEdgesTogether >= edges.size()) {
        sort_candidates(candidates, kept);
        if (kept >= count) bound = candidates[count - 1].key;
        if (threadIdx.x == 0) held = static_cast<int>(min(kept, count));
      }
      __syncthreads();
    }
    for (int64 number = threadIdx.x; number < count; number += kThreads) {
      Take(number, candidates[number].edge);
    }
  }
};

// `far` has room for `far_room` candidates a block; it is null where shared memory holds them. The
// sample is written from the place on that `start` points to, the first where it is null.
// Neighbors are of `num_sources` nodes; it is 0 with `num_nodes`.
template <typename Node, typename Id, typename Neighbor>
__global__ void __launch_bounds__(kThreads)
    fill(const Node* seeds, int64 most_seeds, const int64* exact_seeds, int64 num_nodes,
         int64 num_sources, const int64* pointers, const EdgeWeights weights, int64 fanout,
         int64 replace, uint64 key, const SeedEdges* ranges, const int64* hubs, const int64* indptr,
         Candidate* far, int64 far_room, const int64* start, Neighbor* neighbors, Id* eids,
         Control* control) {
  const int64 num_seeds = count_of(most_seeds, exact_seeds), begin = begin_of(start);
  __shared__ Candidate near[kNearCandidates];
  __shared__ int64 before[kThreads];
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    control->end = begin + static_cast<int64>(control->total);
  }
  neighbors += begin;
  eids += begin;
  Candidate* const candidates = far == nullptr ? near : far + blockIdx.x * far_room;
  const int64 room = far == nullptr ? kNearCandidates : far_room;
  const auto sampler_of = [&](int64 place, const SeedEdges& seed) {
    const int64 to = indptr[place];
    return Sampler<Id, Neighbor>{
        weights,
        {pointers + 3 * seed.segment, seed.first, seed.first + seed.degree, seed.shift},
        seed.time,
        static_cast<uint64>(seeds[place] - seed.time * num_nodes),
        key,
        seed.largest,
        to,
        indptr[place + 1] - to,
        num_sources,
        neighbors,
        eids};
  };
  deal(
      num_seeds, hubs, static_cast<int64>(control->hubs), &control->filled,
      [&](int64 place) {
        const SeedEdges seed = ranges[place];
        const Sampler<Id, Neighbor> sampler = sampler_of(place, seed);
        if (sampler.count == 0) return;
        if (replace) {
          sampler.DrawByBlock(before);
        } else if (sampler.count < seed.positive) {
          sampler.SelectByBlock(candidates, room);
        } else {
          sampler.TakePositiveByBlock(before);
        }
      },
      [&](int64 place) {
        const SeedEdges seed = ranges[place];
        if (is_hub(seed.degree, fanout, replace)) return;
        const Sampler<Id, Neighbor> sampler = sampler_of(place, seed);
        if (sampler.count == 0) return;
        if (replace) {
          sampler.DrawByWarp();
        } else if (sampler.count < seed.positive) {
          sampler.SelectByWarp();
        } else {
          sampler.TakePositive(0, seed.degree, 0);
        }
      });
}

}  // namespace dgl_mgpu
