// Writing and training rows over tiers: the contract stands in dgl_mgpu/ops/scatter.py.
//
// Ids are sorted, `order` says where each stood, and equal ones keep their order. A warp sees to
// all entries of one id, so that no two write one row.
#include "fault.cuh"
#include "ggms.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// The sorted ids.
template <typename Id>
struct SortedIds {
  const Id* ids;
  const int64* order;
  int64 count;

  __device__ __forceinline__ bool IsFirst(int64 at) const {
    return at == 0 || ids[at - 1] != ids[at];
  }
  __device__ __forceinline__ bool IsLast(int64 at) const {
    return at + 1 == count || ids[at + 1] != ids[at];
  }
  // Whether all are rows; if not, one is reported.
  __device__ __forceinline__ bool AreRows(int64 num_rows, int64* fault) const {
    const int64 smallest = ids[0], largest = ids[count - 1];
    if (smallest >= 0 && largest < num_rows) return true;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      report_bad_id(fault, smallest < 0 ? smallest : largest, num_rows);
    }
    return false;
  }
};

// Whether a row is this rank's to write: `shares` has {writers, this rank's place} by segment,
// and is null where all rows are.
__device__ __forceinline__ bool is_ours(Place place, const int64* shares) {
  if (shares == nullptr) return true;
  const int64 writers = shares[2 * place.segment];
  return writers == 1 || (writers != 0 && place.row % writers == shares[2 * place.segment + 1]);
}

template <typename Id, typename Position, typename Vector>
__global__ void __launch_bounds__(kThreads)
    scatter(const Id* ids, const int64* order, int64 count, const char* source,
            const int64* tiers, int64 num_tiers, const int64* pointers, const Position* position,
            const int64* shares, int64 num_rows, int64* fault, int64 row_bytes) {
  const SortedIds<Id> sorted{ids, order, count};
  if (!sorted.AreRows(num_rows, fault)) return;
  const Rows<Position> rows{tiers, static_cast<int>(num_tiers), position};
  const int64 vectors = row_bytes / static_cast<int64>(sizeof(Vector));
  for (int64 at = static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / 32; at < count;
       at += static_cast<int64>(gridDim.x) * kWarps) {
    if (!sorted.IsLast(at)) continue;
    const Place place = rows.Find(ids[at]);
    if (!is_ours(place, shares)) continue;
    Vector* to = reinterpret_cast<Vector*>(pointers[place.segment] + place.row * row_bytes);
    const Vector* from = reinterpret_cast<const Vector*>(source + order[at] * row_bytes);
    for (int64 i = threadIdx.x % 32; i < vectors; i += 32) to[i] = from[i];
  }
}

// The rules. Every operation is rounded by itself, as on the CPU.

struct SGD {
  static constexpr int kTables = 1;
  float lr, unused1, unused2, unused3;

  __device__ __forceinline__ void Step(float gradient, float (&value)[kTables]) const {
    value[0] = __fsub_rn(value[0], __fmul_rn(lr, gradient));
  }
};

struct Adagrad {
  static constexpr int kTables = 2;
  float lr, eps, unused1, unused2;

  __device__ __forceinline__ void Step(float gradient, float (&value)[kTables]) const {
    value[1] = __fadd_rn(value[1], __fmul_rn(gradient, gradient));
    const float ratio = __fdiv_rn(gradient, __fadd_rn(__fsqrt_rn(value[1]), eps));
    value[0] = __fsub_rn(value[0], __fmul_rn(lr, ratio));
  }
};

struct Adam {
  static constexpr int kTables = 3;
  float step_size, one_minus_beta1, one_minus_beta2, eps;

  __device__ __forceinline__ void Step(float gradient, float (&value)[kTables]) const {
    const float squared = __fmul_rn(gradient, gradient);
    value[1] = __fadd_rn(value[1], __fmul_rn(__fsub_rn(gradient, value[1]), one_minus_beta1));
    value[2] = __fadd_rn(value[2], __fmul_rn(__fsub_rn(squared, value[2]), one_minus_beta2));
    const float ratio = __fdiv_rn(value[1], __fadd_rn(__fsqrt_rn(value[2]), eps));
    value[0] = __fsub_rn(value[0], __fmul_rn(step_size, ratio));
  }
};

// `pointers` has kTables columns: the table and its state.
template <typename Id, typename Position, typename Rule>
__global__ void __launch_bounds__(kThreads)
    update(const Id* ids, const int64* order, int64 count, const float* gradients,
           const int64* tiers, int64 num_tiers, const int64* pointers, const Position* position,
           const int64* shares, int64 num_rows, int64* fault, int64 width, double setting0,
           double setting1, double setting2, double setting3) {
  constexpr int kTables = Rule::kTables;
  const SortedIds<Id> sorted{ids, order, count};
  if (!sorted.AreRows(num_rows, fault)) return;
  const Rows<Position> rows{tiers, static_cast<int>(num_tiers), position};
  const Rule rule{static_cast<float>(setting0), static_cast<float>(setting1),
                  static_cast<float>(setting2), static_cast<float>(setting3)};
  for (int64 at = static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / 32; at < count;
       at += static_cast<int64>(gridDim.x) * kWarps) {
    if (!sorted.IsFirst(at)) continue;
    const Place place = rows.Find(ids[at]);
    if (!is_ours(place, shares)) continue;
    int64 end = at + 1;
    while (!sorted.IsLast(end - 1)) ++end;
    const int64* base = pointers + kTables * place.segment;
    for (int64 column = threadIdx.x % 32; column < width; column += 32) {
      float gradient = gradients[order[at] * width + column];
      for (int64 i = at + 1; i < end; ++i) gradient += gradients[order[i] * width + column];
      const int64 offset = place.row * width + column;
      float value[kTables];
#pragma unroll
      for (int table = 0; table < kTables; ++table) {
        value[table] = reinterpret_cast<const float*>(base[table])[offset];
      }
      rule.Step(gradient, value);
#pragma unroll
      for (int table = 0; table < kTables; ++table) {
        reinterpret_cast<float*>(base[table])[offset] = value[table];
      }
    }
  }
}

}  // namespace dgl_mgpu
