// Softmax over the entries of each row, and its gradient: the contract stands in
// dgl_mgpu/ops/edge_softmax.py.
//
// A row and its entries, one row after the other, are a list of items: the row's beginning, then
// its entries. The list is cut into equal shares, a block each (Merrill and Garland's merge path,
// SC'16), so that neither hubs nor empty rows make one longer than another. A row within one share
// is read once and written once. Of a row that others have a part of, a share leaves its largest
// score and its sum; the next kernel merges these, and the last one reads and writes the row.
#include "grid.cuh"
#include "softmax.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kFinishThreads = 128;
// Entries that follow each other and are one thread's. It is odd, so that threads that read theirs
// from shared memory read different banks.
constexpr int kRun = 17;
// Blocks that a multiprocessor is to hold at once: as many as registers allow.
template <typename Score, bool kGradient>
constexpr int kResident = !kGradient ? 4 : sizeof(Score) == 8 ? 2 : 3;

// What is known of one column of a row, or of a part of it: the largest score, and the sum of the
// exponentials of scores less that. Where plain numbers are summed, `largest` is 0.
template <typename Number>
struct Partial {
  Number largest, sum;
};

// `Score` is the type that scores, gradients and results are stored in. Of `columns` a block takes
// one group of kColumns; the last group may lack some.
template <typename Id, typename Score>
struct Request {
  const Id* indptr;
  int64 num_rows;
  const Id* eids;  // null where entry i is edge i
  int64 num_entries;
  const Score* scores;     // of the gradient: the softmax
  const Score* gradients;  // null in the softmax itself
  Score* out;
  int64 columns;
  int64 share;  // items of a share
  int64 num_shares;
  int64* first_rows;  // for each share the first row that begins in it or later, and one more
  void* partials;     // for each share, of the row it begins amid and the row it ends amid

  // Where in the list a row's beginning is.
  __device__ __forceinline__ int64 ItemOf(int64 row) const { return indptr[row] + row; }
  // Entries before a share, given its first row.
  __device__ __forceinline__ int64 EntriesBefore(int64 at, int64 first_row) const {
    return min(at * share, num_rows + num_entries) - first_row;
  }
  __device__ __forceinline__ int64 EdgeOf(int64 entry) const {
    return eids == nullptr ? entry : static_cast<int64>(eids[entry]);
  }
  template <typename Number>
  __device__ __forceinline__ Partial<Number>* PartialOf(int64 at, bool ends, int64 column) const {
    return static_cast<Partial<Number>*>(partials) + (2 * at + ends) * columns + column;
  }
};

template <typename Number>
__device__ __forceinline__ Partial<Number> merged(Partial<Number> left, Partial<Number> right) {
  const Number largest = max(left.largest, right.largest), base = base_of(largest);
  return {largest, left.sum * exponential_of(left.largest - base) +
                       right.sum * exponential_of(right.largest - base)};
}

// How many rows begin before an item. The warp's lanes look at 32 rows at a time.
template <typename Id, typename Score>
__device__ __forceinline__ int64 rows_before(const Request<Id, Score>& request, int64 item) {
  int64 low = max(item - request.num_entries, 0ll), high = min(item, request.num_rows);
  while (low < high) {
    const int64 step = (high - low + 31) / 32;
    const int64 row = low + step * (threadIdx.x % 32 + 1) - 1;
    const bool before = row < high && request.ItemOf(row) < item;
    const int passed = __popc(__ballot_sync(kAllLanes, before));
    high = min(high, low + (passed + 1) * step - 1);
    low += passed * step;
  }
  return low;
}

// The rows and entries of a share.
struct Share {
  int64 first_row, end_row;  // the rows that begin in it
  int64 first_entry;
  int count;
  // Those in between belong to rows that no other share has a part of.
  int own_begin, own_end;
};

template <typename Id, typename Score>
__device__ __forceinline__ Share share_between(const Request<Id, Score>& request, int64 at,
                                               int64 first_row, int64 end_row) {
  Share share{first_row, end_row, request.EntriesBefore(at, first_row), 0, 0, 0};
  const int64 end = request.EntriesBefore(at + 1, end_row);
  share.count = static_cast<int>(end - share.first_entry);
  share.own_begin = share.own_end = share.count;
  if (first_row < end_row) {
    share.own_begin = static_cast<int>(request.indptr[first_row] - share.first_entry);
    if (request.indptr[end_row] > end) {
      share.own_end = static_cast<int>(request.indptr[end_row - 1] - share.first_entry);
    }
  }
  return share;
}

// A block's threads, seen as kPeers for each of kColumns columns.
template <int kColumns>
struct Layout {
  static constexpr int kPeers = kThreads / kColumns;
  static constexpr int kEntries = kPeers * kRun;

  static __device__ __forceinline__ int Column() { return threadIdx.x % kColumns; }
  static __device__ __forceinline__ int Peer() { return threadIdx.x / kColumns; }
};

// The rows in a thread's run of entries.
struct RunRows {
  uint32 starts;   // bit i: entry i begins a row
  int before;      // how many entries before the run do
  int reach;       // so many runs before it, of this warp, have a part of the row it ends in
  bool continues;  // no row begins in an earlier run of this warp
};

// Values of the entries of a block, in shared memory; and what comes of reducing rows.
template <typename Number, int kColumns>
struct Board {
  Number values[Layout<kColumns>::kEntries * kColumns];
  Number warps[kWarps][kColumns];
  bool has_start[kWarps];  // a row begins in the warp's runs
  uint32 starts[Layout<kColumns>::kEntries / 32 + 2];
};

// Marks the entries that rows begin with; all threads see the marks.
template <int kColumns, typename Number, typename Id, typename Score>
__device__ __forceinline__ RunRows find_rows(const Request<Id, Score>& request, const Share& share,
                                             Board<Number, kColumns>& board) {
  for (int i = threadIdx.x; i < Layout<kColumns>::kEntries / 32 + 2; i += kThreads) {
    board.starts[i] = 0;
  }
  __syncthreads();
  for (int64 row = share.first_row + threadIdx.x; row < share.end_row; row += kThreads) {
    const int entry = static_cast<int>(request.indptr[row] - share.first_entry);
    atomicOr(board.starts + entry / 32, 1u << entry % 32);
  }
  __syncthreads();
  const int first = Layout<kColumns>::Peer() * kRun, lane = threadIdx.x % 32;
  const uint64 words =
      board.starts[first / 32] | static_cast<uint64>(board.starts[first / 32 + 1]) << 32;
  RunRows rows;
  rows.starts = static_cast<uint32>(words >> first % 32) & ((1u << kRun) - 1);
  const int num_starts = __popc(rows.starts);
  const bool counts = Layout<kColumns>::Column() == 0;
  const int64 before = block_sum<kThreads>(counts ? num_starts : 0).before;
  rows.before = static_cast<int>(before) - (counts ? 0 : num_starts);
  const uint32 starting_lanes = __ballot_sync(kAllLanes, num_starts != 0);
  const uint32 here = starting_lanes & (kAllLanes >> (31 - lane));
  rows.reach = lane / kColumns - (here == 0 ? 0 : (31 - __clz(here)) / kColumns);
  rows.continues = (starting_lanes & ((1u << lane / kColumns * kColumns) - 1)) == 0;
  if (lane == 0) board.has_start[threadIdx.x / 32] = starting_lanes != 0;
  return rows;
}

struct Largest {
  template <typename Number>
  static __device__ __forceinline__ Number Of(Number left, Number right) {
    return max(left, right);
  }
};
struct Total {
  template <typename Number>
  static __device__ __forceinline__ Number Of(Number left, Number right) {
    return left + right;
  }
};

// Reduces the values of each row, `value(i)` for entry i of the run, in an order that depends on
// nothing else. The results come to lie in board.values in the order in which rows begin, after that
// of the row that the share begins amid; all threads see them.
template <typename Reduction, int kColumns, typename Number, typename Value>
__device__ __forceinline__ void reduce_rows(const RunRows& rows, Number nothing,
                                            Board<Number, kColumns>& board, Value value) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = Layout<kColumns>::Column();
  // The row that the run ends in: of this run, then of all runs of the warp up to it.
  Number last = nothing;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    last = rows.starts >> i & 1 ? value(i) : Reduction::Of(last, value(i));
  }
#pragma unroll
  for (int offset = 1; offset < 32 / kColumns; offset *= 2) {
    const Number left = __shfl_up_sync(kAllLanes, last, offset * kColumns);
    if (rows.reach >= offset) last = Reduction::Of(left, last);
  }
  if (lane >= 32 - kColumns) board.warps[warp][column] = last;
  Number row = __shfl_up_sync(kAllLanes, last, kColumns);
  __syncthreads();
  // The row that the run begins in, up to the run.
  if (lane < kColumns) row = nothing;
  if (rows.continues) {
    Number earlier = nothing;
#pragma unroll
    for (int other = 0; other < kWarps - 1; ++other) {
      if (other >= warp) break;
      const Number theirs = board.warps[other][column];
      earlier = board.has_start[other] ? theirs : Reduction::Of(earlier, theirs);
    }
    row = Reduction::Of(earlier, row);
  }
  Number* result = board.values + rows.before * kColumns + column;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (rows.starts >> i & 1) {
      *result = row;
      result += kColumns;
      row = value(i);
    } else {
      row = Reduction::Of(row, value(i));
    }
  }
  if (Layout<kColumns>::Peer() == Layout<kColumns>::kPeers - 1) *result = row;
  __syncthreads();
}

// Calls `with(i, prepared(result))` for the entries of a run with what reduce_rows left of their rows.
template <int kColumns, typename Number, typename Prepared, typename With>
__device__ __forceinline__ void with_results(const RunRows& rows,
                                             const Board<Number, kColumns>& board,
                                             Prepared prepared, With with) {
  const Number* result = board.values + rows.before * kColumns + Layout<kColumns>::Column();
  Number row = prepared(*result);
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (rows.starts >> i & 1) {
      result += kColumns;
      row = prepared(*result);
    }
    with(i, row);
  }
}

// Calls `with(i, entry, address)` for every kPeers-th entry of the share and its element of an array
// of edges, so that neighbouring threads take neighbouring ones. There may be fewer entries.
template <int kColumns, typename Id, typename Score, typename Address, typename With>
__device__ __forceinline__ void across(const Request<Id, Score>& request, const Share& share,
                                       Address array, int64 column, With with) {
  constexpr int kPeers = Layout<kColumns>::kPeers;
  const int peer = Layout<kColumns>::Peer(), columns = static_cast<int>(request.columns);
  array += column;
  if (request.eids == nullptr) {
    array += (share.first_entry + peer) * columns;
    const int step = kPeers * columns;
#pragma unroll
    for (int i = 0; i < kRun; ++i) with(i, i * kPeers + peer, array + i * step);
    return;
  }
  const Id* eids = request.eids + share.first_entry + peer;
  Id edges[kRun];  // all are under way before the first is needed
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    edges[i] = i * kPeers + peer < share.count ? eids[i * kPeers] : 0;
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    with(i, i * kPeers + peer, array + static_cast<int64>(edges[i]) * columns);
  }
}

// Asks for the entries of a share; beyond the last they are `missing`.
template <int kColumns, typename Number, typename Id, typename Score>
__device__ __forceinline__ void read_across(const Request<Id, Score>& request, const Share& share,
                                            const Score* array, int64 column, Number missing,
                                            Score (&read)[kRun]) {
  const int count = column < request.columns ? share.count : 0;
  Score none;
  store(missing, &none);
  across<kColumns>(request, share, array, column, [&](int i, int entry, const Score* address) {
    read[i] = entry < count ? *address : none;
  });
}

// Makes runs of them, by way of shared memory.
template <int kColumns, typename Number, typename Score>
__device__ __forceinline__ void make_runs(const Score (&read)[kRun],
                                          Board<Number, kColumns>& board, Number (&values)[kRun]) {
  __syncthreads();  // all threads are done with what was there
#pragma unroll
  for (int i = 0; i < kRun; ++i) board.values[i * kThreads + threadIdx.x] = number(read[i]);
  __syncthreads();
  const int first = Layout<kColumns>::Peer() * kRun;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    values[i] = board.values[(first + i) * kColumns + Layout<kColumns>::Column()];
  }
  __syncthreads();
}

// Writes the entries of whole rows.
template <int kColumns, typename Number, typename Id, typename Score>
__device__ __forceinline__ void write_runs(const Request<Id, Score>& request, const Share& share,
                                           int64 column, const Number (&values)[kRun],
                                           Board<Number, kColumns>& board) {
  __syncthreads();
  const int first = Layout<kColumns>::Peer() * kRun;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    board.values[(first + i) * kColumns + Layout<kColumns>::Column()] = values[i];
  }
  __syncthreads();
  const int begin = share.own_begin, end = column < request.columns ? share.own_end : 0;
  across<kColumns>(request, share, request.out, column, [&](int i, int entry, Score* address) {
    if (entry >= begin && entry < end) store(board.values[i * kThreads + threadIdx.x], address);
  });
}

template <typename Id, typename Score, int kColumns, bool kGradient>
__global__ void __launch_bounds__(kThreads, kResident<Score, kGradient>)
    reduce_shares(Request<Id, Score> request) {
  using Number = typename Computed<Score>::Type;
  __shared__ Board<Number, kColumns> board;
  __shared__ int64 bounds[2];
  const int64 groups = (request.columns + kColumns - 1) / kColumns;
  const int64 at = blockIdx.x / groups;
  const int64 column = blockIdx.x % groups * kColumns + Layout<kColumns>::Column();
  if (threadIdx.x < 64) {
    const int which = threadIdx.x / 32;
    const int64 item = min((at + which) * request.share, request.num_rows + request.num_entries);
    const int64 rows = rows_before(request, item);
    if (threadIdx.x % 32 == 0) {
      bounds[which] = rows;
      request.first_rows[at + which] = rows;
    }
  }
  __syncthreads();
  const Share share = share_between(request, at, bounds[0], bounds[1]);
  const Number missing = kGradient ? 0 : lowest<Number>();
  Score read[kRun];
  read_across<kColumns>(request, share, request.scores, column, missing, read);
  const RunRows rows = find_rows(request, share, board);  // while they come
  // Of the block's first row and, for the last peers, its last one.
  const int begins = Layout<kColumns>::Column();
  const int ends = (rows.before + __popc(rows.starts)) * kColumns + begins;
  Number values[kRun];
  Partial<Number> first_row{0, 0}, last_row{0, 0};
  if constexpr (kGradient) {
    Number out[kRun];
    make_runs(read, board, out);
    read_across<kColumns>(request, share, request.gradients, column, missing, read);
    make_runs(read, board, values);
    reduce_rows<Total>(rows, Number{0}, board, [&](int i) { return out[i] * values[i]; });
    with_results(
        rows, board, [](Number sum) { return sum; },
        [&](int i, Number sum) { values[i] = out[i] * (values[i] - sum); });
  } else {
    make_runs(read, board, values);
    const auto value = [&](int i) { return values[i]; };
    reduce_rows<Largest>(rows, missing, board, value);
    first_row.largest = board.values[begins];
    last_row.largest = board.values[ends];
    with_results(
        rows, board, [](Number largest) { return base_of(largest); },
        [&](int i, Number base) { values[i] = exponential_of(values[i] - base); });
    reduce_rows<Total>(rows, Number{0}, board, value);
    with_results(
        rows, board, [](Number sum) { return 1 / sum; },
        [&](int i, Number scale) { values[i] *= scale; });
  }
  first_row.sum = board.values[begins];
  last_row.sum = board.values[ends];
  const bool last_peer = Layout<kColumns>::Peer() == Layout<kColumns>::kPeers - 1;
  if (last_peer && column < request.columns && request.num_shares > 1) {
    *request.template PartialOf<Number>(at, false, column) = first_row;
    *request.template PartialOf<Number>(at, true, column) = last_row;
  }
  write_runs(request, share, column, values, board);
}

// Merges the parts of rows that more than one share has. A warp takes the row that a share ends
// amid, and leaves the whole row's in place of that share's part.
template <typename Id, typename Score, int kColumns>
__global__ void __launch_bounds__(kThreads) merge_shares(Request<Id, Score> request) {
  using Number = typename Computed<Score>::Type;
  const int lane = threadIdx.x % 32;
  const int64 groups = (request.columns + kColumns - 1) / kColumns;
  const int64 warp = static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64 at = warp / groups;
  if (at >= request.num_shares) return;
  const int64 row = request.first_rows[at + 1] - 1;
  if (row < request.first_rows[at]) return;
  const int64 last = (request.ItemOf(row + 1) - 1) / request.share;
  if (last == at) return;
  const int64 column = warp % groups * kColumns + lane % kColumns;
  Partial<Number> whole{lowest<Number>(), 0};
  if (column < request.columns) {
    for (int64 other = at + lane / kColumns; other <= last; other += 32 / kColumns) {
      whole = merged(whole, *request.template PartialOf<Number>(other, other == at, column));
    }
  }
#pragma unroll
  for (int offset = 16; offset >= kColumns; offset /= 2) {
    const Partial<Number> theirs{__shfl_down_sync(kAllLanes, whole.largest, offset),
                                 __shfl_down_sync(kAllLanes, whole.sum, offset)};
    whole = merged(whole, theirs);
  }
  if (lane < kColumns && column < request.columns) {
    *request.template PartialOf<Number>(at, true, column) = whole;
  }
}

// Writes the rows that more than one share has.
template <typename Id, typename Score, int kColumns, bool kGradient>
__global__ void __launch_bounds__(kFinishThreads) finish_shares(Request<Id, Score> request) {
  using Number = typename Computed<Score>::Type;
  const int64 groups = (request.columns + kColumns - 1) / kColumns;
  const int64 at = blockIdx.x / groups;
  const int64 column = blockIdx.x % groups * kColumns + threadIdx.x % kColumns;
  const Share share =
      share_between(request, at, request.first_rows[at], request.first_rows[at + 1]);
  const int head = share.own_begin, tail = share.count - share.own_end;
  if (head + tail == 0 || column >= request.columns) return;
  Partial<Number> first{0, 0}, second{0, 0};
  if (head > 0) {
    const int64 from = request.ItemOf(share.first_row - 1) / request.share;
    first = *request.template PartialOf<Number>(from, true, column);
  }
  if (tail > 0) second = *request.template PartialOf<Number>(at, true, column);
  for (int i = threadIdx.x / kColumns; i < head + tail; i += kFinishThreads / kColumns) {
    const Partial<Number> row = i < head ? first : second;
    const int64 entry = share.first_entry + (i < head ? i : share.own_end + i - head);
    const int64 place = request.EdgeOf(entry) * request.columns + column;
    const Number score = number(request.scores[place]);
    if constexpr (kGradient) {
      store(score * (number(request.gradients[place]) - row.sum), request.out + place);
    } else {
      store(exponential_of(score - base_of(row.largest)) / row.sum, request.out + place);
    }
  }
}

}  // namespace dgl_mgpu
