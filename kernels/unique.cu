// Append-unique: the contract stands in dgl_mgpu/ops/unique.py.
#include "bounded.cuh"
#include "node_table.cuh"

namespace dgl_mgpu {

constexpr int kThreads = 512;

// `nodes` starts with the seeds and has room for all neighbors, `local` starts as the neighbors.
// `report` gets the first bad place (or -1), whether the table was large enough (-1) and the number
// of nodes. Where the number of neighbors is on the device (bounded.cuh), the table has room for
// all, which `kAmple` says.
template <typename Id, bool kAmple>
__global__ void __launch_bounds__(kThreads)
    append_unique(int64 most_seeds, const int64* exact_seeds, int64 most_neighbors,
                  const int64* exact_neighbors, Id* nodes, Id* local, int* slots, int* numbers,
                  uint64* control_words, uint64* table_words, int64 table_mask, int64* report) {
  const int64 num_seeds = count_of(most_seeds, exact_seeds);
  const int64 num_neighbors = count_of(most_neighbors, exact_neighbors);
  const GridControl control{control_words};
  const NodeTable<Id, kAmple> table{table_words, static_cast<uint64>(table_mask),
                                    control.overflow()};
  GridBarrier barrier(control);
  const Numbering scratch{slots, numbers, control.sums()};
  clear(table);
  barrier.Wait();
  const Run seeds = run_of_block(num_seeds), mine = run_of_block(num_neighbors);
  for (int64 i = seeds.begin + threadIdx.x; i < seeds.end; i += kThreads) {
    if (nodes[i] < 0) {
      atomicMin(control.bad(), static_cast<uint64>(i));
    } else {
      table.Insert(nodes[i], static_cast<int>(i));
    }
  }
  for (int64 i = mine.begin + threadIdx.x; i < mine.end; i += kThreads) {
    slots[i] = 0;
    if (local[i] < 0) {
      atomicMin(control.bad(), static_cast<uint64>(num_seeds + i));
    } else {
      slots[i] = table.Insert(local[i], static_cast<int>(num_seeds + i));
    }
  }
  barrier.Wait();
  const int64 count = number_nodes<kThreads>(table, num_seeds, mine, scratch, local, nodes,
                                                 true, barrier);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    report[0] = static_cast<int64>(*control.bad());
    report[1] = static_cast<int64>(*control.overflow());
    report[2] = count;
  }
  control.Leave();
}

}  // namespace dgl_mgpu
