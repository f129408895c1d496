// Philox 4x32-10 (Salmon et al., SC'11), bit for bit as dgl_mgpu/ops/philox.py has it: there
// stands how keys and counters are made.
#pragma once

namespace dgl_mgpu {

using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

// Fourth counter word of neighbour sampling.
constexpr uint32 kSampleStream = 0;
// Of random walks it is this plus the step.
constexpr uint32 kWalkStream = 1u << 31;
// Of negative sampling, of edges and of destinations, these plus the try.
constexpr uint32 kNegativeEdgeStream = 1u << 29, kNegativeDestinationStream = 1u << 30;
// Of the weights that attention drops.
constexpr uint32 kAttentionStream = 1u << 27;

struct Draws {
  uint64 first;
  uint64 second;
};

// The two 64-bit draws of one counter block.
__device__ __forceinline__ Draws philox(uint64 node, uint32 block, uint32 stream, uint64 key) {
  uint32 c0 = static_cast<uint32>(node), c1 = static_cast<uint32>(node >> 32);
  uint32 c2 = block, c3 = stream;
  uint32 k0 = static_cast<uint32>(key), k1 = static_cast<uint32>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32 low0 = 0xD2511F53u * c0, high0 = __umulhi(0xD2511F53u, c0);
    const uint32 low1 = 0xCD9E8D57u * c2, high1 = __umulhi(0xCD9E8D57u, c2);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0 | static_cast<uint64>(c1) << 32, c2 | static_cast<uint64>(c3) << 32};
}

// The 64-bit draw number `index` of a node.
__device__ __forceinline__ uint64 draw(uint64 node, uint32 index, uint32 stream, uint64 key) {
  const Draws draws = philox(node, index >> 1, stream, key);
  return index & 1 ? draws.second : draws.first;
}

// A draw mapped to [0, bound).
__device__ __forceinline__ uint64 below(uint64 random, uint64 bound) {
  return __umul64hi(random, bound);
}

}  // namespace dgl_mgpu
