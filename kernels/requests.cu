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

// `counts` has for each call to the same messages a row: ids for each machine, of this call and
// those before; blocks that are done; and how far before the end of the ids the first bad one is.
// `own` gets the ids of rows that are here; if it is null, their places are those of the rows.
template <typename Id, typename Position, typename Sent>
__global__ void __launch_bounds__(kThreads)
    write_requests(const Id* ids, int64 most_ids, const int64* exact_ids, const Position* position,
                   int64 num_rows, const int64* bounds, int64 num_machines, int64 machine,
                   Sent* own, const Messages messages, int64 room,
                   const __grid_constant__ Notes notes, int64 number, int64* counts,
                   int64* places) {
  __shared__ int block_counts[kMostMachines];
  __shared__ int64 firsts[kMostMachines];
  __shared__ bool is_last;
  const int machines = static_cast<int>(num_machines);
  const int64 count = count_of(most_ids, exact_ids);
  uint64* mine = reinterpret_cast<uint64*>(counts + number * (num_machines + 2));
  const int64* before = number > 0 ? counts + (number - 1) * (num_machines + 2) : nullptr;
  uint64* done = mine + num_machines;
  uint64* bad = done + 1;
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
      id[u] = ids[i];
      if (id[u] < 0 || id[u] >= num_rows) {
        atomicMax(bad, static_cast<uint64>(count - i));
        places[i] = 0;
        continue;
      }
      const int64 at = position == nullptr ? id[u] : static_cast<int64>(position[id[u]]);
      if (at >= 0 && own == nullptr) {
        places[i] = num_machines * room + at;
        continue;
      }
      owner[u] = at >= 0 ? static_cast<int>(machine) : owner_of(id[u], bounds, machines);
      slot[u] = atomicAdd(&block_counts[owner[u]], 1);
    }
    __syncthreads();
    for (int other = threadIdx.x; other < machines; other += kThreads) {
      if (block_counts[other] == 0) continue;
      const int64 first = atomicAdd(mine + other, static_cast<uint64>(block_counts[other]));
      const bool is_own = own != nullptr && other == machine;
      firsts[other] = first + (before == nullptr || is_own ? 0 : before[other]);
    }
    __syncthreads();
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (owner[u] < 0) continue;
      const int64 i = tile + u * kThreads + threadIdx.x, at = firsts[owner[u]] + slot[u];
      if (own != nullptr && owner[u] == machine) {
        own[at] = static_cast<Sent>(id[u]);
        places[i] = num_machines * room + at;
      } else if (at < room) {
        messages.Elements<Sent>(owner[u])[at] = static_cast<Sent>(id[u]);
        places[i] = owner[u] * room + at;
      } else {
        places[i] = -1;
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
  const int64 first_word = kNotes + number * (num_machines + 1);
  for (int64 other = threadIdx.x; other < num_machines; other += kThreads) {
    const int64 total =
        *reinterpret_cast<volatile int64*>(mine + other) + (before == nullptr ? 0 : before[other]);
    mine[other] = static_cast<uint64>(total);
    for (int64 to = 0; to < num_machines; ++to) messages.Head(to)[first_word + other] = total;
  }
  const int64 from_end = *reinterpret_cast<volatile int64*>(bad);
  for (int64 to = threadIdx.x; to < num_machines; to += kThreads) {
    int64* head = messages.Head(to);
    head[first_word + num_machines] = from_end == 0 ? -1 : count - from_end;
    for (int word = 0; word < kNotes; ++word) head[word] = notes.words[word];
  }
}

}  // namespace dgl_mgpu
