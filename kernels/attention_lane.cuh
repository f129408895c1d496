// What one lane does of attention, whichever warps share the path.
#pragma once

#include "attention.cuh"
#include "spmm.cuh"

namespace dgl_mgpu {

// What a lane may read of entries at once takes so many registers at most.
constexpr int kMostRegisters = 56;

// Entries that a lane reads at once: a power of two, so that chunks fill 32 entries.
template <int kRowLanes, int kRegisters>
struct Reads {
  static constexpr int kFit = kMostRegisters / kRegisters;
  static constexpr int kFew = kFit >= 8 ? 8 : kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  static constexpr int kCount = kRowLanes < kFew ? kRowLanes : kFew;
};

// What one lane does: it has kVectors vectors of kVector columns of one head, which kLanes lanes
// share; a warp takes kHeads heads of a row, and reads several entries at a time if lanes are left.
template <typename Id, typename Element, typename Score, typename Pass, bool kDropout, bool kTerms,
          int kVector, int kVectors, int kLanes, int kHeads>
struct Lane {
  using Request = Attention<Id, Element>;
  using Number = typename Computed<Element>::Type;
  using Vector = Loaded<Element, kVector>;
  static constexpr int kColumns = kVector * kVectors;
  // Whether edges' numbers are read.
  static constexpr bool kNumbersEdges = kDropout || kTerms;
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
      ((Pass::kBySource ? kNumbers : 1) + 2 * kTerms) * static_cast<int>(sizeof(Number)) / 4 + 2;
  static constexpr int kReads = Reads<kRowLanes, kRegisters>::kCount;
  // Of the state: sums by column, and what comes behind them.
  static constexpr int kBehind = kColumns;
  static constexpr int kLargest = kBehind, kSum = kBehind + 1, kSize = kBehind + 2;
  static constexpr int kOfLeft = kBehind;
  // The size of values bounds gradients of numbers.
  static constexpr bool kHasSize = Pass::kForward && Score::kOfScalars;
  static constexpr int kOfSource = Score::kOfScalars ? 1 : Score::kReadsLeft ? kColumns : 0;
  static constexpr int kOfPass = Pass::kForward ? 2 + kHasSize : Pass::kBySource ? kOfSource : 0;
  static constexpr int kState = kBehind + kOfPass;

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
    Number edge_score, edge_weight;
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
  __device__ __forceinline__ void Unpack(const Element* of_head, Number* to) const {
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
  __device__ __forceinline__ void UnpackRow(const Base* base, int64 row, Number* to) const {
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

  // What an edge has of its own for this head, in so many columns.
  __device__ __forceinline__ Number LoadTerm(const Number* terms, int64 columns, Id edge,
                                             Number absent) const {
    if (terms == nullptr) return absent;
    return __ldg(terms + static_cast<int64>(edge) * columns + (columns == 1 ? 0 : head));
  }

  __device__ __forceinline__ void LoadEntry(Entry& entry) const {
    const Id other = entry.other;
    if constexpr (kTerms) {
      entry.edge_score =
          LoadTerm(request.edge_scores, request.score_columns, entry.edge, Number{0});
      entry.edge_weight =
          LoadTerm(request.edge_weights, request.weight_columns, entry.edge, Number{1});
    }
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
    const Number sum = row.number + (Pass::kBySource ? ProductOf(entry, kRight) : entry.number);
    return kTerms ? sum + entry.edge_score : sum;
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
  // A score of rows, of its parts' total.
  __device__ __forceinline__ Number Scored(Number total, const Entry& entry) const {
    const Number score =
        Score::kHasVector ? total : total * static_cast<Number>(request.scale);
    return kTerms ? score + entry.edge_score : score;
  }
  static __device__ __forceinline__ Number WeightOf(const Entry& entry) {
    return kTerms ? entry.edge_weight : Number{1};
  }
  // What dropout multiplies a weight by.
  __device__ __forceinline__ Number KeptOf(const Entry& entry) const {
    if constexpr (!kDropout) return 1;
    const int64 number =
        request.edge_numbers == nullptr ? entry.edge : __ldg(request.edge_numbers + entry.edge);
    const Draws draws = philox(static_cast<uint64>(number), static_cast<uint32>(head) / 4,
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
        score = Scored(Total(PartOf(left, right)), entries[i]);
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
      const Number of_edge = WeightOf(entries[i]);
      weight *= KeptOf(entries[i]) * of_edge;
      Number summed[kColumns];
      Widen(entries[i].summed, summed);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        state[j] += weight * summed[j];
        if constexpr (kHasSize) state[kSize] = max(state[kSize], fabs(of_edge * summed[j]));
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
      of_score = Scored(Total(PartOf(left, right)), entry);
    }
    const Number product = Total(Product(row.summed, summed));
    const Number largest = Pass::kBySource ? ProductOf(entry, kLargestScore) : row.largest;
    const Number inverse = Pass::kBySource ? ProductOf(entry, kInverse) : row.inverse;
    const Number of_row = Pass::kBySource ? ProductOf(entry, kProduct) : row.product;
    if (!entry.active) return;
    const Number weight = exponential_of(of_score - largest) * inverse;
    const Number unweighted = KeptOf(entry), kept = unweighted * WeightOf(entry);
    const Number change = weight * (kept * product - of_row);  // of the score
    Number of_edge = change;
    if constexpr (Score::kOfScalars) {
      of_edge *= Slope(sum);
      state[kOfLeft] += of_edge;
      AddToRight(entry, of_edge);
    }
    if constexpr (kTerms && Pass::kBySource) {
      const int64 at = static_cast<int64>(entry.edge) * request.heads + head;
      const bool writes = sub == 0 && has_head;
      if (writes && request.of_edge_scores != nullptr) request.of_edge_scores[at] = of_edge;
      if (writes && request.of_edge_weights != nullptr) {
        request.of_edge_weights[at] = weight * unweighted * product;
      }
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
      Number* kept = request.numbers + at * kKept;
      if (row < request.added_rows) {  // to what earlier edges gave
        Number before[kState];
        UnpackRow(request.out, row, before);
        before[kSum] = kept[kKeptSum];
        before[kLargest] = before[kSum] == 0 ? lowest<Number>() : kept[kKeptLargest];
        if constexpr (kHasSize) before[kSize] = kept[kKeptSize];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) before[i] *= before[kSum];
        Merge(state, before);
      }
      const int64 degree = request.indptr[row + 1] - request.indptr[row];
      const Number sum = state[kSum];
      // Without edges, or if all of them are left out. That all scores happen to be minus infinity
      // gives NaN.
      const bool is_empty = sum == 0 && (degree == 0 || (kTerms && request.edge_scores != nullptr));
      const Number factor = is_empty ? Number{0} : 1 / sum;
      Number offset[kColumns];
      if (request.bias != nullptr) Unpack(request.bias + head * request.width, offset);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        state[i] = state[i] * factor + (request.bias == nullptr ? Number{0} : offset[i]);
      }
      StoreRow(request.out, row, state);
      __syncwarp(kRowLanes == 32 ? kAllLanes : (1u << kRowLanes % 32) - 1);  // all have read it
      if (!first) return;
      kept[kKeptLargest] = is_empty ? Number{0} : state[kLargest];
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

}  // namespace dgl_mgpu
