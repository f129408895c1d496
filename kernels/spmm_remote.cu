// Sums of rows that lie in several memories: the contract stands in dgl_mgpu/ops/spmm_remote.py.
//
// MGG, section 3: rows' entries come in partitions, local ones and remote ones, and each warp takes
// a run of pairs of them. Remote rows are copied into shared memory by asynchronous copies, which
// are under way while local rows are added up. As a pair belongs to one row, a row whose pairs one
// warp has is summed up in registers and written once. What a run has of a row that reaches beyond
// it goes to a buffer, and a second kernel joins those parts in order: sums have the same bits each
// time, which atomic additions of several warps would not.
//
// `kLanes` lanes hold a row's columns of one tile, and the other lanes of the warp read other
// entries at the same time. A lane reads back what it has copied itself, so that nobody waits for
// other lanes.
#include "join.cuh"
#include "spmm.cuh"

// Before sm_80 a lane waits for each of its copies.
#if !defined(DGL_MGPU_EMULATED) && __CUDA_ARCH__ >= 800
#define DGL_MGPU_COPIES_ASYNC
#endif

namespace dgl_mgpu {

constexpr int kThreads = 256;
// Copies of a lane that are under way at once: 16 warps' fill 48 KiB, weights in double with them.
constexpr int kCopies = 4;
// Reads of local rows that are.
constexpr int kReads = 4;
// Warps that a multiprocessor is to hold, which bounds the registers of a thread.
constexpr int kResidentWarps = 24;

// Copies from any memory into shared memory; returns at once where that can be.
template <typename Piece>
__device__ __forceinline__ void copy_async(Piece* to, const Piece* from) {
#ifndef DGL_MGPU_COPIES_ASYNC
  *to = *from;
#else
  if constexpr (sizeof(Piece) < 4) {
    *to = *from;
  } else if constexpr (sizeof(Piece) == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     static_cast<uint32>(__cvta_generic_to_shared(to))),
                 "l"(from)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(
                     static_cast<uint32>(__cvta_generic_to_shared(to))),
                 "l"(from), "n"(sizeof(Piece))
                 : "memory");
  }
#endif
}

// Ends a group of copies, which may be empty.
__device__ __forceinline__ void end_group() {
#ifdef DGL_MGPU_COPIES_ASYNC
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups but the `kLater` last ones.
template <int kLater>
__device__ __forceinline__ void wait_for_group() {
#ifdef DGL_MGPU_COPIES_ASYNC
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
#endif
}

template <typename Id, typename Element>
struct RemoteSum {
  using Number = typename Computed<Element>::Type;

  // By row, how many pairs there are before it.
  const int64* pairs;
  const Id* local_indptr;
  const Id* local_columns;
  const Number* local_weights;
  const Id* remote_indptr;
  const Id* remote_columns;
  const Number* remote_weights;
  const Element* rows;
  // By rank: where its rows are, and the number of the first.
  const uint64* bases;
  const int64* starts;
  Element* out;
  // By run: its part of the row that it begins in, and of the row that it ends in if that began in
  // it; and the number of the latter, or -1.
  Number* parts;
  int64* open_rows;
  int64 num_ranks;
  int64 num_rows;
  int64 num_pairs;
  int64 num_runs;
  int64 partition_size;
  int64 run_length;
  int64 width;
  int64 tiles;
  int64 weights;  // of an entry
  int64 columns_per_weight;

  // The row of a pair, `high` if it is in none of [low, high). All lanes of a warp look together,
  // at 32 rows a time.
  __device__ __forceinline__ int64 RowOf(int64 pair, int64 low, int64 high) const {
    const int lane = threadIdx.x % 32;
    while (low < high) {
      const int64 step = (high - low + 31) / 32;
      const int64 probe = low + (lane + 1) * step - 1;
      const uint32 behind = __ballot_sync(kAllLanes, probe >= high || pairs[probe + 1] > pair);
      if (behind == 0) return high;
      low += (__ffs(static_cast<int>(behind)) - 1) * step;
      high = min(high, low + step - 1);
    }
    return low;
  }

  // Where a pair's entries begin in `indptr`'s columns.
  __device__ __forceinline__ int64 BeginOf(const Id* indptr, int64 row, int64 pair) const {
    const int64 begin = indptr[row];
    if (row == num_rows) return begin;
    return min(begin + (pair - pairs[row]) * partition_size, static_cast<int64>(indptr[row + 1]));
  }

  // Where the row of a remote column is.
  __device__ __forceinline__ uint64 AddressOf(Id column) const {
    int64 low = 0, high = num_ranks - 1;
    while (low < high) {
      const int64 middle = (low + high + 1) / 2;
      if (__ldg(starts + middle) <= column) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const uint64 row = static_cast<uint64>(column - __ldg(starts + low));
    return __ldg(bases + low) + row * static_cast<uint64>(width * sizeof(Element));
  }
};

// `kVector` columns a lane, `kLanes` lanes a row, `kWarps` warps a block.
template <typename Id, typename Element, bool kWeighted, int kVector, int kLanes, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, kResidentWarps / kWarps)
    spmm_remote(RemoteSum<Id, Element> sum) {
  using Number = typename Computed<Element>::Type;
  using Vector = Loaded<Element, kVector>;
  using Part = typename Vector::Part;
  static_assert(Vector::kParts == 1, "a vector is copied as one piece");
  constexpr int kGroups = 32 / kLanes;
  constexpr int kReadsAtOnce = kLanes < kReads ? kLanes : kReads;
  __shared__ Part copied[kWarps][kCopies][32];
  __shared__ Number copied_weights[kWeighted ? kWarps : 1][kCopies][32];

  const int warp_of_block = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / kLanes;
  const int64 warp = static_cast<int64>(blockIdx.x) * kWarps + warp_of_block;
  const int64 tile = warp / sum.num_runs, run = warp - tile * sum.num_runs;
  if (tile >= sum.tiles) return;

  const int64 first = run * sum.run_length;
  const int64 last = min(first + sum.run_length, sum.num_pairs);
  const int64 first_row = sum.RowOf(first, 0, sum.num_rows);
  const int64 most = min(first_row + sum.run_length, sum.num_rows);
  const int64 last_row = sum.RowOf(last, first_row, most);
  const bool has_head = first > sum.pairs[first_row];

  // Lanes behind the last column read the first one.
  const int64 own_column = (tile * kLanes + lane % kLanes) * kVector;
  const bool active = own_column < sum.width;
  const int64 column = active ? own_column : 0;
  const int64 weight = kWeighted ? column / sum.columns_per_weight : 0;

  Number partial[kVector] = {};
  const auto add = [&](const Vector& row, Number factor) {
    Element values[kVector];
    row.Unpack(values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if constexpr (kWeighted) {
        partial[i] += number(values[i]) * factor;
      } else {
        partial[i] += number(values[i]);
      }
    }
  };

  // Remote entries are counted from the run's first. The copies of those before `num_issued`
  // have been issued, and those before `num_added` have been added up.
  const int64 remote_begin = sum.BeginOf(sum.remote_indptr, first_row, first);
  const int remote_count =
      static_cast<int>(sum.BeginOf(sum.remote_indptr, last_row, last) - remote_begin);
  int num_issued = 0, num_added = 0;
  const auto remote_column = [&](int entry) {
    return entry < remote_count ? __ldcs(sum.remote_columns + remote_begin + entry) : Id{0};
  };
  Id next_remote = remote_column(lane);
  uint64 address = 0;  // of 32 entries' rows, one a lane
  const auto begin_copy = [&]() {
    if (num_issued < remote_count) {
      if (num_issued % 32 == 0) {
        if (num_issued + lane < remote_count) address = sum.AddressOf(next_remote);
        next_remote = remote_column(num_issued + 32 + lane);
      }
      const uint64 row = __shfl_sync(kAllLanes, address, num_issued % 32 + group);
      const int entry = num_issued + group, place = num_issued / kGroups % kCopies;
      if (entry < remote_count) {
        copy_async(&copied[warp_of_block][place][lane],
                   reinterpret_cast<const Part*>(row + column * sizeof(Element)));
        if constexpr (kWeighted) {
          copy_async(&copied_weights[warp_of_block][place][lane],
                     sum.remote_weights + (remote_begin + entry) * sum.weights + weight);
        }
      }
      num_issued += kGroups;
    }
    end_group();
  };
  const auto add_remote = [&](int stop) {
    while (num_added < stop) {
      if (num_added % kGroups == 0) wait_for_group<kCopies - 1>();
      const int copy = num_added / kGroups, place = copy % kCopies;
      const int entry = copy * kGroups + group, to = min(stop, (copy + 1) * kGroups);
      if (entry >= num_added && entry < to) {
        Vector row;
        row.parts[0] = copied[warp_of_block][place][lane];
        add(row, kWeighted ? copied_weights[kWeighted ? warp_of_block : 0][place][lane] : Number{});
      }
      num_added = to;
      if (num_added % kGroups == 0) begin_copy();  // in the place of the one that has been added
    }
  };

  // So are local entries; those before `local_at` have been added up.
  const int64 local_begin = sum.BeginOf(sum.local_indptr, first_row, first);
  const int local_count =
      static_cast<int>(sum.BeginOf(sum.local_indptr, last_row, last) - local_begin);
  int local_at = 0;
  const auto local_column = [&](int entry) {
    return entry < local_count ? __ldcs(sum.local_columns + local_begin + entry) : Id{0};
  };
  // Of `count` entries from `local_at` on the lanes have the columns.
  const auto add_local = [&](Id columns, int count) {
#pragma unroll 1
    for (int from = 0; from < count; from += kGroups * kReadsAtOnce) {
      Vector read[kReadsAtOnce];
      Number factor[kReadsAtOnce];
#pragma unroll
      for (int i = 0; i < kReadsAtOnce; ++i) {
        const int entry = from + i * kGroups + group;
        const Id row = __shfl_sync(kAllLanes, columns, entry % 32);
        if (entry >= count) continue;
        read[i].Load(in_row(sum.rows + column, row, sum.width * sizeof(Element)));
        if constexpr (kWeighted) {
          const int64 of_entry = (local_begin + local_at + entry) * sum.weights;
          factor[i] = __ldg(sum.local_weights + of_entry + weight);
        }
      }
#pragma unroll
      for (int i = 0; i < kReadsAtOnce; ++i) {
        if (from + i * kGroups + group < count) add(read[i], kWeighted ? factor[i] : Number{});
      }
    }
  };

  const auto merge_groups = [&]() {
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        partial[i] += __shfl_xor_sync(kAllLanes, partial[i], step);
      }
    }
  };
  const auto keep_part = [&](int is_tail) {
    if (group != 0 || !active) return;
    Number* const to = sum.parts + (2 * run + is_tail) * sum.width + column;
#pragma unroll
    for (int i = 0; i < kVector; ++i) to[i] = partial[i];
  };
  const auto write = [&](int64 row) {
    if (group != 0 || !active) return;
    Element values[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) store(partial[i], values + i);
    store_once(sum.out + row * sum.width + column, values);
  };

#pragma unroll 1
  for (int i = 0; i < kCopies; ++i) begin_copy();
  // Where a row's entries end, which may be behind the run's.
  const auto end_of = [&](const Id* indptr, int64 row, int64 begin, int count) {
    const int64 behind = static_cast<int64>(count) + 1;
    if (row >= sum.num_rows) return static_cast<int>(behind);
    return static_cast<int>(min(indptr[row + 1] - begin, behind));
  };
  const auto local_end_of = [&](int64 row) {
    return end_of(sum.local_indptr, row, local_begin, local_count);
  };
  const auto remote_end_of = [&](int64 row) {
    return end_of(sum.remote_indptr, row, remote_begin, remote_count);
  };
  const int partition_size = static_cast<int>(sum.partition_size);
  int64 row = first_row;
  int local_row_end = local_end_of(row), next_local_row_end = local_end_of(row + 1);
  int remote_row_end = remote_end_of(row), next_remote_row_end = remote_end_of(row + 1);
  Id next_local = local_column(local_at + lane);
  bool is_open = false;
  for (int pairs = static_cast<int>(last - first); pairs > 0; --pairs) {
    const Id columns = next_local;
    const int local_stop = min(local_at + partition_size, local_row_end);
    const int remote_stop = min(num_added + partition_size, remote_row_end);
    next_local = local_column(local_stop + lane);
    add_local(columns, local_stop - local_at);
    add_remote(remote_stop);
    local_at = local_stop;
    is_open = local_stop < local_row_end || remote_stop < remote_row_end;
    if (is_open) continue;
    merge_groups();
    if (has_head && row == first_row) {
      keep_part(0);
    } else {
      write(row);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) partial[i] = 0;
    ++row;
    local_row_end = next_local_row_end;
    remote_row_end = next_remote_row_end;
    next_local_row_end = local_end_of(row + 1);
    next_remote_row_end = remote_end_of(row + 1);
  }
  const bool has_tail = is_open && !(has_head && row == first_row);
  if (is_open) {
    merge_groups();
    keep_part(has_tail);
  }
  if (tile == 0 && lane == 0) sum.open_rows[run] = has_tail ? row : -1;
}

// Rows that reach beyond the run they begin in.
template <typename Id, typename Element>
__global__ void __launch_bounds__(kThreads) join_remote_parts(RemoteSum<Id, Element> sum) {
  using Number = typename Computed<Element>::Type;
  using Joined = Parts<Total, Number>;
  const Joined parts{sum.parts, nullptr, sum.width, sum.run_length};
  const auto last_of = [&](int64 row) { return (sum.pairs[row + 1] - 1) / sum.run_length; };
  const auto write = [&](int64 row, int64 column, const typename Joined::Whole& whole) {
    store(whole.value, sum.out + row * sum.width + column);
  };
  join_open_rows<kThreads>(parts, sum.open_rows, sum.num_runs, last_of, write);
}

}  // namespace dgl_mgpu
