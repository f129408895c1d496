"""Claim: epoch by epoch, training through the store is training with DGL alone.

GraphSAGE on the Facebook page graph, or another data set that is there, by ``dgl-mgpu train`` on
some numbers of ranks and by a plain loop over DGL's own DataLoader, NeighborSampler and DGLGraph on
the CPU, which of this package uses what lets ``import dgl`` work, and the files' reader.  Runs of
one seed begin with the same weights and visit seed nodes in the same order, as many in each
optimizer step; neighbours and dropout are drawn by generators of their own.  The mean training loss
and the validation accuracy of each epoch are compared over the seeds.  The claim holds if in no
fewer than :data:`NEARLY_ALL` of these comparisons the means differ by no more than the larger
standard deviation and Welch's 95 % interval of the difference contains 0.

Beside it, the seconds of training until the validation accuracy comes within :data:`LEVEL` of the
best of DGL alone, as in XGNN's figure 15b.

Two controls show what the comparison sees: DGL alone with other seeds, which differs by chance
only, and DGL alone with a share of :data:`WRONG_ROWS` of the features at the wrong nodes.

    python -m benchmarks.convergence_epochs --out convergence_epochs.json --plot convergence.png
    python -m benchmarks.convergence_epochs --set ogbn-arxiv --data data --ranks 1
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dgl_mgpu  # noqa: F401  (first: it lets dgl import)

# isort: split
import dgl
import numpy as np
import torch
from dgl.dataloading import DataLoader, NeighborSampler
from scipy import stats

from benchmarks.convergence import SAGE
from benchmarks.datasets import data_overrides, datasets_here
from benchmarks.machine import describe_machine
from dgl_mgpu.data import Dataset
from dgl_mgpu.report import read_metrics
from dgl_mgpu.report.colours import BLUE, GREY, ORANGE, RED

#: Seed nodes of an optimizer step, over all ranks.
BATCH, FANOUTS, HIDDEN, LEARNING_RATE = 1024, (10, 10), 128, 0.01
METRICS = {"loss": "mean training loss", "accuracy": "validation accuracy"}
CONFIDENCE, NEARLY_ALL, WRONG_ROWS = 0.95, 0.9, 0.05
#: Share of the best accuracy that training is timed to.
LEVEL = 0.99
ALONE, OTHER_SEEDS, WRONG = "DGL alone", "DGL alone, other seeds", "DGL alone, wrong rows"

#: Of a run, for each metric its value after each epoch, and 'seconds' of training until then.
Curves = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Comparison:
    """A metric after an epoch, over the seeds of two ways to train.

    Attributes
    ----------
    metric : str
    epoch : int
    difference : float
        Of the means.
    welch, paired : tuple of float
        Its :data:`CONFIDENCE` intervals, of samples that are independent (Welch, 1947) and of
        samples paired by their seeds.
    spreads : tuple of float
        Each way's standard deviation over the seeds.
    """

    metric: str
    epoch: int
    difference: float
    welch: tuple[float, float]
    paired: tuple[float, float]
    spreads: tuple[float, float]

    @property
    def is_within_spread(self) -> bool:
        return abs(self.difference) <= max(self.spreads)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_within_spread": self.is_within_spread}


def welch_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Interval of a difference of means, of samples that may differ in variance (Welch, 1947).

    Parameters
    ----------
    ours, theirs : sequence of float
        At least two values each.
    """
    parts = [np.var(sample, ddof=1) / len(sample) for sample in (ours, theirs)]
    variance = sum(parts)
    if variance == 0:
        return _around(float(np.mean(ours) - np.mean(theirs)), 0.0)
    degrees = variance**2 / sum(
        part**2 / (len(sample) - 1) for part, sample in zip(parts, (ours, theirs), strict=True)
    )
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, degrees) * variance**0.5
    return _around(float(np.mean(ours) - np.mean(theirs)), float(reach))


def paired_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Interval of the mean of differences, of at least two pairs."""
    differences = np.subtract(ours, theirs)
    error = differences.std(ddof=1) / len(differences) ** 0.5
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1) * error
    return _around(float(differences.mean()), float(reach))


def contains_zero(interval: tuple[float, float]) -> bool:
    return interval[0] <= 0 <= interval[1]


def _around(middle: float, reach: float) -> tuple[float, float]:
    return middle - reach, middle + reach


def chance_beyond_spread(num_seeds: int) -> float:
    """How often independent samples of one normal distribution differ by more than their spread."""
    random = np.random.default_rng(0)
    ours, theirs = random.standard_normal((2, 200_000, num_seeds))
    spread = np.maximum(ours.std(1, ddof=1), theirs.std(1, ddof=1))
    return float((abs(ours.mean(1) - theirs.mean(1)) > spread).mean())


def compare(ours: Sequence[Curves], theirs: Sequence[Curves]) -> list[Comparison]:
    """Every metric after every epoch, over runs of the same seeds in the same order."""
    found = []
    for metric in METRICS:
        of_epochs = (np.array([run[metric] for run in runs]).T for runs in (ours, theirs))
        for epoch, (a, b) in enumerate(zip(*of_epochs, strict=True), start=1):
            found.append(Comparison(
                metric, epoch, float(a.mean() - b.mean()), welch_interval(a, b),
                paired_interval(a, b), (float(a.std(ddof=1)), float(b.std(ddof=1))),
            ))  # fmt: skip
    return found


def verdict(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """How many comparisons differ, over all metrics, and whether the claim holds."""
    welch = sum(not contains_zero(c.welch) for c in comparisons)
    spread = sum(not c.is_within_spread for c in comparisons)
    alike = sum(c.is_within_spread and contains_zero(c.welch) for c in comparisons)
    return {
        "comparisons": len(comparisons),
        "welch_without_0": welch,
        "paired_without_0": sum(not contains_zero(c.paired) for c in comparisons),
        "without_0_by_chance": (1 - CONFIDENCE) * len(comparisons),
        "beyond_spread": spread,
        "holds": alike >= NEARLY_ALL * len(comparisons),
    }


def seconds_to_accuracy(runs: Mapping[str, Sequence[Curves]]) -> dict[str, Any]:
    """For how long runs train until an accuracy that DGL alone reaches.

    Keys are ``accuracy``; ``seconds``, of each run, None where it does not get there; ``median``,
    None where half of them do not; and ``times_dgl_alone``, the median of DGL alone over each that
    there is.
    """
    best = np.mean([run["accuracy"] for run in runs[ALONE]], axis=0).max()
    accuracy = LEVEL * float(best)
    spent = {name: [_seconds_to(accuracy, run) for run in each] for name, each in runs.items()}
    median = {name: float(np.median(each)) for name, each in spent.items()}

    def known(seconds: float) -> float | None:
        return seconds if np.isfinite(seconds) else None

    return {
        "accuracy": accuracy,
        "seconds": {name: [known(each) for each in of_runs] for name, of_runs in spent.items()},
        "median": {name: known(each) for name, each in median.items()},
        "times_dgl_alone": {
            name: known(median[ALONE] / each) for name, each in median.items() if np.isfinite(each)
        },
    }


def _seconds_to(accuracy: float, run: Curves) -> float:
    reached = (s for s, a in zip(run["seconds"], run["accuracy"], strict=True) if a >= accuracy)
    return next(reached, np.inf)


def seed_order(num_seeds: int, seed: int, epoch: int) -> torch.Tensor:
    """The order in which ``dgl-mgpu train`` visits seed nodes; epochs count from 0."""
    random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return torch.from_numpy(random.permutation(num_seeds))


def through_the_store(name: str, root: str, ranks: int, seed: int, epochs: int) -> Curves:
    """One run of the command line."""
    words = {
        "model": "graphsage", "model.hidden": HIDDEN, "model.dropout": 0.5,
        "sampler.fanouts": list(FANOUTS), "sampler.eval_fanouts": [-1] * len(FANOUTS),
        "trainer.ranks": ranks, "trainer.batch_size": BATCH // ranks, "trainer.seed": seed,
        "trainer.epochs": epochs, "trainer.lr": LEARNING_RATE,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dgl_mgpu.cli", "train", f"hydra.run.dir={folder}"]
        overrides = [f"{key}={value}".replace(" ", "") for key, value in words.items()]
        overrides += data_overrides(name, root)
        subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL)
        reports, _ = read_metrics(Path(folder) / "metrics.jsonl")
    accuracies = [r.valid_accuracy for r in reports if r.valid_accuracy is not None]
    seconds = np.cumsum([r.training_seconds for r in reports]).tolist()
    return {"loss": [r.loss for r in reports], "accuracy": accuracies, "seconds": seconds}


def dgl_alone(
    g: dgl.DGLGraph, dataset: Dataset, seed: int, epochs: int, wrong_rows: float = 0.0
) -> Curves:
    """A script's loop over DGL's DataLoader."""
    torch.manual_seed(seed)
    dgl.seed(seed)
    if wrong_rows:
        g = g.local_var()
        g.ndata["feat"] = _misplaced(g.ndata["feat"], wrong_rows, seed)
    model = SAGE((g.ndata["feat"].shape[1], HIDDEN, dataset.num_classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    train, valid = map(torch.from_numpy, (dataset.train, dataset.valid))

    def batches(ids: torch.Tensor, fanouts: Sequence[int]) -> DataLoader:
        sampler = NeighborSampler(
            list(fanouts), prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        return DataLoader(g, ids, sampler, batch_size=BATCH)

    curves: dict[str, list[float]] = {name: [] for name in (*METRICS, "seconds")}
    spent = 0.0
    for epoch in range(epochs):
        model.train()
        total, begin = 0.0, time.perf_counter()
        order = seed_order(len(train), seed, epoch)
        for _, seeds, blocks in batches(train[order], FANOUTS):
            logits = model(blocks, blocks[0].srcdata["feat"])
            loss = torch.nn.functional.cross_entropy(logits, blocks[-1].dstdata["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(seeds)
        spent += time.perf_counter() - begin
        curves["seconds"].append(spent)
        curves["loss"].append(total / len(train))
        model.eval()
        right = 0
        with torch.no_grad():
            for _, _, blocks in batches(valid, [-1] * len(FANOUTS)):
                logits = model(blocks, blocks[0].srcdata["feat"])
                right += int((logits.argmax(1) == blocks[-1].dstdata["label"]).sum())
        curves["accuracy"].append(right / len(valid))
    return curves


def _misplaced(rows: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """Rows of which a share has changed places."""
    random = torch.Generator().manual_seed(seed)
    places = torch.randperm(len(rows), generator=random)[: max(2, round(share * len(rows)))]
    misplaced = rows.clone()
    misplaced[places] = rows[places.roll(1)]
    return misplaced


def plot(runs: Mapping[str, Sequence[Curves]], ours: Sequence[str], path: Path) -> None:
    """Draw means with bands of a standard deviation, and below how far they are from DGL's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(10.0, 7.0), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(METRICS), sharex=True, height_ratios=[3, 2])
    colours = dict(zip(ours, (BLUE, ORANGE, RED), strict=False))
    for (above, below), (metric, title) in zip(axes.T, METRICS.items(), strict=True):
        for name, colour in {ALONE: "black", **colours}.items():
            values = np.array([run[metric] for run in runs[name]])
            epochs = np.arange(1, values.shape[1] + 1)
            mean, spread = values.mean(0), values.std(0, ddof=1)
            style = "o--" if name == ALONE else "-"
            above.plot(epochs, mean, style, color=colour, label=name, markersize=3, linewidth=1.3)
            above.fill_between(epochs, mean - spread, mean + spread, color=colour, alpha=0.18, lw=0)
        below.axhspan(-1, 1, color=GREY, alpha=0.3, lw=0, label="within the larger deviation")
        below.axhline(0, color="black", linewidth=1)
        for place, (name, colour) in enumerate(colours.items()):
            found = [c for c in compare(runs[name], runs[ALONE]) if c.metric == metric]
            spreads = np.array([max(c.spreads) for c in found])
            middle = np.array([c.difference for c in found]) / spreads
            reach = np.array([c.welch[1] for c in found]) / spreads - middle
            shift = 0.2 * (place - (len(colours) - 1) / 2)
            below.errorbar(epochs + shift, middle, reach, fmt="o", color=colour, markersize=3,
                           linewidth=1.2, label=f"{name}, 95 % interval")  # fmt: skip
        above.set_title(f"{title}: mean of {len(runs[ALONE])} seeds, ± deviation", fontsize=10)
        below.set_title(f"difference from {ALONE} ÷ larger deviation", fontsize=10)
        below.set_xlabel("epoch")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        above.legend(fontsize=8)
        if metric == "accuracy":
            above.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        else:
            above.set_yscale("log")
            above.yaxis.set_major_formatter("{x:g}")
            above.yaxis.set_minor_formatter("{x:g}")
        for axis in (above, below):
            axis.grid(alpha=0.3)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    canvas.print_png(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data", help="root of the data sets")
    parser.add_argument("--set", default="facebook", help="name of the data set")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, default=5, help="runs of each, at least 2")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--out", type=Path, help="where to write the results")
    parser.add_argument("--plot", type=Path, help="draw the curves here, as PNG")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("one seed has no spread")
    begin, machine = time.perf_counter(), describe_machine()
    name = options.set
    dataset = datasets_here([name], options.data)[name]
    g = dataset.to_dgl()
    seeds, epochs = range(options.seeds), options.epochs
    ours = [f"dgl-mgpu, {n} rank{'s' if n > 1 else ''}" for n in options.ranks]
    runs: dict[str, list[Curves]] = {
        ALONE: [dgl_alone(g, dataset, seed, epochs) for seed in seeds],
        OTHER_SEEDS: [dgl_alone(g, dataset, len(seeds) + seed, epochs) for seed in seeds],
        WRONG: [dgl_alone(g, dataset, seed, epochs, WRONG_ROWS) for seed in seeds],
    }
    for label, ranks in zip(ours, options.ranks, strict=True):
        runs[label] = [through_the_store(name, options.data, ranks, seed, epochs) for seed in seeds]
    compared = {label: compare(runs[label], runs[ALONE]) for label in (*ours, OTHER_SEEDS, WRONG)}
    by_chance = chance_beyond_spread(len(seeds))
    print(f"beyond the spread by chance: {by_chance:.1%} of comparisons of independent runs")
    for label, comparisons in compared.items():
        found = verdict(comparisons)
        print(
            f"{label:24} {'holds' if found['holds'] else 'does not hold':14} "
            f"of {found['comparisons']} comparisons: beyond the spread {found['beyond_spread']}, "
            f"intervals without 0: Welch's {found['welch_without_0']}, paired "
            f"{found['paired_without_0']} (by chance {found['without_0_by_chance']:.1f})"
        )
    timed = seconds_to_accuracy({label: runs[label] for label in (ALONE, *ours)})
    print(f"seconds of training until an accuracy of {timed['accuracy']:.1%}: {timed['median']}")
    if options.out:
        report = {
            "machine": machine,
            "settings": {
                "data": name, "seeds": len(seeds), "epochs": epochs, "batch": BATCH,
                "fanouts": FANOUTS, "hidden": HIDDEN, "learning_rate": LEARNING_RATE,
                "confidence": CONFIDENCE, "nearly_all": NEARLY_ALL, "wrong_rows": WRONG_ROWS,
                "level": LEVEL,
            },
            "seconds": time.perf_counter() - begin,
            "beyond_spread_by_chance": by_chance,
            "to_accuracy": timed,
            "verdicts": {label: verdict(found) for label, found in compared.items()},
            "comparisons": {
                label: [each.to_dict() for each in found] for label, found in compared.items()
            },
            "runs": runs,
        }  # fmt: skip
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        plot(runs, ours, options.plot)


if __name__ == "__main__":
    main()
