// Row gather over tiers: the contract stands in dgl_mgpu/ops/gather.py.
//
// A warp takes up to 32 rows: each lane finds one, and then all lanes copy the rows as one run
// of vectors, so that every lane works whatever the size of a row.
#include "buckets.cuh"
#include "convert.cuh"
#include "fault.cuh"
#include "ggms.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 256;
// Up to here the vectors of 32 rows are divided by multiplication with the reciprocal.
constexpr int kFewVectors = 8192;

struct alignas(16) Vector16 {
  uint64 low, high;
};

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
  int64* miss_positions;  // for each row of `out`, the position that is still to be read, or -1
};

// Where a row is, 0 if it is to be zeros, and where in `out` it goes, -1 if nowhere.
struct SourceRow {
  int64 source;
  int64 place;
};

// How a row is divided into vectors: `slots` of them, and where that is more than the row has, the
// first one begins at the line of 128 bytes that the row begins in, so that no line is asked for
// twice (PyTorch-Direct, section 3.2.1).
struct RowShape {
  int64 bytes;
  int slots;
  bool shifted;
  uint32 reciprocal;  // of slots, rounded up: exact while 32 * slots^2 is below 2^32
};

// Copies as many rows as lanes have addresses of, `source` and `target`; a row from address 0
// becomes zeros, one to address 0 is left out.
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
      const bool mine = slot < count && begin != 0 && offset >= 0 && offset < shape.bytes;
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

// The rows in host memory that a gather asks for, in the order of their addresses.
struct HostRows {
  int64 start;        // positions from here on are in host memory
  Buckets buckets;    // of positions from there on; behind the list's length, how many blocks counted
  int64* positions;   // the list; -1 for what is no row
  int* places;        // where in `out` each row of the list goes

  // What is no row has position -1 and is listed with the first.
  __device__ __forceinline__ bool Has(int64 at) const { return at < 0 || at >= start; }
  // Says so to the last of the grid's blocks whose threads all call it.
  __device__ __forceinline__ bool AllCounted() const {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      last = atomicAdd(buckets.counts + buckets.number + 1, 1) == gridDim.x - 1;
    }
    __syncthreads();
    __threadfence();
    return last;
  }
};

// Rows of gathers, times 2^32, plus those of them in host memory. Blocks add to `device_counter`
// and copy its value to `host_counter`, which the host reads without waiting. Both are null where
// rows are not counted.
struct HostReads {
  uint64* device_counter;
  volatile uint64* host_counter;

  __device__ __forceinline__ void Add(int64 rows, int64 in_host_memory) const {
    const uint64 more = static_cast<uint64>(rows) << 32 | static_cast<uint64>(in_host_memory);
    *host_counter = atomicAdd(device_counter, more) + more;
  }
};

// A gather's parameters.
template <typename Seed, typename Position>
struct Request {
  char* out;
  const Seed* ids;
  int64 count;
  const int64* tiers;
  int64 num_tiers;
  const int64* pointers;
  const Position* position;
  int64 num_rows;
  int64 row_bytes;
  int64 row_slots;
  int64 warp_rows;
  HostRows host;
  int64 host_blocks;  // they take the list, the others what is not on it
  HostReads reads;
  Staging staging;
  int64* fault;

  // Position of a row; -1 of what is none.
  __device__ __forceinline__ int64 PositionOf(int64 id) const {
    if (id < 0 || id >= num_rows) return -1;
    return position == nullptr ? id : position[id];
  }
};

// Calls `with(i, position)` for each row in host memory that is asked for, and for each id that is
// no row. Several look-ups a thread at once: what takes the time is to wait for memory.
template <typename Seed, typename Position, typename With>
__device__ __forceinline__ void each_host_row(const Request<Seed, Position>& request, With with) {
  constexpr int kAtOnce = 4;
  const int64 threads = static_cast<int64>(gridDim.x) * kThreads;
  for (int64 start = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x; start < request.count;
       start += kAtOnce * threads) {
    int64 at[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64 i = start + u * threads;
      at[u] = i < request.count ? request.PositionOf(request.ids[i]) : 0;
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64 i = start + u * threads;
      if (i < request.count && request.host.Has(at[u])) with(i, at[u]);
    }
  }
}

// Where in the list each bucket's rows end. The block that is the last to count adds them up: that
// spares the host two launches, which take longer than it does.
template <typename Seed, typename Position>
__global__ void __launch_bounds__(kThreads) count_host_rows(Request<Seed, Position> request) {
  const HostRows& host = request.host;
  each_host_row(
      request, [&](int64, int64 at) { host.buckets.Count(at < 0 ? at : at - host.start); });
  if (host.AllCounted()) host.buckets.Accumulate<kThreads>();
}

// Lists them.
template <typename Seed, typename Position>
__global__ void __launch_bounds__(kThreads) list_host_rows(Request<Seed, Position> request) {
  const HostRows& host = request.host;
  each_host_row(request, [&](int64 i, int64 at) {
    const int place = host.buckets.TakePlace(at < 0 ? at : at - host.start);
    host.positions[place] = at;
    host.places[place] = static_cast<int>(i);
  });
}

// Copies `count` rows on the warps of `blocks` blocks, of which this is number `block`. `find` says
// of each where it comes from (0 for a row of zeros) and its place in `out`, -1 for none.
template <typename Move, int kUnroll, typename Seed, typename Position, typename Find>
__device__ __forceinline__ void gather_rows(const Request<Seed, Position>& request, int64 count,
                                            int64 block, int64 blocks, Find find) {
  const int lane = threadIdx.x % 32;
  const int slots = static_cast<int>(request.row_slots);
  const RowShape shape{request.row_bytes, slots,
                       request.row_slots * sizeof(typename Move::Held) != request.row_bytes,
                       0xffffffffu / slots + 1};
  const int64 warps = blocks * (kThreads / 32);
  for (int64 start = (block * (kThreads / 32) + threadIdx.x / 32) * request.warp_rows;
       start < count; start += warps * request.warp_rows) {
    const int rows = static_cast<int>(min(count - start, request.warp_rows));
    SourceRow row{0, -1};
    if (lane < rows) row = find(start + lane);
    const int64 target =
        row.place < 0
            ? 0
            : reinterpret_cast<int64>(request.out + row.place * Move::Wanted(request.row_bytes));
    copy_rows<Move, kUnroll>(row.source, target, rows, shape);
  }
}

template <typename Move, int kUnroll, typename Seed, typename Position>
__device__ __forceinline__ void gather_all(const Request<Seed, Position>& request) {
  const Staging& staging = request.staging;
  const HostRows& host = request.host;
  const Rows<int> table{request.tiers, static_cast<int>(request.num_tiers), nullptr};
  const auto address_of = [&](int64 at) {
    const Place place = table.Find(at);
    const int64 segment = request.pointers[place.segment];
    return segment == 0 ? 0 : segment + place.row * request.row_bytes;
  };
  const bool counts = request.reads.device_counter != nullptr;
  if (blockIdx.x < request.host_blocks) {
    const int64 listed = host.buckets.counts[host.buckets.number];
    if (counts && blockIdx.x == 0 && threadIdx.x == 0) request.reads.Add(request.count, listed);
    gather_rows<Move, kUnroll>(request, listed, blockIdx.x, request.host_blocks, [&](int64 i) {
      const int64 at = host.positions[i], place = host.places[i];
      if (at < 0) report_bad_id(request.fault, request.ids[place], request.num_rows);
      return SourceRow{at < 0 ? 0 : address_of(at), place};
    });
    return;
  }
  int in_host_memory = 0;
  gather_rows<Move, kUnroll>(
      request, request.count, blockIdx.x - request.host_blocks, gridDim.x - request.host_blocks,
      [&](int64 i) {
        const int64 id = request.ids[i], at = request.PositionOf(id);
        if (request.host_blocks > 0 && host.Has(at)) return SourceRow{0, -1};
        if (at < 0) report_bad_id(request.fault, id, request.num_rows);
        in_host_memory += at >= host.start;
        int64 source = at < 0 ? 0 : address_of(at);
        if (staging.miss_positions != nullptr) {
          int64 miss_position = -1;
          if (at >= 0 && source == 0) {
            const int64 slot = at % staging.slots;
            const bool cached = staging.tags[slot] == at;
            source = cached ? reinterpret_cast<int64>(staging.cache) + slot * request.row_bytes : 0;
            miss_position = cached ? -1 : at;
          }
          staging.miss_positions[i] = miss_position;
        }
        return SourceRow{source, i};
      });
  if (counts && request.host_blocks == 0) {
    const int64 here = block_sum<kThreads>(in_host_memory).total;
    if (threadIdx.x == 0) request.reads.Add(blockIdx.x == 0 ? request.count : 0, here);
  }
}

// Rows as they are stored.
template <typename Seed, typename Position, typename Vector, int kUnroll>
__global__ void __launch_bounds__(kThreads) gather(Request<Seed, Position> request) {
  gather_all<Copy<Vector>, kUnroll>(request);
}

// Rows as elements of another type.
template <typename Seed, typename Position, typename Stored, typename Wanted, int kElements,
          int kUnroll>
__global__ void __launch_bounds__(kThreads) gather_cast(Request<Seed, Position> request) {
  gather_all<Cast<Stored, Wanted, kElements>, kUnroll>(request);
}

// Rows of a tensor, those with the numbers `ids`, one after the other; zeros for what is no row.
// They lie in the order of their positions.
template <typename Seed>
struct Picked {
  char* out;
  const char* table;
  Positions positions;
  const Seed* ids;
  int64 count;
  int64 num_rows;
  int64 row_bytes;
  int64 vector;  // bytes
  int64 slots;
  int64 warp_rows;
  int64 first_block, blocks;
};

constexpr int kTables = 8;

// Of several tensors: each is copied by blocks of its own.
template <typename Seed>
struct PickedTables {
  int64* fault;
  int64 count;
  Picked<Seed> tables[kTables];
};

template <typename Vector, int kUnroll, typename Seed>
__device__ __forceinline__ void pick_rows(const Picked<Seed>& picked, int64* fault) {
  const int vectors = static_cast<int>(picked.slots);
  const bool is_shifted = picked.slots * static_cast<int64>(sizeof(Vector)) != picked.row_bytes;
  const RowShape shape{picked.row_bytes, vectors, is_shifted, 0xffffffffu / vectors + 1};
  const int lane = threadIdx.x % 32;
  const int64 block = blockIdx.x - picked.first_block;
  const int64 warp = block * (kThreads / 32) + threadIdx.x / 32;
  const int64 warps = picked.blocks * (kThreads / 32);
  for (int64 start = warp * picked.warp_rows; start < picked.count;
       start += warps * picked.warp_rows) {
    const int rows = static_cast<int>(min(picked.count - start, picked.warp_rows));
    const int64 mine = start + min(lane, rows - 1), id = picked.ids[mine];
    const bool is_row = id >= 0 && id < picked.num_rows;
    if (!is_row) report_bad_id(fault, id, picked.num_rows);
    const int64 at = is_row ? picked.positions.Of(id) : 0;
    copy_rows<Copy<Vector>, kUnroll>(
        is_row ? reinterpret_cast<int64>(picked.table + at * picked.row_bytes) : 0,
        reinterpret_cast<int64>(picked.out + mine * picked.row_bytes), rows, shape);
  }
}

template <typename Seed, int kUnroll>
__global__ void __launch_bounds__(kThreads)
    pick(const __grid_constant__ PickedTables<Seed> picked) {
  int64 number = 0;
  while (number + 1 < picked.count && picked.tables[number + 1].first_block <= blockIdx.x) {
    ++number;
  }
  const Picked<Seed>& table = picked.tables[number];
  switch (table.vector) {
    case 16: return pick_rows<Vector16, kUnroll>(table, picked.fault);
    case 8: return pick_rows<uint64, kUnroll>(table, picked.fault);
    case 4: return pick_rows<uint32, kUnroll>(table, picked.fault);
    case 2: return pick_rows<unsigned short, kUnroll>(table, picked.fault);
    default: return pick_rows<unsigned char, kUnroll>(table, picked.fault);
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
