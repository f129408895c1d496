// Row gather over tiers: the contract stands in dgl_mgpu/ops/gather/op.py.
//
// A warp takes up to 32 rows: each lane finds one, and then all lanes copy the rows as one run
// of vectors, so that every lane works whatever the size of a row.
#include "convert.cuh"
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

// How vectors of a row are copied.
template <typename Vector>
struct Copy {
  using Held = Vector;
  // Bytes that so many stored ones become.
  static __device__ __forceinline__ int64 Wanted(int64 bytes) { return bytes; }
  static __device__ __forceinline__ void Write(int64 to, Held held) {
    *reinterpret_cast<Vector*>(to) = held;
  }
};

// So many bytes as the fewest vectors.
template <int kBytes>
struct Bytes {
  Vector16 vectors[kBytes / 16];
};
template <>
struct Bytes<8> {
  uint64 vectors[1];
};
template <>
struct Bytes<4> {
  uint32 vectors[1];
};
template <>
struct Bytes<2> {
  unsigned short vectors[1];
};
template <>
struct Bytes<1> {
  unsigned char vectors[1];
};

// How they are copied, `kElements` elements at a time, where another type is wanted.
template <typename StoredType, typename WantedType, int kElements>
struct Cast {
  using Held = Bytes<kElements * sizeof(StoredType)>;
  using Result = Bytes<kElements * sizeof(WantedType)>;
  static __device__ __forceinline__ int64 Wanted(int64 bytes) {
    return bytes / static_cast<int64>(sizeof(StoredType)) * static_cast<int64>(sizeof(WantedType));
  }
  static __device__ __forceinline__ void Write(int64 to, Held held) {
    StoredType stored[kElements];
    WantedType wanted[kElements];
    memcpy(stored, &held, sizeof held);
#pragma unroll
    for (int i = 0; i < kElements; ++i) convert(stored[i], wanted + i);
    Result result;
    memcpy(&result, wanted, sizeof result);
    *reinterpret_cast<Result*>(to) = result;
  }
};

// What a kernel does not read itself: rows whose segment has address 0 are on disk. Some of them
// may be in a cache, where a row's slot is its position modulo `slots`.
struct Staging {
  const int64* tags;  // position of the row in each slot, or -1
  const char* cache;
  int64 slots;
  int64* aside;  // for each place in `out`, the position of the row still to be read, or -1
};

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
template <typename Move, int kUnroll>
__device__ __forceinline__ void copy_rows(int64 source, int64 target, int rows, RowShape shape) {
  const int lane = threadIdx.x % 32;
  using Held = typename Move::Held;
  const int count = rows * shape.slots;
  for (int start = 0; start < count; start += 32 * kUnroll) {
    Held held[kUnroll];
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
      const int64 offset = static_cast<int64>(in_range - row * shape.slots) * sizeof(Held) -
                           (shape.shifted ? from % 128 : 0);
      const bool mine = slot < count && offset >= 0 && offset < shape.bytes;
      to[u] = mine ? begin + Move::Wanted(offset) : 0;
      held[u] = Held{};
      if (mine && from != 0) held[u] = *reinterpret_cast<const Held*>(from + offset);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (to[u] != 0) Move::Write(to[u], held[u]);
    }
  }
}

// A gather's parameters.
template <typename Seed, typename Position>
struct Request {
  char* out;
  const Seed* ids;
  // Where in `out` each row goes; null where they go in the order of `ids`. Then `ids` are sorted
  // positions: the first `host_blocks` blocks take those from `host_start` on, which are in host
  // memory, and neighbours in the list are neighbours there, which spares the translation of
  // addresses (docs/decisions.md). The other blocks take the rest meanwhile.
  const int64* order;
  int64 count;
  const int64* tiers;
  int64 num_tiers;
  const int64* pointers;
  const Position* position;
  int64 num_rows;
  int64 row_bytes;
  int64 row_slots;
  int64 warp_rows;
  int64 host_start;
  int64 host_blocks;
  Staging staging;
  int64* fault;
};

// Gathers rows [run.begin, run.end) of the list `ids` on the warps of `blocks` blocks, of which
// this is number `block`.
template <typename Move, int kUnroll, typename Seed, typename Position>
__device__ __forceinline__ void gather_run(const Request<Seed, Position>& asked, Run run,
                                           int64 block, int64 blocks) {
  const Rows<Position> table{asked.tiers, static_cast<int>(asked.num_tiers), asked.position};
  const Staging& staging = asked.staging;
  const int lane = threadIdx.x % 32;
  const int slots = static_cast<int>(asked.row_slots);
  const RowShape shape{asked.row_bytes, slots,
                       asked.row_slots * sizeof(typename Move::Held) != asked.row_bytes,
                       0xffffffffu / slots + 1};
  const int64 warps = blocks * (kThreads / 32);
  for (int64 start = run.begin + (block * (kThreads / 32) + threadIdx.x / 32) * asked.warp_rows;
       start < run.end; start += warps * asked.warp_rows) {
    const int rows = static_cast<int>(min(run.end - start, asked.warp_rows));
    int64 source = 0, target = 0;
    if (lane < rows) {
      const int64 id = asked.ids[start + lane];
      int64 aside = -1;
      if (id < 0 || id >= asked.num_rows) {
        report_bad_id(asked.fault, id, asked.num_rows);
      } else {
        const Place place = table.Find(id);
        const int64 segment = asked.pointers[place.segment];
        source = segment + place.row * asked.row_bytes;
        if (segment == 0) {
          const int64 at = asked.position == nullptr ? id : asked.position[id];
          const int64 slot = at % staging.slots;
          const bool cached = staging.tags[slot] == at;
          source = cached ? reinterpret_cast<int64>(staging.cache) + slot * asked.row_bytes : 0;
          aside = cached ? -1 : at;
        }
      }
      const int64 place = asked.order == nullptr ? start + lane : asked.order[start + lane];
      target = reinterpret_cast<int64>(asked.out + place * Move::Wanted(asked.row_bytes));
      if (staging.aside != nullptr) staging.aside[place] = aside;
    }
    copy_rows<Move, kUnroll>(source, target, rows, shape);
  }
}

template <typename Move, int kUnroll, typename Seed, typename Position>
__device__ __forceinline__ void gather_all(const Request<Seed, Position>& asked) {
  Run run{0, asked.count};
  int64 block = blockIdx.x, blocks = gridDim.x;
  if (asked.order != nullptr) {
    int64 low = 0, high = asked.count;  // the first row in host memory
    while (low < high) {
      const int64 middle = (low + high) / 2;
      if (asked.ids[middle] < asked.host_start) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const bool host = block < asked.host_blocks;
    run = host ? Run{low, asked.count} : Run{0, low};
    block -= host ? 0 : asked.host_blocks;
    blocks = host ? asked.host_blocks : blocks - asked.host_blocks;
  }
  gather_run<Move, kUnroll>(asked, run, block, blocks);
}

// Rows as they are stored.
template <typename Seed, typename Position, typename Vector, int kUnroll>
__global__ void __launch_bounds__(kThreads) gather(Request<Seed, Position> asked) {
  gather_all<Copy<Vector>, kUnroll>(asked);
}

// Rows as elements of another type.
template <typename Seed, typename Position, typename Stored, typename Wanted, int kElements,
          int kUnroll>
__global__ void __launch_bounds__(kThreads) gather_cast(Request<Seed, Position> asked) {
  gather_all<Cast<Stored, Wanted, kElements>, kUnroll>(asked);
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
