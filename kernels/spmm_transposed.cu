// The transposed sparse-dense product: every entry's message is added to the row of the output that
// the entry names, so that no transposed copy of the matrix is needed.
//
// Warps share the path of spmm.cuh. A row of the left operand stays in registers while its entries
// go by; additions are atomic, and nobody waits for them.
#include "spmm.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Rows of the right operand that a lane reads at a time.
constexpr int kReads = 4;

template <typename Id, typename Element>
struct TransposedProduct {
  const Id* indptr;
  const Id* indices;  // row of the output of each entry
  const Id* eids;     // row of `right` of each entry; null where that is the entry's number
  const Element* left;
  const Element* right;
  typename Computed<Element>::Type* out;
  int64 num_rows;
  int64 share_length;
  int64 num_shares;
  RowLayout layout;
};

template <int kCount>
__device__ __forceinline__ void add_to(double* to, const double (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) atomicAdd(to + i, values[i]);
}
template <int kCount>
__device__ __forceinline__ void add_to(float* to, const float (&values)[kCount]) {
#if !defined(DGL_MGPU_EMULATED) && __CUDA_ARCH__ >= 900
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + i), "f"(values[i]),
                   "f"(values[i + 1]), "f"(values[i + 2]), "f"(values[i + 3]));
    }
  } else if constexpr (kCount == 2) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(values[0]),
                 "f"(values[1]));
  } else {
    atomicAdd(to, values[0]);
  }
#else
#pragma unroll
  for (int i = 0; i < kCount; ++i) atomicAdd(to + i, values[i]);
#endif
}

// A message is the product of the operands that there are. `kVector` columns a lane, `kLanes` lanes
// a row.
template <typename Id, typename Element, typename Left, typename Right, int kVector, int kLanes>
__global__ void __launch_bounds__(kThreads)
    spmm_transposed(TransposedProduct<Id, Element> product) {
  using Number = typename Computed<Element>::Type;
  constexpr int kGroups = 32 / kLanes;
  constexpr int kLeft = Left::template kCount<kVector>, kRight = Right::template kCount<kVector>;
  constexpr bool kHasLeft = !Same<Left, Absent>::value;
  constexpr bool kHasRight = !Same<Right, Absent>::value;
  constexpr bool kEntryScalar = Same<Right, EntryScalar>::value;

  const RowLayout& layout = product.layout;
  const int lane = threadIdx.x % 32, group = lane / kLanes;
  const int64 warp = static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64 tile = warp / product.num_shares;
  if (tile >= layout.tiles) return;
  // From here on rows and entries are counted from the share's first.
  const Share share = share_at(product.indptr, product.num_rows, warp - tile * product.num_shares,
                               product.share_length);

  // The columns of this lane.
  const int64 column = (tile * kLanes + lane % kLanes) * kVector;
  const bool active = column < layout.width;
  const Element* left_base = product.left;
  const Element* right_base = product.right;
  layout.Locate(active ? column : 0, &left_base, &right_base);

  // Behind the share's entries, row 0 is read and left out.
  const auto id_of = [&](const Id* ids, int at) {
    if (at >= share.count) return Id{0};
    return ids == nullptr ? static_cast<Id>(share.first_entry + at)
                          : __ldcs(ids + share.first_entry + at);
  };
  // Where a row ends; the one in which the share ends does so behind everything.
  const auto end_of = [&](int row) {
    if (row >= share.rows) return share.count + 1;
    return static_cast<int>(product.indptr[share.first_row + row + 1] - share.first_entry);
  };
  int row = 0, row_end = end_of(0), row_in_registers = -1;
  Number left[kLeft == 0 ? 1 : kLeft];

  for (int at = 0; at < share.count; at += 32) {
    // Ids of 32 entries, one a lane.
    const Id target = id_of(product.indices, at + lane);
    Id edge{};
    if constexpr (kHasRight) edge = id_of(product.eids, at + lane);
    Number entry_scalar{};
    if constexpr (kEntryScalar) entry_scalar = number(product.right[edge]);

    const int stop = min(at + 32, share.count);
    for (int from = at;;) {
      const int to = min(row_end, stop);
      if constexpr (kHasLeft) {
        if (from < to && row_in_registers != row) {
          Loaded<Element, kLeft> loaded;
          Element of_row[kLeft];
          loaded.Load(
              in_row(left_base, static_cast<Id>(share.first_row + row), layout.left_bytes));
          loaded.Unpack(of_row);
#pragma unroll
          for (int i = 0; i < kLeft; ++i) left[i] = number(of_row[i]);
          row_in_registers = row;
        }
      }
      for (int first = from; first < to; first += kGroups * kReads) {
        Loaded<Element, kRight == 0 ? 1 : kRight> right[kReads];
        if constexpr (kRight > 0) {
#pragma unroll
          for (int i = 0; i < kReads; ++i) {
            const Id right_row = __shfl_sync(kAllLanes, edge, (first + i * kGroups + group) % 32);
            right[i].Load(in_row(right_base, right_row, layout.right_bytes));
          }
        }
#pragma unroll
        for (int i = 0; i < kReads; ++i) {
          const int entry = first + i * kGroups + group;
          const Id out_row = __shfl_sync(kAllLanes, target, entry % 32);
          Number scalar{};
          if constexpr (kEntryScalar) scalar = __shfl_sync(kAllLanes, entry_scalar, entry % 32);
          if (entry >= to || !active) continue;
          Element of_right[kRight == 0 ? 1 : kRight];
          if constexpr (kRight > 0) right[i].Unpack(of_right);
          Number message[kVector];
#pragma unroll
          for (int j = 0; j < kVector; ++j) {
            if constexpr (kRight > 0) scalar = number(of_right[kRight == 1 ? 0 : j]);
            if constexpr (!kHasLeft) {
              message[j] = scalar;
            } else {
              message[j] = left[kLeft == 1 ? 0 : j];
              if constexpr (kHasRight) message[j] *= scalar;
            }
          }
          add_to(product.out + static_cast<int64>(out_row) * layout.width + column, message);
        }
      }
      if (row_end > stop) break;
      from = to;
      row_end = end_of(++row);
    }
  }
}

}  // namespace dgl_mgpu
