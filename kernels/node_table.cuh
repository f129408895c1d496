// A hash table from node ids to numbers, and the numbering of a sample's nodes with it.
//
// Seeds come first; then each new node by the place of its first occurrence, so that the result
// does not depend on the order in which threads run (WholeGraph, section III-C, numbers them in
// the order of its table). A node that is being added has its place as a provisional number,
// which the smallest place wins.
#pragma once

#include "grid.cuh"

namespace dgl_mgpu {

__device__ __forceinline__ uint64 hash_id(uint64 id) {
  id *= 0x9E3779B97F4A7C15ull;
  return id ^ (id >> 32);
}

struct alignas(16) Pair {
  uint64 first, second;
};

// Entries that are looked through before a table counts as full.
constexpr int kMostProbes = 1024;

// Open addressing over `mask` + 1 entries, filled with ones before use. Ids are not negative. A
// table that is full says so in `overflow` (0 then), and its result is not to be used. With `kAmple`
// it has more entries than there can be nodes, and is searched to its end.
template <typename Id, bool kAmple = false>
struct NodeTable;

// Id and number share a word, so that one atomic operation settles both.
template <bool kAmple>
struct NodeTable<int, kAmple> {
  uint64* words;
  uint64 mask;
  uint64* overflow;

  static constexpr int kWords = 1;

  // Finds or adds `id` and lowers its number to `number`; returns its slot.
  __device__ __forceinline__ int Insert(int id, int number) const {
    const uint64 mine = static_cast<uint64>(id) << 32 | static_cast<uint32>(number);
    uint64 slot = hash_id(id) & mask;
    for (int probe = 0; kAmple || probe < kMostProbes; ++probe) {
      uint64 seen = *static_cast<volatile uint64*>(words + slot);
      if (seen == ~0ull) {
        seen = atomicCAS(words + slot, ~0ull, mine);
        if (seen == ~0ull) return static_cast<int>(slot);
      }
      if (seen >> 32 == static_cast<uint64>(id)) {
        if (seen > mine) atomicMin(words + slot, mine);
        return static_cast<int>(slot);
      }
      slot = (slot + 1) & mask;
    }
    *overflow = 0;
    return 0;
  }
  __device__ __forceinline__ int Number(int slot) const { return static_cast<int>(words[slot]); }
  __device__ __forceinline__ void SetNumber(int slot, int number) const {
    reinterpret_cast<int*>(words + slot)[0] = number;
  }
};

// Two words an entry: id and number.
template <bool kAmple>
struct NodeTable<int64, kAmple> {
  uint64* words;
  uint64 mask;
  uint64* overflow;

  static constexpr int kWords = 2;

  __device__ __forceinline__ int Insert(int64 id, int number) const {
    const uint64 wanted = static_cast<uint64>(id);
    uint64 slot = hash_id(wanted) & mask;
    for (int probe = 0; kAmple || probe < kMostProbes; ++probe) {
      uint64* entry = words + 2 * slot;
      uint64 seen = *static_cast<volatile uint64*>(entry);
      if (seen == ~0ull) {
        seen = atomicCAS(entry, ~0ull, wanted);
        if (seen == ~0ull) seen = wanted;
      }
      if (seen == wanted) {
        const uint64 mine = static_cast<uint32>(number);
        if (*static_cast<volatile uint64*>(entry + 1) > mine) atomicMin(entry + 1, mine);
        return static_cast<int>(slot);
      }
      slot = (slot + 1) & mask;
    }
    *overflow = 0;
    return 0;
  }
  __device__ __forceinline__ int Number(int slot) const {
    return static_cast<int>(words[2 * static_cast<uint64>(slot) + 1]);
  }
  __device__ __forceinline__ void SetNumber(int slot, int number) const {
    words[2 * static_cast<uint64>(slot) + 1] = static_cast<uint32>(number);
  }
};

// Empties a table, all blocks together.
template <typename Table>
__device__ __forceinline__ void clear(const Table& table) {
  const int64 words = static_cast<int64>(table.mask + 1) * table.kWords;
  const int64 threads = static_cast<int64>(gridDim.x) * blockDim.x;
  for (int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; 2 * i < words;
       i += threads) {
    reinterpret_cast<Pair*>(table.words)[i] = {~0ull, ~0ull};
  }
}

// Working memory for the numbering of one hop.
struct Numbering {
  int* slots;    // of each neighbor in the table
  int* numbers;  // of each neighbor
  int64* sums;   // of each block
};

// Numbers the nodes of a hop, of which this block has the neighbors of `mine`; the table holds
// them with `known` + place as provisional number. Replaces `neighbors` by their numbers, appends
// the new nodes to the `known` ones and returns how many there are then. Neighbors are written
// when it returns, nodes before.
template <int kThreads, typename Table, typename Id>
__device__ int64 number_nodes(const Table& table, int64 known, Run mine, Numbering scratch,
                              Id* neighbors, Id* nodes, bool last_hop, GridBarrier& barrier) {
  // Several look-ups a thread at once: what takes the time is to wait for memory.
  constexpr int kAtOnce = 4;
  int64 first_ones = 0;
  for (int64 start = mine.begin + threadIdx.x; start < mine.end; start += kAtOnce * kThreads) {
    int number[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64 i = start + u * kThreads;
      number[u] = i < mine.end ? table.Number(scratch.slots[i]) : -1;
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64 i = start + u * kThreads;
      if (i < mine.end) scratch.numbers[i] = number[u];
      first_ones += number[u] == known + i;
    }
  }
  const Sum firsts = block_sum<kThreads>(first_ones);
  if (threadIdx.x == 0) scratch.sums[blockIdx.x] = firsts.total;
  barrier.Wait();

  const Sum added = grid_sum<kThreads>(scratch.sums);
  int64 next = known + added.before;
  for (int64 start = mine.begin; start < mine.end; start += kThreads) {
    const int64 i = start + threadIdx.x;
    const bool first = i < mine.end && scratch.numbers[i] == known + i;
    const Sum firsts = block_sum<kThreads>(first);
    if (first) {
      const int number = static_cast<int>(next + firsts.before);
      nodes[number] = neighbors[i];
      scratch.numbers[i] = ~number;  // negative: final
      if (!last_hop) table.SetNumber(scratch.slots[i], number);
    }
    next += firsts.total;
  }
  barrier.Wait();

  for (int64 start = mine.begin + threadIdx.x; start < mine.end; start += kAtOnce * kThreads) {
    int number[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64 i = start + u * kThreads;
      number[u] = i < mine.end ? scratch.numbers[i] : 0;
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (number[u] >= known && start + u * kThreads < mine.end) {
        number[u] = scratch.numbers[number[u] - known];
      }
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64 i = start + u * kThreads;
      if (i < mine.end) neighbors[i] = number[u] < 0 ? ~number[u] : number[u];
    }
  }
  return known + added.total;
}

}  // namespace dgl_mgpu
