"""Claim: gathering rows over tiers on the CPU is as fast as torch.index_select on one tensor.

For each row size and distribution of ids, ``torch.index_select`` and ``gather_rows`` over one
tier and over four tiers of four parts each, in turns, in the same process, with the same
number of threads.  No speed is reported for a gather whose result is not index_select's.

    python -m benchmarks.gather_cpu --out gather.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from benchmarks.machine import describe_machine
from dgl_mgpu.ops import RowView, gather_rows

PARTS = 4
TIERS = 4


def tiered_view(rows: torch.Tensor, tiers: int, parts: int) -> RowView:
    """View of rows in tiers of equal size, each dealt out modulo over ``parts`` segments."""
    bounds = [len(rows) * tier // tiers for tier in range(tiers + 1)]
    segments = [
        rows[start + part : stop : parts].contiguous()
        for start, stop in pairwise(bounds)
        for part in range(parts)
    ]
    return RowView(
        tiers=torch.tensor([[bounds[t], bounds[t + 1], parts, t * parts] for t in range(tiers)]),
        pointers=torch.tensor([segment.data_ptr() for segment in segments]),
        num_rows=len(rows),
        row_shape=tuple(rows.shape[1:]),
        dtype=rows.dtype,
        owner=segments,
    )


def ids_of(kind: str, count: int, num_rows: int, seed: int) -> torch.Tensor:
    """Ids with repeats; power-law ids favour the low ones, as rows in order of hotness do."""
    draws = np.random.default_rng(seed).random(count)
    return torch.from_numpy((num_rows * draws ** (4 if kind == "power law" else 1)).astype("i8"))


Gather = Callable[[torch.Tensor], torch.Tensor]


def measure(
    contenders: dict[str, Gather], new_ids: Callable[[int], torch.Tensor], repeats: int
) -> dict[str, np.ndarray]:
    """Seconds of each call after the first, in turns of random order, each with ids of its own.

    Repeated ids would find the rows, and the page table's entries for them, in the cache.
    """
    order = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for turn, name in enumerate(order.permutation(list(contenders))):
            ids = new_ids(repeat * len(contenders) + turn)
            begin = time.perf_counter()
            contenders[name](ids)
            seconds[name].append(time.perf_counter() - begin)
    return {name: np.array(times[1:]) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=int, default=512, help="size of the table in MiB")
    parser.add_argument("--gathered", type=int, default=20, help="size of the result in MiB")
    parser.add_argument(
        "--row-bytes", type=int, nargs="+", default=[16, 64, 128, 256, 400, 512, 1024]
    )
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="write the result here, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    measured = []
    print(f"{options.threads} threads; ratio = median time of index_select / of gather_rows")
    print("row bytes  ids        index_select GB/s   one tier  four tiers of four parts")
    for row_bytes in options.row_bytes:
        num_rows = (options.table << 20) // row_bytes
        rows = torch.arange(num_rows * (row_bytes // 4)).float().reshape(num_rows, -1)
        # Views of copies: no contender profits from what another has just read.
        one, many = tiered_view(rows.clone(), 1, 1), tiered_view(rows, TIERS, PARTS)
        contenders: dict[str, Gather] = {
            "index_select": partial(torch.index_select, rows, 0),
            "one tier": partial(gather_rows, one),
            "many tiers": partial(gather_rows, many),
        }
        for kind in ("uniform", "power law"):
            count = (options.gathered << 20) // row_bytes
            new_ids = partial(ids_of, kind, count, num_rows)
            ids = new_ids(0)
            expected = contenders["index_select"](ids)
            for name, gather in contenders.items():
                if not torch.equal(gather(ids), expected):
                    raise ValueError(f"{name}: wrong rows of {row_bytes} bytes, {kind} ids")
            seconds = measure(contenders, new_ids, options.repeats)
            select = seconds["index_select"]
            measured.append(
                {
                    "row_bytes": row_bytes,
                    "ids": kind,
                    "index_select_bytes_per_second": count * row_bytes / np.median(select),
                    "one_tier_ratio": float(np.median(select) / np.median(seconds["one tier"])),
                    "many_tiers_ratio": float(np.median(select) / np.median(seconds["many tiers"])),
                    "samples": {name: times.tolist() for name, times in seconds.items()},
                }
            )
            last = measured[-1]
            print(
                f"{row_bytes:9}  {kind:10} {last['index_select_bytes_per_second'] / 1e9:17.2f}"
                f"   {last['one_tier_ratio']:8.2f}   {last['many_tiers_ratio']:8.2f}"
            )
    if options.out:
        result = {
            "machine": describe_machine(),
            "threads": options.threads,
            "measured": measured,
        }
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
