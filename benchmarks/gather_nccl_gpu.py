"""Claim: gathering rows over GPUs takes less than half as long as through NCCL.

Rows are dealt out over all GPUs, ids are uniform, all ranks gather at once.  Ours is the store's
gather: one kernel that reads the others' memory.  The other one is what WholeGraph compares with
(section III-C3, figure 10), in plain torch.distributed: ids are put into buckets by owner, their
numbers and then the ids are exchanged, owners pick their rows, rows are exchanged and put into the
order of the ids.  Beside the times is what comes over the links in a second (the paper's BusBW), in
our gather and in the exchange of rows alone.

Both gather the same ids first: what they give is compared, bit for bit, with what the rows hold and
with each other.  Then they are timed in turns, with ids of their own.

    python -m benchmarks.gather_nccl_gpu --ranks 4 --out gather_nccl.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ceilings import measure_ceilings, print_ceilings
from benchmarks.figures import Figure, Report
from benchmarks.gather_gpu import numbering, refilled, rows_of
from benchmarks.gpu import NumberedWords, built_store, measure, require_words, this_device
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.ops import RowView, gather_rows
from dgl_mgpu.store.memory import FeatureSource
from dgl_mgpu.train.launch.launch import launch

#: How many times as long the gather through NCCL takes at least.
TIMES_NCCL = 2.0
#: Rows that are made at a time.
_CHUNK = 1 << 18


class DistributedGather:
    """Rows dealt out over the ranks of a job, gathered by messages.

    Parameters
    ----------
    own : Tensor, shape (num_own, width)
        Row ``i`` is row ``i * ranks + rank`` of all.
    ranks : int
    """

    def __init__(self, own: torch.Tensor, ranks: int) -> None:
        self._own, self._ranks = own, ranks

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of ``ids``, int64, in their order."""
        owner = (ids % self._ranks).to(torch.uint8)  # eight bits are sorted in one go
        order = owner.argsort(stable=True)
        sends, receives = self._counts(owner)
        wanted = _exchanged(ids[order], sends, receives)
        rows = _exchanged(self._own[wanted // self._ranks], receives, sends)
        return torch.empty_like(rows).index_copy_(0, order, rows)

    def rows_exchange(self, ids: torch.Tensor) -> Callable[[Any], torch.Tensor]:
        """The exchange of as many rows as ``ids`` ask for, alone."""
        sends, receives = self._counts(ids % self._ranks)
        rows = self._own.new_zeros(sum(receives), self._own.shape[1])
        return lambda _: _exchanged(rows, receives, sends)

    def _counts(self, owner: torch.Tensor) -> tuple[list[int], list[int]]:
        """How many rows this rank asks each other for, and these ask it for."""
        sends = torch.bincount(owner, minlength=self._ranks)
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends)
        # At once: the host waits for the GPU.
        counts = torch.stack([sends, receives]).tolist()
        return counts[0], counts[1]


def _exchanged(given: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
    """What the ranks have sent here, one rank's after the other's."""
    found = given.new_empty(sum(receives), *given.shape[1:])
    dist.all_to_all_single(found, given, receives, sends)
    return found


class Bench:
    """Rows of all widths, on one rank."""

    def __init__(self, options: argparse.Namespace, ceilings: dict[str, float]) -> None:
        self._options, self._device = options, this_device()
        self._ranks = Communicator.of_this_machine()
        about = {key: str(value) for key, value in vars(options).items()}
        self._report = Report(self._ranks, options.out, options=about, ceilings=ceilings)

    def run(self) -> None:
        ranks, wide = self._ranks, max(self._options.row_bytes)
        torch.manual_seed(ranks.rank)
        num_rows = int(self._options.gb_per_gpu * 1e9) // wide * ranks.size
        source = {"rows": FeatureSource(NumberedWords(num_rows, wide))}
        first = ranks.rank == 0
        partitioned = {"policy": "partitioned"}
        with built_store(source if first else None, {}, ranks, partitioned) as store:
            for row_bytes in self._options.row_bytes:
                self._figure(refilled(rows_of(store.tables["rows"]), row_bytes), wide)

    def _figure(self, view: RowView, wide: int) -> None:
        ranks, row_bytes = self._ranks, view.row_bytes
        numbers = numbering(view, wide // 4)
        messages = DistributedGather(self._own_rows(view, numbers), ranks.size)
        ids = self._new_ids(view.num_rows)
        gathers: dict[str, Callable[[torch.Tensor], torch.Tensor]]
        gathers = {"ours": partial(gather_rows, view), "NCCL": messages}
        case = f"uniform, {row_bytes} B"
        for name, gather in gathers.items():
            require_words(f"{name}, {case}", gather, ids, numbers)
        if not torch.equal(*(gather(ids).view(torch.int32) for gather in gathers.values())):
            raise ValueError(f"{case}: the two gathers differ")
        seconds, samples = measure(
            {**gathers, "rows alone": messages.rows_exchange(ids)},
            lambda turn: [self._new_ids(view.num_rows) for _ in range(self._options.window + 2)],
            self._options.repeats,
            ranks,
        )
        mean = {name: sum(each) / len(each) for name, each in seconds.items()}
        over_links = self._options.ids * row_bytes * (1 - 1 / ranks.size) / 1e9
        more = {
            "row_bytes": row_bytes,
            "rows": view.num_rows,
            "each_rank_s": seconds,
            "samples": samples,
            "bus_gb_per_second": {name: over_links / spent for name, spent in mean.items()},
        }
        ours, theirs = 1e3 * mean["ours"], 1e3 * mean["NCCL"]
        self._report.add(Figure(case, "ms", ours, theirs, times_peer=TIMES_NCCL, more=more))

    def _own_rows(
        self, view: RowView, numbers: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """This rank's rows, with the words that the store's have."""
        ranks = self._ranks
        own = torch.arange(ranks.rank, view.num_rows, ranks.size, device=self._device)
        rows = torch.empty(len(own), *view.row_shape, dtype=torch.int32, device=self._device)
        for ids, some in zip(own.split(_CHUNK), rows.split(_CHUNK), strict=True):
            some.copy_(numbers(ids))
        return rows.view(torch.float32)

    def _new_ids(self, num_rows: int) -> torch.Tensor:
        return torch.randint(num_rows, (self._options.ids,), device=self._device)


def work(options: argparse.Namespace, ceilings: dict[str, float]) -> None:
    """All that a rank does."""
    Bench(options, ceilings).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--row-bytes", type=int, nargs="+", default=[400, 512, 1024])
    parser.add_argument("--ids", type=int, default=1_000_000, help="a gather")
    parser.add_argument("--gb-per-gpu", type=float, default=2.0, help="of rows, for each way")
    parser.add_argument("--repeats", type=int, default=10, help="timed windows")
    parser.add_argument("--window", type=int, default=8, help="timed gathers in a window")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error("messages need at least 2 ranks")
    ceilings = measure_ceilings(options.ranks)
    print_ceilings(ceilings)
    launch(work, options.ranks, options, ceilings)


if __name__ == "__main__":
    main()
