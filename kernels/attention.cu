// Attention over the entries of rows: the contract stands in dgl_mgpu/ops/attention.py.
//
// Warps share the path through rows and entries as in spmm.cu, and rows that several of them have
// parts of are joined by a second kernel, in order. There are three passes. Forward goes along the
// in-edges of destinations and keeps a running maximum and sum. Backward goes along them once more
// for the destinations' operands, and along the out-edges of sources for theirs; it computes weights
// again from what a destination keeps.
//
// Additive scores need no second pass: what an edge adds to its destination's number is known when
// its source is done. It is added in memory, as an integer, so that the order does not matter. Each
// destination has a unit of its own, so small that nothing is lost, and so large that no sum
// overflows: weights add up to 1, and the largest value that a destination reads, which the forward
// pass has seen, bounds what they are multiplied by.
#include "attention_lane.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Blocks that a multiprocessor is to hold, which bounds the registers of a thread.
constexpr int kBlocks = 2;
// For the parts of rows that a block joins.
constexpr int kSharedBytes = 32 << 10;

template <typename Id, typename Element, typename Score, typename Pass, bool kDropout, bool kTerms,
          int kVector, int kVectors, int kLanes, int kHeads>
__global__ void __launch_bounds__(kThreads, kBlocks) attend(Attention<Id, Element> request) {
  using Of = Lane<Id, Element, Score, Pass, kDropout, kTerms, kVector, kVectors, kLanes, kHeads>;
  using Number = typename Of::Number;
  constexpr int kGroups = Of::kGroups, kReads = Of::kReads, kChunk = kGroups * kReads;

  const int lane = threadIdx.x % 32, group = lane / Of::kRowLanes;
  const int64 warp = static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int tile = static_cast<int>(warp / request.num_shares);
  const int64 share = warp - tile * request.num_shares;
  if (tile >= request.tiles) return;

  // From here on rows and entries are counted from the share's first.
  const Share whole = with_whole_rows(
      share_at(request.indptr, request.num_rows, share, request.share_length), request.indptr,
      share, request.share_length);
  const int64 first_row = whole.first_row, first_entry = whole.first_entry;
  const int rows = whole.rows, count = whole.count;

  Of of(request, tile, lane);
  Number state[Of::kState];
  Of::Clear(state);
  const auto keep_part = [&](int is_tail) {
    if (group != 0) return;
    Number* to = request.parts +
                 ((2 * share + is_tail) * request.tiles + tile) * Of::kState * Of::kRowLanes + lane;
#pragma unroll
    for (int i = 0; i < Of::kState; ++i) to[i * Of::kRowLanes] = state[i];
  };

  // Behind the share's entries, row 0 is read and left out.
  const auto id_of = [&](int at) {
    return at < count ? __ldcs(request.indices + first_entry + at) : Id{0};
  };
  const auto edge_of = [&](int at) {
    if (at >= count) return Id{0};
    return request.eids == nullptr ? static_cast<Id>(first_entry + at)
                                   : __ldcs(request.eids + first_entry + at);
  };
  // Where a row ends; the one in which the share ends does so behind everything.
  const auto end_of = [&](int row) {
    if (row >= rows) return count + 1;
    return static_cast<int>(request.indptr[first_row + row + 1] - first_entry);
  };
  int row = 0, row_end = end_of(0), next_row_end = end_of(1);
  typename Of::Row operands = of.LoadRow(first_row), next_operands = of.LoadRow(first_row + 1);
  const auto finish_row = [&]() {
    Of::MergeGroups(state);
    if (whole.has_head && row == 0) {
      keep_part(0);
    } else if (group == 0) {
      of.Write(first_row + row, state);
    }
    Of::Clear(state);
    ++row;
    row_end = next_row_end;
    next_row_end = end_of(row + 1);
    operands = next_operands;
    next_operands = of.LoadRow(first_row + row + 1);
  };

  // Ids of 32 entries, one a lane, and those of the 32 behind them.
  Id id{}, next_id = id_of(lane), edge{}, next_edge{};
  if constexpr (Of::kNumbersEdges) next_edge = edge_of(lane);
  for (int at = 0; at < count; at += kChunk) {
    if (at % 32 == 0) {
      id = next_id;
      next_id = id_of(at + 32 + lane);
      if constexpr (Of::kNumbersEdges) {
        edge = next_edge;
        next_edge = edge_of(at + 32 + lane);
      }
    }
    // Unconditional reads, or each would wait for the one before.
    typename Of::Entry entries[kReads];
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const int slot = at % 32 + i * kGroups + group;
      entries[i].other = __shfl_sync(kAllLanes, id, slot);
      if constexpr (Of::kNumbersEdges) entries[i].edge = __shfl_sync(kAllLanes, edge, slot);
      of.LoadEntry(entries[i]);
    }
    const int stop = min(at + kChunk, count);
    for (int from = at;;) {
      const int to = min(row_end, stop);
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        const int entry = at + i * kGroups + group;
        entries[i].active = entry >= from && entry < to;
      }
      of.Take(operands, entries, state);
      if (row_end > stop) break;
      from = to;
      finish_row();
    }
  }
  while (row < rows) finish_row();  // without entries, in a share without entries

  const bool has_tail = whole.has_open && !(whole.has_head && rows == 0);
  if (whole.has_open) {
    Of::MergeGroups(state);
    keep_part(has_tail);
  }
  if (tile == 0 && lane == 0) request.open_rows[share] = has_tail ? first_row + rows : -1;
  if constexpr (Score::kHasVector && !Pass::kForward && !Pass::kBySource) {
#pragma unroll
    for (int step = Of::kRowLanes; step < 32; step *= 2) {
#pragma unroll
      for (int i = 0; i < Of::kColumns; ++i) {
        of.vector_sum[i] += __shfl_xor_sync(kAllLanes, of.vector_sum[i], step);
      }
    }
    if (group == 0) of.StoreNumbers(share);
  }
}

// Rows that reach beyond the share they begin in: a block for each share and tile.
template <typename Id, typename Element, typename Score, typename Pass, bool kDropout, bool kTerms,
          int kVector, int kVectors, int kLanes, int kHeads>
__global__ void __launch_bounds__(kThreads) join_attention(Attention<Id, Element> request) {
  using Of = Lane<Id, Element, Score, Pass, kDropout, kTerms, kVector, kVectors, kLanes, kHeads>;
  using Number = typename Of::Number;
  // As many warps as there is shared memory for.
  constexpr int kBytes = Of::kState * Of::kRowLanes * static_cast<int>(sizeof(Number));
  constexpr int kFit = kSharedBytes / kBytes;
  constexpr int kJoining = kFit >= kWarps ? kWarps : kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  __shared__ Number shared[kJoining][Of::kState][Of::kRowLanes];
  const int64 share = blockIdx.x % request.num_shares;
  const int tile = static_cast<int>(blockIdx.x / request.num_shares);
  const int64 row = request.open_rows[share];
  if (row < 0) return;
  const int64 last = request.EndOf(row) / request.share_length;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = lane / Of::kRowLanes, place = lane % Of::kRowLanes;

  Number state[Of::kState];
  Of::Clear(state);
  int64 at = warp < kJoining ? share + warp * Of::kGroups + group : last + 1;
  for (; at <= last; at += kJoining * Of::kGroups) {
    const Number* from = request.parts + ((2 * at + (at == share)) * request.tiles + tile) *
                                             Of::kState * Of::kRowLanes + place;
    Number part[Of::kState];
#pragma unroll
    for (int i = 0; i < Of::kState; ++i) part[i] = from[i * Of::kRowLanes];
    Of::Merge(state, part);
  }
  Of::MergeGroups(state);
  if (group == 0 && warp < kJoining) {
#pragma unroll
    for (int i = 0; i < Of::kState; ++i) shared[warp][i][place] = state[i];
  }
  __syncthreads();
  if (warp != 0 || group != 0) return;
  for (int other = 1; other < kJoining; ++other) {
    Number part[Of::kState];
#pragma unroll
    for (int i = 0; i < Of::kState; ++i) part[i] = shared[other][i][place];
    Of::Merge(state, part);
  }
  Of(request, tile, lane).Write(row, state);
}

}  // namespace dgl_mgpu
