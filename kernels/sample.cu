// Uniform neighbour sampling of one hop, and of all hops with append-unique in one launch
// (XGNN's KHop sampler, section 5, and WholeGraph's sampling and append-unique, section III-C, as
// one kernel). The contract stands in dgl_mgpu/ops/sample.py.
//
// A block has the same seeds in every phase of a hop, unless they are taken in the order of their
// edges' addresses. Phases are divided by barriers over the grid, so that no phase waits for the
// host.
#include "bounded.cuh"
#include "buckets.cuh"
#include "fault.cuh"
#include "floyd.cuh"
#include "ggms.cuh"
#include "node_table.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 256;
constexpr int kMostHops = 6;

// Where the edges of each seed are: arrays with an element a seed.
struct SeedEdges {
  int64* first;
  int64* degree;
  int64* shift;  // from an edge's place to its id
  int* segment;
};

__device__ __forceinline__ int64 sample_size(int64 degree, int64 fanout, bool replace) {
  if (fanout < 0) return degree;
  if (replace) return degree > 0 ? fanout : 0;
  return min(degree, fanout);
}

// Looks up the edges of seed `i`; returns their number.
template <typename Seed, typename Id, typename Position>
__device__ __forceinline__ int64 find_edges(const Graph<Id, Position>& graph, int64 num_rows,
                                            const Seed* seeds, int64 i, SeedEdges ranges,
                                            GridControl control) {
  const int64 node = seeds[i];
  int64 first = 0, degree = 0, shift = 0, segment = 0;
  if (node < 0 || node >= num_rows) {
    atomicMin(control.bad(), static_cast<uint64>(i));
  } else {
    const auto span = graph.Find(node);
    first = span.begin;
    degree = span.size();
    shift = span.shift;
    segment = (span.base - graph.pointers) / 3;
  }
  ranges.first[i] = first;
  ranges.degree[i] = degree;
  ranges.shift[i] = shift;
  ranges.segment[i] = static_cast<int>(segment);
  return degree;
}

// Of the seeds in `mine`, of whose degrees `degree_of` tells, `indptr` gets the sum of sample sizes
// within this block, and `control` the block's sum.
template <typename Start, typename DegreeOf>
__device__ void add_up(Run mine, int64 fanout, bool replace, Start* indptr, GridControl control,
                       DegreeOf degree_of) {
  int64 size = 0;
  for (int64 start = mine.begin; start < mine.end; start += kThreads) {
    const int64 i = start + threadIdx.x;
    const int64 count = i < mine.end ? sample_size(degree_of(i), fanout, replace) : 0;
    const Sum sum = block_sum<kThreads>(count);
    if (i < mine.end) indptr[i] = static_cast<Start>(size + sum.before);
    size += sum.total;
  }
  if (threadIdx.x == 0) control.sums()[blockIdx.x] = size;
}

// Seeds in the order in which their edges lie in memory, where that is the host's.
struct SeedOrder {
  int* seeds;  // null where they are taken as they come
  Buckets buckets;
  int64 least;  // fewer seeds are taken as they come, too

  // All blocks call it together, and wait for each other when it is done.
  template <typename Seed, typename Position>
  __device__ void Arrange(const Rows<Position>& rows, int64 num_rows, const Seed* nodes, Run mine,
                          GridBarrier& barrier) const {
    const int64 thread = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x;
    for (int64 bucket = thread; bucket < buckets.number; bucket += gridDim.x * kThreads) {
      buckets.counts[bucket] = 0;
    }
    barrier.Wait();
    const auto position_of = [&](int64 i) -> int64 {
      const int64 node = nodes[i];
      if (node < 0 || node >= num_rows) return -1;
      return rows.position == nullptr ? node : static_cast<int64>(rows.position[node]);
    };
    for (int64 i = mine.begin + threadIdx.x; i < mine.end; i += kThreads) {
      buckets.Count(position_of(i));
    }
    barrier.Wait();
    if (blockIdx.x == 0) buckets.Accumulate<kThreads>();
    barrier.Wait();
    for (int64 i = mine.begin + threadIdx.x; i < mine.end; i += kThreads) {
      seeds[buckets.TakePlace(position_of(i))] = static_cast<int>(i);
    }
    barrier.Wait();
  }
};

__device__ __forceinline__ int exchange(int* at, int value) { return atomicExch(at, value); }

__device__ __forceinline__ int64 exchange(int64* at, int64 value) {
  return static_cast<int64>(atomicExch(reinterpret_cast<uint64*>(at), static_cast<uint64>(value)));
}

// The seeds that are filled one after another: those of a run, or where `order` is given all blocks
// go through it together, so that edges that are read at the same time lie close together.
struct Turns {
  int64 first;
  int64 end;
  int64 step;
  const int* order;

  __device__ __forceinline__ int64 Seed(int64 turn) const {
    return order == nullptr ? turn : order[turn];
  }
};

struct TurnsOfRun {
  Run run;
  __device__ __forceinline__ Turns operator()(int64 at_once) const {
    return {run.begin, run.end, at_once, nullptr};
  }
};

struct TurnsInOrder {
  int64 count;
  const int* order;
  __device__ __forceinline__ Turns operator()(int64 at_once) const {
    return {blockIdx.x * at_once, count, gridDim.x * at_once, order};
  }
};

// Writes samples: neighbors and edge ids. `Added` is told of every neighbor and its place.
template <typename Id, typename Position, typename Added>
struct Filler {
  using Edges = typename Graph<Id, Position>::Span;

  const Graph<Id, Position>& graph;
  SeedEdges ranges;
  bool replace;
  int64 fanout;
  uint64 key;
  Id* neighbors;
  Id* eids;
  Added added;

  // Writes edge `i` of a seed.
  __device__ __forceinline__ void Take(int64 to, const Edges& edges, int64 i) const {
    const Id neighbor = edges.neighbors()[i];
    neighbors[to] = neighbor;
    eids[to] = edges.edge(i);
    added(to, neighbor);
  }

  // The sample of one seed, by a group of lanes.
  template <int kLanes>
  __device__ __forceinline__ void Fill(int64 i, int64 node, int64 to, uint32 mask, int lane) const {
    const int64 first = ranges.first[i], degree = ranges.degree[i];
    const int64 count = sample_size(degree, fanout, replace);
    const Edges edges{graph.pointers + 3 * static_cast<int64>(ranges.segment[i]), first,
                      first + degree, ranges.shift[i]};
    if (replace && fanout >= 0) {
      for (int64 j = lane; j < count; j += kLanes) {
        Take(to + j, edges, below(draw(node, j, kSampleStream, key), degree));
      }
    } else if (count == degree) {
      for (int64 j = lane; j < count; j += kLanes) Take(to + j, edges, j);
    } else if (count <= kLanes) {
      const bool active = lane < count;
      const int64 last = degree - count + lane;
      const int64 t = active ? below(draw(node, lane, kSampleStream, key), last + 1) : 0;
      const int64 pick = resolve_draws<kLanes>(mask, lane, degree - count, t, active, false);
      if (active) Take(to + lane, edges, pick);
    } else if constexpr (kLanes == 32) {  // smaller groups have no more picks than lanes
      FillMany(node, to, edges, count);
    }
  }

  // More picks than lanes: in groups, which look up the picks of the groups before in a hash table
  // made of the room for the sample. Until that is written, neighbors[to + bucket] is 1 + the last
  // draw whose pick is in the bucket, and eids[to + j] that of the draw before j in j's bucket, 0
  // if there is none, inverted if draw j has collided.
  __device__ void FillMany(int64 node, int64 to, const Edges& edges, int64 count) const {
    const int lane = threadIdx.x % 32;
    const int64 degree = edges.size();
    for (int64 bucket = lane; bucket < count; bucket += 32) neighbors[to + bucket] = 0;
    __syncwarp();
    const auto last = [&](int64 j) { return degree - count + j; };
    const auto drawn = [&](int64 j) {
      return static_cast<int64>(below(draw(node, j, kSampleStream, key), last(j) + 1));
    };
    for (int64 start = 0; start < count; start += 32) {
      const int64 j = start + lane;
      const bool active = j < count;
      const int64 t = active ? drawn(j) : 0;
      bool taken = false;
      for (Id next = active ? neighbors[to + below(hash_id(t), count)] : 0; next != 0 && !taken;) {
        const int64 earlier = next - 1;
        const Id link = eids[to + earlier];
        taken = t == (link < 0 ? last(earlier) : drawn(earlier));
        next = link < 0 ? ~link : link;
      }
      const int64 pick = resolve_draws<32>(kAllLanes, lane, last(start), t, active, taken);
      if (active) {
        Id* const head = neighbors + to + below(hash_id(pick), count);
        const Id before = exchange(head, static_cast<Id>(j + 1));
        eids[to + j] = pick == t ? before : ~before;
      }
      __syncwarp();
    }
    for (int64 j = lane; j < count; j += 32) {
      Take(to + j, edges, eids[to + j] < 0 ? last(j) : drawn(j));
    }
  }

  // The samples of the seeds of a block, whose first edge is number `before`.
  template <typename Seed, int kLanes, typename Start>
  __device__ void FillGroups(const Seed* seeds, Turns turns, int64 before, Start* indptr) const {
    const int lane = threadIdx.x % kLanes;
    const uint32 mask = (kAllLanes >> (32 - kLanes)) << (threadIdx.x % 32 / kLanes * kLanes);
    const int64 group = turns.first + threadIdx.x / kLanes;
    for (int64 turn = group; turn < turns.end; turn += turns.step) {
      const int64 i = turns.Seed(turn), to = before + indptr[i];
      __syncwarp(mask);
      if (lane == 0) indptr[i] = static_cast<Start>(to);
      Fill<kLanes>(i, seeds[i], to, mask, lane);
    }
  }

  // `turns_of` says which seeds are a block's that fills so many at a time.
  template <typename Seed, typename Start, typename TurnsOf>
  __device__ void FillAll(const Seed* seeds, TurnsOf turns_of, int64 before, Start* indptr) const {
    if (fanout < 0 || fanout > 16) {
      FillGroups<Seed, 32>(seeds, turns_of(kThreads / 32), before, indptr);
    } else if (fanout > 8) {
      FillGroups<Seed, 16>(seeds, turns_of(kThreads / 16), before, indptr);
    } else if (fanout > 4) {
      FillGroups<Seed, 8>(seeds, turns_of(kThreads / 8), before, indptr);
    } else {
      FillGroups<Seed, 4>(seeds, turns_of(kThreads / 4), before, indptr);
    }
  }
};

template <typename Id>
struct Ignore {
  __device__ __forceinline__ void operator()(int64, Id) const {}
};

template <typename Id, typename Table>
struct AddToTable {
  Table table;
  int64 known;
  int* slots;
  __device__ __forceinline__ void operator()(int64 place, Id node) const {
    slots[place] = table.Insert(node, static_cast<int>(known + place));
  }
};

// One hop of `count` seeds, by all blocks together: looks up their edges, and writes the samples.
// Returns the number of edges before those of this block's seeds, and of all. What other blocks have
// written is there after the next barrier.
template <bool kOrdered, typename Seed, typename Id, typename Position, typename Added,
          typename Start>
__device__ Sum sample(const Filler<Id, Position, Added>& filler, int64 num_rows, const Seed* seeds,
                      int64 count, SeedOrder order, Start* indptr, GridControl control,
                      GridBarrier& barrier) {
  const Run mine = run_of_block(count);
  const auto find = [&](int64 i) {
    return find_edges(filler.graph, num_rows, seeds, i, filler.ranges, control);
  };
  const bool ordered = kOrdered && count >= order.least;
  if (ordered) {
    order.Arrange(filler.graph.rows, num_rows, seeds, mine, barrier);
    const Turns turns = TurnsInOrder{count, order.seeds}(kThreads);
    for (int64 turn = turns.first + threadIdx.x; turn < turns.end; turn += turns.step) {
      find(turns.Seed(turn));
    }
    barrier.Wait();
    add_up(mine, filler.fanout, filler.replace, indptr, control,
           [&](int64 i) { return filler.ranges.degree[i]; });
  } else {
    add_up(mine, filler.fanout, filler.replace, indptr, control, find);
  }
  barrier.Wait();
  const Sum edges = grid_sum<kThreads>(control.sums());
  if (ordered) {
    for (int64 i = mine.begin + threadIdx.x; i < mine.end; i += kThreads) {
      indptr[i] += static_cast<Start>(edges.before);
    }
    barrier.Wait();
    filler.template FillAll<Seed>(seeds, TurnsInOrder{count, order.seeds}, 0, indptr);
  } else {
    filler.template FillAll<Seed>(seeds, TurnsOfRun{mine}, edges.before, indptr);
  }
  return edges;
}

// First of two launches where the number of edges has no useful bound (fanout -1): look up and
// count. `report` gets the first bad seed (or -1) and the number of edges.
template <typename Seed, typename Id, typename Position>
__global__ void __launch_bounds__(kThreads, 4)
    count_edges(const Seed* seeds, int64 num_seeds, const int64* tiers, int64 num_tiers,
                const int64* pointers, const Position* position, int64 num_rows, int64 fanout,
                int64 replace, int64* range_first, int64* range_degree, int64* range_shift,
                int* range_segment, int64* indptr, uint64* control_words, int64* report) {
  const Graph<Id, Position> graph{{tiers, static_cast<int>(num_tiers), position}, pointers};
  const SeedEdges ranges{range_first, range_degree, range_shift, range_segment};
  const GridControl control{control_words};
  GridBarrier barrier(control);
  const Run mine = run_of_block(num_seeds);
  add_up(mine, fanout, replace, indptr, control,
         [&](int64 i) { return find_edges(graph, num_rows, seeds, i, ranges, control); });
  barrier.Wait();
  const Sum edges = grid_sum<kThreads>(control.sums());
  for (int64 i = mine.begin + threadIdx.x; i < mine.end; i += kThreads) indptr[i] += edges.before;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    indptr[num_seeds] = edges.total;
    report[0] = static_cast<int64>(*control.bad());
    report[1] = edges.total;
  }
  control.Leave();
}

// Second of the two: write the samples.
template <typename Seed, typename Id, typename Position>
__global__ void __launch_bounds__(kThreads, 4)
    fill_edges(const Seed* seeds, int64 num_seeds, const int64* pointers, int64 fanout,
               int64 replace, uint64 key, int64* range_first, int64* range_degree,
               int64* range_shift, int* range_segment, int64* indptr, Id* neighbors, Id* eids) {
  const Graph<Id, Position> graph{{nullptr, 0, nullptr}, pointers};
  const Filler<Id, Position, Ignore<Id>> filler{
      graph, {range_first, range_degree, range_shift, range_segment}, replace != 0, fanout, key,
      neighbors, eids, {}};
  filler.template FillAll<Seed>(seeds, TurnsOfRun{run_of_block(num_seeds)}, 0, indptr);
}

// Both in one cooperative launch, where outputs of `most_seeds` * `fanout` edges are there. They
// are written from the place on that `start` points to, the first where it is null; `report` gets
// the first bad seed (or -1) and the place after the last edge.
template <typename Seed, typename Id, typename Position, bool kOrdered>
__global__ void __launch_bounds__(kThreads, 4)
    sample_hop(const Seed* seeds, int64 most_seeds, const int64* exact_seeds, const int64* tiers,
               int64 num_tiers, const int64* pointers, const Position* position, int64 num_rows,
               int64 fanout, int64 replace, uint64 key, int64* range_first, int64* range_degree,
               int64* range_shift, int* range_segment, int64* indptr, const int64* start,
               Id* neighbors, Id* eids, uint64* control_words, int64* report,
               const SeedOrder order) {
  const int64 num_seeds = count_of(most_seeds, exact_seeds), first = begin_of(start);
  const Graph<Id, Position> graph{{tiers, static_cast<int>(num_tiers), position}, pointers};
  const SeedEdges ranges{range_first, range_degree, range_shift, range_segment};
  const GridControl control{control_words};
  GridBarrier barrier(control);
  const Filler<Id, Position, Ignore<Id>> filler{
      graph, ranges, replace != 0, fanout, key, neighbors + first, eids + first, {}};
  const Sum edges =
      sample<kOrdered>(filler, num_rows, seeds, num_seeds, order, indptr, control, barrier);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    indptr[num_seeds] = edges.total;
    report[0] = static_cast<int64>(*control.bad());
    report[1] = first + edges.total;
  }
  control.Leave();
}

// What all hops of a mini-batch are sampled from and into. `nodes` gets the seeds and then the new
// nodes of each hop, so that the nodes of every hop are a beginning of it. `indptr`, `neighbors`
// and `eids` hold the hops one after another, each in as much room as hop h can need: S seeds and
// S * fanout edges, with S the seeds of the hop before and its edges, at most `most_nodes`.
// `report` gets the first bad seed (or -1), whether the table was large enough (-1), and edges and
// nodes of each hop. Where nobody waits for it, with `kPadded`, a bad seed goes to `fault`
// (fault.cuh); every `indptr` is then filled to the end of its room, and the table has room for all
// nodes there can be. With `kOrdered` a hop of at least `order.least` seeds takes them in that order.
template <typename Id, typename Position>
struct Hops {
  const Id* seeds;
  int64 num_seeds;
  const int64* tiers;
  int64 num_tiers;
  const int64* pointers;
  const Position* position;
  int64 num_rows;
  int64 most_nodes;
  int64 replace;
  Id* nodes;
  Id* indptr;
  Id* neighbors;
  Id* eids;
  int64* range_first;
  int64* range_degree;
  int64* range_shift;
  int* range_segment;
  int* slots;
  int* numbers;
  uint64* control_words;
  uint64* table_words;
  int64 table_mask;
  int64* report;
  int64 num_hops;
  int64 fanouts[kMostHops];
  uint64 keys[kMostHops];
  int64* fault;
  SeedOrder order;
};

template <typename Id, typename Position, bool kPadded, bool kOrdered>
__global__ void __launch_bounds__(kThreads, 4) sample_hops(const Hops<Id, Position> hops) {
  const Graph<Id, Position> graph{
      {hops.tiers, static_cast<int>(hops.num_tiers), hops.position}, hops.pointers};
  const SeedEdges ranges{hops.range_first, hops.range_degree, hops.range_shift, hops.range_segment};
  const GridControl control{hops.control_words};
  using Table = NodeTable<Id, kPadded>;
  const Table table{hops.table_words, static_cast<uint64>(hops.table_mask), control.overflow()};
  GridBarrier barrier(control);
  const Numbering scratch{hops.slots, hops.numbers, control.more_sums()};
  const bool reports = blockIdx.x == 0 && threadIdx.x == 0;
  Id* nodes = hops.nodes;
  Id* indptr = hops.indptr;
  Id* neighbors = hops.neighbors;
  Id* eids = hops.eids;

  clear(table);
  int64 known = hops.num_seeds, room = hops.num_seeds;
  const Run mine = run_of_block(known);
  for (int64 i = mine.begin + threadIdx.x; i < mine.end; i += kThreads) nodes[i] = hops.seeds[i];
#pragma unroll 1
  for (int hop = 0; hop < hops.num_hops; ++hop) {
    const int64 fanout = hops.fanouts[hop];
    const Filler<Id, Position, AddToTable<Id, Table>> filler{
        graph,     ranges, hops.replace != 0, fanout, hops.keys[hop],
        neighbors, eids,  {table, known, hops.slots}};
    const Sum edges = sample<kOrdered>(filler, hops.num_rows, nodes, known, hops.order, indptr,
                                       control, barrier);
    if (hop == 0) {  // not before the whole table is clear, which is since the last barrier
      for (int64 i = mine.begin + threadIdx.x; i < mine.end; i += kThreads) {
        if (nodes[i] >= 0) table.Insert(nodes[i], static_cast<int>(i));
      }
    }
    // The block's own edges end where the next block's begin.
    const Run own{edges.before, edges.before + control.sums()[blockIdx.x]};
    barrier.Wait();
    if (reports) {
      indptr[known] = static_cast<Id>(edges.total);
      hops.report[2 + 2 * hop] = edges.total;
    }
    if (kPadded) {
      const Run rest = run_of_block(room - known);
      for (int64 i = rest.begin + threadIdx.x; i < rest.end; i += kThreads) {
        indptr[known + 1 + i] = static_cast<Id>(edges.total);
      }
    }
    known = number_nodes<kThreads>(table, known, own, scratch, neighbors, nodes,
                                       hop + 1 == hops.num_hops, barrier);
    if (reports) hops.report[3 + 2 * hop] = known;
    indptr += room + 1;
    neighbors += room * fanout;
    eids += room * fanout;
    room = min(room + room * fanout, hops.most_nodes);
  }
  if (reports) {
    hops.report[0] = static_cast<int64>(*control.bad());
    hops.report[1] = static_cast<int64>(*control.overflow());
    if (kPadded && *control.bad() != ~0ull) {
      report_bad_id(hops.fault, hops.seeds[*control.bad()], hops.num_rows);
    }
  }
  control.Leave();
}

}  // namespace dgl_mgpu
