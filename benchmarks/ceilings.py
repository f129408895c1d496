"""What the machine's copy engines reach: the ceilings that gathers are held against.

All GPUs at once, in GB/s for each: copies of large blocks from the next GPU of a ring, from pinned
host memory (also one GPU alone), and within a GPU.

    python -m benchmarks.ceilings --ranks 4 --out ceilings.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.machine import describe_machine

BLOCK_BYTES = 256 << 20
REPEATS = 8

Copy = tuple[torch.Tensor, torch.Tensor]


def copy_rates(copies: Sequence[Copy], repeats: int = REPEATS) -> list[float]:
    """GB/s of each copy (target, source), all at once."""
    # torch carries out a copy on the stream of the GPU it comes from, if it comes from one.
    carriers = [source.device if source.is_cuda else target.device for target, source in copies]
    streams = [torch.cuda.Stream(device) for device in carriers]
    starts, stops = ([torch.cuda.Event(enable_timing=True) for _ in copies] for _ in range(2))
    # The first copy sets up mappings; during the first and the last timed one all are under way.
    for repeat in range(repeats + 2):
        for (target, source), stream, start, stop in zip(
            copies, streams, starts, stops, strict=True
        ):
            with torch.cuda.stream(stream):
                if repeat == 1:
                    start.record(stream)
                target.copy_(source, non_blocking=True)
                if repeat == repeats:
                    stop.record(stream)
    for stream in streams:
        stream.synchronize()
    return [
        repeats * target.numel() * target.element_size() / (start.elapsed_time(stop) * 1e6)
        for (target, _), start, stop in zip(copies, starts, stops, strict=True)
    ]


def measure_ceilings(num_gpus: int, block_bytes: int = BLOCK_BYTES) -> dict[str, float]:
    """Mean GB/s a GPU of each kind of copy; nothing on a machine without GPUs.

    Keys are ``device_copy``, ``pinned_copy_alone``, ``pinned_copy`` and, with several GPUs,
    ``ring_copy``.  A copy within a GPU counts each byte once, though it is read and written.
    """
    if not torch.cuda.is_available():
        return {}
    gpus = [torch.device("cuda", gpu) for gpu in range(num_gpus)]
    blocks = [torch.zeros(block_bytes, dtype=torch.uint8, device=gpu) for gpu in gpus]
    targets = [torch.empty_like(block) for block in blocks]
    host = [torch.zeros(block_bytes, dtype=torch.uint8, pin_memory=True) for _ in gpus]
    from_host = list(zip(targets, host, strict=True))
    kinds: dict[str, list[Copy]] = {
        "device_copy": list(zip(targets, blocks, strict=True)),
        "pinned_copy_alone": from_host[:1],
        "pinned_copy": from_host,
    }
    if num_gpus > 1:
        kinds["ring_copy"] = list(zip(targets, [*blocks[1:], blocks[0]], strict=True))
    rates = {kind: copy_rates(copies) for kind, copies in kinds.items()}
    del blocks, targets, host, from_host, kinds
    torch.cuda.empty_cache()
    return {kind: sum(found) / len(found) for kind, found in rates.items()}


def print_ceilings(ceilings: dict[str, float]) -> None:
    for kind, rate in ceilings.items():
        print(f"{kind.replace('_', ' '):20} {rate:8.1f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="GPUs")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    ceilings = measure_ceilings(options.ranks)
    if not ceilings:
        print("this machine has no GPU: no ceilings")
    print_ceilings(ceilings)
    if options.out:
        report = {"machine": describe_machine(), "ranks": options.ranks, "ceilings": ceilings}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
