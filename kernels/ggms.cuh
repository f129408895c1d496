// How a kernel sees the store: the three accessors of XGNN's global GNN memory store (section 3,
// figure 5), NumNeighbor, Neighbors and Features, over tiers and base pointers.
//
// The structures repeat dgl_mgpu/ops/view.py, where tiers, parts and positions are explained. A
// view's tensors are passed to a kernel as they are:
//
//   extern "C" __global__ void degrees(const int64* tiers, int num_tiers, const int64* pointers,
//                                      const int* position, ...) {
//     const dgl_mgpu::Graph<int, int> graph{{tiers, num_tiers, position}, pointers};
//     ... graph.NumNeighbor(node) ...
//   }
#pragma once

#include "philox.cuh"

namespace dgl_mgpu {

// Where a row lies: the index of its segment's pointer and its row there.
struct Place {
  int64 segment;
  int64 row;
};

// Rows behind tiers. Position is the type of the entries of `position`, which maps a row's id to
// its position and is null where ids are positions.
template <typename Position>
struct Rows {
  const int64* tiers;  // (num_tiers, 4): start, stop, parts, first pointer
  int num_tiers;
  const Position* position;

  __device__ __forceinline__ Place Find(int64 id) const {
    const int64 at = position == nullptr ? id : static_cast<int64>(position[id]);
    int tier = 0;
    while (tier + 1 < num_tiers && at >= tiers[4 * tier + 1]) ++tier;
    const int64 offset = at - tiers[4 * tier];
    const int64 parts = tiers[4 * tier + 2], first = tiers[4 * tier + 3];
    if (parts == 1) return {first, offset};
    if (offset > 0xffffffffll) return {first + offset % parts, offset / parts};
    const uint32 row = static_cast<uint32>(offset) / static_cast<uint32>(parts);
    return {first + offset - row * parts, row};
  }
};

// The positions of rows where their type is known only when a kernel runs. A row of a table is then
// looked up by its position, in Rows<int> without positions.
struct Positions {
  const void* entries;  // null where ids are positions
  int64 entry_bytes;

  __device__ __forceinline__ int64 Of(int64 id) const {
    if (entries == nullptr) return id;
    return entry_bytes == 8 ? static_cast<const int64*>(entries)[id]
                            : static_cast<const int*>(entries)[id];
  }
};

// A table of rows of `row_bytes` bytes. Where the store keeps some rows on disk, the pointer to
// these is 0: such a table must not be read in this way.
template <typename Position>
struct FeatureTable {
  Rows<Position> rows;
  const int64* pointers;
  int64 row_bytes;

  // Address of a node's row; Element is its type as stored.
  template <typename Element>
  __device__ __forceinline__ const Element* Features(int64 node) const {
    const Place place = rows.Find(node);
    return reinterpret_cast<const Element*>(pointers[place.segment] + place.row * row_bytes);
  }
};

// In place of a segment's pointer to edge ids: they count on from a first one of each row.
constexpr int64 kPaired = 1;

// Of a row: the place of its first edge in its segment and, if the segment is paired, its id.
struct alignas(16) FirstEdge {
  int64 place;
  int64 id;
};

// The in-edges of every node. Id is the graph's id type.
template <typename Id, typename Position>
struct Graph {
  Rows<Position> rows;
  const int64* pointers;  // (segments, 3): indptr, indices, edge ids

  // Where a node's edges begin and end in its segment.
  struct Span {
    const int64* base;  // the segment's three pointers
    int64 begin;
    int64 end;
    int64 shift;  // from an edge's place to its id, where ids are not stored

    __device__ __forceinline__ int64 size() const { return end - begin; }
    __device__ __forceinline__ const Id* neighbors() const {
      return reinterpret_cast<const Id*>(base[1]) + begin;
    }
    // Id of edge `i` of the node.
    __device__ __forceinline__ Id edge(int64 i) const {
      return base[2] == 0 || base[2] == kPaired
                 ? static_cast<Id>(begin + i + shift)
                 : reinterpret_cast<const Id*>(base[2])[begin + i];
    }
  };

  // Looks a node up once; the accessors below are for those who want one thing of it.
  __device__ __forceinline__ Span Find(int64 node) const {
    const Place place = rows.Find(node);
    const int64* base = pointers + 3 * place.segment;
    if (base[2] == kPaired) {
      const FirstEdge* first = reinterpret_cast<const FirstEdge*>(base[0]) + place.row;
      const FirstEdge mine = first[0];
      return {base, mine.place, first[1].place, mine.id - mine.place};
    }
    const int64* indptr = reinterpret_cast<const int64*>(base[0]);
    return {base, indptr[place.row], indptr[place.row + 1], 0};
  }

  __device__ __forceinline__ int64 NumNeighbor(int64 node) const { return Find(node).size(); }
  __device__ __forceinline__ const Id* Neighbors(int64 node) const {
    return Find(node).neighbors();
  }
};

}  // namespace dgl_mgpu
