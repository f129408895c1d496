// Ids into messages to the machines that own them: the contract stands in dgl_mgpu/ops/requests.py.
#include "bounded.cuh"
#include "messages.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 256;
// Ids of a thread that a block counts together.
constexpr int kAtOnce = 4;
constexpr int kMostMachines = 1024;

// The last one whose first node is not behind `id`.
__device__ __forceinline__ int owner_of(int64 id, const int64* bounds, int num_machines) {
  int first = 0, end = num_machines;
  while (end - first > 1) {
    const int middle = (first + end) / 2;
    if (bounds[middle] <= id) {
      first = middle;
    } else {
      end = middle;
    }
  }
  return first;
}

template <typename Id, typename Position, typename Sent>
struct Requests {
  const Id* ids;
  int64 most_ids;
  const int64* exact_ids;
  const Position* position;
  int64 num_rows;
  const int64* bounds;
  int64 num_machines;
  int64 machine;
  Sent* own;  // gets the ids of rows that are here; if it is null, their places are those of the rows
  Messages messages;
  int64 room;
  int64 number;  // of calls before to the same messages
  // Zeros, which a launch leaves so: ids for each machine, blocks that are done, and how far before
  // the end of the ids the first bad one is.
  uint64* counters;
  int64* places;
  Notes notes;

  __device__ __forceinline__ int64 FirstWord(int64 call) const {
    return kNotes + call * (num_machines + 1);
  }
  // Ids for a machine in calls before.
  __device__ __forceinline__ int64 Before(int64 other) const {
    return number == 0 ? 0 : messages.Head(0)[FirstWord(number - 1) + other];
  }
};

template <typename Id, typename Position, typename Sent>
__global__ void __launch_bounds__(kThreads)
    write_requests(const __grid_constant__ Requests<Id, Position, Sent> asked) {
  __shared__ int block_counts[kMostMachines];
  __shared__ int64 firsts[kMostMachines];
  __shared__ bool is_last;
  const int machines = static_cast<int>(asked.num_machines);
  const int64 count = count_of(asked.most_ids, asked.exact_ids), room = asked.room;
  uint64* const done = asked.counters + machines;
  uint64* const bad = done + 1;
  constexpr int64 kTile = kThreads * kAtOnce;

  for (int64 tile = blockIdx.x * kTile; tile < count; tile += gridDim.x * kTile) {
    for (int other = threadIdx.x; other < machines; other += kThreads) block_counts[other] = 0;
    __syncthreads();
    int64 id[kAtOnce];
    int owner[kAtOnce], slot[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64 i = tile + u * kThreads + threadIdx.x;
      owner[u] = -1;
      if (i >= count) continue;
      id[u] = asked.ids[i];
      if (id[u] < 0 || id[u] >= asked.num_rows) {
        atomicMax(bad, static_cast<uint64>(count - i));
        asked.places[i] = 0;
        continue;
      }
      const int64 at =
          asked.position == nullptr ? id[u] : static_cast<int64>(asked.position[id[u]]);
      if (at >= 0 && asked.own == nullptr) {
        asked.places[i] = machines * room + at;
        continue;
      }
      owner[u] = at >= 0 ? static_cast<int>(asked.machine)
                         : owner_of(id[u], asked.bounds, machines);
      slot[u] = atomicAdd(&block_counts[owner[u]], 1);
    }
    __syncthreads();
    for (int other = threadIdx.x; other < machines; other += kThreads) {
      if (block_counts[other] == 0) continue;
      const int64 first =
          atomicAdd(asked.counters + other, static_cast<uint64>(block_counts[other]));
      const bool is_own = asked.own != nullptr && other == asked.machine;
      firsts[other] = first + (is_own ? 0 : asked.Before(other));
    }
    __syncthreads();
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (owner[u] < 0) continue;
      const int64 i = tile + u * kThreads + threadIdx.x, at = firsts[owner[u]] + slot[u];
      if (asked.own != nullptr && owner[u] == asked.machine) {
        asked.own[at] = static_cast<Sent>(id[u]);
        asked.places[i] = machines * room + at;
      } else if (at < room) {
        asked.messages.template Elements<Sent>(owner[u])[at] = static_cast<Sent>(id[u]);
        asked.places[i] = owner[u] * room + at;
      } else {
        asked.places[i] = -1;
      }
    }
    __syncthreads();
  }

  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(done, 1ull) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  const int64 first_word = asked.FirstWord(asked.number);
  for (int other = threadIdx.x; other < machines; other += kThreads) {
    const int64 total =
        *reinterpret_cast<volatile int64*>(asked.counters + other) + asked.Before(other);
    for (int to = 0; to < machines; ++to) asked.messages.Head(to)[first_word + other] = total;
    asked.counters[other] = 0;
  }
  const int64 from_end = *reinterpret_cast<volatile int64*>(bad);
  for (int to = threadIdx.x; to < machines; to += kThreads) {
    int64* head = asked.messages.Head(to);
    head[first_word + machines] = from_end == 0 ? -1 : count - from_end;
    for (int word = 0; word < kNotes; ++word) head[word] = asked.notes.words[word];
  }
  __syncthreads();
  if (threadIdx.x == 0) *done = *bad = 0;
}

}  // namespace dgl_mgpu
