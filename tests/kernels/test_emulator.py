"""The emulator itself, and the two headers all kernels use, run by it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dgl_mgpu.ops.cpu import kernel
from dgl_mgpu.ops.device import Kernel, struct
from dgl_mgpu.ops.philox import philox
from tests.kernels.emulator import EmulatedDriver, EmulationError
from tests.ops.views import LAYOUTS, power_law_graph, row_view

WARPS = r"""
#include "philox.cuh"
using namespace dgl_mgpu;

__global__ void shuffles(const int64* in, int64 operand, int64 width, int64* out) {
  const int i = threadIdx.x;
  const int64 mine = in[i];
  out[4 * i] = __shfl_sync(0xffffffffu, mine, int(operand), int(width));
  out[4 * i + 1] = __shfl_up_sync(0xffffffffu, mine, unsigned(operand), int(width));
  out[4 * i + 2] = __shfl_down_sync(0xffffffffu, mine, unsigned(operand), int(width));
  out[4 * i + 3] = __shfl_xor_sync(0xffffffffu, mine, int(operand), int(width));
}

// Two groups of each warp in different branches, the second in two rounds.
__global__ void votes(const int64* in, int64 first, int64* out) {
  const int i = threadIdx.x;
  const uint32 group = first, rest = ~group;
  if (group >> i % 32 & 1) {
    out[4 * i] = __match_any_sync(group, in[i]);
    out[4 * i + 1] = __ballot_sync(group, in[i] % 2 == 0);
    out[4 * i + 2] = __any_sync(group, in[i] == 3);
    out[4 * i + 3] = __all_sync(group, in[i] < 4);
  } else {
    out[4 * i] = __match_any_sync(rest, in[i]);
    __syncwarp(rest);
    out[4 * i + 1] = __ballot_sync(rest, in[i] % 2 == 0);
    out[4 * i + 2] = __any_sync(rest, in[i] == 3);
    out[4 * i + 3] = __all_sync(rest, in[i] < 4);
  }
}

__global__ void float_sum(const float* in, float* out) {
  float sum = in[threadIdx.x];
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  out[threadIdx.x] = sum;
}
"""

BLOCKS = r"""
#include "philox.cuh"
using namespace dgl_mgpu;

// Sums before and with each element, within runs of one block's threads.
template <typename T>
__global__ void __launch_bounds__(1024) scan(const T* __restrict__ in, int64 n, T* out) {
  __shared__ T line[1024];
  const int64 at = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= n) return;  // the others do not wait for these
  line[threadIdx.x] = __ldg(in + at);
  __syncthreads();
  for (unsigned offset = 1; offset < blockDim.x; offset *= 2) {
    const T left = threadIdx.x >= offset ? line[threadIdx.x - offset] : T(0);
    __syncthreads();
    line[threadIdx.x] += left;
    __syncthreads();
  }
  out[at] = line[threadIdx.x];
}

// Blocks pass values round, one place in each round.
__global__ void pass_round(int64 rounds, int64* values, uint64* arrived) {
  __shared__ int64 next;
  for (int64 round = 0; round < rounds; ++round) {
    if (threadIdx.x == 0) next = values[(blockIdx.x + 1) % gridDim.x];
    for (int half = 0; half < 2; ++half) {
      __syncthreads();
      if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(arrived, 1ull);
        const uint64 goal = (2 * round + half + 1) * gridDim.x;
        while (*static_cast<volatile uint64*>(arrived) < goal) __nanosleep(20);
      }
      __syncthreads();
      if (half == 0 && threadIdx.x == blockDim.x - 1) values[blockIdx.x] = next;
    }
  }
}

__global__ void atomics(const int64* in, int64 n, int64* longs, int* ints, double* doubles,
                        float* floats) {
  const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const int small = static_cast<int>(in[i]);
  atomicAdd(reinterpret_cast<uint64*>(longs), static_cast<uint64>(in[i]));
  atomicMin(longs + 1, in[i]);
  atomicMax(longs + 2, in[i]);
  uint64* const product = reinterpret_cast<uint64*>(longs) + 3;
  for (uint64 seen = *product, before; ; seen = before) {
    before = atomicCAS(product, seen, seen * (2 * in[i] + 1));
    if (before == seen) break;
  }
  atomicAdd(ints, small);
  atomicMin(ints + 1, small);
  atomicMax(ints + 2, small);
  atomicOr(ints + 3, small);
  if (atomicExch(ints + 4, 1) == 0) atomicAdd(ints + 5, 1);
  atomicAdd(doubles, 0.5);
  atomicAdd(floats, 0.5f);
}

__global__ void order(int64* places, int64* next) {
  const uint64 place = atomicAdd(reinterpret_cast<uint64*>(next) + blockIdx.x, 1ull);
  places[int64(blockIdx.x) * blockDim.x + threadIdx.x] = place;
}
"""

NUMBERS = r"""
#include "philox.cuh"
using namespace dgl_mgpu;

__global__ void integers(const int64* a, const int64* b, int64 n, int64* out) {
  for (int64 i = threadIdx.x; i < n; i += blockDim.x) {
    const uint64 x = a[i], y = b[i];
    int64* const row = out + 8 * i;
    row[0] = __umul64hi(x, y);
    row[1] = __umulhi(uint32(x), uint32(y));
    row[2] = __popcll(x);
    row[3] = __popc(uint32(x));
    row[4] = __clzll(x);
    row[5] = __clz(uint32(x));
    row[6] = __ffs(uint32(x));
    row[7] = min(a[i], b[i]) ^ max(a[i], b[i]);
  }
}

__global__ void doubles(const double* a, const double* b, double c, int64 n, double* out) {
  for (int64 i = threadIdx.x; i < n; i += blockDim.x) {
    out[3 * i] = __dadd_rn(__dmul_rn(a[i], b[i]), c);
    out[3 * i + 1] = __dmul_rn(a[i], b[i]) + c;
    out[3 * i + 2] = __ddiv_rn(a[i], b[i]);
  }
}
"""

WRONG = r"""
using int64 = long long;

__global__ void wrong(int64 how, int64* out) {
  __shared__ int64 line[4];
  const int i = threadIdx.x;
  if (how == 0 && i < 5 && i != 3) out[i] = __ballot_sync(0x1fu, i);
  if (how == 1 && i == 3) return;
  if (how == 1) __syncwarp();
  if (how == 2 && i < 4) __any_sync(0x7u, 1);
  if (how == 3) i % 2 ? __syncwarp() : __syncthreads();
  if (how == 4 && i < 8) out[i] = __shfl_sync(i < 4 ? 0x0fu : 0xffu, i, 0);
  if (how == 5 && i == 5) out[1ll << 40] = 1;
  if (how == 6 && i == 5) *reinterpret_cast<float4*>(out + 1) = float4{};
  if (how == 7) line[i] = i;
  if (how == 8 && i == 5) out[i] = i / *reinterpret_cast<volatile int64*>(out);
  if (how == 9) while (*static_cast<volatile int64*>(out) == 0);
  if (how == 10 && blockIdx.x == 1) __trap();
  if (how == 10) while (*static_cast<volatile int64*>(out) == 0);
  if (how == 11) out[i] = __shfl_sync(~0u, i, 0, 12);
  if (how == 12) out[i] = i + (how << 60) * 16;
  if (how == 13) while (atomicCAS(reinterpret_cast<unsigned*>(out), 1u, 1u) == 0);
  if (how == 14) __syncthreads();
}

struct Both {
  int64* out;
  int64 values[2];
};

__global__ void of_struct(const Both both) { *both.out = both.values[0] - both.values[1]; }

__global__ void rubbish(int64* out) {
  __shared__ int64 before;
  out[blockIdx.x] = before;
  before = 0;
}

__global__ void absent_lane(int64* out) {
  if (threadIdx.x < 4) out[threadIdx.x] = __shfl_down_sync(0xfu, int64(threadIdx.x), 2u);
}
"""


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("width", [32, 8, 1])
@pytest.mark.parametrize("operand", [0, 1, 5, 8, 31])
def test_shuffles(emulated, width, operand):
    values = torch.randint(0, 2**60, (64,))
    out = torch.empty(64, 4, dtype=torch.int64)
    emulated.run(WARPS, "shuffles", 1, 64, values, operand, width, out)
    for i in range(64):
        first = i - i % width
        inside = range(first, first + width)
        lane, base = i % 32, i - i % 32
        sources = (
            first + operand % width,
            i - operand if i - operand in inside else i,
            i + operand if i + operand in inside else i,
            base + (lane ^ operand) if base + (lane ^ operand) < first + width else i,
        )
        assert out[i].tolist() == [values[source].item() for source in sources]


@pytest.mark.parametrize("group", [0x0F0F00FF, 0x1, 0xFFFFFFFE, 0x55555555])
def test_groups_of_one_warp_vote_apart(emulated, group):
    values = torch.randint(0, 5, (64,))
    out = torch.empty(64, 4, dtype=torch.int64)
    emulated.run(WARPS, "votes", 1, 64, values, group, out)
    for i in range(64):
        mine = group >> i % 32 & 1
        others = {
            lane: values[i - i % 32 + lane].item()
            for lane in range(32)
            if group >> lane & 1 == mine
        }
        assert out[i].tolist() == [
            sum(1 << lane for lane, value in others.items() if value == values[i]),
            sum(1 << lane for lane, value in others.items() if value % 2 == 0),
            any(value == 3 for value in others.values()),
            all(value < 4 for value in others.values()),
        ]


def test_floats_are_shuffled(emulated):
    values = torch.randint(-50, 50, (32,)).float() / 4
    out = torch.empty(32)
    emulated.run(WARPS, "float_sum", 1, 32, values, out)
    assert torch.equal(out, values.sum().expand(32))


@pytest.mark.parametrize("threads", [1, 33, 256, 1024])
def test_threads_of_a_block_work_together(emulated, threads):
    values = torch.randint(0, 1000, (7 * threads - threads // 3,))
    out = torch.empty_like(values)
    emulated.run(BLOCKS, "scan<int64>", 7, threads, values, len(values), out)
    expected = [run.cumsum(0) for run in values.split(threads)]
    assert torch.equal(out, torch.cat(expected))


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_blocks_wait_for_each_other(emulated, blocks):
    values = torch.arange(blocks)
    arrived = integers(0)
    emulated.run(BLOCKS, "pass_round", blocks, 64, 7, values, arrived, cooperative=True)
    assert values.tolist() == [(block + 7) % blocks for block in range(blocks)]


def test_only_resident_blocks_may_wait_for_each_other(emulated):
    device = torch.device("cpu")
    resident = emulated.resident_blocks(Kernel("", ""), device, 64)
    with pytest.raises(EmulationError, match="at once"):
        emulated.run(
            BLOCKS, "pass_round", resident + 1, 64, 1, integers(0), integers(0), cooperative=True
        )


def test_atomics(emulated):
    values = torch.randint(-1000, 1000, (2000,))
    longs, ints = integers(5, 0, 0, 1), torch.tensor([5, 0, 0, 0, 0, 0], dtype=torch.int32)
    doubles, floats = torch.zeros(1, dtype=torch.float64), torch.zeros(1)
    emulated.run(BLOCKS, "atomics", 16, 128, values, 2000, longs, ints, doubles, floats)
    product = 1
    for value in values.tolist():
        product = product * (2 * value + 1) % 2**64
    total, low, high = values.sum().item() + 5, values.min().item(), values.max().item()
    bits = int(np.bitwise_or.reduce(values.numpy()))
    assert longs.tolist()[:3] == [total, low, high]
    assert longs[3].item() % 2**64 == product
    assert ints.tolist() == [total, low, high, bits, 1, 1]
    assert doubles.item() == floats.item() == 1000


def test_the_order_of_threads_differs_between_blocks(emulated):
    places, next_place = torch.empty(4, 64, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    emulated.run(BLOCKS, "order", 4, 64, places, next_place)
    assert torch.equal(places.sort(dim=1).values, torch.arange(64).expand(4, 64))
    assert len({tuple(block) for block in places.tolist()}) > 1


def test_integer_functions(emulated):
    numbers = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (2, 50))
    numbers[:, :4] = [[0, 1, -1, 2**63 - 1], [-1, 1 << 32, -1, -(2**63)]]
    a, b = torch.from_numpy(numbers)
    out = torch.empty(50, 8, dtype=torch.int64)
    emulated.run(NUMBERS, "integers", 1, 32, a, b, 50, out)
    for x, y, row in zip(a.tolist(), b.tolist(), out.tolist(), strict=True):
        wide, narrow = x % 2**64, x % 2**32
        assert row == [
            np.uint64(wide * (y % 2**64) >> 64).astype(np.int64),
            narrow * (y % 2**32) >> 32,
            wide.bit_count(),
            narrow.bit_count(),
            64 - wide.bit_length(),
            32 - narrow.bit_length(),
            (narrow & -narrow).bit_length(),
            x ^ y,
        ]


def test_rounded_operations_stay_apart(emulated):
    a, b = torch.rand(2, 1000, dtype=torch.float64)
    c = -0.25
    out = torch.empty(1000, 3, dtype=torch.float64)
    emulated.run(NUMBERS, "doubles", 1, 32, a, b, c, 1000, out)
    expected = torch.stack([a * b + c, a * b + c, a / b], dim=1)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (0, r"deadlock(.|\n)*__ballot_sync\(0x0000001f, …\), lanes 0x00000008 have returned"),
        (1, r"deadlock(.|\n)*__syncwarp\(0xffffffff, …\), lanes 0x00000008 have returned"),
        (2, r"thread 3: __any_sync with mask 0x00000007 lacks the caller"),
        (3, r"deadlock(.|\n)*__syncthreads\(\)\n.*__syncwarp.*, lanes 0x55555555 are elsewhere"),
        (4, r"deadlock, 4 of 40 threads(.|\n)*\(0x000000ff, …\), lanes 0x0000000f have returned"),
        (5, r"thread 5: no memory at"),
        (6, r"thread 5: undefined behaviour(.|\n)*float4"),
        (7, r"undefined behaviour(.|\n)*line\[i\] = i"),
        (8, r"thread 5: (division by zero|undefined behaviour)"),
        (9, r"still running"),
        (10, r"block 1, thread \d+: __trap"),
        (11, r"width 12"),
        (12, r"undefined behaviour(.|\n)*<< 60"),
        (13, r"still running"),
    ],
)
def test_mistakes_are_reported(emulated, how, message):
    driver = EmulatedDriver(timeout=0.5) if how in (9, 13) else emulated
    out = torch.zeros(100, dtype=torch.int64)
    with pytest.raises(EmulationError, match=message):
        driver.run(WRONG, "wrong", 2, 40, how, out)
    emulated.run(WRONG, "wrong", 2, 40, 14, out)  # and it goes on working


def test_a_mask_beyond_the_block_is_reported(emulated):
    with pytest.raises(EmulationError, match="lanes 0xfff00000 are beyond the block"):
        emulated.run(WRONG, "wrong", 1, 20, 1, torch.zeros(20, dtype=torch.int64))


def test_what_is_undefined_is_rubbish(emulated):
    out = torch.zeros(8, dtype=torch.int64)
    emulated.run(WRONG, "rubbish", 8, 1, out)
    assert (out == -0x3232323232323233).all()
    out = torch.zeros(4, dtype=torch.int64)
    emulated.run(WRONG, "absent_lane", 1, 32, out)
    assert out[:2].tolist() == [2, 3]
    assert out[2].item() == out[3].item() == -0x3232323232323233


def test_allocations_are_filled(emulated):
    assert torch.empty(3).isnan().all()
    assert (torch.empty(3, dtype=torch.int64) == 2**63 - 1).all()
    assert (emulated.host_buffer(3) != 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([1], "1 arguments for 2"),
        ([1, torch.zeros(1), 2], "3 arguments for 2"),
        ([torch.zeros(1), torch.zeros(1)], "argument 0 .* not an integer"),
        ([1, 2], "argument 1 is 2, not a pointer"),
        ([1.0, None], "argument 0 is 1.0, not an integer"),
        ([2**63, None], "argument 0 is 9223372036854775808"),
    ],
)
def test_arguments_are_checked(emulated, arguments, message):
    with pytest.raises(EmulationError, match=message):
        emulated.run(WRONG, "wrong", 1, 1, *arguments)


def test_structs_are_passed_by_value(emulated):
    out = torch.zeros(1, dtype=torch.int64)
    emulated.run(WRONG, "of_struct", 1, 1, struct(out, 5, 8))
    assert out.item() == -3
    with pytest.raises(EmulationError, match="not a struct of 24 B"):
        emulated.run(WRONG, "of_struct", 1, 1, struct(out, 5))


@pytest.mark.parametrize(("blocks", "threads"), [(0, 32), (1, 0), (1, 1025), (2**31, 32)])
def test_the_shape_of_a_launch_is_checked(emulated, blocks, threads):
    with pytest.raises(EmulationError, match=f"{blocks} blocks of {threads} threads"):
        emulated.run(WRONG, "rubbish", blocks, threads, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__global__ void f(int n) {}", "parameters are pointers, 64-bit integers, doubles"),
        ("__global__ void f(float x) {}", "parameters are pointers, 64-bit integers, doubles"),
        ("__global__ void f() { here }", r"kernel\.cu:1(.|\n)*here"),
        ("__global__ void f() { min(1, 1ll); }", "ambiguous"),
        ("__global__ void g() {}", "was not declared"),
    ],
)
def test_what_does_not_compile_says_why(emulated, text, message):
    with pytest.raises(EmulationError, match=f"f does not compile(.|\n)*{message}"):
        emulated.run(text, "f", 1, 1, 1)


def test_launches_from_several_threads(emulated):
    outs = [torch.zeros(64, 4, dtype=torch.int64) for _ in range(4)]
    values = torch.arange(64)

    def launch(out: torch.Tensor) -> None:
        for _ in range(10):
            emulated.run(WARPS, "shuffles", 1, 64, values, 1, 32, out)

    with ThreadPoolExecutor(len(outs)) as pool:
        list(pool.map(launch, outs))  # raises what a thread raises
    assert all(torch.equal(out, outs[0]) and out.any() for out in outs)


STORE = r"""
#include "ggms.cuh"
using namespace dgl_mgpu;

__global__ void draws(const uint64* nodes, int64 n, uint64 block, uint64 stream, uint64 key,
                      uint64* out) {
  const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const Draws both = philox(nodes[i], block, stream, key);
  out[2 * i] = both.first;
  out[2 * i + 1] = both.second;
}

template <typename Id>
__global__ void edges(const int64* tiers, int64 num_tiers, const int64* pointers,
                      const int* position, int64 n, const int64* starts, int64* sources,
                      int64* eids) {
  const int64 node = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (node >= n) return;
  const Graph<Id, int> graph{{tiers, int(num_tiers), position}, pointers};
  const auto span = graph.Find(node);
  for (int64 i = 0; i < graph.NumNeighbor(node); ++i) {
    sources[starts[node] + i] = graph.Neighbors(node)[i];
    eids[starts[node] + i] = span.edge(i);
  }
}

__global__ void rows(const int64* tiers, int64 num_tiers, const int64* pointers,
                     const int* position, int64 width, const int64* nodes, int64 n, float* out) {
  const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const FeatureTable<int> table{{tiers, int(num_tiers), position}, pointers, 4 * width};
  for (int64 j = 0; j < width; ++j) out[i * width + j] = table.Features<float>(nodes[i])[j];
}
"""


def of_view(view):
    position = view.position if view.position.numel() else None
    return view.tiers, len(view.tiers), view.pointers, position


@kernel
def _cpu_draws(nodes, block, stream, key, out):
    for i in range(len(nodes)):
        out[2 * i], out[2 * i + 1] = philox(nodes[i], block, stream, key)


@pytest.mark.parametrize(
    ("block", "stream", "key"), [(0, 0, 1), (5, 0, -12345), (2**31, 2**31 + 7, 0)]
)
def test_philox_is_the_cpus_bit_for_bit(emulated, block, stream, key):
    nodes = np.random.default_rng(0).integers(0, 2**63, 1000)
    expected = np.zeros(2000, np.uint64)
    _cpu_draws(nodes, block, stream, np.int64(key), expected)
    out = torch.empty(2000, dtype=torch.int64)
    emulated.run(STORE, "draws", 8, 128, torch.from_numpy(nodes), 1000, block, stream, key, out)
    assert np.array_equal(out.numpy().view(np.uint64), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shuffled", [False, True])
def test_features_finds_every_row(emulated, layout, shuffled):
    table = torch.randn(113, 7)
    view = row_view(table, LAYOUTS[layout], np.random.default_rng(1) if shuffled else None)
    nodes = torch.randint(0, 113, (500,))
    out = torch.empty(500, 7)
    emulated.run(STORE, "rows", 4, 128, *of_view(view), 7, nodes, 500, out)
    assert torch.equal(out, table[nodes])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("idtype", "c_type"), [(torch.int32, "int"), (torch.int64, "int64")])
def test_neighbors_finds_every_edge(emulated, layout, shuffled, idtype, c_type):
    graph = power_law_graph(113, 1000, seed=2)
    view = graph.view(LAYOUTS[layout], idtype, np.random.default_rng(1) if shuffled else None)
    sources, eids = torch.empty(2, 1000, dtype=torch.int64)
    emulated.run(
        STORE, f"edges<{c_type}>", 1, 128, *of_view(view), 113, torch.from_numpy(graph.indptr),
        sources, eids,
    )  # fmt: skip
    assert np.array_equal(sources, graph.indices)
    assert torch.equal(eids, torch.arange(1000))
