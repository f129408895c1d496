// Random walks and PinSAGE's neighbour selection: the contract stands in dgl_mgpu/ops/walk/op.py.
#include "bounded.cuh"
#include "ggms.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 128;

__device__ __forceinline__ int64 thread_number() {
  return static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x;
}

__device__ __forceinline__ int64 thread_count() {
  return static_cast<int64>(gridDim.x) * kThreads;
}

// One view of a metapath, as the table of a launch has it. Views differ in their positions' width.
struct View {
  const int64* tiers;
  int64 num_tiers;
  const int64* pointers;
  Positions positions;

  // A random neighbor of a node, or -1 if it has none. `edge`, if not null, gets the edge's id.
  template <typename Id>
  __device__ __forceinline__ int64 Step(int64 node, uint64 random, int64* edge) const {
    const Graph<Id, int> graph{{tiers, static_cast<int>(num_tiers), nullptr}, pointers};
    const auto span = graph.Find(positions.Of(node));
    if (span.size() == 0) return -1;
    const int64 place = below(random, span.size());
    if (edge != nullptr) *edge = static_cast<int64>(span.edge(place));
    return static_cast<int64>(span.neighbors()[place]);
  }
};

// A thread a walk, `each` of them from every start. How many starts there are may be known on the
// device alone (bounded.cuh); so it is with seeds below. `numbers` has the number of each walk among
// those from its node; null stands for 0, 1, … at each start. `stops` are the probabilities to
// end before each step, in units of 2^-53. `edges`, if not null, gets the ids of the edges taken,
// -1 for none. `bad`, filled with ones, gets the first start that is no node.
template <typename Start, typename Id>
__global__ void __launch_bounds__(kThreads)
    walk(const Start* starts, int64 most_starts, const int64* exact_starts, const int64* numbers,
         int64 each, const int64* stops, int64 length, const View* views, int64 num_views,
         int64 num_rows, int64 key, int64* traces, int64* edges, uint64* bad) {
  const int64 num_starts = count_of(most_starts, exact_starts);
  for (int64 i = thread_number(); i < num_starts * each; i += thread_count()) {
    const int64 start = starts[i / each];
    const bool outside = start < 0 || start >= num_rows;
    if (outside) atomicMin(bad, static_cast<uint64>(i / each));
    const uint32 number = static_cast<uint32>(numbers == nullptr ? i % each : numbers[i]);
    int64* trace = traces + i * (length + 1);
    int64 node = trace[0] = outside ? -1 : start;
    int view = 0;
    for (int64 step = 0; step < length; ++step) {
      int64* edge = edges == nullptr ? nullptr : edges + i * length + step;
      if (edge != nullptr) *edge = -1;
      if (node >= 0) {
        const Draws draws = philox(start, number, kWalkStream + static_cast<uint32>(step), key);
        const bool ends = static_cast<int64>(draws.second >> 11) < stops[step];
        node = ends ? -1 : views[view].Step<Id>(node, draws.first, edge);
      }
      trace[step + 1] = node;
      if (++view == num_views) view = 0;
    }
  }
}

// The visits of one seed's walks: every `stride`-th node after the start, walk by walk.
struct Visits {
  const int64* traces;
  int64 columns;
  int64 stride;
  int64 each;  // of a walk

  __device__ __forceinline__ int64 Node(int64 visit) const {
    return traces[visit / each * columns + (visit % each + 1) * stride];
  }
};

// A thread a visit. `counts` gets the number of visits to a node at its first visit and 0 at the
// others and after the end of a walk; `distinct`, zeros before, the number of a seed's nodes.
//
// Comparing every visit with all others of the seed takes more steps than a hash table would, but
// a seed has a dozen of them (XGNN's setting, section 6.1), which neighbouring threads share.
__global__ void __launch_bounds__(kThreads)
    count_visits(const int64* traces, int64 most_seeds, const int64* exact_seeds, int64 num_walks,
                 int64 columns, int64 stride, int* counts, int64* distinct) {
  const int64 num_seeds = count_of(most_seeds, exact_seeds);
  const int64 each = (columns - 1) / stride, visits = num_walks * each;
  for (int64 i = thread_number(); i < num_seeds * visits; i += thread_count()) {
    const int64 seed = i / visits, visit = i % visits;
    const int64* rows = traces + seed * num_walks * columns;
    const int64 node = Visits{rows, columns, stride, each}.Node(visit);
    int count = 0;
    bool first = node >= 0;
    int64 other = 0;
    for (int64 row = 0; row < num_walks; ++row) {
      for (int64 column = stride; column < columns; column += stride, ++other) {
        const bool equal = rows[row * columns + column] == node;
        count += equal;
        first = first && !(equal && other < visit);
      }
    }
    counts[i] = first ? count : 0;
    if (first) atomicAdd(reinterpret_cast<uint64*>(distinct + seed), 1ull);
  }
}

// A thread a visit. Writes the `indptr[seed + 1] - indptr[seed]` most visited nodes of each seed;
// of equally visited ones the one visited first is first.
template <typename Id>
__global__ void __launch_bounds__(kThreads)
    select_visited(const int64* traces, int64 most_seeds, const int64* exact_seeds,
                   int64 num_walks, int64 columns, int64 stride, const int* counts,
                   const int64* indptr, Id* neighbors, int64* neighbor_counts) {
  const int64 num_seeds = count_of(most_seeds, exact_seeds);
  const int64 each = (columns - 1) / stride, visits = num_walks * each;
  for (int64 i = thread_number(); i < num_seeds * visits; i += thread_count()) {
    const int64 seed = i / visits, visit = i % visits;
    if (counts[i] == 0) continue;
    const int* others = counts + seed * visits;
    int64 rank = 0;
    for (int64 other = 0; other < visits; ++other) {
      rank += others[other] > counts[i] || (others[other] == counts[i] && other < visit);
    }
    if (rank < indptr[seed + 1] - indptr[seed]) {
      const int64* rows = traces + seed * num_walks * columns;
      const int64 to = indptr[seed] + rank;
      neighbors[to] = static_cast<Id>(Visits{rows, columns, stride, each}.Node(visit));
      neighbor_counts[to] = counts[i];
    }
  }
}

}  // namespace dgl_mgpu
