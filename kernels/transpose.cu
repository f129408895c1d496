// A CSR made of a CSC, or the reverse. The contract stands in dgl_mgpu/ops/transpose.py.
//
// Columns are counted with atomic additions, so that their entries lie together, but in any order.
// An entry's place in its column is then how many are to come before it. Of columns that are too
// long for that, pieces are ordered so, and all blocks merge them: also where one column has all
// entries, nothing takes longer than sorting.
//
// All of it is one cooperative launch, with barriers over the grid between phases.
#include "grid.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 256;
// Entries of a column that are ordered by counting; a block has a thread for each when merging.
constexpr uint32 kPiece = kThreads;

// An entry among those of its column, which are the places [begin, end).
struct alignas(16) Entry {
  uint32 edge;
  uint32 row;
  uint32 begin;
  uint32 end;
};

// What is transposed, and into what. `out_indptr` holds the columns' counts first and `out_eids`
// which one in its column, by the counter, each entry is.
template <typename Id>
struct Transposition {
  const Id* indptr;
  const Id* indices;
  const Id* eids;  // null where entry i is edge i
  int64 num_rows;
  int64 num_cols;
  int64 num_entries;
  Id* out_indptr;
  Id* out_indices;
  Id* out_eids;
  Entry* entries;
  uint64* words;       // edge and row of entries of long columns, while not in the output
  uint32* longest;     // column, where one is longer than a piece; else 0
  uint32* num_pieces;  // of columns longer than one
  uint32* pieces;      // where these begin
  uint64* control_words;

  // Edge and row at a place, in the output or in `words`.
  __device__ __forceinline__ uint32 EdgeAt(uint32 place, bool in_output) const {
    return static_cast<uint32>(in_output ? out_eids[place] : words[place] >> 32);
  }
  __device__ __forceinline__ uint32 RowAt(uint32 place, bool in_output) const {
    return static_cast<uint32>(in_output ? out_indices[place] : words[place]);
  }
  __device__ __forceinline__ void Put(uint32 place, uint32 edge, uint32 row, bool in_output) const {
    if (in_output) {
      out_eids[place] = edge;
      out_indices[place] = row;
    } else {
      words[place] = static_cast<uint64>(edge) << 32 | row;
    }
  }

  // The row of an entry of the input.
  __device__ __forceinline__ uint32 RowOf(int64 entry) const {
    uint32 low = 0, high = static_cast<uint32>(num_rows);
    while (low < high) {
      const uint32 middle = (low + high) / 2;
      if (indptr[middle + 1] <= entry) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

__device__ __forceinline__ int add_count(int* to, int count) { return atomicAdd(to, count); }

__device__ __forceinline__ int64 add_count(int64* to, int count) {
  return static_cast<int64>(atomicAdd(reinterpret_cast<uint64*>(to), static_cast<uint64>(count)));
}

// Whether the ordered runs of a width are in the output. Every merging takes a column's to the
// other place, and the last one to the output.
__device__ __forceinline__ bool in_output(uint32 length, uint32 width) {
  bool there = true;
  for (; width < length; width *= 2) there = !there;
  return there;
}

// Merges neighbouring runs of a width in all columns that are longer.
template <typename Id>
__device__ void merge_runs(const Transposition<Id>& of, uint32 width) {
  const uint32 num_pieces = *of.num_pieces;
  for (uint32 piece = blockIdx.x; piece < num_pieces; piece += gridDim.x) {
    const uint32 first = of.pieces[piece], place = first + threadIdx.x;
    const uint32 begin = of.entries[first].begin, end = of.entries[first].end;
    const uint32 length = end - begin;
    if (length <= width || place >= end) continue;
    const bool from_output = in_output(length, width);
    const uint32 edge = of.EdgeAt(place, from_output);
    // How many of the other run come before it.
    const uint32 offset = place - begin, run = offset & ~(width - 1);
    const uint32 other = min(begin + (run ^ width), end);
    uint32 low = other, high = min(other + width, end);
    while (low < high) {
      const uint32 middle = low + (high - low) / 2;
      if (of.EdgeAt(middle, from_output) < edge) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    of.Put(begin + (run & ~width) + (offset - run) + (low - other), edge,
           of.RowAt(place, from_output), in_output(length, 2 * width));
  }
}

template <typename Id>
__global__ void __launch_bounds__(kThreads) transpose(const Transposition<Id> of) {
  const GridControl control{of.control_words};
  GridBarrier barrier(control);
  const int lane = threadIdx.x % 32;
  const int64 own = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x;
  const int64 step = static_cast<int64>(gridDim.x) * kThreads;

  for (int64 i = own; i < of.num_cols; i += step) of.out_indptr[i] = 0;
  if (own == 0) *of.longest = *of.num_pieces = 0;
  barrier.Wait();

  // One addition for all equal columns of a warp: a column may have most of the entries.
  for (int64 i = own; i - lane < of.num_entries; i += step) {
    const uint32 active = __ballot_sync(kAllLanes, i < of.num_entries);
    if (i >= of.num_entries) continue;
    const Id column = of.indices[i];
    const uint32 equal = __match_any_sync(active, column);
    const int leader = __ffs(equal) - 1;
    Id before = 0;
    if (lane == leader) before = add_count(of.out_indptr + column, __popc(equal));
    before = __shfl_sync(active, before, leader);
    of.out_eids[i] = before + __popc(equal & ((1u << lane) - 1));
  }
  barrier.Wait();

  const Run mine = run_of_block(of.num_cols);
  int64 count = 0;
  for (int64 i = mine.begin + threadIdx.x; i < mine.end; i += kThreads) count += of.out_indptr[i];
  const Sum sum = block_sum<kThreads>(count);
  if (threadIdx.x == 0) control.sums()[blockIdx.x] = sum.total;
  barrier.Wait();

  int64 before = grid_sum<kThreads>(control.sums()).before;
  for (int64 start = mine.begin; start < mine.end; start += kThreads) {
    const int64 i = start + threadIdx.x;
    const int64 length = i < mine.end ? of.out_indptr[i] : 0;
    const Sum sum = block_sum<kThreads>(length);
    if (i < mine.end) of.out_indptr[i] = before + sum.before;
    if (length > kPiece) atomicMax(of.longest, static_cast<uint32>(length));
    before += sum.total;
  }
  if (own == 0) of.out_indptr[of.num_cols] = of.num_entries;
  barrier.Wait();

  for (int64 i = own; i < of.num_entries; i += step) {
    const Id column = of.indices[i];
    const uint32 begin = of.out_indptr[column], end = of.out_indptr[column + 1];
    const uint32 edge = of.eids == nullptr ? i : of.eids[i];
    of.entries[begin + of.out_eids[i]] = {edge, of.RowOf(i), begin, end};
  }
  barrier.Wait();

  for (int64 i = own; i < of.num_entries; i += step) {
    const Entry entry = of.entries[i];
    const uint32 place = i, length = entry.end - entry.begin;
    const uint32 from = place - (place - entry.begin) % kPiece, to = min(from + kPiece, entry.end);
    uint32 ordered = from;
    for (uint32 other = from; other < to; ++other) {
      ordered += of.entries[other].edge < entry.edge;
    }
    of.Put(ordered, entry.edge, entry.row, in_output(length, kPiece));
    if (length > kPiece && place == from) of.pieces[atomicAdd(of.num_pieces, 1u)] = place;
  }

  const uint32 longest = *of.longest;
  for (uint32 width = kPiece; width < longest; width *= 2) {
    barrier.Wait();
    merge_runs(of, width);
  }
  control.Leave();
}

}  // namespace dgl_mgpu
