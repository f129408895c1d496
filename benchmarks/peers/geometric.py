"""The peer torch-geometric, where it is installed: its layers, and what keeps its loader away."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F


def why_no_loader() -> str:
    """Why there is no NeighborLoader of torch-geometric here; nothing, if there is one."""
    if importlib.util.find_spec("torch_geometric") is None:
        return "torch-geometric is not installed"
    from torch_geometric.typing import WITH_PYG_LIB

    return "" if WITH_PYG_LIB else "torch-geometric's loader samples by pyg-lib, which is not there"


class Hop(NamedTuple):
    """A layer's edges as a sampler gives them, by destination.

    Attributes
    ----------
    edges : Tensor, shape (2, E)
        Sources and destinations, numbered among the layer's sources.
    offsets : Tensor, shape (num_targets + 1,)
    sources : Tensor, shape (E,)
        As in ``edges``.
    num_sources, num_targets : int
    """

    edges: torch.Tensor
    offsets: torch.Tensor
    sources: torch.Tensor
    num_sources: int
    num_targets: int


class Layout(NamedTuple):
    """What a layer's edges are to torch-geometric, and the layer that takes them."""

    edges: Callable[[Hop], torch.Tensor]
    layer: Callable[[int, int], torch.nn.Module]
    is_compiled: bool = False


def edge_list(hop: Hop) -> torch.Tensor:
    """What torch-geometric gathers by and sums with atomics, which want int64."""
    return hop.edges.long()


def csr(hop: Hop) -> torch.Tensor:
    """What it multiplies by (with cuSPARSE on a GPU), destinations by sources."""
    return torch.sparse_csr_tensor(
        hop.offsets,
        hop.sources,
        torch.ones(len(hop.sources), device=hop.sources.device),
        size=(hop.num_targets, hop.num_sources),
        check_invariants=False,
    )


def sage_conv(given: int, made: int) -> torch.nn.Module:
    """The layer that its users take."""
    from torch_geometric.nn import SAGEConv

    return SAGEConv(given, made, aggr="mean")


class Product(torch.nn.Module):
    """What SAGEConv computes, of torch-geometric's product with a CSR matrix alone: SAGEConv makes
    a list of edges of the matrix, too, for which the host waits, and does not use it."""

    def __init__(self, given: int, made: int) -> None:
        from torch_geometric.utils import spmm

        super().__init__()
        self.lin_l = torch.nn.Linear(given, made)
        self.lin_r = torch.nn.Linear(given, made, bias=False)
        self._spmm = spmm

    def forward(self, rows: tuple[torch.Tensor, torch.Tensor], edges: torch.Tensor) -> torch.Tensor:
        """Of sources' and destinations' rows, the latter's."""
        sources, targets = rows
        return self.lin_l(self._spmm(edges, sources, "mean")) + self.lin_r(targets)


#: Which is the fastest depends on the sizes, so all are tried.  They need no packages that are
#: compiled (torch-sparse, pyg-lib).  Not here is its EdgeIndex: SAGEConv takes it for a list of
#: edges, and its own product's gradient fails where sources are more than destinations (2.8.1).
LAYOUTS = {
    "edge list": Layout(edge_list, sage_conv),
    "CSR": Layout(csr, sage_conv),
    "CSR product": Layout(csr, Product),
}


class Geometric(torch.nn.Module):
    """GraphSAGE of torch-geometric's layers, which take the mean of neighbours."""

    def __init__(
        self,
        layer: Callable[[int, int], torch.nn.Module],
        widths: Iterable[tuple[int, int]],
    ) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(itertools.starmap(layer, widths))

    def forward(
        self, rows: torch.Tensor, edges: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> torch.Tensor:
        """Scores of the seeds."""
        for layer, some, size in zip(self.layers, edges, sizes, strict=True):
            rows = layer((rows, rows[:size]), some)
            if layer is not self.layers[-1]:
                rows = F.relu(rows)
        return rows
