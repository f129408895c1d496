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

// The samples of the ids that each other machine has asked for, into a message to it. Those for
// machine m are in `indptrs` from m * (room.ids + 1) on, and their edges from where those of the
// machine before end, of which `ends` has every second word. This machine's own end where it says,
// too, and go nowhere.
template <typename Id, typename Sent>
__global__ void __launch_bounds__(kThreads)
    write_samples(const Messages asked, int64 num_machines, int64 machine, const int64* indptrs,
                  const int64* ends, const Id* neighbors, const Id* eids, const Messages answers,
                  const SampleRoom room, const __grid_constant__ Notes notes) {
  const int64 first = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x;
  const int64 step = static_cast<int64>(gridDim.x) * kThreads;
  const auto begin_for = [&](int64 to) -> int64 {
    const int64 before = to - 1 == machine ? to - 2 : to - 1;
    return to == machine || before < 0 ? 0 : ends[2 * before];
  };
  for (int64 to = 0; to < num_machines; ++to) {
    for (int64 word = first; word <= kNotes + num_machines; word += step) {
      const int64 other = word - kNotes;
      int64 value = -1;
      if (other < 0) {
        value = notes.words[word];
      } else if (other < num_machines) {
        value = ends[2 * other] - begin_for(other);
      }
      answers.Head(to)[word] = value;
    }
    if (to == machine) continue;
    const int64 num_ids = count_of(room.ids, asked.Head(to) + kNotes + machine);
    const int64 begin = begin_for(to), count = ends[2 * to] - begin;
    Sent* const starts = answers.Elements<Sent>(to);
    Sent* const to_neighbors = starts + room.starts;
    for (int64 i = first; i <= num_ids; i += step) {
      starts[i] = static_cast<Sent>(indptrs[to * (room.ids + 1) + i]);
    }
    for (int64 edge = first; edge < count && edge < room.edges; edge += step) {
      to_neighbors[edge] = static_cast<Sent>(neighbors[begin + edge]);
      to_neighbors[room.edges + edge] = static_cast<Sent>(eids[begin + edge]);
    }
  }
}

// The edges of ids that this machine has itself.
template <typename Id>
struct OwnEdges {
  const int64* indptr;
  const Id* neighbors;
  const Id* eids;
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

  __device__ EdgesOfId(const Messages& messages, const OwnEdges<Id>& mine, int64 num_machines,
                       const SampleRoom& room, int64 fanout, int64 place) {
    if (place < 0) return;
    const int64 machine = place / room.ids, slot = place % room.ids;
    if (machine >= num_machines) {
      const int64 at = place - num_machines * room.ids, begin = mine.indptr[at];
      own = mine.neighbors + begin;
      own_eids = mine.eids + begin;
      count = mine.indptr[at + 1] - begin;
      return;
    }
    const Sent* starts = messages.Elements<Sent>(machine);
    const int64 begin = starts[slot], end = starts[slot + 1];
    if (begin < 0 || end < begin || end - begin > fanout || end > room.edges) return;
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

// The edges of all ids, in the order of these, of what all machines have sent. `places` are those
// of the ids, `num_edges` gets how many edges there are.
template <typename Id, typename Sent>
__global__ void __launch_bounds__(kThreads)
    join_samples(const int64* places, int64 most_ids, const int64* exact_ids,
                 const Messages received, const OwnEdges<Id> own, int64 num_machines,
                 const SampleRoom room, int64 fanout, int64 num_nodes, int64* indptr,
                 Id* neighbors, Id* eids, uint64* control_words, int64* num_edges) {
  const GridControl control{control_words};
  GridBarrier barrier(control);
  const int64 count = count_of(most_ids, exact_ids);
  const Run mine = run_of_block(count);
  int64 size = 0;
  for (int64 start = mine.begin; start < mine.end; start += kThreads) {
    const int64 i = start + threadIdx.x;
    const int64 of_id =
        i < mine.end
            ? EdgesOfId<Id, Sent>(received, own, num_machines, room, fanout, places[i]).count
            : 0;
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
    const EdgesOfId<Id, Sent> of_id(received, own, num_machines, room, fanout, places[i]);
    const int64 to = edges.before + indptr[i];
    __syncwarp(mask);
    if (lane == 0) indptr[i] = to;
    for (int64 edge = lane; edge < of_id.count; edge += kLanes) {
      const Id neighbor = of_id.Neighbor(edge);
      neighbors[to + edge] = neighbor < 0 || neighbor >= num_nodes ? 0 : neighbor;
      eids[to + edge] = of_id.EdgeId(edge);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    indptr[count] = edges.total;
    *num_edges = edges.total;
  }
  control.Leave();
}

}  // namespace dgl_mgpu
