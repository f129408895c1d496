"""Claim: as CUDA graphs, the steps of ``dgl-mgpu train`` take at most half the time.

Every model that trains on mini-batches of one type of nodes, with the settings of ``configs/``, on
a generated graph in GPU memory: epochs with ``trainer.cuda_graphs=auto``, as it is unless told
otherwise, beside those with ``false``, whose steps the host queues kernel by kernel.  An epoch is
what a run reports of it, without its validation; the first one, in which steps are captured, does
not count.  Without dropout, which draws other numbers in a captured step, both have the same
loss in their first epoch, or the benchmark fails; later ones drift apart by what sums in another
order do.

    python -m benchmarks.train_gpu --out train.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.figures import Figure, Report
from dgl_mgpu.cli import main as dgl_mgpu
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.report import EpochReport, read_metrics

MODELS = ("graphsage", "gcn", "gat", "gin", "rgcn", "pinsage")
TIMES_UNCAPTURED = 2.0
#: Between losses.
_TOLERANCE = 2e-3


def epochs(options: argparse.Namespace, root: str, model: str, graphs: str) -> list[EpochReport]:
    """Those of a run."""
    folder = Path(root) / f"{model}-{graphs}"
    words = {
        "data.root": root,
        "data.options.num_nodes": options.nodes,
        "data.options.num_edges": options.edges,
        "model": model,
        "model.dropout": 0,
        "store.device": "cuda" if torch.cuda.is_available() else "cpu",
        "trainer.batch_size": options.batch,
        "trainer.epochs": 1 + options.repeats,
        "trainer.eval_every": 2 + options.repeats,
        "trainer.cuda_graphs": graphs,
        "hydra.run.dir": folder,
    }
    with contextlib.redirect_stdout(io.StringIO()) as said:
        failed = dgl_mgpu(["train", *(f"{name}={value}" for name, value in words.items())])
    if failed:
        raise ValueError(f"{model}: the run failed; it said:\n{said.getvalue()}")
    reports, _ = read_metrics(folder / "metrics.jsonl")
    return reports


def step_ms(report: EpochReport) -> float:
    """Milliseconds of a step, without the epoch's validation."""
    seconds = report.seconds
    return 1e3 * (seconds.total - (seconds.evaluate or 0.0)) / report.steps


def compare(options: argparse.Namespace, root: str, model: str) -> Figure:
    """A model's captured steps beside those that are not."""
    captured, others = (epochs(options, root, model, graphs) for graphs in ("auto", "false"))
    loss, other = captured[0].loss, others[0].loss
    if not math.isclose(loss, other, rel_tol=_TOLERANCE):
        raise ValueError(f"{model}: loss {loss} of captured steps, {other} of others")
    times = {
        way: [step_ms(each) for each in reports[1:]]
        for way, reports in (("captured", captured), ("others", others))
    }
    medians = {way: statistics.median(each) for way, each in times.items()}
    more = {
        "ms": times,
        "steps": captured[0].steps,
        "losses": {"captured": [r.loss for r in captured], "others": [r.loss for r in others]},
        "seeds_per_second": {way: 1e3 * options.batch / ms for way, ms in medians.items()},
    }
    return Figure(
        model, "ms", medians["captured"], medians["others"], times_peer=TIMES_UNCAPTURED, more=more
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--batch", type=int, default=1024, help="seeds of a mini-batch")
    parser.add_argument("--nodes", type=int, default=500_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=3, help="timed epochs")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    about = {**vars(options), "models": list(options.models), "out": str(options.out)}
    report = Report(Communicator.of_this_machine(), options.out, options=about)
    with tempfile.TemporaryDirectory() as root:
        for model in options.models:
            report.add(compare(options, root, model))


if __name__ == "__main__":
    main()
