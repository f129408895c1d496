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

}  // namespace dgl_mgpu
