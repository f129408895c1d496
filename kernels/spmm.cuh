// Parts of the sparse-dense product in spmm.cu: vectors of elements, operations, reductions and the
// path that warps share.
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
// element for all of it, or with one element for all columns of an entry.
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
  template <typename Number>
  static __device__ __forceinline__ Number Start() {
    return 0;
  }
  template <typename Number>
  static __device__ __forceinline__ bool IsBetter(Number, Number) {
    return false;
  }
};
struct Largest {
  static constexpr bool kChooses = true;
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
    const uint32 found = __ballot_sync(kAllLanes, behind);
    if (found == 0) return high;
    low += (__ffs(static_cast<int>(found)) - 1) * step;
    high = min(high, low + step - 1);
  }
  return low;
}

}  // namespace dgl_mgpu
