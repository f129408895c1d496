"""Claim: a read of memory spread over all GPUs takes a microsecond or two (WholeGraph, table I).

One thread of the first GPU reads 100,000 lines of 128 bytes, one after another: each has the number
of the next one, so nothing can be read ahead or at the same time.  The numbers are a linear
congruential sequence, which comes to every line of the memory once before it comes to one again.
So no cache has a line that is read, whatever the size, and what TLBs have is what they reach of
memory that is read at random.

The memory is that of all GPUs, line ``i`` being on GPU ``i`` modulo their number and found as
kernels find rows of a store; the GPU's own; a peer's; and the host's, pinned as a store's is.  The
paper compares with unified memory, which is not tried here.

The line reached is compared with the one that the sequence has there.

    python -m benchmarks.dependent_reads_gpu --ranks 4 --out dependent_reads.json
"""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.figures import Figure, Report
from benchmarks.gpu import window
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.cuda_runtime import Runtime, choose_runtime
from dgl_mgpu.config.store_options import parse_bytes
from dgl_mgpu.ops import RowView, gather_rows
from dgl_mgpu.ops.device import cupy, source_text
from dgl_mgpu.store.memory.device import DeviceMemory
from dgl_mgpu.store.memory.segment import SHARED_MEMORY, Segment
from dgl_mgpu.train.launch.launch import launch

LINE_BYTES = 128
_WORDS = LINE_BYTES // 8
#: In place of a rank, the host.
HOST = -1
#: Share of the free memory that is taken at most.
_SHARE = 0.95
#: Lines that are written at a time, and bytes that are written to have caches forget the others.
_CHUNK, _FLUSHED_BYTES = 1 << 24, 1 << 30

SOURCE = r"""
// From line `*line`, so many steps along the chain.
extern "C" __global__ void follow(const dgl_mgpu::int64* tiers, const dgl_mgpu::int64* pointers,
                                  dgl_mgpu::int64* line, dgl_mgpu::int64 line_bytes,
                                  dgl_mgpu::int64 steps) {
  const dgl_mgpu::FeatureTable<int> lines{{tiers, 1, nullptr}, pointers, line_bytes};
  dgl_mgpu::int64 at = *line;
  for (dgl_mgpu::int64 step = 0; step < steps; ++step) {
    at = *lines.Features<dgl_mgpu::int64>(at);
  }
  *line = at;
}
"""


@dataclass(frozen=True)
class Chain:
    """A sequence that comes to each of ``lines`` numbers, a power of two, before it repeats one."""

    lines: int

    def after(self, line: Any) -> Any:
        """The number after one, or after each of a tensor (whose products wrap, as they may)."""
        return (line * 6364136223846793005 + 1442695040888963407) & (self.lines - 1)

    def reached(self, steps: int) -> int:
        """The number that is so many steps after 0."""
        line = 0
        for _ in range(steps):
            line = self.after(line)
        return line


class Blocks:
    """A block of each rank's memory and one of the host's, all of which this rank reads.

    Collective.  On a machine without GPUs they are in shared memory.
    """

    def __init__(
        self, ranks: Communicator, runtime: Runtime | None, nbytes: int, host_bytes: int
    ) -> None:
        self._ranks, self._runtime = ranks, runtime
        self._host = self._of_first(host_bytes)
        if runtime is None:
            own = Segment.create(nbytes)
            paths = ranks.all_gather(own.path)
            self._shared = [Segment.attach(path, nbytes) for path in paths]
            ranks.all_gather(None)  # until all have mapped it
            addresses = [segment.address for segment in self._shared]
        else:
            self._gpu = DeviceMemory(runtime, self._of_first(8 * ranks.size), ranks.rank)
            self._gpu.register(self._host)
            self._gpu.allocate(nbytes)
            handles = ranks.all_gather(self._gpu.share() if ranks.size > 1 else b"")
            addresses = [
                self._gpu.block if rank == ranks.rank else self._gpu.open(handle)
                for rank, handle in enumerate(handles)
            ]
        self._addresses = {**dict(enumerate(addresses)), HOST: self._host.address}

    def _of_first(self, nbytes: int) -> Segment:
        """Shared memory that the first rank makes."""
        made: list[Segment] = []

        def make() -> Path:
            made.append(Segment.create(nbytes))
            return made[0].path

        path = self._ranks.broadcast_from_rank0("make shared memory", make)
        segment = Segment.attach(path, nbytes)
        self._ranks.all_gather(None)
        return segment

    def view(self, holders: tuple[int, ...], lines: int) -> RowView:
        """Lines dealt out over the blocks of ``holders``."""
        where = torch.device("cpu") if self._runtime is None else self._runtime.device
        tiers = torch.tensor([[0, lines, len(holders), 0]], device=where)
        pointers = torch.tensor([self._addresses[holder] for holder in holders], device=where)
        return RowView(tiers, pointers, lines, (_WORDS,), torch.int64, owner=self)

    def write(self, holders: tuple[int, ...], chain: Chain) -> None:
        """Have the lines of ``holders`` be a chain; collective."""
        parts = len(holders)
        for part, holder in enumerate(holders):
            if self._ranks.rank == max(holder, 0):  # the first rank writes the host's
                own = self._words(holder, len(range(part, chain.lines, parts)))
                for start in range(0, len(own), _CHUNK):
                    some = own[start : start + _CHUNK]
                    local = torch.arange(start, start + len(some), device=own.device)
                    some[:, 0] = chain.after(local * parts + part)
        if self._runtime is not None:
            # What was written last must not be read from the GPU's cache.
            torch.zeros(_FLUSHED_BYTES, dtype=torch.uint8, device=self._runtime.device)
            self._runtime.synchronize()
        self._ranks.all_gather(None)

    def _words(self, holder: int, lines: int) -> torch.Tensor:
        """The lines at the beginning of a block, int64, shape (lines, words of a line)."""
        shape = lines, _WORDS
        if holder == HOST:
            return torch.from_numpy(self._host.array(np.int64, shape))
        if self._runtime is None:
            return torch.from_numpy(self._shared[holder].array(np.int64, shape))
        return torch.as_tensor(_Array(self._addresses[holder], shape), device=self._runtime.device)

    def close(self) -> None:
        """Give the GPUs' memory back; collective."""
        if self._runtime is not None:
            self._gpu.close()


class _Array:
    """GPU memory at an address, as torch takes it for a tensor of int64."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": "<i8", "data": (address, False), "version": 3,
        }  # fmt: skip


def source() -> str:
    """The kernel, with what it needs to see a store."""
    return source_text("ggms.cuh") + SOURCE


@functools.cache
def _kernel() -> Any:
    module = cupy().RawModule(code=source(), options=("-std=c++17",))
    return module.get_function("follow")


class Walk:
    """A walk along a chain, from line 0.

    Attributes
    ----------
    line : Tensor, int64, shape (1,)
        The line reached.
    steps : int
        How many lines were read.
    """

    def __init__(self, view: RowView) -> None:
        self._view, self.steps = view, 0
        self.line = torch.zeros(1, dtype=torch.int64, device=view.tiers.device)

    def go(self, steps: int) -> None:
        """Go on, by so many lines."""
        view, line = self._view, self.line
        self.steps += steps
        if not line.is_cuda:
            for _ in range(steps):
                line.copy_(gather_rows(view, line)[:, 0])
            return
        stream = cupy().cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        tensors = (view.tiers.data_ptr(), view.pointers.data_ptr(), line.data_ptr())
        sizes = (np.int64(view.row_bytes), np.int64(steps))
        _kernel()((1,), (1,), (*tensors, *sizes), stream=stream)


@dataclass(frozen=True)
class Case:
    """Memory to read, and by rank who holds it, each an equal part."""

    where: str
    holders: tuple[int, ...]
    nbytes: int

    @property
    def name(self) -> str:
        return f"{self.where}, {self.nbytes / 2**30:g} GiB"

    @property
    def gpu_bytes(self) -> int:
        """Of each GPU that holds some."""
        return 0 if self.holders == (HOST,) else -(-self.nbytes // len(self.holders))


def cases(size: int, sizes: Sequence[int], host_sizes: Sequence[int]) -> list[Case]:
    """What the first of ``size`` ranks reads."""
    on_gpus: dict[str, tuple[int, ...]] = {"its own memory": (0,)}
    if size > 1:
        on_gpus = {"all GPUs": tuple(range(size)), **on_gpus, "a peer": (1,)}
    found = [Case(where, who, nbytes) for where, who in on_gpus.items() for nbytes in sizes]
    return [*found, *(Case("the host", (HOST,), nbytes) for nbytes in host_sizes)]


class Bench:
    """All kinds of memory in all sizes, on one rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._ranks, self._options = Communicator.of_this_machine(), options
        about = {key: str(value) for key, value in vars(options).items()}
        self._report = Report(self._ranks, options.out, options=about, line_bytes=LINE_BYTES)

    def run(self) -> None:
        ranks, options = self._ranks, self._options
        runtime = choose_runtime("auto", ranks)
        wanted = cases(ranks.size, options.sizes, options.host_sizes)
        room = min(ranks.all_gather(_room(runtime, ranks)))
        fitting = [case for case in wanted if case.gpu_bytes <= room]
        most = max((case.gpu_bytes for case in fitting), default=0)
        blocks = Blocks(ranks, runtime, most + LINE_BYTES, max(options.host_sizes))
        try:
            for case in fitting:
                chain = Chain(case.nbytes // LINE_BYTES)
                blocks.write(case.holders, chain)
                view = blocks.view(case.holders, chain.lines)
                spent = ranks.broadcast_from_rank0(
                    f"read {case.name}", partial(self._time, case, view)
                )
                more = {**vars(case), "seconds": spent}
                ours = 1e6 * statistics.median(spent)
                self._report.add(Figure(case.name, "µs", ours, more=more))
        finally:
            blocks.close()
        for case in wanted:
            if case not in fitting and ranks.rank == 0:
                print(f"{case.name}: left out, there is room for {room / 2**30:.1f} GiB a GPU")

    def _time(self, case: Case, view: RowView) -> list[float]:
        """Seconds of a read, for each time that it was measured.

        Raises
        ------
        ValueError
            If the line reached is not the right one.
        """
        walk, steps = Walk(view), self._options.steps
        times = range(self._options.repeats)
        spent = [window(walk.go, [steps] * 3, walk.line.device) / steps for _ in times]
        expected = Chain(view.num_rows).reached(walk.steps)
        if int(walk.line) != expected:
            raise ValueError(
                f"{case.name}: line {int(walk.line)} after {walk.steps} reads, not {expected}"
            )
        return spent


def _room(runtime: Runtime | None, ranks: Communicator) -> int:
    """Bytes that this rank may take of its GPU, or of shared memory."""
    if runtime is not None:
        return int(_SHARE * runtime.device_info().free)
    return shutil.disk_usage(SHARED_MEMORY).free // (2 * ranks.size)


def work(options: argparse.Namespace) -> None:
    """All that a rank does."""
    Bench(options).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    size = partial(parse_bytes, action="a size")
    doubled = [2**power << 30 for power in range(3, 11)]
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument(
        "--sizes", type=size, nargs="+", default=doubled, metavar="8GiB",
        help="of memory on GPUs, powers of two; those without room are left out",
    )  # fmt: skip
    parser.add_argument("--host-sizes", type=size, nargs="+", default=doubled[:1], metavar="8GiB")
    parser.add_argument("--steps", type=int, default=100_000, help="reads that are timed at once")
    parser.add_argument("--repeats", type=int, default=3, help="times that they are")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    for nbytes in (*options.sizes, *options.host_sizes):
        if nbytes < LINE_BYTES or nbytes & (nbytes - 1):
            parser.error(f"{nbytes} bytes are no power of two of at least {LINE_BYTES}")
    launch(work, options.ranks, options)


if __name__ == "__main__":
    main()
