// Messages to and from machines, as dgl_mgpu/ops/requests.py lays them out.
#pragma once

#include "grid.cuh"

namespace dgl_mgpu {

// Words at the beginning of every head.
constexpr int kNotes = 6;

struct Notes {
  int64 words[kNotes];
};

// A message for each machine: a head of int64 words, and elements of another type.
struct Messages {
  char* bytes;
  int64 message_bytes;
  int64 head_words;

  __device__ __forceinline__ int64* Head(int64 machine) const {
    return reinterpret_cast<int64*>(bytes + machine * message_bytes);
  }
  template <typename Element>
  __device__ __forceinline__ Element* Elements(int64 machine) const {
    return reinterpret_cast<Element*>(Head(machine) + head_words);
  }
};

// The most that any machine has for another one in a round, as the heads that all have sent here
// tell: what a message needs room for. All threads of a block call it together, and one writes it.
__device__ __forceinline__ void write_longest(const Messages& received, int64 num_machines,
                                              int64* longest) {
  __shared__ uint64 most;
  if (threadIdx.x == 0) most = 0;
  __syncthreads();
  for (int64 pair = threadIdx.x; pair < num_machines * num_machines; pair += blockDim.x) {
    const int64 from = pair / num_machines, to = pair % num_machines;
    if (from == to) continue;
    atomicMax(&most, static_cast<uint64>(received.Head(from)[kNotes + to]));
  }
  __syncthreads();
  if (threadIdx.x == 0) *longest = static_cast<int64>(most);
}

}  // namespace dgl_mgpu
