"""What DGL's Python does with graphs, run on DGL's C++ and on graphs made of tensors."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import dgl
import numpy as np
import pytest
import scipy.sparse
import torch
from dgl import backend as F
from dgl import ndarray as nd

from dgl_mgpu.graph.dispatch import tensor_backed_graphs

IDTYPES = (torch.int32, torch.int64)
PLACES = (
    "tensors",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
)


@dataclasses.dataclass(frozen=True)
class Where:
    """Where a scenario makes its graphs.

    Parameters
    ----------
    idtype : torch.dtype
    device : str
    """

    idtype: torch.dtype
    device: str = "cpu"

    def ids(self, *numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=self.idtype, device=self.device)

    def tensor(self, data: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.as_tensor(data, dtype=dtype).to(self.device)

    def graph(self, kind: str) -> dgl.DGLGraph:
        """A graph of a kind of `GRAPHS`, with features."""
        return with_features(GRAPHS[kind](self))


def _edges(where: Where, num_src: int, num_dst: int, count: int) -> tuple[torch.Tensor, ...]:
    """Edges, some of them parallel, in no order; the last node of either side has none."""
    generator = torch.Generator().manual_seed(num_src * 1009 + num_dst * 31 + count)
    src = torch.randint(0, max(num_src - 1, 1), (count,), generator=generator)
    dst = torch.randint(0, max(num_dst - 1, 1), (count,), generator=generator)
    dst[: count // 4] = 0  # a hub
    src[-2:], dst[-2:] = src[:2].clone(), dst[:2].clone()
    return src.to(where.device, where.idtype), dst.to(where.device, where.idtype)


def _homogeneous(where: Where) -> dgl.DGLGraph:
    return dgl.graph(_edges(where, 11, 11, 40), num_nodes=11)


def _simple(where: Where) -> dgl.DGLGraph:
    """No parallel edges, no self-loops."""
    src = [0, 3, 1, 2, 5, 4, 6, 0, 2, 3, 6]
    dst = [1, 1, 0, 3, 2, 5, 4, 2, 6, 4, 0]
    return dgl.graph((where.ids(*src), where.ids(*dst)), num_nodes=8)


def _bipartite(where: Where) -> dgl.DGLGraph:
    return dgl.heterograph({("a", "to", "b"): _edges(where, 7, 9, 30)}, {"a": 7, "b": 9})


def _heterogeneous(where: Where) -> dgl.DGLGraph:
    return dgl.heterograph(
        {
            ("user", "follows", "user"): _edges(where, 9, 9, 24),
            ("user", "likes", "item"): _edges(where, 9, 6, 20),
            ("user", "buys", "item"): _edges(where, 9, 6, 12),
            ("item", "rates", "user"): _edges(where, 6, 9, 15),
            ("item", "unused", "tag"): (where.ids(), where.ids()),
        },
        {"user": 9, "item": 6, "tag": 3},
    )


def _edgeless(where: Where) -> dgl.DGLGraph:
    return dgl.graph((where.ids(), where.ids()), num_nodes=4)


def _nodeless(where: Where) -> dgl.DGLGraph:
    return dgl.graph((where.ids(), where.ids()), num_nodes=0)


GRAPHS: dict[str, Callable[[Where], dgl.DGLGraph]] = {
    "homogeneous": _homogeneous,
    "simple": _simple,
    "bipartite": _bipartite,
    "heterogeneous": _heterogeneous,
    "edgeless": _edgeless,
    "nodeless": _nodeless,
}
HOMOGENEOUS = ("homogeneous", "simple", "edgeless", "nodeless")
WITH_EDGES = ("homogeneous", "simple")


def with_features(g: dgl.DGLGraph) -> dgl.DGLGraph:
    """A float vector and a number for every node and edge."""

    def features(count: int) -> dict[str, torch.Tensor]:
        number = torch.arange(count, device=g.device)
        return {"x": (number[:, None] * 3 + number.new_tensor([1, 7])) % 5 + 0.25, "n": number}

    for ntype in g.ntypes:
        g.nodes[ntype].data.update(features(g.num_nodes(ntype)))
    for etype in g.canonical_etypes:
        g.edges[etype].data.update(features(g.num_edges(etype)))
    return g


def facts(value: Any) -> Any:
    """What a result says, without where it is: tensors on the CPU, graphs as dictionaries."""
    if isinstance(value, dgl.DGLGraph):
        return _graph_facts(value)
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, nd.NDArray):
        return F.zerocopy_from_dgl_ndarray(value)
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value)
    if scipy.sparse.issparse(value):
        return torch.as_tensor(value.toarray())
    if isinstance(value, Mapping):
        return {key: facts(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [facts(part) for part in value]
    return value


def _graph_facts(g: dgl.DGLGraph) -> dict[str, Any]:
    return {
        "types": (g.srctypes, g.dsttypes, g.canonical_etypes),
        "block": g.is_block,
        "idtype": g.idtype,
        "nodes": [g.num_src_nodes(t) for t in g.srctypes]
        + [g.num_dst_nodes(t) for t in g.dsttypes],
        "edges": [facts(g.edges(etype=e, order="eid")) for e in g.canonical_etypes],
        "ndata": [facts(dict(g.srcnodes[t].data)) for t in g.srctypes]
        + [facts(dict(g.dstnodes[t].data)) for t in g.dsttypes],
        "edata": [facts(dict(g.edges[e].data)) for e in g.canonical_etypes],
        "batch": [facts(g.batch_num_nodes(t)) for t in g.ntypes]
        + [facts(g.batch_num_edges(e)) for e in g.canonical_etypes],
    }


def assert_same(found: Any, expected: Any, at: str = "result") -> None:
    """Integers and names equal, floats up to rounding; the path to what differs is named."""
    assert type(found) is type(expected), (at, found, expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, (at, found.dtype, expected.dtype)
        torch.testing.assert_close(found, expected, msg=lambda text: f"{at}: {text}")
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), (at, found.keys(), expected.keys())
        for key in expected:
            assert_same(found[key], expected[key], f"{at}[{key!r}]")
    elif isinstance(expected, list):
        assert len(found) == len(expected), (at, found, expected)
        for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_same(ours, theirs, f"{at}[{place}]")
    else:
        assert found == expected, (at, found, expected)


@contextmanager
def graphs_at(place: str) -> Iterator[str]:
    """Graphs made inside are made of tensors; yields the device to make them on."""
    with tensor_backed_graphs() if place == "tensors" else nullcontext():
        yield "cpu" if place == "tensors" else place


def _seeded(run: Callable[..., Any], *arguments: Any) -> Any:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dgl.seed(0)
    return facts(run(*arguments))


def compare(run: Callable[..., Any], place: str, idtype: torch.dtype, *arguments: Any) -> None:
    """``run(where, *arguments)`` gives the same with graphs at `place` as with DGL's own."""
    expected = _seeded(run, Where(idtype), *arguments)
    with graphs_at(place) as device:
        found = _seeded(run, Where(idtype, device), *arguments)
    assert_same(found, expected)


class Scenarios:
    """The scenarios of a test module.

    A scenario is a function ``run(where, g)``, for every kind of graph it is said to be for.
    """

    def __init__(self) -> None:
        self._cases: list[Any] = []

    def on(self, *kinds: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def add(run: Callable[..., Any]) -> Callable[..., Any]:
            name = run.__name__.strip("_")
            self._cases += [pytest.param(run, kind, id=f"{name}-{kind}") for kind in kinds]
            return run

        return add

    def cases(self) -> Iterable[Any]:
        return self._cases

    def parametrize(self, test: Callable[..., Any]) -> Any:
        for mark in (
            pytest.mark.parametrize(("run", "kind"), self._cases),
            pytest.mark.parametrize("idtype", IDTYPES, ids=("int32", "int64")),
            pytest.mark.parametrize("place", PLACES),
        ):
            test = mark(test)
        return test


def run_on_kind(run: Callable[..., Any], kind: str, place: str, idtype: torch.dtype) -> None:
    """A scenario of `Scenarios`, on a graph of a kind."""
    compare(lambda where: run(where, where.graph(kind)), place, idtype)
