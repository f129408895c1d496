"""What the examples share: a description of each, data, seeds, and results as a table and JSON."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgl_mgpu  # first: it lets dgl import

# isort: split
import dgl
import numpy as np
import torch
from dgl.dataloading import DataLoader, MultiLayerFullNeighborSampler

from benchmarks.machine import describe_machine
from dgl_mgpu.data import load
from dgl_mgpu.errors import DataFormatError, UnavailableError

GENERATED = "generated"
#: Runs on a data set that DGL states a figure for, and on others.
SEEDS, FEW_SEEDS = 10, 3


def seed_all(seed: int) -> None:
    """Seed all that draws: models and negatives, samplers, and DGL's DataLoader, which shuffles."""
    torch.manual_seed(seed)
    dgl.seed(seed)
    np.random.seed(seed)


def rewired(g: dgl.DGLGraph) -> dgl.DGLGraph:
    """The same nodes, with edges of each type between nodes at random; all degrees stay."""
    edges = {}
    for etype in g.canonical_etypes:
        u, v = g.edges(etype=etype)
        edges[etype] = u, v[torch.randperm(len(v))]
    other = dgl.heterograph(edges, {ntype: g.num_nodes(ntype) for ntype in g.ntypes})
    for ntype in g.ntypes:
        other.nodes[ntype].data.update(g.nodes[ntype].data)
    return other


@dataclass(frozen=True)
class Example:
    """A reproduction of one of DGL's examples.

    Attributes
    ----------
    name, measure : str
        What to call it and what it measures.
    readme : str
        Folder in DGL's repository whose README states figures.
    stated : mapping of str to float
        These figures, by data set.
    read : callable of (name, root)
        The data, or a DataFormatError that says what is missing where.
    learn : callable of (data, epochs, device)
        Trains with the seeds as they are and returns the measure.
    epochs, generated_epochs : int
        DGL's number, and how many suffice for the generated data.
    others : tuple of str
        Data sets for which DGL states no figure.
    rewire : callable
        The generated data without what its edges tell.
    """

    name: str
    measure: str
    readme: str
    stated: Mapping[str, float]
    read: Callable[[str, str], Any]
    learn: Callable[[Any, int, str], float]
    epochs: int
    generated_epochs: int
    others: tuple[str, ...] = (GENERATED,)
    rewire: Callable[[Any], Any] = rewired

    def run(self, data: Any, epochs: int, seed: int, device: str = "cpu") -> float:
        """Train and measure from one seed."""
        seed_all(seed)
        return self.learn(data, epochs, device)


def read_nodes(name: str, root: str) -> dgl.DGLGraph:
    """A graph with features, labels and a split of its nodes."""
    options = {"num_nodes": 2000, "num_edges": 20_000, "num_classes": 7, "train": 0.1, "test": 0.7}
    return load(name, root, **(options if name == GENERATED else {})).to_dgl()


def require(path: Path, data: str, source: str) -> Path:
    """A path of a data set that another program has to put there."""
    if not path.exists():
        raise DataFormatError(asked=f"read {data}", found=f"no {path}", fix=source)
    return path


@contextmanager
def placed(g: dgl.DGLGraph, device: str, store: bool, edges: bool = False) -> Iterator[Any]:
    """What a DataLoader gets: the graph on the device, or that of a store."""
    if not store:
        yield g.to(device)
        return
    seed = torch.initial_seed()
    with dgl_mgpu.GlobalStore.from_dgl(g, seed=seed, edges=edges, device=device) as made:
        yield made.graph


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """One step down a loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def embeddings(model: Any, graph: Any, x: torch.Tensor) -> torch.Tensor:
    """What a model of layers gives for every node: layer by layer, from all neighbours."""
    model.eval()
    nodes = torch.arange(graph.num_nodes(), dtype=graph.idtype, device=graph.device)
    for number in range(len(model.layers)):
        loader = DataLoader(graph, nodes, MultiLayerFullNeighborSampler(1), batch_size=4096)
        x = torch.cat([model.layer(number, b, x[inputs.long()]) for inputs, _, (b,) in loader])
    return x


def main(examples: Iterable[Example]) -> None:
    """Run examples from the command line, on all data sets that are there."""
    by_name = {example.name: example for example in examples}
    parser = argparse.ArgumentParser(description=f"Examples: {', '.join(by_name)}.")
    parser.add_argument("--root", default="data", help="root of the data sets")
    parser.add_argument("--only", nargs="+", choices=list(by_name), default=list(by_name))
    parser.add_argument("--data", nargs="+", help="data sets, in place of all of an example's")
    parser.add_argument("--seeds", type=int, help="in place of 10, or 3 where DGL states nothing")
    parser.add_argument("--epochs", type=int, help="in place of an example's own number")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="where to write the results")
    options = parser.parse_args()
    report = {"machine": describe_machine(), "device": options.device, "runs": [], "absent": []}
    for name in options.only:
        example = by_name[name]
        for data in options.data or [*example.stated, *example.others]:
            _measure(example, data, options, report)
            if options.out:  # after each: all of them take hours
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n" + table(report))


def _measure(example: Example, name: str, options: argparse.Namespace, report: Any) -> None:
    try:
        data = example.read(name, options.root)
    except (DataFormatError, UnavailableError) as error:
        print(f"{example.name}: {error}", flush=True)
        report["absent"].append({"example": example.name, "data": name, "why": str(error)})
        return
    generated = name == GENERATED
    epochs = options.epochs or (example.generated_epochs if generated else example.epochs)
    seeds = range(options.seeds or (SEEDS if name in example.stated else FEW_SEEDS))
    begin = time.perf_counter()
    values = [example.run(data, epochs, seed, options.device) for seed in seeds]
    run = {
        "example": example.name,
        "data": name,
        "measure": example.measure,
        "epochs": epochs,
        "stated": example.stated.get(name),
        "readme": f"{example.readme}/README.md",
        "values": values,
        "seconds": (time.perf_counter() - begin) / len(seeds),
    }
    if generated:
        torch.manual_seed(0)
        data = example.rewire(data)
        run["rewired"] = [example.run(data, epochs, seed, options.device) for seed in seeds]
    report["runs"].append(run)
    print(_row(run), flush=True)


def table(report: Mapping[str, Any]) -> str:
    """The runs of a report, in Markdown."""
    head = ["example", "data", "measure", "DGL states", "here", "edges at random", "seeds"]
    return "\n".join(["| " + " | ".join(head) + " |", "| --- " * len(head) + "|",
                      *map(_row, report["runs"])])  # fmt: skip


def _row(run: Mapping[str, Any]) -> str:
    stated = "" if run["stated"] is None else f"{run['stated']:g}"
    cells = [
        *(run["example"], run["data"], run["measure"], stated, _spread(run["values"])),
        *(_spread(run.get("rewired", [])), str(len(run["values"]))),
    ]
    return "| " + " | ".join(cells) + " |"


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "".join(f"{value:.3f}" for value in values)
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
