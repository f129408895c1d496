// What comes before and after attention's passes over edges: kernels over rows of its operands. The
// contract stands in dgl_mgpu/ops/attention.py.
#include "attention.cuh"
#include "spmm.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 256;

// What the backward pass reads of destinations: a group of kLanes lanes for each head. Units are for
// additive scores, which have numbers on the right; products of a gradient with values are
// multiplied by at most `factor`.
template <typename Element, int kVector, int kLanes>
__global__ void __launch_bounds__(kThreads)
    multiply_gradients(const Element* grad, const Element* out,
                       const typename Computed<Element>::Type* kept,
                       const typename Computed<Element>::Type* right, const Element* bias,
                       typename Computed<Element>::Type* products, int* exponents, int64 count,
                       int64 heads, int64 width, double factor) {
  using Number = typename Computed<Element>::Type;
  const int64 at = (static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  const int64 head = at % heads;
  const int sub = threadIdx.x % kLanes;
  Number sum = 0;
  double size = 0;
  if (at < count) {
    for (int64 column = sub * kVector; column < width; column += kLanes * kVector) {
      Loaded<Element, kVector> loaded[3];
      loaded[0].Load(grad + at * width + column);
      loaded[1].Load(out + at * width + column);
      if (bias != nullptr) loaded[2].Load(bias + head * width + column);
      Element of_grad[kVector], of_out[kVector], of_bias[kVector];
      loaded[0].Unpack(of_grad);
      loaded[1].Unpack(of_out);
      if (bias != nullptr) loaded[2].Unpack(of_bias);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const Number offset = bias == nullptr ? Number{0} : number(of_bias[i]);
        const Number gradient = number(of_grad[i]);
        sum += gradient * (number(of_out[i]) - offset);
        size += fabs(gradient);
      }
    }
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, step);
    size += __shfl_xor_sync(kAllLanes, size, step);
  }
  if (at >= count || sub != 0) return;
  Number* to = products + at * kProducts;
  to[kRight] = right == nullptr ? Number{0} : right[at];
  to[kLargestScore] = kept[at * kKept + kKeptLargest];
  const Number sum_of_powers = kept[at * kKept + kKeptSum];
  to[kInverse] = sum_of_powers == 0 ? Number{0} : 1 / sum_of_powers;
  to[kProduct] = sum;
  if (right == nullptr) return;
  const double largest = kept[at * kKept + kKeptSize];
  const double bound = factor * (size * largest + fabs(static_cast<double>(sum)));
  int above = 0;
  frexp(bound, &above);  // the bound is less than this power of two
  const int exponent = bound == 0 ? 0 : min(max(kBits - above, -1000), 1000);
  exponents[at] = bound <= 0x1p1000 ? exponent : kNoBound;
}

// Numbers that additive scores are made of: products of values with two vectors. A group of kLanes
// lanes for each head.
template <typename Element, int kVector, int kLanes>
__global__ void __launch_bounds__(kThreads)
    multiply_vectors(const Element* values, const typename Computed<Element>::Type* vectors,
                     typename Computed<Element>::Type* left,
                     typename Computed<Element>::Type* right, int64 count, int64 right_count,
                     int64 heads, int64 width) {
  using Number = typename Computed<Element>::Type;
  const int64 at = (static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  const int64 head = at % heads;
  const int sub = threadIdx.x % kLanes;
  Number sums[2] = {};
  if (at < count) {
    for (int64 column = sub * kVector; column < width; column += kLanes * kVector) {
      Loaded<Element, kVector> loaded;
      loaded.Load(values + at * width + column);
      Element value[kVector];
      loaded.Unpack(value);
      const Number* of_left = vectors + head * width + column;
      const Number* of_right = of_left + heads * width;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        sums[0] += number(value[i]) * of_left[i];
        sums[1] += number(value[i]) * of_right[i];
      }
    }
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    sums[0] += __shfl_xor_sync(kAllLanes, sums[0], step);
    sums[1] += __shfl_xor_sync(kAllLanes, sums[1], step);
  }
  if (at >= count || sub != 0) return;
  left[at] = sums[0];
  if (at < right_count) right[at] = sums[1];
}

// Gradients of the destinations' numbers, of their integers.
template <typename Result>
__global__ void __launch_bounds__(kThreads)
    scale_sums(const int64* sums, const unsigned char* bad, const int* exponents, Result* out,
               int64 count) {
  const int64 at = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  Result sum = 0;
  if (sums[at] != 0) sum = static_cast<Result>(sums[at] / power_of_two(exponents[at]));
  if (bad[at]) sum = __uint_as_float(0x7fc00000u);
  out[at] = sum;
}

// Where numbers on the left and on the right are products of values with vectors: adds what their
// gradients make of those of the values, and sums up by block what they make of the vectors'.
template <typename Element, int kVector>
__global__ void __launch_bounds__(kThreads)
    fold_vectors(const Element* values, const typename Computed<Element>::Type* of_left,
                 const typename Computed<Element>::Type* of_right,
                 const typename Computed<Element>::Type* vectors, Element* of_values,
                 typename Computed<Element>::Type* shares, int64 num_src, int64 num_dst,
                 int64 heads, int64 width) {
  using Number = typename Computed<Element>::Type;
  const int64 columns = heads * width;
  // A block takes some columns of every so many rows: several rows at a time if they are short.
  const int64 num_vectors = (columns + kVector - 1) / kVector;
  int lanes = kThreads;
  while (lanes / 2 >= num_vectors) lanes /= 2;
  const int row_of_thread = threadIdx.x / lanes, rows = kThreads / lanes;
  __shared__ Number sums[2][kThreads * kVector];
  for (int64 first = 0; first < num_vectors; first += lanes) {
    const int64 column = (first + threadIdx.x % lanes) * kVector;
    const bool active = column < columns;
    const int64 head = active ? column / width : 0;
    Number of_vectors[2][kVector], vector[2][kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      of_vectors[0][i] = of_vectors[1][i] = 0;
      vector[0][i] = active ? vectors[column + i] : Number{0};
      vector[1][i] = active ? vectors[columns + column + i] : Number{0};
    }
    for (int64 row = static_cast<int64>(blockIdx.x) * rows + row_of_thread; row < num_src && active;
         row += static_cast<int64>(gridDim.x) * rows) {
      const Number left = of_left[row * heads + head];
      const Number right =
          of_right != nullptr && row < num_dst ? of_right[row * heads + head] : Number{0};
      Loaded<Element, kVector> loaded[2];
      loaded[0].Load(values + row * columns + column);
      using Part = typename Loaded<Element, kVector>::Part;
      const Part* before = reinterpret_cast<const Part*>(of_values + row * columns + column);
#pragma unroll
      for (int i = 0; i < Loaded<Element, kVector>::kParts; ++i) loaded[1].parts[i] = before[i];
      Element value[kVector], gradient[kVector];
      loaded[0].Unpack(value);
      loaded[1].Unpack(gradient);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        of_vectors[0][i] += left * number(value[i]);
        of_vectors[1][i] += right * number(value[i]);
        store(number(gradient[i]) + left * vector[0][i] + right * vector[1][i], gradient + i);
      }
      store_once(of_values + row * columns + column, gradient);
    }
    __syncthreads();  // what was there has been read
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      sums[0][threadIdx.x * kVector + i] = of_vectors[0][i];
      sums[1][threadIdx.x * kVector + i] = of_vectors[1][i];
    }
    __syncthreads();
    if (row_of_thread != 0 || !active) continue;
    for (int side = 0; side < 2; ++side) {
      Number* to = shares + (2 * static_cast<int64>(blockIdx.x) + side) * columns + column;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        Number sum = 0;
        for (int other = 0; other < rows; ++other) {
          sum += sums[side][(other * lanes + threadIdx.x) * kVector + i];
        }
        to[i] = sum;
      }
    }
  }
}

}  // namespace dgl_mgpu
