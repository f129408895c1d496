// What a kernel that nobody waits for tells of an id that is no row; dgl_mgpu/ops/device.py raises
// it at the next operator call.
#pragma once

#include "philox.cuh"

namespace dgl_mgpu {

// `fault` lies in host memory: {whether, the id, the number of rows}.
__device__ __forceinline__ void report_bad_id(int64* fault, int64 id, int64 num_rows) {
  fault[1] = id;
  fault[2] = num_rows;
  __threadfence_system();
  fault[0] = 1;
}

}  // namespace dgl_mgpu
