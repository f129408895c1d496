// Rows that several warps of a kernel have parts of, joined by a second kernel, in order: sums have
// the same bits each time.
#pragma once

#include "spmm.cuh"

namespace dgl_mgpu {

// Parts that a thread reads before it joins the first of them: what bounds this is waiting.
constexpr int kJoinReads = 8;
// Rows of more parts are joined by all warps of a block.
constexpr int64 kFewParts = 32;

// What shares of a path have of rows that reach beyond them.
template <typename Reduction, typename Number>
struct Parts {
  using Whole = Partial<Reduction, Number, uint64>;

  // By share: its part of the row that it is in when it begins, and of the row that it is in when
  // it ends if that began in it.
  const Number* values;
  const uint32* entries;  // of those chosen, counted along the path from where the share begins
  int64 width;
  int64 share_length;

  // A column of a row that begins in share `first`: its parts in the shares [from, last], every
  // `step`th.
  __device__ __forceinline__ Whole Joined(int64 row, int64 first, int64 from, int64 last,
                                          int64 step, int64 column) const {
    Whole whole;
    for (int64 begin = from; begin <= last; begin += kJoinReads * step) {
      Number value[kJoinReads];
      uint32 entry[kJoinReads];
#pragma unroll
      for (int i = 0; i < kJoinReads; ++i) {
        const int64 share = min(begin + i * step, last);
        const int64 at = (2 * share + (share == first)) * width + column;
        value[i] = values[at];
        if constexpr (Reduction::kChooses) entry[i] = entries[at];
      }
#pragma unroll
      for (int i = 0; i < kJoinReads; ++i) {
        const int64 share = begin + i * step;
        if (share > last) continue;
        Whole part;
        part.value = value[i];
        if constexpr (Reduction::kChooses) {
          if (entry[i] != kNoEntry) part.entry = share * share_length + entry[i] - row;
        }
        whole.Merge(part);
      }
    }
    return whole;
  }
};

// All threads of the block call it together: `last_of(row)` is the last share that has a part of a
// row, and `write(row, column, whole)` writes what the parts come to. A block looks at as many
// shares as it has threads; there are blocks for all shares, several times, and each time they take
// other columns.
template <int kThreads, typename Reduction, typename Number, typename LastOf, typename Write>
__device__ __forceinline__ void join_open_rows(const Parts<Reduction, Number>& parts,
                                               const int64* open_rows, int64 num_shares,
                                               const LastOf& last_of, const Write& write) {
  using Whole = typename Parts<Reduction, Number>::Whole;
  constexpr int kWarps = kThreads / 32;
  __shared__ Number values[kThreads];
  __shared__ uint64 entries[kThreads];
  __shared__ int64 rows[kThreads], lasts[kThreads];
  // Which threads' rows have few parts, and from the end on those that have many.
  __shared__ int owners[kThreads], num_few, num_many;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

  const int64 blocks = (num_shares + kThreads - 1) / kThreads;
  const int64 turn = blockIdx.x / blocks, base = (blockIdx.x - turn * blocks) * kThreads;
  // Lanes that hold a row's columns.
  int lanes = 32;
  while (lanes / 2 >= parts.width) lanes /= 2;
  const int64 first_column = turn * lanes, step = gridDim.x / blocks * lanes;

  if (thread == 0) num_few = num_many = 0;
  __syncthreads();
  const int64 mine = base + thread;
  const int64 open_row = mine < num_shares ? open_rows[mine] : -1;
  if (open_row >= 0) {
    rows[thread] = open_row;
    lasts[thread] = last_of(open_row);
    if (lasts[thread] - mine < kFewParts) {
      owners[atomicAdd(&num_few, 1)] = thread;
    } else {
      owners[kThreads - 1 - atomicAdd(&num_many, 1)] = thread;
    }
  }
  __syncthreads();

  for (int i = warp; i < num_few; i += kWarps) {
    const int owner = owners[i];
    const int64 row = rows[owner], first = base + owner;
    for (int64 columns = first_column; columns < parts.width; columns += step) {
      const int64 column = columns + lane % lanes;
      Whole whole;
      if (column < parts.width) {
        whole = parts.Joined(row, first, first + lane / lanes, lasts[owner], 32 / lanes, column);
      }
      for (int other_lane = lanes; other_lane < 32; other_lane *= 2) {
        Whole other;
        other.value = __shfl_xor_sync(kAllLanes, whole.value, other_lane);
        if constexpr (Reduction::kChooses) {
          other.entry = __shfl_xor_sync(kAllLanes, whole.entry, other_lane);
        }
        whole.Merge(other);
      }
      if (lane < lanes && column < parts.width) write(row, column, whole);
    }
  }

  for (int i = 0; i < num_many; ++i) {
    const int owner = owners[kThreads - 1 - i];
    const int64 row = rows[owner], first = base + owner;
    for (int64 columns = first_column; columns < parts.width; columns += step) {
      const int64 column = columns + thread % lanes;
      Whole whole;
      if (column < parts.width) {
        whole = parts.Joined(row, first, first + thread / lanes, lasts[owner], kThreads / lanes,
                             column);
      }
      values[thread] = whole.value;
      if constexpr (Reduction::kChooses) entries[thread] = whole.entry;
      for (int half = kThreads / 2; half >= lanes; half /= 2) {
        __syncthreads();
        if (thread < half) {
          Whole other;
          other.value = values[thread + half];
          if constexpr (Reduction::kChooses) other.entry = entries[thread + half];
          whole.Merge(other);
          values[thread] = whole.value;
          if constexpr (Reduction::kChooses) entries[thread] = whole.entry;
        }
      }
      if (thread < lanes && column < parts.width) write(row, column, whole);
      __syncthreads();
    }
  }
}

}  // namespace dgl_mgpu
