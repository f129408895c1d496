// Row gather over tiers: the contract stands in dgl_mgpu/ops/gather/op.py.
//
// A warp takes up to 32 rows: each lane finds one, and then all lanes copy the rows as one run
// of vectors, so that every lane works whatever the size of a row.
#include "ggms.cuh"
#include "grid.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 256;
// Up to here the vectors of 32 rows are divided by multiplication with the reciprocal.
constexpr int kFewVectors = 8192;

struct alignas(16) Vector16 {
  uint64 low, high;
};

// Where an id that is no row is reported: {whether, the id, the number of rows}, in host memory.
__device__ __forceinline__ void report_bad_id(int64* fault, int64 id, int64 num_rows) {
  fault[1] = id;
  fault[2] = num_rows;
  __threadfence_system();
  fault[0] = 1;
}

// How a row is divided into vectors: `slots` of them, and where that is more than the row has, the
// first one begins at the line of 128 bytes that the row begins in, so that no line is asked for
// twice (PyTorch-Direct, section 4.5).
struct RowShape {
  int64 bytes;
  int slots;
  bool shifted;
  uint32 reciprocal;  // of slots, rounded up: exact while 32 * slots^2 is below 2^32
};

// Copies as many rows as lanes have addresses of, `source` and `target`; a row from address 0
// becomes zeros.
template <typename Vector, int kUnroll>
__device__ __forceinline__ void copy_rows(int64 source, int64 target, int rows, RowShape shape) {
  const int lane = threadIdx.x % 32;
  const int count = rows * shape.slots;
  for (int start = 0; start < count; start += 32 * kUnroll) {
    Vector held[kUnroll];
    int64 to[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int slot = start + 32 * u + lane;
      const int in_range = min(slot, count - 1);
      const int row = shape.slots == 1 ? in_range
                      : shape.slots <= kFewVectors
                          ? static_cast<int>(__umulhi(in_range, shape.reciprocal))
                          : in_range / shape.slots;
      const int64 from = __shfl_sync(kAllLanes, source, row);
      const int64 begin = __shfl_sync(kAllLanes, target, row);
      const int64 offset = static_cast<int64>(in_range - row * shape.slots) * sizeof(Vector) -
                           (shape.shifted ? from % 128 : 0);
      const bool mine = slot < count && offset >= 0 && offset < shape.bytes;
      to[u] = mine ? begin + offset : 0;
      held[u] = Vector{};
      if (mine && from != 0) held[u] = *reinterpret_cast<const Vector*>(from + offset);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (to[u] != 0) *reinterpret_cast<Vector*>(to[u]) = held[u];
    }
  }
}

// Gathers rows [run.begin, run.end) of the list `ids` on the warps of `blocks` blocks, of which
// this is number `block`. `order`, if given, says where in `out` each row of the list goes.
template <typename Seed, typename Position, typename Vector, int kUnroll>
__device__ void gather_run(Run run, int64 block, int64 blocks, char* out, const Seed* ids,
                           const int64* order, const FeatureTable<Position>& table,
                           int64 num_rows, int64 row_slots, int64 warp_rows, int64* fault) {
  const int lane = threadIdx.x % 32;
  const int slots = static_cast<int>(row_slots);
  const RowShape shape{table.row_bytes, slots, row_slots * sizeof(Vector) != table.row_bytes,
                       0xffffffffu / slots + 1};
  const int64 warps = blocks * (kThreads / 32);
  for (int64 start = run.begin + (block * (kThreads / 32) + threadIdx.x / 32) * warp_rows;
       start < run.end; start += warps * warp_rows) {
    const int rows = static_cast<int>(min(run.end - start, warp_rows));
    int64 source = 0, target = 0;
    if (lane < rows) {
      const int64 id = ids[start + lane];
      if (id < 0 || id >= num_rows) {
        report_bad_id(fault, id, num_rows);
      } else {
        source = reinterpret_cast<int64>(table.template Features<char>(id));
      }
      const int64 place = order == nullptr ? start + lane : order[start + lane];
      target = reinterpret_cast<int64>(out + place * table.row_bytes);
    }
    copy_rows<Vector, kUnroll>(source, target, rows, shape);
  }
}

template <typename Seed, typename Position, typename Vector, int kUnroll>
__global__ void __launch_bounds__(kThreads)
    gather(char* out, const Seed* ids, int64 count, const int64* tiers, int64 num_tiers,
           const int64* pointers, const Position* position, int64 num_rows, int64 row_bytes,
           int64 row_slots, int64 warp_rows, int64* fault) {
  const FeatureTable<Position> table{
      {tiers, static_cast<int>(num_tiers), position}, pointers, row_bytes};
  gather_run<Seed, Position, Vector, kUnroll>({0, count}, blockIdx.x, gridDim.x, out, ids, nullptr,
                                              table, num_rows, row_slots, warp_rows, fault);
}

// `positions` are sorted, and `order` says where in `out` each row goes. The first `host_blocks`
// blocks take the rows from `host_start` on, which are in host memory: neighbours in the list are
// neighbours there, which spares the translation of addresses (docs/decisions.md). The other
// blocks take the rest meanwhile.
template <typename Sorted, typename Vector, int kUnroll>
__global__ void __launch_bounds__(kThreads)
    gather_sorted(char* out, const Sorted* positions, const int64* order, int64 count,
                  const int64* tiers, int64 num_tiers, const int64* pointers, int64 num_rows,
                  int64 row_bytes, int64 row_slots, int64 warp_rows, int64 host_start,
                  int64 host_blocks, int64* fault) {
  const FeatureTable<int> table{
      {tiers, static_cast<int>(num_tiers), nullptr}, pointers, row_bytes};
  int64 low = 0, high = count;  // the first row in host memory
  while (low < high) {
    const int64 middle = (low + high) / 2;
    if (positions[middle] < host_start) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const bool host = blockIdx.x < host_blocks;
  gather_run<Sorted, int, Vector, kUnroll>(
      host ? Run{low, count} : Run{0, low}, host ? blockIdx.x : blockIdx.x - host_blocks,
      host ? host_blocks : gridDim.x - host_blocks, out, positions, order, table, num_rows,
      row_slots, warp_rows, fault);
}

// Ids to positions, before they are sorted; a bad id becomes position 0 and is reported.
template <typename Seed, typename Position, typename Sorted>
__global__ void __launch_bounds__(kThreads)
    find_positions(Sorted* positions, const Seed* ids, int64 count, const Position* position,
                   int64 num_rows, int64* fault) {
  for (int64 i = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64>(gridDim.x) * kThreads) {
    const int64 id = ids[i];
    const bool bad = id < 0 || id >= num_rows;
    if (bad) report_bad_id(fault, id, num_rows);
    positions[i] = bad ? 0 : position == nullptr ? id : position[id];
  }
}

// How many rows of each segment are asked for, added to `counts`.
template <typename Seed, typename Position>
__global__ void __launch_bounds__(kThreads)
    count_tiers(const Seed* ids, int64 count, const int64* tiers, int64 num_tiers,
                const Position* position, int64 num_rows, int64 num_segments, int64* counts,
                int64* fault) {
  constexpr int kCounted = 1024;  // segments counted within a block
  __shared__ int here[kCounted];
  const Rows<Position> rows{tiers, static_cast<int>(num_tiers), position};
  for (int segment = threadIdx.x; segment < kCounted; segment += kThreads) here[segment] = 0;
  __syncthreads();
  for (int64 i = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64>(gridDim.x) * kThreads) {
    const int64 id = ids[i];
    if (id < 0 || id >= num_rows) {
      report_bad_id(fault, id, num_rows);
      continue;
    }
    const int64 segment = rows.Find(id).segment;
    if (segment < kCounted) {
      atomicAdd(here + segment, 1);
    } else {
      atomicAdd(reinterpret_cast<uint64*>(counts) + segment, 1ull);
    }
  }
  __syncthreads();
  for (int segment = threadIdx.x; segment < min(num_segments, static_cast<int64>(kCounted));
       segment += kThreads) {
    if (here[segment] != 0) {
      atomicAdd(reinterpret_cast<uint64*>(counts) + segment, static_cast<uint64>(here[segment]));
    }
  }
}

}  // namespace dgl_mgpu
