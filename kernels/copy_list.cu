// Many small copies in one launch. The contract stands in dgl_mgpu/capture/copy_list.py.
#include "philox.cuh"

namespace dgl_mgpu {

// Bytes or elements of one item that a block writes at a time.
constexpr int64 kChunk = 1 << 14;

enum Kind : int64 { kCopy = 0, kFill = 1, kStarts = 2 };

// `a` to `c` are, of a copy, the source; of a fill, the value; of the starts of rows, the first
// one's least value, how many edges rows have that share them evenly, and all edges.
struct Item {
  char* to;
  int64 count;        // bytes of a copy, else elements
  int64 kind;
  int64 first_chunk;  // chunks of the items before
  int64 a, b, c;
};

template <int kItems>
struct Items {
  int64 count;
  int64 chunks;
  Item items[kItems];
};

template <typename Word>
__device__ void copy_words(char* to, const char* from, int64 begin, int64 end) {
  Word* out = reinterpret_cast<Word*>(to);
  const Word* in = reinterpret_cast<const Word*>(from);
  constexpr int64 size = sizeof(Word);
  for (int64 i = begin / size + threadIdx.x; i < end / size; i += blockDim.x) out[i] = in[i];
}

__device__ inline void copy_chunk(const Item& item, int64 begin, int64 end) {
  const char* from = reinterpret_cast<const char*>(item.a);
  const uint64 joint = reinterpret_cast<uint64>(item.to) | item.a | item.count;
  if (joint % 16 == 0) {
    copy_words<uint4>(item.to, from, begin, end);
  } else if (joint % 4 == 0) {
    copy_words<uint32>(item.to, from, begin, end);
  } else {
    copy_words<char>(item.to, from, begin, end);
  }
}

template <typename Id>
__device__ void write_ids(const Item& item, int64 begin, int64 end) {
  Id* out = reinterpret_cast<Id*>(item.to);
  for (int64 i = begin + threadIdx.x; i < end; i += blockDim.x) {
    int64 value = item.a;
    if (item.kind == kStarts) {
      const int64 even = item.c - item.b * (item.count - 1 - i);
      value = item.a + i > even ? item.a + i : even;
      value = value < item.c ? value : item.c;
    }
    out[i] = static_cast<Id>(value);
  }
}

template <typename Id, int kItems>
__global__ void copy_list(const __grid_constant__ Items<kItems> list) {
  int64 number = 0;
  for (int64 chunk = blockIdx.x; chunk < list.chunks; chunk += gridDim.x) {
    while (number + 1 < list.count && list.items[number + 1].first_chunk <= chunk) ++number;
    const Item& item = list.items[number];
    const int64 begin = (chunk - item.first_chunk) * kChunk;
    const int64 end = begin + kChunk < item.count ? begin + kChunk : item.count;
    if (item.kind == kCopy) {
      copy_chunk(item, begin, end);
    } else {
      write_ids<Id>(item, begin, end);
    }
  }
}

}  // namespace dgl_mgpu
