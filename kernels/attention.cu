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
#include "softmax.cuh"
#include "spmm.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Blocks that a multiprocessor is to hold, which bounds the registers of a thread, and those that
// what it reads of entries may take.
constexpr int kBlocks = 2;
constexpr int kMostRegisters = 56;
// For the parts of rows that a block joins.
constexpr int kSharedBytes = 32 << 10;

// ---- Scores ----

struct Additive {
  static constexpr bool kOfScalars = true, kHasVector = false, kReadsLeft = false;
};
struct Dynamic {
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
  const Element* grad;      // of the output
  const Number* products;   // by destination and head, kProducts of each
  const int* exponents;     // of the same: so many powers of two, units, make 1
  const uint64* key;        // of what is dropped
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

// Entries that a lane reads at once: a power of two, so that chunks fill 32 entries.
template <int kRowLanes, int kRegisters>
struct Reads {
  static constexpr int kFit = kMostRegisters / kRegisters;
  static constexpr int kFew = kFit >= 8 ? 8 : kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  static constexpr int kCount = kRowLanes < kFew ? kRowLanes : kFew;
};

// What one lane does: it has kVectors vectors of kVector columns of one head, which kLanes lanes
// share; a warp takes kHeads heads of a row, and reads several entries at a time if lanes are left.
template <typename Id, typename Element, typename Score, typename Pass, bool kDropout, int kVector,
          int kVectors, int kLanes, int kHeads>
struct Lane {
  using Request = Attention<Id, Element>;
  using Number = typename Computed<Element>::Type;
  using Vector = Loaded<Element, kVector>;
  static constexpr int kColumns = kVector * kVectors;
  static constexpr bool kDrops = kDropout;
  static constexpr int kTogether = kLanes * kHeads < 32 ? kHeads : 32 / kLanes;
  static constexpr int kRowLanes = kLanes * kTogether, kGroups = 32 / kRowLanes;
  // Rows of an entry: of what is summed, and of what its score is made of besides.
  static constexpr bool kOtherRow =
      Pass::kBySource ? !Score::kOfScalars : Score::kReadsLeft;
  // Products of a destination are one in each of a head's lanes, if there are enough of them.
  static constexpr bool kSpreads = kLanes >= kProducts;
  static constexpr int kNumbers = kSpreads ? 1 : kProducts;
  // Of an entry: its rows, its numbers, and what it is.
  static constexpr int kRegisters =
      (kOtherRow ? 2 : 1) * kVectors * static_cast<int>(sizeof(Vector)) / 4 +
      (Pass::kBySource ? kNumbers : 1) * static_cast<int>(sizeof(Number)) / 4 + 2;
  static constexpr int kReads = Reads<kRowLanes, kRegisters>::kCount;
  // Of the state: sums by column, and what comes behind them.
  static constexpr int kBehind = kColumns;
  static constexpr int kLargest = kBehind, kSum = kBehind + 1, kSize = kBehind + 2;
  static constexpr int kOfLeft = kBehind;
  // The size of values bounds gradients of numbers.
  static constexpr bool kHasSize = Pass::kForward && Score::kOfScalars;
  static constexpr int kState =
      kBehind + (Pass::kForward ? 2 + kHasSize
                                : !Pass::kBySource ? 0
                                                   : Score::kOfScalars ? 1
                                                                       : Score::kReadsLeft ? kColumns : 0);

  // A row's operands: the gradient of a destination's output, or a source's values; and what scores
  // are made of.
  struct Row {
    Number summed[kColumns];
    Number scored[kColumns];
    Number number, largest, inverse, product;
  };
  struct Entry {
    Vector summed[kVectors];
    Vector scored[kVectors];
    Number number;
    Number products[kNumbers];
    int exponent;
    Id other;  // the node at the other end
    Id edge;
    bool active;
  };

  const Request& request;
  int head, sub;  // which head it is of, and which of the lanes of the head
  bool has_head;
  Number vector[kColumns];
  Number vector_sum[kColumns];

  __device__ __forceinline__ Lane(const Request& of, int tile, int lane) : request(of) {
    const int place = lane % kRowLanes;
    head = tile * kTogether + place / kLanes;
    sub = place % kLanes;
    has_head = head < request.heads;
    if (!has_head) head = static_cast<int>(request.heads) - 1;
    if constexpr (Score::kHasVector) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int64 column = ColumnOf(i / kVector) + i % kVector;
        vector[i] = Has(i / kVector) ? request.vector[head * request.width + column] : Number{0};
        vector_sum[i] = 0;
      }
    }
  }

  __device__ __forceinline__ int64 ColumnOf(int i) const {
    return static_cast<int64>(i * kLanes + sub) * kVector;
  }
  __device__ __forceinline__ bool Has(int i) const {
    return has_head && ColumnOf(i) < request.width;
  }
  // Bytes of a row of all heads.
  __device__ __forceinline__ int64 RowBytes() const {
    return request.heads * request.width * static_cast<int64>(sizeof(Element));
  }
  // Columns that there are not are read from where the head begins, and no use is made of them.
  template <typename Base>
  __device__ __forceinline__ void Load(const Base* base, Id row, Vector (&to)[kVectors]) const {
    const Element* from =
        in_row(static_cast<const Element*>(base), row, RowBytes()) + head * request.width;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int64 column = ColumnOf(i);
      to[i].Load(from + (column < request.width ? column : 0));
    }
  }
  static __device__ __forceinline__ void Widen(const Vector (&from)[kVectors],
                                               Number (&to)[kColumns]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      Element elements[kVector];
      from[i].Unpack(elements);
#pragma unroll
      for (int j = 0; j < kVector; ++j) to[i * kVector + j] = number(elements[j]);
    }
  }
  // One head's columns of this lane; 0 where there is none.
  __device__ __forceinline__ void Unpack(const Element* of_head, Number (&to)[kColumns]) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const bool has = Has(i);
      Vector loaded;
      loaded.Load(of_head + (has ? ColumnOf(i) : 0));
      Element elements[kVector];
      loaded.Unpack(elements);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        to[i * kVector + j] = has ? number(elements[j]) : Number{0};
      }
    }
  }
  template <typename Base>
  __device__ __forceinline__ void UnpackRow(const Base* base, int64 row,
                                            Number (&to)[kColumns]) const {
    Unpack(in_row(static_cast<const Element*>(base), row, RowBytes()) + head * request.width, to);
  }

  // ---- What is read of rows and entries ----

  __device__ __forceinline__ Row LoadRow(int64 row) const {
    Row read;
    if (row >= request.num_rows) row = request.num_rows - 1;
    const int64 at = row * request.heads + head;
    if constexpr (Pass::kBySource) {
      UnpackRow(request.values, row, read.summed);
      if constexpr (Score::kReadsLeft) UnpackRow(request.left, row, read.scored);
      if constexpr (Score::kOfScalars) read.number = static_cast<const Number*>(request.left)[at];
      return read;
    }
    if constexpr (Score::kOfScalars) {
      read.number = static_cast<const Number*>(request.right)[at];
    } else {
      UnpackRow(request.right, row, read.scored);
    }
    if constexpr (!Pass::kForward) {
      UnpackRow(request.grad, row, read.summed);
      Number of[kProducts];
      LoadProducts(at, of);
      read.largest = of[kLargestScore];
      read.inverse = of[kInverse];
      read.product = of[kProduct];
    }
    return read;
  }

  __device__ __forceinline__ void LoadProducts(int64 at, Number (&to)[kProducts]) const {
    Loaded<Number, kProducts> loaded;
    loaded.Load(request.products + at * kProducts);
    loaded.Unpack(to);
  }

  __device__ __forceinline__ void LoadEntry(Entry& entry) const {
    const Id other = entry.other;
    const int64 at = static_cast<int64>(other) * request.heads + head;
    if constexpr (Pass::kBySource) {
      Load(request.grad, other, entry.summed);
      if constexpr (!Score::kOfScalars) Load(request.right, other, entry.scored);
      if constexpr (kSpreads) {
        entry.products[0] = __ldg(request.products + at * kProducts + sub % kProducts);
      } else {
        LoadProducts(at, entry.products);
      }
      if constexpr (Score::kOfScalars) entry.exponent = __ldg(request.exponents + at);
      return;
    }
    if constexpr (Score::kOfScalars) {
      entry.number = __ldg(static_cast<const Number*>(request.left) + at);
    }
    Load(request.values, other, entry.summed);
    if constexpr (Score::kReadsLeft) Load(request.left, other, entry.scored);
  }

  // One of an entry's products; all lanes of the warp ask together.
  static __device__ __forceinline__ Number ProductOf(const Entry& entry, int which) {
    if constexpr (!kSpreads) return entry.products[which];
    const int first = threadIdx.x % 32 / kLanes * kLanes;
    return __shfl_sync(kAllLanes, entry.products[0], first + which);
  }

  // ---- Scores ----

  // Over the lanes of a head.
  static __device__ __forceinline__ Number Total(Number value) {
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      value += __shfl_xor_sync(kAllLanes, value, step);
    }
    return value;
  }
  __device__ __forceinline__ Number Act(Number value) const {
    return value > 0 ? value : static_cast<Number>(request.slope) * value;
  }
  __device__ __forceinline__ Number Slope(Number value) const {
    return value > 0 ? Number{1} : static_cast<Number>(request.slope);
  }
  static __device__ __forceinline__ Number Product(const Number (&one)[kColumns],
                                                   const Number (&other)[kColumns]) {
    Number sum = 0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum += one[i] * other[i];
    return sum;
  }
  // Operands on the left and on the right, where they are rows.
  __device__ __forceinline__ void Operands(const Row& row, const Entry& entry,
                                           const Number (&summed)[kColumns],
                                           Number (&left)[kColumns],
                                           Number (&right)[kColumns]) const {
    Number of_entry[kColumns];
    if constexpr (kOtherRow) Widen(entry.scored, of_entry);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if constexpr (Pass::kBySource) {
        left[i] = Score::kReadsLeft ? row.scored[i] : row.summed[i];
        right[i] = of_entry[i];
      } else {
        left[i] = Score::kReadsLeft ? of_entry[i] : summed[i];
        right[i] = row.scored[i];
      }
    }
  }
  // Additive scores before the slope.
  static __device__ __forceinline__ Number Sum(const Row& row, const Entry& entry) {
    return row.number + (Pass::kBySource ? ProductOf(entry, kRight) : entry.number);
  }
  // A lane's part of a score of rows.
  __device__ __forceinline__ Number PartOf(const Number (&left)[kColumns],
                                           const Number (&right)[kColumns]) const {
    if constexpr (!Score::kHasVector) return Product(left, right);
    Number sum = 0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum += vector[i] * Act(left[i] + right[i]);
    return sum;
  }
  __device__ __forceinline__ Number Scaled(Number total) const {
    return Score::kHasVector ? total : total * static_cast<Number>(request.scale);
  }
  // What a weight is multiplied by.
  __device__ __forceinline__ Number KeptOf(const Entry& entry) const {
    if constexpr (!kDropout) return 1;
    const Draws draws = philox(static_cast<uint64>(entry.edge), static_cast<uint32>(head) / 4,
                               kAttentionStream, *request.key);
    const uint64 pair = head & 2 ? draws.second : draws.first;
    const uint64 word = head & 1 ? pair >> 32 : pair & 0xffffffffu;
    return word < request.threshold ? Number{0} : static_cast<Number>(request.kept);
  }

  // ---- What comes of the entries of a row ----

  static __device__ __forceinline__ void Clear(Number (&state)[kState]) {
#pragma unroll
    for (int i = 0; i < kState; ++i) state[i] = 0;
    if constexpr (Pass::kForward) state[kLargest] = lowest<Number>();
  }

  __device__ __forceinline__ void Take(const Row& row, Entry (&entries)[kReads],
                                       Number (&state)[kState]) {
    if constexpr (Pass::kForward) {
      TakeForward(row, entries, state);
    } else {
#pragma unroll
      for (int i = 0; i < kReads; ++i) TakeBackward(row, entries[i], state);
    }
  }

  __device__ __forceinline__ void TakeForward(const Row& row, const Entry (&entries)[kReads],
                                              Number (&state)[kState]) const {
    Number scores[kReads], largest = state[kLargest];
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      Number score;
      if constexpr (Score::kOfScalars) {
        score = Act(Sum(row, entries[i]));
      } else {
        Number summed[kColumns], left[kColumns], right[kColumns];
        Widen(entries[i].summed, summed);
        Operands(row, entries[i], summed, left, right);
        score = Scaled(Total(PartOf(left, right)));
      }
      scores[i] = entries[i].active ? score : lowest<Number>();
      largest = max(largest, scores[i]);
    }
    const Number base = base_of(largest);
    const Number factor = exponential_of(state[kLargest] - base);
    state[kLargest] = largest;
    state[kSum] *= factor;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) state[i] *= factor;
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      if (!entries[i].active) continue;
      Number weight = exponential_of(scores[i] - base);
      state[kSum] += weight;
      weight *= KeptOf(entries[i]);
      Number summed[kColumns];
      Widen(entries[i].summed, summed);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        state[j] += weight * summed[j];
        if constexpr (kHasSize) state[kSize] = max(state[kSize], fabs(summed[j]));
      }
    }
  }

  // Adds an edge's part of the gradient of its destination's number.
  __device__ __forceinline__ void AddToRight(const Entry& entry, Number change) const {
    if (request.right_sums == nullptr || sub != 0 || !has_head) return;
    const int64 at = static_cast<int64>(entry.other) * request.heads + head;
    const bool has_bound = entry.exponent != kNoBound;
    const double units = change * power_of_two(has_bound ? entry.exponent : 0);
    if (has_bound && fabs(units) <= kLargestSum) {
      atomicAdd(request.right_sums + at, static_cast<uint64>(static_cast<int64>(units)));
    } else {
      request.right_bad[at] = 1;
    }
  }

  __device__ __forceinline__ void TakeBackward(const Row& row, const Entry& entry,
                                               Number (&state)[kState]) {
    Number summed[kColumns], left[kColumns], right[kColumns];
    Widen(entry.summed, summed);
    Number of_score = 0, sum = 0;
    if constexpr (Score::kOfScalars) {
      sum = Sum(row, entry);
      of_score = Act(sum);
    } else {
      Operands(row, entry, summed, left, right);
      of_score = Scaled(Total(PartOf(left, right)));
    }
    const Number product = Total(Product(row.summed, summed));
    const Number largest = Pass::kBySource ? ProductOf(entry, kLargestScore) : row.largest;
    const Number inverse = Pass::kBySource ? ProductOf(entry, kInverse) : row.inverse;
    const Number of_row = Pass::kBySource ? ProductOf(entry, kProduct) : row.product;
    if (!entry.active) return;
    const Number weight = exponential_of(of_score - largest) * inverse, kept = KeptOf(entry);
    const Number change = weight * (kept * product - of_row);  // of the score
    if constexpr (Score::kOfScalars) {
      const Number of_sum = change * Slope(sum);
      state[kOfLeft] += of_sum;
      AddToRight(entry, of_sum);
    }
    const Number scaled = change * static_cast<Number>(request.scale);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      Number of_operand = 0;
      if constexpr (Score::kHasVector) {
        const Number value = left[i] + right[i];
        of_operand = change * vector[i] * Slope(value);
        if constexpr (!Pass::kBySource) vector_sum[i] += change * Act(value);
      } else if constexpr (!Score::kOfScalars) {
        of_operand = scaled * (Pass::kBySource ? right[i] : left[i]);
      }
      if constexpr (!Pass::kBySource) {
        state[i] += of_operand;
      } else {
        state[i] += weight * kept * summed[i];
        if constexpr (Score::kReadsLeft) {
          state[kOfLeft + i] += of_operand;
        } else {
          state[i] += of_operand;
        }
      }
    }
  }

  static __device__ __forceinline__ void Merge(Number (&state)[kState],
                                               const Number (&other)[kState]) {
    if constexpr (Pass::kForward) {
      const Number largest = max(state[kLargest], other[kLargest]), base = base_of(largest);
      const Number mine = exponential_of(state[kLargest] - base);
      const Number theirs = exponential_of(other[kLargest] - base);
#pragma unroll
      for (int i = 0; i < kState; ++i) {
        if (i != kLargest && !(kHasSize && i == kSize)) {
          state[i] = state[i] * mine + other[i] * theirs;
        }
      }
      state[kLargest] = largest;
      if constexpr (kHasSize) state[kSize] = max(state[kSize], other[kSize]);
    } else {
#pragma unroll
      for (int i = 0; i < kState; ++i) state[i] += other[i];
    }
  }
  // What the groups of lanes have of a row.
  static __device__ __forceinline__ void MergeGroups(Number (&state)[kState]) {
#pragma unroll
    for (int step = kRowLanes; step < 32; step *= 2) {
      Number other[kState];
#pragma unroll
      for (int i = 0; i < kState; ++i) other[i] = __shfl_xor_sync(kAllLanes, state[i], step);
      Merge(state, other);
    }
    if constexpr (kHasSize) {
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) {
        state[kSize] = max(state[kSize], __shfl_xor_sync(kAllLanes, state[kSize], step));
      }
    }
  }

  // ---- What is written ----

  // Columns of one head of a row.
  __device__ __forceinline__ void StoreRow(Element* base, int64 row, const Number* numbers) const {
    Element* to = base + (row * request.heads + head) * request.width;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!Has(i)) continue;
      Element elements[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) store(numbers[i * kVector + j], elements + j);
      store_once(to + ColumnOf(i), elements);
    }
  }

  // A share's part of the vector's gradient.
  __device__ __forceinline__ void StoreNumbers(int64 share) const {
    Number* to = request.numbers + (share * request.heads + head) * request.width;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!Has(i)) continue;
#pragma unroll
      for (int j = 0; j < kVector; ++j) to[ColumnOf(i) + j] = vector_sum[i * kVector + j];
    }
  }

  __device__ __forceinline__ void Write(int64 row, Number (&state)[kState]) const {
    const int64 at = row * request.heads + head;
    [[maybe_unused]] const bool first = sub == 0 && has_head;
    if constexpr (Pass::kForward) {
      const int64 degree = request.indptr[row + 1] - request.indptr[row];
      const Number sum = state[kSum], factor = degree == 0 ? Number{0} : 1 / sum;
      Number offset[kColumns];
      if (request.bias != nullptr) Unpack(request.bias + head * request.width, offset);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        state[i] = state[i] * factor + (request.bias == nullptr ? Number{0} : offset[i]);
      }
      StoreRow(request.out, row, state);
      if (!first) return;
      Number* kept = request.numbers + at * kKept;
      kept[kKeptLargest] = degree == 0 ? Number{0} : state[kLargest];
      kept[kKeptSum] = sum;
      kept[kKeptSize] = 0;
      if constexpr (kHasSize) kept[kKeptSize] = state[kSize];
      return;
    }
    if constexpr (Pass::kBySource) {
      if (row < request.added_rows) {
        Number before[kColumns];
        UnpackRow(request.out, row, before);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) state[i] += before[i];
      }
    }
    StoreRow(request.out, row, state);
    if constexpr (Pass::kBySource && Score::kReadsLeft) {
      StoreRow(request.left_out, row, state + kOfLeft);
    } else if constexpr (Pass::kBySource && Score::kOfScalars) {
      if (first) request.numbers[at] = state[kOfLeft];
    }
  }
};

template <typename Id, typename Element, typename Score, typename Pass, bool kDropout, int kVector,
          int kVectors, int kLanes, int kHeads>
__global__ void __launch_bounds__(kThreads, kBlocks) attend(Attention<Id, Element> request) {
  using Of = Lane<Id, Element, Score, Pass, kDropout, kVector, kVectors, kLanes, kHeads>;
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
  if constexpr (Of::kDrops) next_edge = edge_of(lane);
  for (int at = 0; at < count; at += kChunk) {
    if (at % 32 == 0) {
      id = next_id;
      next_id = id_of(at + 32 + lane);
      if constexpr (Of::kDrops) {
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
      if constexpr (Of::kDrops) entries[i].edge = __shfl_sync(kAllLanes, edge, slot);
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
template <typename Id, typename Element, typename Score, typename Pass, bool kDropout, int kVector,
          int kVectors, int kLanes, int kHeads>
__global__ void __launch_bounds__(kThreads) join_attention(Attention<Id, Element> request) {
  using Of = Lane<Id, Element, Score, Pass, kDropout, kVector, kVectors, kLanes, kHeads>;
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
  to[kInverse] = 1 / kept[at * kKept + kKeptSum];
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
