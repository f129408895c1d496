"""The same on a whole graph, by DGL's C++ on the CPU, and on this rank's part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import dgl
import torch
import torch.distributed as dist

import dgl_mgpu
from tests.distributed.graphs import homogeneous

Rows = dict[str, torch.Tensor]
Run = Callable[[dgl.DGLGraph, Rows], torch.Tensor]


class Both:
    """A whole graph and this rank's part, on which the same is run and compared.

    Attributes
    ----------
    g : DGLGraph
        On the CPU.
    pg : PartitionedGraph
        On this rank's device, where the rows of `own_nodes` and `own_edges` are as well.
    nodes, edges : Tensor, int64
        Ids in the whole graph of the part's, on the CPU.
    """

    def __init__(self, g: dgl.DGLGraph, by: Any = "random", exchange: str = "halo") -> None:
        self.g = g
        self.pg = dgl_mgpu.partition_graph(g, by=by, exchange=exchange)
        self.nodes = self.pg.ndata[dgl.NID].long().cpu()
        self.edges = self.pg.edata[dgl.EID].long().cpu()

    def own_nodes(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of this rank's nodes, from those of all."""
        return rows[self.nodes].to(self.pg.device)

    def own_edges(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of this rank's edges, from those of all."""
        return rows[self.edges].to(self.pg.device)

    def compare(
        self,
        run: Run,
        nodes: Mapping[str, torch.Tensor] | None = None,
        edges: Mapping[str, torch.Tensor] | None = None,
        model: torch.nn.Module | None = None,
        of_edges: bool = False,
        turn: bool = False,
        what: object = "",
    ) -> None:
        """Compare what ``run`` returns, and the gradients of all it is given.

        Parameters
        ----------
        run : callable
            Gets a graph and its rows of ``nodes`` and ``edges``.
        nodes, edges : dict of Tensor
            Of the whole graph.
        model : Module, optional
            Is moved to where the graph is.
        of_edges : bool
            Whether ``run`` returns rows of edges, not of nodes.
        turn : bool
            Whether graphs are reversed before.
        """
        nodes, edges = nodes or {}, edges or {}
        model = torch.nn.Module() if model is None else model
        taken = self.own_edges if of_edges else self.own_nodes
        results = []
        for graph in (self.g, self.pg):
            whole = graph is self.g
            given = {k: v if whole else self.own_nodes(v) for k, v in nodes.items()}
            given |= {k: v if whole else self.own_edges(v) for k, v in edges.items()}
            given = {k: v.detach().clone().requires_grad_() for k, v in given.items()}
            model.to(graph.device)
            graph = dgl.reverse(graph, copy_ndata=True, copy_edata=True) if turn else graph
            with graph.local_scope():
                torch.manual_seed(8)
                out = run(graph, given)
                draw = torch.Generator().manual_seed(6)
                size = self.g.num_edges() if of_edges else self.g.num_nodes()
                factors = torch.rand(size, *out.shape[1:], generator=draw, dtype=out.dtype)
                factors = factors if whole else taken(factors)
                wanted = [*given.values(), *model.parameters()]
                found = torch.autograd.grad((out * factors).sum(), wanted, allow_unused=True)
            results.append(
                (out.detach(), dict(zip(given, found, strict=False)), found[len(given) :])
            )
        (expected, of_given, of_model), (out, grads, of_part) = results
        same(out, taken(expected), what)
        for key, gradient in grads.items():
            mine = of_given[key]
            assert (mine is None) == (gradient is None), (what, key)
            if mine is not None:
                own = self.own_edges(mine) if key in edges else self.own_nodes(mine)
                same(gradient, own, (what, key))
        for gradient, mine in zip(of_model, of_part, strict=True):
            if gradient is not None:
                same(of_all_ranks(mine, gradient), gradient, (what, "parameters"))


def of_all_ranks(mine: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """The sum of what each rank has, zeros where it has none; on the CPU."""
    total = torch.zeros_like(like) if mine is None else mine.to("cpu", copy=True)
    dist.all_reduce(total)
    return total


def same(found: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    """Compare numbers of float64, wherever they are."""
    torch.testing.assert_close(
        found,
        expected,
        rtol=1e-9,
        atol=1e-9,
        check_device=False,
        msg=lambda text: f"{what}: {text}",
    )


def random_rows(*shape: int, seed: int = 2) -> torch.Tensor:
    """Of float64, the same on every rank."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def operands(g: dgl.DGLGraph, shapes: tuple[tuple[int, ...], ...]) -> Rows:
    """Rows of sources, edges and destinations, none near zero."""
    counts = (g.num_nodes(), g.num_edges(), g.num_nodes())
    return {
        key: rows.sign() * (rows.abs() + 0.5)
        for seed, (key, count, shape) in enumerate(zip("uev", counts, shapes, strict=True))
        for rows in [random_rows(count, *shape, seed=seed)]
    }


def uneven(of_last: str) -> tuple[dgl.DGLGraph, torch.Tensor]:
    """A graph and its nodes' ranks: the last one has no nodes, or no edges to them.

    Others have edges from them.
    """
    g = dgl.add_self_loop(homogeneous())
    count, last = g.num_nodes(), dist.get_world_size() - 1
    ranks = torch.arange(count) % last
    if of_last == "no nodes":
        return g, ranks
    g = dgl.add_edges(dgl.add_nodes(g, 4), torch.arange(count, count + 3), torch.tensor([0, 1, 4]))
    return g, torch.cat([ranks, torch.full((4,), last)])
