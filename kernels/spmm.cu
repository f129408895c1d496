// Generalised sparse-dense product: the contract stands in dgl_mgpu/ops/spmm.py.
//
// Each warp takes an equal share of the path through rows and entries (Merrill and Garland's merge
// path, SC'16), so that neither hubs nor rows without entries keep others waiting. A row that ends
// in the share behind the one that it begins in is done by that warp nevertheless: else, where
// shares are as short as rows, most rows would be in parts. What a share has of a longer row goes
// to a buffer, and a second kernel joins those parts in order: sums have the same bits each time.
//
// Inside a share, `kLanes` lanes hold a row's columns of one tile, and the other lanes of the warp
// read other entries at the same time. Rows of features are read a chunk of entries at a time,
// before anything is done with them and whichever rows they belong to: what bounds this kernel is
// how many of these reads are under way.
//
// Where the output's row repeats the left operand's, each time with another scalar, as heads do that
// share rows, a lane has its columns of all repeats and reads a row once.
#include "join.cuh"
#include "spmm.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Blocks that a multiprocessor is to hold, which bounds the registers of a thread; and reads of a
// lane that may be under way at once, by number and by bytes.
constexpr int kBlocks = 3, kBlocksOfRepeats = 2;
constexpr int kMostReads = 16;
constexpr int kMostReadBytes = 128;

// A power of two, so that chunks fill 32 entries.
template <int kLanes, int kBytes>
struct Reads {
  static constexpr int kFit = kMostReadBytes / kBytes;
  static constexpr int kFew = kFit >= 16 ? 16 : kFit >= 8 ? 8 : kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  static constexpr int kMost = kFew < kMostReads ? kFew : kMostReads;
  static constexpr int kCount = kLanes < kMost ? kLanes : kMost;
};

template <typename Id, typename Element>
struct Product {
  using Number = typename Computed<Element>::Type;

  const Id* indptr;
  const Id* left_ids;   // row of `left` of each entry; null where that is the entry's number
  const Id* right_ids;  // the same of `right`
  const Element* left;
  const Element* right;
  Element* out;
  Id* left_choice;  // for Largest and Smallest: ids of the entry chosen, null if not asked for
  Id* right_choice;
  // By share: its part of the row that it is in when it begins, and of the row that it is in when
  // it ends if that began in it; and the number of the latter, or -1.
  Number* parts;
  uint32* part_entries;  // counted along the path, from where the share begins
  int64* open_rows;
  int64 num_rows;
  int64 share_length;
  int64 num_shares;
  RowLayout layout;

  __device__ __forceinline__ int64 EndOf(int64 row) const { return row + indptr[row + 1]; }

  // Writes an element's row and column, and which entry it is from.
  template <typename Reduction, int kVector, typename Entry>
  __device__ __forceinline__ void Write(
      int64 row, int64 column, const Partial<Reduction, Number, Entry> (&partials)[kVector],
      int64 first_entry) const {
    const int64 at = row * layout.width + column;
    Element values[kVector];
    if constexpr (Reduction::kAdds) {
      if (IsWhole<kVector>()) {
        Loaded<Element, kVector> before;
        before.Load(out + at);
        before.Unpack(values);
      } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if (column + i < layout.width) values[i] = out[at + i];
        }
      }
    }
    Number divisor = 1;
    if constexpr (Reduction::kDivides) {
      const int64 entries = indptr[row + 1] - indptr[row];
      divisor = static_cast<Number>(max(entries, int64{1}));
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      Number value = partials[i].value;
      if constexpr (Reduction::kDivides) value /= divisor;
      if constexpr (Reduction::kAdds) value += number(values[i]);
      store(value, values + i);
    }
    Store(out, at, column, values);
    if constexpr (Reduction::kChooses) {
      WriteChoice(left_choice, left_ids, at, column, partials, first_entry);
      WriteChoice(right_choice, right_ids, at, column, partials, first_entry);
    }
  }

 private:
  // Whether rows of the output are vectors, as those of the left operand are. Where that was copied
  // to be so, the last vector has less in the output, and begins anywhere.
  template <int kVector>
  __device__ __forceinline__ bool IsWhole() const {
    return layout.width % kVector == 0;
  }

  template <typename Stored, int kVector>
  __device__ __forceinline__ void Store(Stored* to, int64 at, int64 column,
                                        const Stored (&values)[kVector]) const {
    if (IsWhole<kVector>()) {
      store_once(to + at, values);
      return;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (column + i < layout.width) to[at + i] = values[i];
    }
  }

  template <typename Reduction, int kVector, typename Entry>
  __device__ __forceinline__ void WriteChoice(
      Id* choice, const Id* ids, int64 at, int64 column,
      const Partial<Reduction, Number, Entry> (&partials)[kVector], int64 first_entry) const {
    if (choice == nullptr) return;
    Id chosen[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const bool none = partials[i].entry == static_cast<Entry>(-1);
      const int64 entry = none ? 0 : first_entry + static_cast<int64>(partials[i].entry);
      chosen[i] = none ? 0 : ids == nullptr ? static_cast<Id>(entry) : ids[entry];
    }
    Store(choice, at, column, chosen);
  }
};

// `kVector` columns a lane, `kLanes` lanes a row; and the same columns of each repeat, if there are
// several, for which the right operand is an EntryScalar.
template <typename Id, typename Element, typename Operation, typename Left, typename Right,
          typename Reduction, int kVector, int kLanes, int kRepeats>
__global__ void __launch_bounds__(kThreads, kRepeats == 1 ? kBlocks : kBlocksOfRepeats)
    spmm(Product<Id, Element> product) {
  using Number = typename Computed<Element>::Type;
  constexpr int kGroups = 32 / kLanes;
  constexpr int kLeft = Left::template kCount<kVector>, kRight = Right::template kCount<kVector>;
  constexpr int kReads = Reads<kLanes, (kLeft + kRight) * sizeof(Element)>::kCount;
  constexpr int kChunk = kGroups * kReads;
  constexpr bool kEntryShare = Same<Right, EntryShare>::value;
  constexpr bool kEntryScalar = Same<Right, EntryScalar>::value || kEntryShare;
  constexpr bool kHasRight = !Same<Right, Absent>::value && !kEntryShare;

  const int lane = threadIdx.x % 32, group = lane / kLanes;
  const int64 warp = static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int tile = static_cast<int>(warp / product.num_shares);
  const int share = static_cast<int>(warp - tile * product.num_shares);
  if (tile >= product.layout.tiles) return;

  // From here on rows and entries are counted from the share's first.
  const Share whole = with_whole_rows(
      share_at(product.indptr, product.num_rows, share, product.share_length), product.indptr,
      share, product.share_length);
  const int64 first_row = whole.first_row, first_entry = whole.first_entry;
  const int rows = whole.rows, count = whole.count;

  // The columns of this lane, of the first repeat.
  const int64 column = (static_cast<int64>(tile) * kLanes + lane % kLanes) * kVector;
  const int64 run = product.layout.width / kRepeats;
  const bool active = column < run;
  const Element* left_base = product.left;
  const Element* right_base = product.right;
  product.layout.Locate(active ? column : 0, &left_base, &right_base);

  Partial<Reduction, Number, uint32> partial[kRepeats][kVector];
  // Brings what the groups of lanes have of a row together.
  const auto merge_groups = [&]() {
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) {
#pragma unroll
      for (int i = 0; i < kRepeats * kVector; ++i) {
        Partial<Reduction, Number, uint32>& own = partial[i / kVector][i % kVector];
        Partial<Reduction, Number, uint32> other;
        other.value = __shfl_xor_sync(kAllLanes, own.value, step);
        if constexpr (Reduction::kChooses) {
          other.entry = __shfl_xor_sync(kAllLanes, own.entry, step);
        }
        own.Merge(other);
      }
    }
  };
  const auto keep_part = [&](int row, int is_tail) {
    if (group != 0 || !active) return;
    const int64 at = (2 * static_cast<int64>(share) + is_tail) * product.layout.width + column;
#pragma unroll
    for (int r = 0; r < kRepeats; ++r) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (column + i >= run) break;
        const int64 to = at + r * run + i;
        product.parts[to] = partial[r][i].value;
        if constexpr (Reduction::kChooses) {
          const uint32 entry = partial[r][i].entry;
          product.part_entries[to] = entry == kNoEntry ? kNoEntry : entry + row + whole.skipped;
        }
      }
    }
  };

  // Behind the share's entries, row 0 is read and left out.
  const auto id_of = [&](const Id* ids, int at) {
    if (at >= count) return Id{0};
    return ids == nullptr ? static_cast<Id>(first_entry + at) : __ldcs(ids + first_entry + at);
  };
  // Where a row ends; the one in which the share ends does so behind everything.
  const auto end_of = [&](int row) {
    if (row >= rows) return count + 1;
    return static_cast<int>(product.indptr[first_row + row + 1] - first_entry);
  };
  int row = 0, row_end = end_of(0), next_row_end = end_of(1);
  const auto finish_row = [&]() {
    merge_groups();
    if (whole.has_head && row == 0) {
      keep_part(0, 0);
    } else if (group == 0 && active) {
#pragma unroll
      for (int r = 0; r < kRepeats; ++r) {
        product.Write(first_row + row, r * run + column, partial[r], first_entry);
      }
    }
#pragma unroll
    for (int i = 0; i < kRepeats * kVector; ++i) partial[i / kVector][i % kVector] = {};
    ++row;
    row_end = next_row_end;
    next_row_end = end_of(row + 1);
  };

  // Ids of 32 entries, one a lane, and those of the 32 behind them.
  Id left_id{}, right_id{}, next_left_id = id_of(product.left_ids, lane), next_right_id{};
  if constexpr (kHasRight) next_right_id = id_of(product.right_ids, lane);
  Number entry_scalar[kRepeats] = {};

  for (int at = 0; at < count; at += kChunk) {
    if (at % 32 == 0) {
      left_id = next_left_id;
      next_left_id = id_of(product.left_ids, at + 32 + lane);
      if constexpr (kHasRight) {
        right_id = next_right_id;
        next_right_id = id_of(product.right_ids, at + 32 + lane);
      }
      if constexpr (kEntryShare) {
        const Id* bounds = reinterpret_cast<const Id*>(product.right) + left_id;
        entry_scalar[0] = Number{1} / static_cast<Number>(bounds[1] - bounds[0]);
      } else if constexpr (kEntryScalar) {
#pragma unroll
        for (int r = 0; r < kRepeats; ++r) {
          entry_scalar[r] = number(product.right[static_cast<int64>(right_id) * kRepeats + r]);
        }
      }
    }

    // Unconditional reads, or each would wait for the one before.
    Loaded<Element, kLeft> left[kReads];
    Loaded<Element, kRight == 0 ? 1 : kRight> right[kReads];
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const int slot = at % 32 + i * kGroups + group;
      const Id left_row = __shfl_sync(kAllLanes, left_id, slot);
      left[i].Load(in_row(left_base, left_row, product.layout.left_bytes));
      if constexpr (kRight > 0) {
        const Id right_row = __shfl_sync(kAllLanes, right_id, slot);
        right[i].Load(in_row(right_base, right_row, product.layout.right_bytes));
      }
    }

    const int stop = min(at + kChunk, count);
    for (int from = at;;) {
      const int to = min(row_end, stop);
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        const int entry = at + i * kGroups + group;
        Number right_numbers[kRepeats] = {};
        if constexpr (kEntryScalar) {
#pragma unroll
          for (int r = 0; r < kRepeats; ++r) {
            right_numbers[r] =
                __shfl_sync(kAllLanes, entry_scalar[r], at % 32 + i * kGroups + group);
          }
        }
        if (entry < from || entry >= to) continue;
        Element of_left[kLeft], of_right[kRight == 0 ? 1 : kRight];
        left[i].Unpack(of_left);
        if constexpr (kRight > 0) right[i].Unpack(of_right);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          if constexpr (kRight > 0) right_numbers[0] = number(of_right[kRight == 1 ? 0 : j]);
          const Number left_number = number(of_left[kLeft == 1 ? 0 : j]);
#pragma unroll
          for (int r = 0; r < kRepeats; ++r) {
            partial[r][j].Add(Operation::Apply(left_number, right_numbers[r]),
                              static_cast<uint32>(entry));
          }
        }
      }
      if (row_end > stop) break;
      from = to;
      finish_row();
    }
  }
  while (row < rows) finish_row();  // without entries, in a share without entries

  const bool has_tail = whole.has_open && !(whole.has_head && rows == 0);
  if (whole.has_open) {
    merge_groups();
    keep_part(rows, has_tail);
  }
  if (tile == 0 && lane == 0) product.open_rows[share] = has_tail ? first_row + rows : -1;
}

// Rows that reach beyond the share they begin in.
template <typename Id, typename Element, typename Reduction>
__global__ void __launch_bounds__(kThreads) join_parts(Product<Id, Element> product) {
  using Number = typename Computed<Element>::Type;
  using Joined = Parts<Reduction, Number>;
  const Joined parts{product.parts, product.part_entries, product.layout.width,
                     product.share_length};
  const auto last_of = [&](int64 row) { return product.EndOf(row) / product.share_length; };
  const auto write = [&](int64 row, int64 column, const typename Joined::Whole& whole) {
    const typename Joined::Whole partials[1] = {whole};
    product.Write(row, column, partials, 0);
  };
  join_open_rows<kThreads>(parts, product.open_rows, product.num_shares, last_of, write);
}

}  // namespace dgl_mgpu
