// What kernels of attention are given: the contract stands in dgl_mgpu/ops/attention.py.
#pragma once

#include "softmax.cuh"

namespace dgl_mgpu {

// ---- Scores ----

struct Additive {
  static constexpr bool kOfScalars = true, kHasVector = false, kReadsLeft = false;
};
struct GATv2 {
  static constexpr bool kOfScalars = false, kHasVector = true, kReadsLeft = false;
};
// Of the values, and of rows of their own.
struct DotOfValues {
  static constexpr bool kOfScalars = false, kHasVector = false, kReadsLeft = false;
};
struct Dot {
  static constexpr bool kOfScalars = false, kHasVector = false, kReadsLeft = true;
};

// ---- Passes: what rows and entries are ----

struct Forward {
  static constexpr bool kForward = true, kBySource = false;
};
struct Destinations {
  static constexpr bool kForward = false, kBySource = false;
};
struct Sources {
  static constexpr bool kForward = false, kBySource = true;
};

// Of a destination and head, what the backward pass reads.
enum : int { kRight, kLargestScore, kInverse, kProduct, kProducts };
// Of the same, what the forward pass leaves: also the largest of the values.
enum : int { kKeptLargest, kKeptSum, kKeptSize, kKept };
// Integers of sums are at most this.
constexpr int kBits = 61;
constexpr double kLargestSum = 0x1p61;
// In place of an exponent, where sums have no bound.
constexpr int kNoBound = 1 << 20;

// Of exponents of numbers that are neither subnormal nor infinite.
__device__ __forceinline__ double power_of_two(int exponent) {
  return __longlong_as_double(static_cast<int64>(exponent + 1023) << 52);
}

template <typename Id, typename Element>
struct Attention {
  using Number = typename Computed<Element>::Type;

  const Id* indptr;
  const Id* indices;
  const Id* eids;  // null where entry i is edge i
  const Element* values;
  const void* left;  // of additive scores a Number for each head, else a row
  const void* right;
  const Number* vector;
  const Element* bias;      // null if there is none
  // By edge: added to scores, and what the softmax is multiplied by; null, or with a column for
  // each head or for all.
  const Number* edge_scores;
  const Number* edge_weights;
  int64 score_columns;
  int64 weight_columns;
  const Element* grad;      // of the output
  const Number* products;   // by destination and head, kProducts of each
  const int* exponents;     // of the same: 2^exponent units make 1
  const uint64* key;        // of what is dropped
  const int64* edge_numbers;  // by edge, what its draws depend on; null where that is its own number
  uint64 threshold;         // draws of 32 bits below it drop a weight
  double kept;              // what the others are multiplied by
  double slope;
  double scale;
  // The output; or the gradient of rows on the right; or that of values.
  Element* out;
  Element* left_out;  // the gradient of rows on the left
  // What destinations keep, kKept of each head; or the gradient of numbers on the left; or shares of
  // the vector's gradient.
  Number* numbers;
  // Gradients of numbers on the right, in units; and whether they are not finite.
  uint64* right_sums;
  unsigned char* right_bad;
  // Gradients by edge and head, or null.
  Number* of_edge_scores;
  Number* of_edge_weights;
  int64 num_rows;
  int64 added_rows;  // so many first rows of the output are added to what it has
  int64 heads;
  int64 width;
  int64 tiles;  // warps that a row's heads take
  int64 share_length;
  int64 num_shares;
  // By share: its part of the row that it is in when it begins, and of the row that it is in when
  // it ends if that began in it; and the number of the latter, or -1.
  Number* parts;
  int64* open_rows;

  __device__ __forceinline__ int64 EndOf(int64 row) const { return row + indptr[row + 1]; }
};

}  // namespace dgl_mgpu
