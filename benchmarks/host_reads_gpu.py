"""Reads of pinned host memory by one GPU, by the size of rows and by their order.

A kernel of which each thread reads four bytes of a row, next to each other in a warp, with ids that
are drawn at random: as they are, and sorted, as a GPU samples a graph in host memory in the order
of addresses.  Beside them, a copy from pinned memory.

What is read is checked first.  Without a GPU torch reads, which only shows that the program works.

    python -m benchmarks.host_reads_gpu --out host_reads.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import this_device, window
from benchmarks.machine import describe_machine

ROW_BYTES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
#: Most bytes of what is read at a time.
MAX_READ = 1 << 28
BLOCKS_A_MULTIPROCESSOR, THREADS = 16, 512

SOURCE = r"""
extern "C" __global__ void reads(const int* rows, const long long* ids, int* out, long long count,
                                 int width) {
  const long long total = count * width, step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += step) {
    const long long row = i / width;
    out[i] = rows[ids[row] * width + i - row * width];
  }
}
"""

Read = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def kernel() -> Read:
    """What reads rows of the host's memory into those of a GPU."""
    import cupy

    function = cupy.RawKernel(SOURCE, "reads")
    sms = torch.cuda.get_device_properties(this_device()).multi_processor_count

    def read(rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        pointers = (each.data_ptr() for each in (rows, ids, out))
        sizes = (np.int64(len(ids)), np.int32(rows.shape[1]))
        function((BLOCKS_A_MULTIPROCESSOR * sms,), (THREADS,), (*pointers, *sizes), stream=stream)

    return read


def on_cpu(rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    torch.index_select(rows, 0, ids, out=out)


class Bench:
    """All sizes of rows, in the same memory."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._device = options, this_device()
        on_gpu = self._device.type == "cuda"
        words = int(options.gib * 2**30) // 4
        self._memory = torch.arange(words, dtype=torch.int32)
        if on_gpu:
            self._memory = self._memory.pin_memory()
        self._room = torch.empty(min(words, MAX_READ // 4), dtype=torch.int32, device=self._device)
        self._read = kernel() if on_gpu else on_cpu
        part = self._memory[: len(self._room)]
        self.copy_s = self._times(lambda: self._room.copy_(part, non_blocking=True))

    @property
    def copied_gb_per_s(self) -> float:
        return 4 * len(self._room) / statistics.median(self.copy_s) / 1e9

    def figures(self) -> list[dict[str, Any]]:
        """One for each size."""
        return [self._figure(size) for size in ROW_BYTES]

    def _figure(self, row_bytes: int) -> dict[str, Any]:
        width = row_bytes // 4
        rows = self._memory[: len(self._memory) // width * width].view(-1, width)
        count = min(self._options.reads, len(self._room) // width)
        out = self._room[: count * width].view(count, width)
        drawn = torch.randint(len(rows), (count,), device=self._device)
        figure: dict[str, Any] = {"row_bytes": row_bytes, "reads": count, "samples_s": {}}
        for order, ids in (("at_random", drawn), ("in_order", drawn.sort().values)):
            out.zero_()
            self._read(rows, ids, out)
            columns = torch.arange(width, device=self._device)
            if not torch.equal(out.long(), ids[:, None] * width + columns):
                raise ValueError(f"rows of {row_bytes} bytes, {order}: wrong words")
            spent = self._times(partial(self._read, rows, ids, out))
            reads_a_second = count / statistics.median(spent)
            figure[f"{order}_million_per_s"] = reads_a_second / 1e6
            figure[f"{order}_gb_per_s"] = reads_a_second * row_bytes / 1e9
            figure["samples_s"][order] = spent
        return figure

    def _times(self, call: Callable[[], object]) -> list[float]:
        """Seconds of calls before and after which others are under way."""
        times = range(self._options.repeats)
        return [window(lambda _: call(), [None] * 3, self._device) for _ in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="of pinned memory")
    parser.add_argument("--reads", type=int, default=1_000_000, help="rows at a time, at most")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    bench = Bench(options)
    figures = bench.figures()
    print(f"pinned copy: {bench.copied_gb_per_s:.1f} GB/s")
    print(f"{'bytes':>6} {'at random, M/s':>15} {'GB/s':>7} {'in order, M/s':>15} {'GB/s':>7}")
    for each in figures:
        columns = (each[f"{order}_{unit}"] for order in ("at_random", "in_order")
                   for unit in ("million_per_s", "gb_per_s"))  # fmt: skip
        print("{:6} {:15.1f} {:7.2f} {:15.1f} {:7.2f}".format(each["row_bytes"], *columns))
    if options.out:
        report = {
            "machine": describe_machine(),
            "pinned_copy_gb_per_s": bench.copied_gb_per_s,
            "pinned_copy_samples_s": bench.copy_s,
            "memory_gib": options.gib,
            "reads": options.reads,
            "figures": figures,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
