// Parts of the sparse-dense products in spmm.cu and spmm_transposed.cu: vectors of elements, rows of
// operands, operations, reductions and the path that warps share.
#pragma once

#include "grid.cuh"
#include "number.cuh"

namespace dgl_mgpu {

// ---- Vectors of elements ----

// The widest piece that so many bytes are read and written in.
template <int kBytes>
struct Piece {
  using Type = uint4;
};
template <>
struct Piece<8> {
  using Type = uint2;
};
template <>
struct Piece<4> {
  using Type = unsigned int;
};
template <>
struct Piece<2> {
  using Type = unsigned short;
};

// Elements as they are stored, which stay so until they are needed: half types take half the
// registers.
template <typename Element, int kCount>
struct Loaded {
  using Part = typename Piece<kCount * sizeof(Element)>::Type;
  static constexpr int kParts = kCount * sizeof(Element) / sizeof(Part);
  Part parts[kParts];

  // Of a row of features: read once, and by chance again by someone else.
  __device__ __forceinline__ void Load(const Element* from) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) parts[i] = __ldg(reinterpret_cast<const Part*>(from) + i);
  }
  __device__ __forceinline__ void Unpack(Element (&to)[kCount]) const {
    memcpy(to, parts, sizeof parts);
  }
};

// Writes what nobody reads soon: the cache is left to rows of features.
template <typename Element, int kCount>
__device__ __forceinline__ void store_once(Element* to, const Element (&from)[kCount]) {
  using Part = typename Loaded<Element, kCount>::Part;
  Loaded<Element, kCount> packed;
  memcpy(packed.parts, from, sizeof packed.parts);
#pragma unroll
  for (int i = 0; i < packed.kParts; ++i) __stcs(reinterpret_cast<Part*>(to) + i, packed.parts[i]);
}

// ---- Rows of operands ----

// Dimensions, where neighbours that the same operands have are one.
constexpr int kDimensions = 4;

// How the operands' rows meet those of the output.
struct RowLayout {
  int64 tiles;
  int64 width;
  int64 left_bytes;  // of a row
  int64 right_bytes;
  int64 dimensions;
  // Outermost first. An operand that lacks a dimension has stride 0 there.
  int64 sizes[kDimensions];
  int64 left_strides[kDimensions];
  int64 right_strides[kDimensions];

  // Moves pointers to the operands' rows 0 on to what belongs to a column of the output.
  template <typename Element>
  __device__ __forceinline__ void Locate(int64 column, const Element** of_left,
                                         const Element** of_right) const {
    for (int64 d = dimensions - 1; d >= 0; --d) {
      const int64 outer = d == 0 ? 0 : column / sizes[d];
      const int64 inner = column - outer * sizes[d];
      *of_left += inner * left_strides[d];
      *of_right += inner * right_strides[d];
      column = outer;
    }
  }
};

// The same element of another row. With 32-bit numbers that is one instruction; rows are shorter
// than 4 GiB.
template <typename Element, typename Id>
__device__ __forceinline__ const Element* in_row(const Element* of_row_0, Id row, int64 row_bytes) {
  const uint64 offset = sizeof(Id) == 4
                            ? static_cast<uint64>(static_cast<uint32>(row)) *
                                  static_cast<uint32>(row_bytes)
                            : static_cast<uint64>(row) * static_cast<uint64>(row_bytes);
  return reinterpret_cast<const Element*>(reinterpret_cast<const char*>(of_row_0) + offset);
}

// ---- Operations of a left and a right operand ----

struct Copy {
  template <typename Number>
  static __device__ __forceinline__ Number Apply(Number left, Number) {
    return left;
  }
};
struct Add {
  template <typename Number>
  static __device__ __forceinline__ Number Apply(Number left, Number right) {
    return left + right;
  }
};
struct Sub {
  template <typename Number>
  static __device__ __forceinline__ Number Apply(Number left, Number right) {
    return left - right;
  }
};
struct Mul {
  template <typename Number>
  static __device__ __forceinline__ Number Apply(Number left, Number right) {
    return left * right;
  }
};
struct Div {
  template <typename Number>
  static __device__ __forceinline__ Number Apply(Number left, Number right) {
    return left / right;
  }
};

// How an operand meets a vector of the output: not at all, with a vector of its own, with one
// element for all of it, with one element for all columns of an entry, or with an entry's equal share
// of all that the left operand's row has in another matrix, whose `indptr` it then is.
struct Absent {
  template <int kVector>
  static constexpr int kCount = 0;
};
struct Vectors {
  template <int kVector>
  static constexpr int kCount = kVector;
};
struct Scalars {
  template <int kVector>
  static constexpr int kCount = 1;
};
struct EntryScalar {
  template <int kVector>
  static constexpr int kCount = 0;
};
struct EntryShare {
  template <int kVector>
  static constexpr int kCount = 0;
};

template <typename Left, typename Right>
struct Same {
  static constexpr bool value = false;
};
template <typename Type>
struct Same<Type, Type> {
  static constexpr bool value = true;
};

// ---- Reductions ----

struct Total {
  static constexpr bool kChooses = false;
  static constexpr bool kDivides = false;
  static constexpr bool kAdds = false;
  template <typename Number>
  static __device__ __forceinline__ Number Start() {
    return 0;
  }
  template <typename Number>
  static __device__ __forceinline__ bool IsBetter(Number, Number) {
    return false;
  }
};
// The total, divided by how many entries the row has when it is written.
struct Mean : Total {
  static constexpr bool kDivides = true;
};
// The total and what the output had before.
struct Added : Total {
  static constexpr bool kAdds = true;
};
struct Largest {
  static constexpr bool kChooses = true;
  static constexpr bool kDivides = false;
  static constexpr bool kAdds = false;
  template <typename Number>
  static __device__ __forceinline__ Number Start() {
    return __uint_as_float(0xff800000u);
  }
  template <typename Number>
  static __device__ __forceinline__ bool IsBetter(Number one, Number other) {
    return one > other;
  }
};
struct Smallest {
  static constexpr bool kChooses = true;
  static constexpr bool kDivides = false;
  static constexpr bool kAdds = false;
  template <typename Number>
  static __device__ __forceinline__ Number Start() {
    return __uint_as_float(kFloatInfinity);
  }
  template <typename Number>
  static __device__ __forceinline__ bool IsBetter(Number one, Number other) {
    return one < other;
  }
};

// No entry has been chosen: NaN never is, as every comparison with it is false.
constexpr uint32 kNoEntry = 0xffffffffu;

// What some entries of a row come to; `Entry` numbers entries and is unsigned.
template <typename Reduction, typename Number, typename Entry>
struct Partial {
  Number value = Reduction::template Start<Number>();
  Entry entry = static_cast<Entry>(-1);

  __device__ __forceinline__ void Add(Number other, Entry other_entry) {
    if constexpr (!Reduction::kChooses) {
      value += other;
    } else if (Reduction::IsBetter(other, value)) {
      value = other;
      entry = other_entry;
    }
  }
  // Also where entries do not come in order: of equal ones the first counts.
  __device__ __forceinline__ void Merge(const Partial& other) {
    if constexpr (!Reduction::kChooses) {
      value += other.value;
    } else if (Reduction::IsBetter(other.value, value) ||
               (other.value == value && other.entry < entry)) {
      *this = other;
    }
  }
};

// ---- The path ----

// Rows and entries in one order: a row's entries, then its end, then the next row's entries. So
// entry j of row r is at r + j, and the row's end at r + indptr[r + 1].

// The first row in [low, high] whose end is at `place` or behind it, `high` if none before is. All
// lanes of a warp look together, at 32 rows a time.
template <typename Id>
__device__ __forceinline__ int64 row_at(const Id* indptr, int64 place, int64 low, int64 high) {
  const int lane = threadIdx.x % 32;
  while (low < high) {
    const int64 step = (high - low + 31) / 32;
    const int64 probe = low + (lane + 1) * step - 1;
    const bool behind = probe >= high || probe + indptr[probe + 1] >= place;
    const uint32 behind_lanes = __ballot_sync(kAllLanes, behind);
    if (behind_lanes == 0) return high;
    low += (__ffs(static_cast<int>(behind_lanes)) - 1) * step;
    high = min(high, low + step - 1);
  }
  return low;
}

// A warp's share of the path: `count` entries, and `rows` rows end in it.
struct Share {
  int64 first_row;
  int64 first_entry;
  int rows;
  int count;
  bool has_head;  // begins inside a row
  bool has_open;  // ends inside a row
  int skipped;    // places on the path that it leaves to the share before it
};

// All lanes of a warp ask together.
template <typename Id>
__device__ __forceinline__ Share share_at(const Id* indptr, int64 num_rows, int64 share,
                                          int64 share_length) {
  const int64 length = num_rows + indptr[num_rows];
  const int64 begin = min(share * share_length, length);
  const int64 end = min(begin + share_length, length);
  Share result;
  result.first_row = row_at(indptr, begin, 0, num_rows);
  const int64 most = min(num_rows, result.first_row + end - begin);
  const int64 last_row = row_at(indptr, end, result.first_row, most);
  result.first_entry = begin - result.first_row;
  result.rows = static_cast<int>(last_row - result.first_row);
  result.count = static_cast<int>(end - last_row - result.first_entry);
  const auto start_of = [&](int64 row) { return row + indptr[row]; };
  result.has_head = result.first_row < num_rows && start_of(result.first_row) < begin;
  result.has_open = last_row < num_rows && start_of(last_row) < end;
  result.skipped = 0;
  return result;
}

// A share that also has the rest of a row that begins in it and ends in the next one, and leaves
// the like to the share before it: only rows that reach farther are in parts.
template <typename Id>
__device__ __forceinline__ Share with_whole_rows(Share share, const Id* indptr, int64 number,
                                                 int64 share_length) {
  const int64 begin = number * share_length, end = begin + share_length;
  const int64 open_row = share.first_row + share.rows;
  if (share.has_open && open_row + indptr[open_row] >= begin &&
      open_row + indptr[open_row + 1] < end + share_length) {
    share.count = static_cast<int>(indptr[open_row + 1] - share.first_entry);
    share.rows += 1;
    share.has_open = false;
  }
  if (share.has_head && share.rows > 0 &&
      share.first_row + indptr[share.first_row] >= begin - share_length) {
    const int entries = static_cast<int>(indptr[share.first_row + 1] - share.first_entry);
    share.first_row += 1;
    share.first_entry += entries;
    share.rows -= 1;
    share.count -= entries;
    share.has_head = false;
    share.skipped = entries + 1;
  }
  return share;
}

}  // namespace dgl_mgpu
