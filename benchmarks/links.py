"""What the links between GPUs carry: by loads and by stores.

A gather on all GPUs at once loads from all others.  Every load sends a request the other way,
where it takes the place of somebody else's data; stores need none.  So three patterns (one GPU
alone, a ring, all from all others) are measured with plain kernels that load or store rows, at
random and one after another: what a gather is to be held against, beside copies
(``benchmarks/ceilings.py``).

Rows are checked before they are timed.

    python -m benchmarks.links --out links.json
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import describe_machine

#: Of each GPU's table, and of what one launch moves.
TABLE_BYTES, MOVED_BYTES = 4 << 30, 1 << 30
REPEATS, BLOCKS, THREADS = 6, 528, 256

SOURCE = r"""
typedef long long int64;

// Row `rows[i]` of GPU `gpus[i]`'s table to row i of `mine`, or with `kStore` the other way.
template <bool kStore>
__global__ void move(ulonglong2* mine, const int64* tables, const int* gpus, const int* rows,
                     int64 count, int vectors) {
  constexpr int kUnroll = 4;
  const int64 total = count * vectors, step = (int64)gridDim.x * blockDim.x;
  for (int64 start = (int64)blockIdx.x * blockDim.x + threadIdx.x; start < total;
       start += kUnroll * step) {
    ulonglong2 held[kUnroll];
    ulonglong2* to[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64 at = min(start + u * step, total - 1), i = at / vectors;
      ulonglong2* theirs =
          (ulonglong2*)tables[gpus[i]] + (int64)rows[i] * vectors + at % vectors;
      held[u] = kStore ? mine[at] : *theirs;
      to[u] = kStore ? theirs : mine + at;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) *to[u] = held[u];
  }
}
"""

#: By GPU, the others that it reads or writes.
Pattern = Mapping[int, Sequence[int]]


class Machine:
    """Tables on all GPUs of this process, each mapped by the others."""

    def __init__(self, row_bytes: int) -> None:
        import cupy

        self._cupy = cupy
        self.gpus = range(torch.cuda.device_count())
        self.vectors = row_bytes // 16
        self.table_rows, self.count = TABLE_BYTES // row_bytes, MOVED_BYTES // row_bytes
        self._module = cupy.RawModule(
            code=SOURCE, options=("-std=c++17",), name_expressions=("move<true>", "move<false>")
        )
        self.tables: list[torch.Tensor] = []
        self.mine: list[torch.Tensor] = []
        self.streams: list[torch.cuda.Stream] = []
        for gpu in self.gpus:
            with cupy.cuda.Device(gpu):
                for other in self.gpus:
                    if other != gpu:
                        cupy.cuda.runtime.deviceEnablePeerAccess(other)
            where = torch.device("cuda", gpu)
            table = torch.empty(self.table_rows, row_bytes // 8, dtype=torch.int64, device=where)
            table[:] = (torch.arange(self.table_rows, device=where) * len(self.gpus) + gpu)[:, None]
            self.tables.append(table)
            self.mine.append(
                torch.empty(self.count, row_bytes // 8, dtype=torch.int64, device=where)
            )
            self.streams.append(torch.cuda.Stream(where))

    def moves(
        self, pattern: Pattern, store: bool, at_random: bool
    ) -> dict[int, Callable[[], None]]:
        """For each GPU of a pattern, what launches its kernel."""
        return {gpu: self._move(gpu, others, store, at_random) for gpu, others in pattern.items()}

    def _move(
        self, gpu: int, others: Sequence[int], store: bool, at_random: bool
    ) -> Callable[[], None]:
        rng = np.random.default_rng(gpu)
        # Whoever stores has a part of each table to himself.
        first, room = 0, self.table_rows
        if store:
            room //= len(self.gpus)
            first = gpu * room
        if at_random:
            theirs = rng.choice(others, self.count)
            rows = rng.integers(0, room, self.count)
        else:  # runs of 64 rows
            theirs = np.resize(np.repeat(others, 64), self.count)
            rows = np.arange(self.count) % room
        where = torch.device("cuda", gpu)
        numbers = [
            torch.from_numpy(each.astype(np.int32)).to(where) for each in (theirs, first + rows)
        ]
        tables = torch.tensor([table.data_ptr() for table in self.tables], device=where)
        function = self._module.get_function("move<true>" if store else "move<false>")

        def launch() -> None:
            with self._cupy.cuda.Device(gpu):
                stream = self._cupy.cuda.ExternalStream(self.streams[gpu].cuda_stream)
                pointers = (each.data_ptr() for each in (self.mine[gpu], tables, *numbers))
                sizes = (np.int64(self.count), np.int32(self.vectors))
                function((BLOCKS,), (THREADS,), (*pointers, *sizes), stream=stream)

        if not store:
            launch()
            self.streams[gpu].synchronize()
            expected = numbers[1].long() * len(self.gpus) + numbers[0]
            if not torch.equal(self.mine[gpu], expected[:, None].expand_as(self.mine[gpu])):
                raise ValueError(f"GPU {gpu} loaded wrong rows")
        return launch

    def seconds(self, moves: Mapping[int, Callable[[], None]]) -> list[list[float]]:
        """Of each GPU's launches, all GPUs at once."""
        timing = partial(torch.cuda.Event, enable_timing=True)
        events = {gpu: [timing() for _ in range(REPEATS + 1)] for gpu in moves}
        # During the first and the last timed launch all are under way.
        for repeat in range(REPEATS + 2):
            for gpu, launch in moves.items():
                if repeat > 0:
                    events[gpu][repeat - 1].record(self.streams[gpu])
                launch()
        for gpu in moves:
            self.streams[gpu].synchronize()
        return [
            [start.elapsed_time(stop) / 1e3 for start, stop in itertools.pairwise(each)]
            for each in events.values()
        ]

    def rate(self, seconds: Sequence[Sequence[float]]) -> float:
        """GB/s of a GPU, the mean over GPUs."""
        moved = self.count * self.vectors * 16 / 1e9
        return float(np.mean([moved * len(each) / sum(each) for each in seconds]))


def measure_links(
    row_bytes: int,
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, list[list[float]]]]]:
    """Mean GB/s a GPU, and the seconds of each GPU's launches, by pattern and way."""
    machine = Machine(row_bytes)
    gpus = list(machine.gpus)
    patterns: dict[str, Pattern] = {
        "one from one": {0: [1]},
        "a ring": {gpu: [(gpu + 1) % len(gpus)] for gpu in gpus},
        "all from all others": {gpu: [o for o in gpus if o != gpu] for gpu in gpus},
    }
    found: dict[str, dict[str, float]] = {name: {} for name in patterns}
    samples: dict[str, dict[str, list[list[float]]]] = {name: {} for name in patterns}
    # Loads first: stores change the rows that loads are checked by.
    for store in (False, True):
        for name, pattern in patterns.items():
            for at_random in (False, True):
                order = "at random" if at_random else "one after another"
                way = f"{'stores' if store else 'loads'}, {order}"
                seconds = machine.seconds(machine.moves(pattern, store, at_random))
                samples[name][way], found[name][way] = seconds, machine.rate(seconds)
    return found, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row-bytes", type=int, default=512)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print("this machine has fewer than two GPUs: no links")
        return
    found, samples = measure_links(options.row_bytes)
    for pattern, rates in found.items():
        for way, rate in rates.items():
            print(f"{pattern:20} {way:28} {rate:7.1f} GB/s a GPU")
    if options.out:
        report: dict[str, Any] = {
            "machine": describe_machine(), "row_bytes": options.row_bytes,
            "gpus": torch.cuda.device_count(), "gb_per_second_a_gpu": found,
            "samples_s": samples,
        }  # fmt: skip
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
