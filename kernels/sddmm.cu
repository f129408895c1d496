// An operation on two operands' rows for every edge: the contract stands in
// dgl_mgpu/ops/sddmm.py.
//
// A block takes some edges, and its threads their output as one run of vectors (or of products to
// be summed up), so that every thread works whatever the width of a row. Threads of one edge read
// its ids together, which costs one access.
#include "number.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 256;
// Vectors of the output that a thread has under way, and dot products of a few lanes.
constexpr int kVectors = 4, kProducts = 2;

enum Operation : int { kCopy, kAdd, kSub, kMul, kDiv };

// `ids` has the row of each edge; null where edge i has row i.
template <typename Id, typename Element>
struct Operand {
  const Element* rows;
  const Id* ids;
  int64 width;

  __device__ __forceinline__ const Element* RowOf(int64 edge) const {
    return rows + (ids == nullptr ? edge : static_cast<int64>(ids[edge])) * width;
  }
};

// Of `columns` of the output column i comes from the columns offsets[i] of the left and
// offsets[columns + i] of the right operand; where `offsets` is null from column i, of a dot product
// `reduced` * i, of both; `reduced` is 1 for all else. A copy has no right operand.
template <typename Id, typename Element>
struct Request {
  Operand<Id, Element> left, right;
  Element* out;
  int64 num_edges;
  int64 columns;
  const int* offsets;
  int64 operation;
  int64 reduced;      // numbers of a dot product
  int64 lanes;        // that share one
  int64 block_edges;  // of one block

  __device__ __forceinline__ int64 FirstEdge() const { return blockIdx.x * block_edges; }
  __device__ __forceinline__ int64 LeftColumn(int64 column) const {
    return offsets == nullptr ? column * reduced : offsets[column];
  }
  __device__ __forceinline__ int64 RightColumn(int64 column) const {
    return offsets == nullptr ? column * reduced : offsets[columns + column];
  }
  // How many pieces of the output a block has, given those of an edge.
  __device__ __forceinline__ int Pieces(int edge_pieces) const {
    return static_cast<int>(min(block_edges, num_edges - FirstEdge())) * edge_pieces;
  }
};

// A number of pieces that is divided by. A block has one edge or few pieces.
struct Divisor {
  uint32 value;
  uint32 reciprocal;  // rounded up: exact while a product of both numbers is below 2^32

  __device__ __forceinline__ explicit Divisor(int64 number)
      : value(static_cast<uint32>(number)), reciprocal(0xffffffffu / value + 1) {}
  __device__ __forceinline__ int Quotient(int number) const {
    return value == 1 ? number : static_cast<int>(__umulhi(number, reciprocal));
  }
};

// So many elements as one vector.
template <int kBytes>
struct Bits {
  using Type = uint4;
};
template <>
struct Bits<8> {
  using Type = uint2;
};
template <>
struct Bits<4> {
  using Type = uint32;
};
template <>
struct Bits<2> {
  using Type = unsigned short;
};

template <typename Element, int kElements>
struct Vector {
  using Type = typename Bits<kElements * sizeof(Element)>::Type;
  Type bits;

  __device__ __forceinline__ void Load(const Element* from) {
    bits = __ldg(reinterpret_cast<const Type*>(from));
  }
  // Nobody reads the output soon: caches are left to rows.
  __device__ __forceinline__ void Store(Element* to) const {
    __stcs(reinterpret_cast<Type*>(to), bits);
  }
  __device__ __forceinline__ void Unpack(Element (&to)[kElements]) const {
    memcpy(to, &bits, sizeof bits);
  }
  __device__ __forceinline__ void Pack(const Element (&from)[kElements]) {
    memcpy(&bits, from, sizeof bits);
  }
};

template <typename Number>
__device__ __forceinline__ Number result_of(int64 operation, Number left, Number right) {
  switch (operation) {
    case kAdd:
      return left + right;
    case kSub:
      return left - right;
    case kMul:
      return left * right;
    default:
      return left / right;
  }
}

// Where operands have columns of their own, kElements is 1.
template <typename Id, typename Element, int kElements>
__global__ void __launch_bounds__(kThreads) sddmm(Request<Id, Element> request) {
  const int slots = static_cast<int>(request.columns / kElements), count = request.Pieces(slots);
  const int64 first_edge = request.FirstEdge();
  const bool one_edge = request.block_edges == 1, copies = request.operation == kCopy;
  const Divisor divisor(slots);
  for (int start = threadIdx.x; start < count; start += kVectors * kThreads) {
    // Step by step for all vectors, without branches: all ids are under way at once, then all rows.
    const Element* left_at[kVectors];
    const Element* right_at[kVectors];
    int64 to[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int slot = min(start + i * kThreads, count - 1);
      const int within = one_edge ? 0 : divisor.Quotient(slot);
      const int64 edge = first_edge + within;
      const int64 column = static_cast<int64>(slot - within * slots) * kElements;
      to[i] = edge * request.columns + column;
      left_at[i] = request.left.RowOf(edge) + request.LeftColumn(column);
      right_at[i] = request.right.RowOf(edge) + request.RightColumn(column);
    }
    Vector<Element, kElements> left[kVectors], right[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) left[i].Load(left_at[i]);
    if (!copies) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) right[i].Load(right_at[i]);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        Element a[kElements], b[kElements];
        left[i].Unpack(a);
        right[i].Unpack(b);
#pragma unroll
        for (int j = 0; j < kElements; ++j) {
          store(result_of(request.operation, number(a[j]), number(b[j])), a + j);
        }
        left[i].Pack(a);
      }
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (start + i * kThreads < count) left[i].Store(request.out + to[i]);
    }
  }
}

// The dot products of rows: some lanes share one, or `kRepeats` of them that follow each other and
// have the same left operand, which is read once.
template <typename Id, typename Element, int kElements, int kRepeats>
__global__ void __launch_bounds__(kThreads) sddmm_dot(Request<Id, Element> request) {
  using Number = typename Computed<Element>::Type;
  const int runs = static_cast<int>(request.columns / kRepeats), count = request.Pieces(runs);
  const int lanes = static_cast<int>(request.lanes), lane = threadIdx.x % lanes;
  const int at_once = kThreads / lanes;
  const int64 first_edge = request.FirstEdge();
  const bool one_edge = request.block_edges == 1;
  const Divisor divisor(runs);
  // All lanes stay to the end: they exchange their sums.
  for (int start = 0; start < count; start += kProducts * at_once) {
    const Element* left[kProducts];
    const Element* right[kProducts][kRepeats];
    Number sums[kProducts][kRepeats];
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      const int run = min(start + i * at_once + static_cast<int>(threadIdx.x) / lanes, count - 1);
      const int within = one_edge ? 0 : divisor.Quotient(run);
      const int column = (run - within * runs) * kRepeats;
      left[i] = request.left.RowOf(first_edge + within) + request.LeftColumn(column);
      const Element* right_row = request.right.RowOf(first_edge + within);
#pragma unroll
      for (int r = 0; r < kRepeats; ++r) {
        right[i][r] = right_row + request.RightColumn(column + r);
        sums[i][r] = 0;
      }
    }
    for (int64 at = lane * kElements; at < request.reduced; at += lanes * kElements) {
      Vector<Element, kElements> a[kProducts], b[kProducts][kRepeats];
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        a[i].Load(left[i] + at);
#pragma unroll
        for (int r = 0; r < kRepeats; ++r) b[i][r].Load(right[i][r] + at);
      }
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        Element x[kElements], y[kElements];
        a[i].Unpack(x);
#pragma unroll
        for (int r = 0; r < kRepeats; ++r) {
          b[i][r].Unpack(y);
#pragma unroll
          for (int j = 0; j < kElements; ++j) sums[i][r] += number(x[j]) * number(y[j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      const int run = start + i * at_once + static_cast<int>(threadIdx.x) / lanes;
      Element* out = request.out + (first_edge * runs + run) * kRepeats;
#pragma unroll
      for (int r = 0; r < kRepeats; ++r) {
        for (int offset = lanes / 2; offset > 0; offset /= 2) {
          sums[i][r] += __shfl_xor_sync(0xffffffffu, sums[i][r], offset);
        }
        if (lane == 0 && run < count) store(sums[i][r], out + r);
      }
    }
  }
}

}  // namespace dgl_mgpu
