// Many small copies in one launch, and the padding behind them. The contract stands in
// dgl_mgpu/capture/copy_list.py.
#include "philox.cuh"

namespace dgl_mgpu {

// Bytes or elements of one item that a block writes at a time.
constexpr int64 kChunk = 1 << 14;

enum Kind : int64 { kNothing = 0, kRows = 1, kIds = 2, kStarts = 3 };

struct Item {
  char* to;
  int64 size;         // of the buffer: bytes of rows, else elements
  int64 first_chunk;  // chunks of the buffers before
  int64 padding;      // eight bytes of it; or an id; or, of starts, all edges
  int64 share;        // of starts: how many edges rows have that share them evenly
  // Of the batch.
  int64 kind;
  const char* from;
  int64 count;  // bytes or elements that are copied
  int64 last;   // of rows, where padding ends; of starts, how many edges are no padding
};

template <int kItems>
struct Items {
  int64 count;
  int64 chunks;
  Item items[kItems];
};

template <typename Word>
__device__ void copy_words(const Item& item, int64 begin, int64 end) {
  Word* out = reinterpret_cast<Word*>(item.to);
  const Word* in = reinterpret_cast<const Word*>(item.from);
  constexpr int64 size = sizeof(Word);
  for (int64 i = begin / size + threadIdx.x; i < end / size; i += blockDim.x) out[i] = in[i];
}

template <typename Word>
__device__ void pad_words(const Item& item, int64 begin, int64 end) {
  Word* out = reinterpret_cast<Word*>(item.to);
  constexpr int64 size = sizeof(Word);
  const uint64 padding = item.padding;
  for (int64 i = begin / size + threadIdx.x; i < end / size; i += blockDim.x) {
    out[i] = static_cast<Word>(padding >> (8 * (i * size % 8)));
  }
}

__device__ inline void write_rows(const Item& item, int64 begin, int64 end) {
  const int64 copied = end < item.count ? end : item.count;
  const uint64 joint = reinterpret_cast<uint64>(item.to) | item.count;
  const uint64 from = reinterpret_cast<uint64>(item.from);
  if ((joint | from) % 16 == 0) {
    copy_words<uint4>(item, begin, copied);
  } else if ((joint | from) % 4 == 0) {
    copy_words<uint32>(item, begin, copied);
  } else {
    copy_words<char>(item, begin, copied);
  }
  const int64 first = begin > item.count ? begin : item.count;
  const int64 last = end < item.last ? end : item.last;
  if ((joint | item.last) % 4 == 0) {
    pad_words<uint32>(item, first, last);
  } else {
    pad_words<char>(item, first, last);
  }
}

template <typename Id>
__device__ void write_ids(const Item& item, int64 begin, int64 end) {
  Id* out = reinterpret_cast<Id*>(item.to);
  const Id* in = reinterpret_cast<const Id*>(item.from);
  for (int64 i = begin + threadIdx.x; i < end; i += blockDim.x) {
    int64 value = item.padding;
    if (i < item.count) {
      value = in[i];
    } else if (item.kind == kStarts) {
      const int64 one_each = item.last + 1 + i - item.count;
      const int64 even = item.padding - item.share * (item.size - 1 - i);
      const int64 start = one_each > even ? one_each : even;
      value = start < item.padding ? start : item.padding;
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
    const int64 end = begin + kChunk < item.size ? begin + kChunk : item.size;
    if (item.kind == kRows) {
      write_rows(item, begin, end);
    } else if (item.kind != kNothing) {
      write_ids<Id>(item, begin, end);
    }
  }
}

}  // namespace dgl_mgpu
