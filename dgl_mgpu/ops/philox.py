"""Counter-based random numbers: Philox 4x32-10 and the key every sampling operator takes.

There is no state.  A draw is a function of *what* is sampled, not of *when*, so the same
seed gives the same sample on any device, thread count, rank and placement::

    key      = SampleKey.fold()               64 bits: k0 = low word, k1 = high word
    counter  = (low 32 bits of the node id,
                high 32 bits of the node id,
                block,                        two draws a block
                stream)                       which operator is drawing
    draw 2b     = word 0 | word 1 << 32       of block b
    draw 2b + 1 = word 2 | word 3 << 32

Everything is unsigned integer arithmetic modulo 2**32 or 2**64; ``kernels/`` repeats it bit
for bit.

Source: Salmon, Moraes, Dror, Shaw, «Parallel random numbers: as easy as 1, 2, 3» (SC'11);
splitmix64 as in Steele, Lea, Flood, «Fast splittable pseudorandom number generators»
(OOPSLA'14).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import cpu
from dgl_mgpu.ops.cpu import inline, intrinsic, kernel

#: Fourth counter word of neighbour sampling.
SAMPLE_STREAM = 0
#: Fourth counter word of random walks is this plus the step, which has the block to itself.
WALK_STREAM = 1 << 31
#: Fourth counter words of negative sampling, of edges and of destinations, are these plus the try.
NEGATIVE_EDGE_STREAM, NEGATIVE_DESTINATION_STREAM = 1 << 29, 1 << 30
#: Fourth counter word of the weights that attention drops; the block is the head's, of four.
ATTENTION_STREAM = 1 << 27

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

_MASK64 = (1 << 64) - 1
#: Draws worth a thread.
_GRAIN = 1 << 14
_GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(state: int) -> int:
    """Mix 64 bits (the output function of splitmix64, a bijection)."""
    state = (state + _GOLDEN) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


@dataclass(frozen=True)
class SampleKey:
    """Names one random experiment; equal keys give equal samples.

    Parameters
    ----------
    seed : int
        The run's seed.
    epoch, batch, hop : int
        Which epoch, which mini-batch of it, and which hop away from the seed nodes.
    etype : int
        Which edge type; 0 in a homogeneous graph.

    Raises
    ------
    InvalidInputError
        If a field is not an integer in [0, 2**64).
    """

    seed: int
    epoch: int = 0
    batch: int = 0
    hop: int = 0
    etype: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or not 0 <= value <= _MASK64:
                raise InvalidInputError(
                    f"make a SampleKey with {name}={value!r}",
                    "it is not an integer in [0, 2**64)",
                    "pass a non-negative Python int of at most 64 bits",
                )

    def fold(self) -> int:
        """Mix all fields into one signed 64-bit integer, the form in which operators take it.

        ``k = splitmix64(seed)``, then ``k = splitmix64(k ^ field)`` for epoch, batch, hop and
        edge type in this order.  Keys that differ in one field never fold to the same value.
        """
        return self.fold_hops(1)[0]

    def fold_hops(self, count: int) -> list[int]:
        """The folded keys of this hop and of those that follow, ``count`` of them."""
        hops = range(self.hop, self.hop + count)
        return fold_keys(self.seed, self.epoch, self.batch, hops, self.etype)


def fold_keys(seed: int, epoch: int, batch: int, hops: Iterable[int], etype: int) -> list[int]:
    """The folded keys of some hops; fields are those of :class:`SampleKey`, not checked again."""
    of_batch = splitmix64(splitmix64(splitmix64(seed) ^ epoch) ^ batch)
    keys = [splitmix64(splitmix64(of_batch ^ hop) ^ etype) for hop in hops]
    return [key - (1 << 64) if key >> 63 else key for key in keys]


@intrinsic
def mulhi64(typing_context, left, right):  # type: ignore[no-untyped-def]
    """High 64 bits of the product of two uint64: maps a draw to [0, right) without division."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        wide = ir.IntType(128)
        left, right = (builder.zext(arg, wide) for arg in args)
        high = builder.lshr(builder.mul(left, right), ir.Constant(wide, 64))
        return builder.trunc(high, ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), codegen


@inline
def philox(node: int, block: int, stream: int, key: int) -> tuple[np.uint64, np.uint64]:
    """Two 64-bit draws of one counter block, as uint64."""
    counter = np.uint64(node)
    folded = np.uint64(key)
    c0 = counter & _LOW
    c1 = counter >> _32
    c2 = np.uint64(block) & _LOW
    c3 = np.uint64(stream) & _LOW
    k0 = folded & _LOW
    k1 = folded >> _32
    for _ in range(10):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0 = (product_1 >> _32) ^ c1 ^ k0
        c1 = product_1 & _LOW
        c2 = (product_0 >> _32) ^ c3 ^ k1
        c3 = product_0 & _LOW
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    return c0 | (c1 << _32), c2 | (c3 << _32)


@inline
def draw(node: int, index: int, stream: int, key: int) -> np.uint64:
    """The 64-bit draw number ``index`` of a node, as uint64."""
    first, second = philox(node, index >> 1, stream, key)
    return second if index & 1 else first


@intrinsic
def _leading_zeros(typing_context, value):  # type: ignore[no-untyped-def]
    """Number of leading zero bits of a uint64 that is not 0."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), codegen


@inline
def exponential(random: np.uint64) -> float:
    """Map a uint64 draw to an exponentially distributed float64, -log(u) with u in (0, 1).

    Only integer operations and single IEEE additions, multiplications and divisions, each
    rounded on its own (device code must not fuse them), so that every machine gets the same
    bits; a mathematical library would not.  Relative error below 1e-15::

        t = 2 * (draw >> 12) + 1                       u = t / 2**53
        u = m * 2**(bits - 53),  sqrt(1/2) <= m < sqrt(2)
        log(m) = 2 artanh(f) = 2 (f + f**3/3 + … + f**21/21),  f = (m - 1) / (m + 1)
    """
    t = ((random >> np.uint64(12)) << np.uint64(1)) | np.uint64(1)
    zeros = _leading_zeros(t)
    m = np.float64((t << zeros) >> np.uint64(11)) * 2.0**-53
    exponent = np.float64(np.int64(zeros) - 11)
    if m < 0.7071067811865476:
        m *= 2.0
        exponent += 1.0
    f = (m - 1.0) / (m + 1.0)
    square = f * f
    series = 0.0
    for divisor in (21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = series * square + 1.0 / divisor
    return exponent * 0.6931471805599453 - 2.0 * f * series


@inline
def below(random: np.uint64, bound: int) -> np.int64:
    """Map a uint64 draw to [0, bound), with a bias of at most bound / 2**64."""
    return np.int64(mulhi64(random, np.uint64(bound)))


@kernel
def _draw_all(
    begin: int, end: int, nodes: np.ndarray, blocks: np.ndarray, streams: np.ndarray, key: int,
    first: np.ndarray, second: np.ndarray,
) -> None:  # fmt: skip
    for place in range(begin, end):
        draws = philox(nodes[place], blocks[place], streams[place], key)
        first[place] = np.int64(draws[0])
        second[place] = np.int64(draws[1])


# The same for tensors of counters on any other device, made of torch's functions.
_MULTIPLIERS = int(_MULTIPLIER_0), int(_MULTIPLIER_1)
_WEYLS = int(_WEYL_0), int(_WEYL_1)
_LOW_WORD = int(_LOW)


def draw_blocks(
    nodes: Tensor, blocks: Tensor | int, streams: Tensor | int, key: int
) -> tuple[Tensor, Tensor]:
    """The two draws of counter blocks, as int64 with the bits of `philox`.

    The counters' words are int64 and broadcast; ``key`` is a folded `SampleKey`.
    """
    nodes, block, stream = torch.broadcast_tensors(
        nodes,
        torch.as_tensor(blocks, device=nodes.device),
        torch.as_tensor(streams, device=nodes.device),
    )
    if nodes.device.type == "cpu":
        counters = [words.reshape(-1).contiguous() for words in (nodes, block, stream)]
        drawn = torch.empty(2, nodes.numel(), dtype=torch.int64)
        arrays = [words.numpy() for words in (*counters, *drawn)]
        cpu.run(_draw_all, nodes.numel(), _GRAIN, *arrays[:3], key, *arrays[3:])
        first, second = drawn.view(2, *nodes.shape)
        return first, second
    c0, c1 = nodes & _LOW_WORD, _high(nodes)
    c2, c3 = block & _LOW_WORD, stream & _LOW_WORD
    k0, k1 = key & _LOW_WORD, (key >> 32) & _LOW_WORD
    for _ in range(10):
        product_0, product_1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = _high(product_1) ^ c1 ^ k0, _high(product_0) ^ c3 ^ k1
        c1, c3 = product_1 & _LOW_WORD, product_0 & _LOW_WORD
        k0, k1 = (k0 + _WEYLS[0]) & _LOW_WORD, (k1 + _WEYLS[1]) & _LOW_WORD
    return c0 | (c1 << 32), c2 | (c3 << 32)


def _high(products: Tensor) -> Tensor:
    return (products >> 32) & _LOW_WORD


def as_uniform(draws: Tensor) -> Tensor:
    """Draws as multiples of 2**-53 in [0, 1), float64."""
    return top_bits(draws).double() * 2.0**-53


def as_below(draws: Tensor, bounds: Tensor) -> Tensor:
    """Draws as integers in [0, bounds), as `below` has them, or 0; bounds are under 2**31."""
    low = (draws & _LOW_WORD) * bounds >> 32
    return (_high(draws) * bounds + low) >> 32


def top_bits(draws: Tensor) -> Tensor:
    """The 53 highest bits of draws, int64."""
    return (draws >> 11) & ((1 << 53) - 1)
