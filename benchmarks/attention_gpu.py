"""Claim: DGL's attention layers take one pass over the edges, and memory of nodes, not of edges.

The graph has the size of ogbn-products, in-degrees from a Pareto distribution of exponent 1.5 and
sources drawn uniformly, so that caches help nobody.  Forward and backward passes of a layer as
unmodified scripts call it, against the same layer composed of operators as DGL does (on this
package's operators), and torch-geometric's.  Outputs and gradients are compared first.  What takes
memory of edges does not fit at this size; so some rows have a sixteenth of the nodes and edges.

    python -m benchmarks.attention_gpu --out attention.json
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip
import dgl.sparse as dglsp  # isort: skip
from dgl.nn import DotGatConv, EGATConv, GATConv, GATv2Conv, HGTConv  # isort: skip

from benchmarks.ceilings import copy_rates
from benchmarks.gpu import PowerLaw, this_device
from benchmarks.machine import describe_machine
from dgl_mgpu.graph.originals import originals

FEATURES = 100
#: Types of edges, and features of an edge.
EDGE_TYPES, EDGE_FEATURES = 4, 8
#: How a layer is run.
WAYS = "one pass", "composed", "torch-geometric"


class Case(NamedTuple):
    """A layer, and milliseconds and bytes that it is to take at most."""

    name: str
    layer: Callable[[], nn.Module]
    peer: str | None  # of torch-geometric
    heads: int
    width: int
    dtype: torch.dtype = torch.float32
    permuted: bool = False
    #: Rows that are read for each edge, forward and backward; keys that are not the values as well.
    passes: int = 2
    milliseconds: float | None = None
    gigabytes: float | None = None
    #: Divides the numbers of nodes and edges.
    divisor: int = 1
    #: What the layer is called with beside the graph and its features.
    others: Callable[[dgl.DGLGraph, torch.dtype], dict[str, Any]] = lambda graph, dtype: {}


class SparseAttention(nn.Module):
    """Attention by dot products, written with sparse matrices as in DGL's graph transformers."""

    def __init__(self, reads_values: bool = False) -> None:
        super().__init__()
        self.products = nn.ModuleList(nn.Linear(FEATURES, 256, bias=False) for _ in range(3))
        #: Values that are read are computed, and the attention is not one pass.
        self.reads_values = reads_values

    def forward(
        self, graph: dgl.DGLGraph, features: torch.Tensor, adj: dglsp.SparseMatrix
    ) -> torch.Tensor:
        """Rows of shape (nodes, 4, 64)."""
        q, k, v = (product(features).view(-1, 64, 4) for product in self.products)
        scores = dglsp.bsddmm(adj, q / 8, k.transpose(1, 0))
        if self.reads_values:
            scores.val  # noqa: B018
        shares = scores.softmax()
        if self.reads_values:
            shares.val  # noqa: B018
        return dglsp.bspmm(shares, v).transpose(1, 2)


def _gat() -> nn.Module:
    return GATConv(FEATURES, 64, 4, allow_zero_in_degree=True)


def _gatv2() -> nn.Module:
    return GATv2Conv(FEATURES, 16, 4, allow_zero_in_degree=True)


def _dot() -> nn.Module:
    return DotGatConv(FEATURES, 64, 4, allow_zero_in_degree=True)


def _edge_weights(graph: dgl.DGLGraph, dtype: torch.dtype) -> dict[str, Any]:
    return {"edge_weight": torch.rand(graph.num_edges(), device=graph.device, dtype=dtype)}


def _adjacency(graph: dgl.DGLGraph, dtype: torch.dtype) -> dict[str, Any]:
    return {"adj": graph.adj()}


def _edge_features(graph: dgl.DGLGraph, dtype: torch.dtype) -> dict[str, Any]:
    shape = graph.num_edges(), EDGE_FEATURES
    return {"efeats": torch.randn(shape, device=graph.device, dtype=dtype)}


def _types(graph: dgl.DGLGraph, dtype: torch.dtype) -> dict[str, Any]:
    ntype = torch.zeros(graph.num_nodes(), dtype=torch.long, device=graph.device)
    etype = torch.randint(EDGE_TYPES, (graph.num_edges(),), device=graph.device)
    return {"ntype": ntype, "etype": etype}


def _egat() -> nn.Module:
    return EGATConv(FEATURES, EDGE_FEATURES, 64, 16, 4)


def _hgt() -> nn.Module:
    return HGTConv(FEATURES, 64, 4, 1, EDGE_TYPES, dropout=0.0)  # drawn anew at each call


CASES = (
    Case("GATConv 4 x 64", _gat, "GATConv", 4, 64, milliseconds=110, gigabytes=12),
    Case("GATConv 4 x 64, edge ids permuted", _gat, None, 4, 64, torch.float32, True, 2, 110, 12),
    Case("GATConv 4 x 64, bfloat16", _gat, "GATConv", 4, 64, torch.bfloat16, False, 2, 65),
    Case("GATv2Conv 4 x 16", _gatv2, "GATv2Conv", 4, 16, passes=4, milliseconds=60, gigabytes=8),
    Case("DotGatConv 4 x 64", _dot, None, 4, 64, passes=4, milliseconds=120, gigabytes=12),
    Case("GATConv 4 x 64, edge weights", _gat, None, 4, 64, others=_edge_weights),
    Case(
        "dgl.sparse, dot products 4 x 64", SparseAttention, None, 4, 64, passes=6, others=_adjacency
    ),
    Case("HGTConv 4 x 64, 4 edge types", _hgt, None, 4, 64, passes=6, others=_types),
    Case("GATConv 4 x 64, a 16th", _gat, "GATConv", 4, 64, divisor=16),
    Case("GATv2Conv 4 x 16, a 16th", _gatv2, "GATv2Conv", 4, 16, passes=4, divisor=16),
    Case(
        "HGTConv 4 x 64, 4 edge types, a 16th",
        _hgt,
        None,
        4,
        64,
        passes=6,
        divisor=16,
        others=_types,
    ),
    Case(
        "EGATConv 4 x 64, edges 4 x 16, a 16th",
        _egat,
        None,
        4,
        64,
        divisor=16,
        others=_edge_features,
    ),
)


def composed(layer: nn.Module) -> Callable[..., torch.Tensor]:
    """The layer's forward pass as DGL composes it."""
    if isinstance(layer, SparseAttention):
        other = SparseAttention(reads_values=True)
        other.products = layer.products
        return other
    kind = type(layer)
    original = originals[f"{kind.__module__}:{kind.__name__}.forward"]
    return lambda *arguments, **others: original(layer, *arguments, **others)


def _step(run: Callable[[], Any], grad: torch.Tensor) -> torch.Tensor:
    out = run()
    if isinstance(out, tuple):  # of nodes, and of edges
        out = out[0]
    out.backward(grad.view_as(out))
    return out.detach()


def _measured(
    run: Callable[[], Any], grad: torch.Tensor, parameters: list[nn.Parameter], turns: int
) -> dict[str, Any]:
    """Milliseconds and the peak of memory; without them if there was not enough."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = []
    try:
        for _ in range(turns + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for parameter in parameters:
                parameter.grad = None
            start.record()
            _step(run, grad)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
    except torch.OutOfMemoryError as error:
        return {"ended": str(error).partition(". GPU")[0]}
    finally:
        for parameter in parameters:
            parameter.grad = None
    peak = torch.cuda.max_memory_allocated()
    return {"ms": statistics.median(times[2:]), "all_ms": times[2:], "peak_gb": peak / 1e9}


def _difference(
    one: Callable[[], Any],
    other: Callable[[], Any],
    grad: torch.Tensor,
    parameters: list[nn.Parameter],
) -> dict[str, float] | str:
    """The largest differences of outputs and gradients, relative to the largest of each."""
    results = []
    try:
        for run in (one, other):
            for parameter in parameters:
                parameter.grad = None
            out = _step(run, grad)
            results.append([out, *(parameter.grad for parameter in parameters)])
    except torch.OutOfMemoryError:
        return "the composition does not fit"
    names = ["output", *(f"gradient of {tuple(it.shape)}" for it in parameters)]
    pairs = zip(names, *results, strict=True)
    return {
        name: float((x - y).abs().max() / y.abs().max()) for name, x, y in pairs if y is not None
    }


def _peer(case: Case, edges: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A layer of torch-geometric's for the same graph."""
    if case.peer is None:
        return None
    try:
        from torch_geometric import nn as peers
    except ImportError:
        return None
    layer = getattr(peers, case.peer)(FEATURES, case.width, case.heads, add_self_loops=False)
    layer = layer.to(edges.device, case.dtype)
    return lambda rows: layer(rows, edges).view(len(rows), case.heads, case.width)


def _row(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device = this_device()
    nodes, num_edges = options.nodes // case.divisor, options.edges // case.divisor
    indptr, indices = PowerLaw(nodes, num_edges).csc(device, torch.int32)
    order = torch.empty(0, dtype=torch.int32, device=device)
    if case.permuted:
        order = torch.randperm(len(indices), device=device).int()
    g = dgl.graph(("csc", (indptr.int(), indices, order))).formats(["csc", "csr"])
    g.create_formats_()
    features = torch.randn(nodes, FEATURES, device=device, dtype=case.dtype)
    layer = case.layer().to(device, case.dtype)
    grad = torch.randn(nodes, case.heads, case.width, device=device, dtype=case.dtype)
    parameters = list(layer.parameters())
    others = case.others(g, case.dtype)
    ours = partial(layer, g, features, **others)
    dgls = partial(composed(layer), g, features, **others)
    row: dict[str, Any] = {"name": case.name, "aim_ms": case.milliseconds}
    row["aim_gb"] = case.gigabytes
    row["one pass"] = _measured(ours, grad, parameters, options.turns)
    row["composed"] = _measured(dgls, grad, parameters, options.turns)
    if case.dtype == torch.float32:
        row["differences"] = _difference(ours, dgls, grad, parameters)
    del g, ours, dgls, others
    if options.peer:
        ends = torch.arange(nodes, device=device).repeat_interleave(indptr.diff())
        peer = _peer(case, torch.stack([indices.long(), ends]))
        if peer is not None:
            row["torch-geometric"] = _measured(lambda: peer(features), grad, [], options.turns)
    # What passes read, a row for each edge, at the speed of a copy, which reads and writes.
    pass_bytes = len(indices) * case.heads * case.width * case.dtype.itemsize
    row["ms_of_passes"] = case.passes * pass_bytes / (2e6 * options.copy_gb_per_s)
    return row


def _text(result: dict[str, Any] | None) -> str:
    if result is None:
        return "-"
    return f"{result['ms']:.1f} ms, {result['peak_gb']:.1f} GB" if "ms" in result else "no memory"


def main() -> None:
    """Print a row for each case, and keep all of them in a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2_449_029)
    parser.add_argument("--edges", type=int, default=123_718_280)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=[], help="parts of cases' names")
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    buffer = torch.empty(2, 1 << 30, dtype=torch.uint8, device=this_device())
    options.copy_gb_per_s = copy_rates([(buffer[0], buffer[1])])[0]
    content = {
        "machine": describe_machine(),
        "options": {name: str(value) for name, value in vars(options).items()},
        "figures": rows,
    }
    del buffer
    for case in CASES:
        if options.only and not any(part in case.name for part in options.only):
            continue
        row = _row(case, options)
        rows.append(row)
        cells = (f"{way}: {_text(row.get(way))}" for way in WAYS)
        print(f"{case.name:36}", "; ".join(cells), flush=True)
        if options.out:
            options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
