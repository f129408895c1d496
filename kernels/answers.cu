// Samples that machines answer each other with: the contract stands in
// dgl_mgpu/ops/machine_hops.py.
#include "bounded.cuh"
#include "messages.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 256;
// Threads that copy the edges of one id.
constexpr int kLanes = 8;

// What a message has room for: where each id's edges begin and the last ones end, neighbors, and
// edge ids.
struct SampleRoom {
  int64 ids;
  int64 starts;
  int64 edges;
};

// The samples of the ids that each other machine has asked for. Those for machine m are in `indptrs`
// from m * (room.ids + 1) on, and their edges from where those of the machine before end, of which
// `ends` has every second word. This machine's own end where it says, too, and go nowhere.
template <typename Id>
struct Sampled {
  Messages asked;
  int64 num_machines;
  int64 machine;
  const int64* indptrs;
  const int64* ends;
  const Id* neighbors;
  const Id* eids;
  Messages answers;
  SampleRoom room;
  int64* longest;  // gets the room that what all have asked for needed

  __device__ __forceinline__ int64 BeginFor(int64 to) const {
    const int64 before = to - 1 == machine ? to - 2 : to - 1;
    return to == machine || before < 0 ? 0 : ends[2 * before];
  }
};

// Writes them to a message to each machine. Of heads, nobody reads the notes.
template <typename Id, typename Sent>
__global__ void __launch_bounds__(kThreads)
    write_samples(const __grid_constant__ Sampled<Id> sampled) {
  const int64 first = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x;
  const int64 step = static_cast<int64>(gridDim.x) * kThreads;
  const int64 num_machines = sampled.num_machines;
  const SampleRoom& room = sampled.room;
  for (int64 to = 0; to < num_machines; ++to) {
    for (int64 other = first; other < num_machines; other += step) {
      const int64 count = sampled.ends[2 * other] - sampled.BeginFor(other);
      sampled.answers.Head(to)[kNotes + other] = count;
    }
    if (to == sampled.machine) continue;
    const int64* const asked = sampled.asked.Head(to) + kNotes + sampled.machine;
    const int64 num_ids = count_of(room.ids, asked);
    const int64 begin = sampled.BeginFor(to), count = sampled.ends[2 * to] - begin;
    const int64* const indptr = sampled.indptrs + to * (room.ids + 1);
    Sent* const starts = sampled.answers.template Elements<Sent>(to);
    Sent* const neighbors = starts + room.starts;
    for (int64 i = first; i <= num_ids; i += step) starts[i] = static_cast<Sent>(indptr[i]);
    for (int64 edge = first; edge < count && edge < room.edges; edge += step) {
      neighbors[edge] = static_cast<Sent>(sampled.neighbors[begin + edge]);
      neighbors[room.edges + edge] = static_cast<Sent>(sampled.eids[begin + edge]);
    }
  }
  if (blockIdx.x == 0) write_longest(sampled.asked, num_machines, sampled.longest);
}

// The edges of ids that this machine has itself.
template <typename Id>
struct OwnEdges {
  const int64* indptr;
  const Id* neighbors;
  const Id* eids;
};

// The edges of all ids, in the order of these, of what all machines have sent.
template <typename Id>
struct Joined {
  const int64* places;  // of the ids
  int64 most_ids;
  const int64* exact_ids;
  Messages received;
  OwnEdges<Id> own;
  int64 num_machines;
  SampleRoom room;
  int64 fanout;
  int64 num_nodes;
  int64* indptr;
  Id* neighbors;
  Id* eids;
  uint64* control_words;
  int64* num_edges;  // gets how many there are
  int64* longest;    // gets the room that what all have answered needed
};

// The edges of one id among those received. Where messages had too little room what they say is not
// true: an id has no edges rather than some that are nowhere, and no neighbors that are no nodes.
template <typename Id, typename Sent>
struct EdgesOfId {
  const Sent* received = nullptr;
  const Id* own = nullptr;
  int64 to_eids = 0;  // from an edge's neighbor to its id, of those received
  const Id* own_eids = nullptr;
  int64 count = 0;

  __device__ EdgesOfId(const Joined<Id>& joined, int64 place) {
    if (place < 0) return;
    const SampleRoom& room = joined.room;
    const OwnEdges<Id>& mine = joined.own;
    const int64 machine = place / room.ids, slot = place % room.ids;
    if (machine >= joined.num_machines) {
      const int64 at = place - joined.num_machines * room.ids, begin = mine.indptr[at];
      own = mine.neighbors + begin;
      own_eids = mine.eids + begin;
      count = mine.indptr[at + 1] - begin;
      return;
    }
    const Sent* starts = joined.received.template Elements<Sent>(machine);
    const int64 begin = starts[slot], end = starts[slot + 1];
    if (begin < 0 || end < begin || end - begin > joined.fanout || end > room.edges) return;
    received = starts + room.starts + begin;
    to_eids = room.edges;
    count = end - begin;
  }
  __device__ __forceinline__ Id Neighbor(int64 edge) const {
    return own == nullptr ? static_cast<Id>(received[edge]) : own[edge];
  }
  __device__ __forceinline__ Id EdgeId(int64 edge) const {
    return own == nullptr ? static_cast<Id>(received[to_eids + edge]) : own_eids[edge];
  }
};

template <typename Id, typename Sent>
__global__ void __launch_bounds__(kThreads)
    join_samples(const __grid_constant__ Joined<Id> joined) {
  const GridControl control{joined.control_words};
  GridBarrier barrier(control);
  const int64 count = count_of(joined.most_ids, joined.exact_ids);
  const Run mine = run_of_block(count);
  int64* const indptr = joined.indptr;
  int64 size = 0;
  for (int64 start = mine.begin; start < mine.end; start += kThreads) {
    const int64 i = start + threadIdx.x;
    const int64 of_id =
        i < mine.end ? EdgesOfId<Id, Sent>(joined, joined.places[i]).count : 0;
    const Sum sum = block_sum<kThreads>(of_id);
    if (i < mine.end) indptr[i] = size + sum.before;
    size += sum.total;
  }
  if (threadIdx.x == 0) control.sums()[blockIdx.x] = size;
  barrier.Wait();

  const Sum edges = grid_sum<kThreads>(control.sums());
  const int lane = threadIdx.x % kLanes;
  const uint32 mask = ((1u << kLanes) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
  for (int64 i = mine.begin + threadIdx.x / kLanes; i < mine.end; i += kThreads / kLanes) {
    const EdgesOfId<Id, Sent> of_id(joined, joined.places[i]);
    const int64 to = edges.before + indptr[i];
    __syncwarp(mask);
    if (lane == 0) indptr[i] = to;
    for (int64 edge = lane; edge < of_id.count; edge += kLanes) {
      const Id neighbor = of_id.Neighbor(edge);
      joined.neighbors[to + edge] = neighbor < 0 || neighbor >= joined.num_nodes ? 0 : neighbor;
      joined.eids[to + edge] = of_id.EdgeId(edge);
    }
  }
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) indptr[count] = *joined.num_edges = edges.total;
    write_longest(joined.received, joined.num_machines, joined.longest);
  }
  control.Leave();
}

}  // namespace dgl_mgpu
