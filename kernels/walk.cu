// Random walks and PinSAGE's neighbour selection: the contract stands in dgl_mgpu/ops/walk.py.
#include "bounded.cuh"
#include "ggms.cuh"
#include "grid.cuh"

namespace dgl_mgpu {

// Of a block: those that walk, and those that select.
constexpr int kThreads = 128, kSelectors = 512;

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

// A thread a walk, `walks_per_start` of them. How many starts there are may be known on the
// device alone (bounded.cuh); so it is with seeds below. `numbers` has the number of each walk among
// those from its node; null stands for 0, 1, … at each start. `stops` are the probabilities to
// end before each step, in units of 2^-53. `edges`, if not null, gets the ids of the edges taken,
// -1 for none. `bad`, filled with ones, gets the first start that is no node.
template <typename Start, typename Id>
__global__ void __launch_bounds__(kThreads)
    walk(const Start* starts, int64 most_starts, const int64* exact_starts, const int64* numbers,
         int64 walks_per_start, const int64* stops, int64 length, const View* views,
         int64 num_views, int64 num_rows, int64 key, int64* traces, int64* edges, uint64* bad) {
  const int64 num_starts = count_of(most_starts, exact_starts);
  for (int64 i = thread_number(); i < num_starts * walks_per_start; i += thread_count()) {
    const int64 start = starts[i / walks_per_start];
    const bool outside = start < 0 || start >= num_rows;
    if (outside) atomicMin(bad, static_cast<uint64>(i / walks_per_start));
    const uint32 number =
        static_cast<uint32>(numbers == nullptr ? i % walks_per_start : numbers[i]);
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
  int64 visits_per_walk;

  __device__ __forceinline__ int64 Node(int64 visit) const {
    return traces[visit / visits_per_walk * columns + (visit % visits_per_walk + 1) * stride];
  }
};

// Selects the most visited nodes of each seed, at most `most_neighbors`; of equally visited ones the
// one visited first is first. `counts` is working memory for a number a visit; `end` gets how many
// are selected in all. A cooperative launch.
//
// Comparing every visit with all others of the seed takes more steps than a hash table would, but
// a seed has a dozen of them (XGNN's setting, section 6.1), which neighbouring threads share.
template <typename Id>
__global__ void __launch_bounds__(kSelectors, 2)
    select_visited(const int64* traces, int64 most_seeds, const int64* exact_seeds,
                   int64 num_walks, int64 columns, int64 stride, int64 most_neighbors, int* counts,
                   int64* indptr, Id* neighbors, int64* neighbor_counts, uint64* control_words,
                   int64* end) {
  const int64 num_seeds = count_of(most_seeds, exact_seeds);
  const int64 visits_per_walk = (columns - 1) / stride, visits = num_walks * visits_per_walk;
  const GridControl control{control_words};
  GridBarrier barrier(control);
  const Run mine = run_of_block(num_seeds);
  const Run my_visits{mine.begin * visits, mine.end * visits};

  // The number of visits to a node at its first visit; 0 at the others and after a walk's end.
  for (int64 i = my_visits.begin + threadIdx.x; i < my_visits.end; i += kSelectors) {
    const int64 visit = i % visits;
    const int64* rows = traces + i / visits * num_walks * columns;
    const int64 node = Visits{rows, columns, stride, visits_per_walk}.Node(visit);
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
  }
  __syncthreads();

  int64 size = 0;
  for (int64 start = mine.begin; start < mine.end; start += kSelectors) {
    const int64 seed = start + threadIdx.x;
    int64 distinct = 0;
    if (seed < mine.end) {
      for (int64 i = seed * visits; i < (seed + 1) * visits; ++i) distinct += counts[i] > 0;
    }
    const Sum sum = block_sum<kSelectors>(min(distinct, most_neighbors));
    if (seed < mine.end) indptr[seed] = size + sum.before;
    size += sum.total;
  }
  if (threadIdx.x == 0) control.sums()[blockIdx.x] = size;
  barrier.Wait();
  const Sum selected = grid_sum<kSelectors>(control.sums());
  for (int64 seed = mine.begin + threadIdx.x; seed < mine.end; seed += kSelectors) {
    indptr[seed] += selected.before;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) indptr[num_seeds] = *end = selected.total;
  __syncthreads();

  for (int64 i = my_visits.begin + threadIdx.x; i < my_visits.end; i += kSelectors) {
    if (counts[i] == 0) continue;
    const int64 seed = i / visits, visit = i % visits;
    const int* others = counts + seed * visits;
    int64 rank = 0;
    for (int64 other = 0; other < visits; ++other) {
      rank += others[other] > counts[i] || (others[other] == counts[i] && other < visit);
    }
    if (rank < most_neighbors) {
      const int64* rows = traces + seed * num_walks * columns;
      const int64 to = indptr[seed] + rank;
      neighbors[to] = static_cast<Id>(Visits{rows, columns, stride, visits_per_walk}.Node(visit));
      neighbor_counts[to] = counts[i];
    }
  }
  control.Leave();
}

}  // namespace dgl_mgpu
