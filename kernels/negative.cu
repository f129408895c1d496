// Negative sampling: the contract stands in dgl_mgpu/ops/negative.py.
#include "ggms.cuh"
#include "grid.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 256;

// Whether `source` is among the in-edges of a node; all lanes of the warp ask for the same. They
// are in no order, so that all may have to be read.
template <typename Id, typename Position>
__device__ __forceinline__ bool has_edge(const Graph<Id, Position>& graph, int64 source,
                                         int64 destination) {
  constexpr int kUnroll = 4;  // loads of a lane that are under way together
  const auto span = graph.Find(destination);
  const Id* neighbors = span.neighbors();
  const int64 count = span.size();
  for (int64 start = 0; start < count; start += 32 * kUnroll) {
    bool is_neighbor = false;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int64 at = start + 32 * i + threadIdx.x % 32;
      if (at < count) is_neighbor |= neighbors[at] == source;
    }
    if (__any_sync(kAllLanes, is_neighbor)) return true;
  }
  return false;
}

// Pairs that have been taken, without repeats: open addressing over `mask` + 1 entries, all ones
// where nothing is. An entry has the try in which a pair was taken and, in the bits below, the
// pair's place, so that the smallest entry is the one to stay. A try has 29 bits (op.py), and 2^34
// pairs would fit no GPU.
constexpr int kPlaceBits = 34;

__device__ __forceinline__ uint64 entry_of(int64 attempt, int64 place) {
  return static_cast<uint64>(attempt) << kPlaceBits | static_cast<uint64>(place);
}

template <typename Id>
struct PairTable {
  uint64* entries;
  uint64 mask;
  const volatile Id* sources;
  const volatile Id* destinations;

  __device__ __forceinline__ void Clear() const {
    const uint64 threads = static_cast<uint64>(gridDim.x) * kThreads;
    for (uint64 slot = static_cast<uint64>(blockIdx.x) * kThreads + threadIdx.x; slot <= mask;
         slot += threads) {
      entries[slot] = ~0ull;
    }
  }

  // Finds or adds a pair and lowers its entry; returns the slot.
  __device__ __forceinline__ int64 Insert(uint64 entry, Id source, Id destination) const {
    __threadfence();  // whoever sees the entry sees the pair
    uint64 slot = static_cast<uint64>(source) * 0x9E3779B97F4A7C15ull ^
                  static_cast<uint64>(destination) * 0xC2B2AE3D27D4EB4Full;
    slot = (slot ^ slot >> 32) & mask;
    while (true) {
      const uint64 seen = atomicCAS(entries + slot, ~0ull, entry);
      if (seen == ~0ull) return static_cast<int64>(slot);
      __threadfence();
      const uint64 other = seen & ((1ull << kPlaceBits) - 1);
      if (sources[other] == source && destinations[other] == destination) {
        atomicMin(entries + slot, entry);
        return static_cast<int64>(slot);
      }
      slot = (slot + 1) & mask;
    }
  }
};

// What is known of a pair, in the place of its slot in the table.
constexpr int64 kPending = -1, kTaken = -2;

// `drawn` and `slots` have room for each pair; without a table pairs may be equal. A block has the
// same pairs in every try, a warp a pair. `report` gets the number of pairs written.
template <typename Id, typename Position>
__global__ void __launch_bounds__(kThreads)
    negative_edges(int64 count, const int64* tiers, int64 num_tiers, const int64* pointers,
                   const Position* position, int64 num_rows, int64 num_cols,
                   int64 exclude_self_loops, int64 max_tries, int64 key, Id* drawn_sources,
                   Id* drawn_destinations, int64* slots, uint64* table_entries, int64 table_mask,
                   uint64* control_words, Id* sources, Id* destinations, int64* report) {
  const Graph<Id, Position> graph{{tiers, static_cast<int>(num_tiers), position}, pointers};
  const PairTable<Id> table{table_entries, static_cast<uint64>(table_mask), drawn_sources,
                            drawn_destinations};
  const GridControl control{control_words};
  GridBarrier barrier(control);
  int64* sums = control.sums();
  const Run mine = run_of_block(count);
  const bool distinct = table_entries != nullptr;
  const int lane = threadIdx.x % 32;
  for (int64 i = mine.begin + threadIdx.x; i < mine.end; i += kThreads) slots[i] = kPending;
  if (distinct) table.Clear();
  barrier.Wait();

  for (int64 attempt = 0; attempt < max_tries; ++attempt) {
    for (int64 i = mine.begin + threadIdx.x / 32; i < mine.end; i += kThreads / 32) {
      if (slots[i] != kPending) continue;
      const Draws draws = philox(i, 0, kNegativeEdgeStream + static_cast<uint32>(attempt), key);
      const int64 source = below(draws.first, num_cols);
      const int64 destination = below(draws.second, num_rows);
      if (exclude_self_loops && source == destination) continue;
      if (has_edge(graph, source, destination)) continue;
      if (lane == 0) {
        drawn_sources[i] = static_cast<Id>(source);
        drawn_destinations[i] = static_cast<Id>(destination);
        slots[i] = distinct ? table.Insert(entry_of(attempt, i), source, destination) : kTaken;
      }
    }
    barrier.Wait();
    int64 pending = 0;
    for (int64 i = mine.begin + threadIdx.x; i < mine.end; i += kThreads) {
      if (slots[i] >= 0) {
        const bool first = table.entries[slots[i]] == entry_of(attempt, i);
        slots[i] = first ? kTaken : kPending;
      }
      pending += slots[i] == kPending;
    }
    const Sum left = block_sum<kThreads>(pending);
    if (threadIdx.x == 0) sums[blockIdx.x] = left.total;
    barrier.Wait();
    if (grid_sum<kThreads>(sums).total == 0) break;
  }

  barrier.Wait();  // all have read the sums
  int64 taken = 0;
  for (int64 i = mine.begin + threadIdx.x; i < mine.end; i += kThreads) taken += slots[i] == kTaken;
  const Sum here = block_sum<kThreads>(taken);
  if (threadIdx.x == 0) sums[blockIdx.x] = here.total;
  barrier.Wait();
  const Sum all = grid_sum<kThreads>(sums);
  int64 next = all.before;
  for (int64 start = mine.begin; start < mine.end; start += kThreads) {
    const int64 i = start + threadIdx.x;
    const bool write = i < mine.end && slots[i] == kTaken;
    const Sum sum = block_sum<kThreads>(write);
    if (write) {
      sources[next + sum.before] = drawn_sources[i];
      destinations[next + sum.before] = drawn_destinations[i];
    }
    next += sum.total;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *report = all.total;
  control.Leave();
}

// A warp a destination, `k` for each source. `numbers` tells mentions of one source apart. `bad`,
// filled with ones, gets the first source that is no node.
template <typename Source, typename Id, typename Position>
__global__ void __launch_bounds__(kThreads)
    negative_destinations(const Source* sources, int64 num_sources, const int64* numbers, int64 k,
                          const int64* tiers, int64 num_tiers, const int64* pointers,
                          const Position* position, int64 num_rows, int64 num_cols,
                          int64 avoid_existing, int64 exclude_self_loops, int64 max_tries,
                          int64 key, Id* destinations, uint64* bad) {
  const Graph<Id, Position> graph{{tiers, static_cast<int>(num_tiers), position}, pointers};
  const int64 warps = static_cast<int64>(gridDim.x) * (kThreads / 32);
  for (int64 i = static_cast<int64>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
       i < num_sources * k; i += warps) {
    const int64 source = sources[i / k];
    const bool outside = source < 0 || source >= num_cols;
    if (outside) atomicMin(bad, static_cast<uint64>(i / k));
    const uint32 block = static_cast<uint32>(numbers[i / k] * k + i % k);
    int64 chosen = -1;
    for (int64 attempt = 0; attempt < max_tries && !outside && chosen < 0; ++attempt) {
      const uint32 stream = kNegativeDestinationStream + static_cast<uint32>(attempt);
      const int64 candidate = below(philox(source, block, stream, key).first, num_rows);
      if (exclude_self_loops && candidate == source) continue;
      if (avoid_existing && has_edge(graph, source, candidate)) continue;
      chosen = candidate;
    }
    if (threadIdx.x % 32 == 0) destinations[i] = static_cast<Id>(chosen);
  }
}

}  // namespace dgl_mgpu
