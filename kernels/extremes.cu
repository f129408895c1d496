// Extremes that come in several parts: the contract stands in dgl_mgpu/ops/extremes.py. A thread
// for each element.
#include "number.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 256;

template <typename Id, typename Element, bool kHighest>
__global__ void __launch_bounds__(kThreads)
    keep_extremes(Element* values, Id* entries, Id* winners, const Element* found,
                  const Id* chosen, const Id* numbers, const Id* indices, int64 begin,
                  int64 count) {
  const int64 at = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  const Id entry = chosen[at];
  const Id edge = numbers == nullptr ? entry : numbers[entry];
  const auto before = number(values[at]);
  const auto now = number(found[at]);
  const bool is_better = kHighest ? now > before : now < before;
  if (!is_better && !(now == before && edge < entries[at])) return;
  values[at] = found[at];
  entries[at] = edge;
  winners[at] = static_cast<Id>(begin + indices[entry]);
}

template <typename Id, typename Element>
__global__ void __launch_bounds__(kThreads)
    scatter_to_winners(typename Computed<Element>::Type* out, const Element* elements,
                       const Id* winners, int64 begin, int64 rows, int64 count, int64 width) {
  const int64 at = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  const int64 row = static_cast<int64>(winners[at]) - begin;
  if (row < 0 || row >= rows) return;
  atomicAdd(out + row * width + at % width, number(elements[at]));
}

}  // namespace dgl_mgpu
