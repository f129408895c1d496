"""Graphs that benchmarks run on: generated ones, with hubs alone or also with structure, and real
ones.

Hubs alone flatter a store, which keeps the rows that are read most.  So figures are measured on
graphs with communities and locality, too.  Generated graphs are made on the device, the same on
every rank of one kind of machine.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from benchmarks.datasets import datasets_here
from benchmarks.gpu import PowerLaw
from dgl_mgpu.data import Dataset

_CHUNK = 1 << 26
#: Small ones, of the data sets that need no download where their files are.
REAL = ("cora", "facebook")


class GraphSource(Protocol):
    """What makes a graph.

    Attributes
    ----------
    nodes, edges : int
        The number of edges is met within a tenth, if the graph is generated.
    """

    @property
    def nodes(self) -> int: ...
    @property
    def edges(self) -> int: ...

    def csc(
        self, device: torch.device, idtype: torch.dtype, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``indptr`` (int64) and ``indices``, in-edges of one node after the other's."""
        ...


@dataclass(frozen=True)
class RMAT:
    """A recursive matrix (Chakrabarti, Zhan and Faloutsos, SDM 2004).

    Each edge descends through quarters of the adjacency matrix, destinations by sources.  Hubs have
    low ids, and communities of communities are ranges of ids.  Edges that are drawn again are
    dropped; ids of the matrix, whose side is a power of two, are scaled to those of nodes.

    Attributes
    ----------
    nodes, edges : int
    quarters : tuple of float
        Probabilities of the upper left, upper right and lower left quarter; Graph500's.
    """

    nodes: int
    edges: int
    quarters: tuple[float, float, float] = (0.57, 0.19, 0.19)

    def csc(
        self, device: torch.device, idtype: torch.dtype, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``indptr`` (int64) and ``indices`` on a device."""
        levels = max(1, (self.nodes - 1).bit_length())
        left, upper = self.quarters[0], self.quarters[0] + self.quarters[1]
        draw = torch.Generator(device).manual_seed(seed)

        def drawn(count: int) -> torch.Tensor:
            dst, src = torch.zeros(2, count, dtype=torch.int64, device=device)
            for _ in range(levels):
                at = torch.rand(count, generator=draw, device=device)
                lower = at >= upper
                dst.mul_(2).add_(lower)
                src.mul_(2).add_(torch.where(lower, at >= upper + self.quarters[2], at >= left))
            scale = self.nodes / 2**levels
            return (dst * scale).long() * self.nodes + (src * scale).long()

        return _without_repeats(drawn, self.edges, self.nodes, idtype, device)


@dataclass(frozen=True)
class PlantedPartition:
    """Communities of equal size, degrees being given (Karrer and Newman's degree-corrected block
    model, 2011): ranges of ids, as orders of real graphs have them.

    In-degrees are from a Pareto distribution.  A node is a source in proportion to its in-degree,
    of edges of its community as of those between communities.  Edges that are drawn again are
    dropped.

    Attributes
    ----------
    nodes, edges : int
    communities : int
        0 for one of 4096 nodes each.
    inside : float
        Share of the edges that are drawn within a community.
    degree_exponent : float
    """

    nodes: int
    edges: int
    communities: int = 0
    inside: float = 0.8
    degree_exponent: float = 2.0

    @property
    def num_communities(self) -> int:
        """How many there are."""
        return self.communities or math.ceil(self.nodes / 4096)

    def community(self, nodes: torch.Tensor) -> torch.Tensor:
        """Communities of nodes, int64."""
        return nodes.long() * self.num_communities // self.nodes

    def csc(
        self, device: torch.device, idtype: torch.dtype, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``indptr`` (int64) and ``indices`` on a device."""
        draw = torch.Generator(device).manual_seed(seed)

        def uniform(count: int) -> torch.Tensor:
            return torch.rand(count, generator=draw, device=device, dtype=torch.float64)

        # A node's weight is its share of a line; a point that is drawn on it draws a node.
        alpha = self.degree_exponent
        weights = (1 - uniform(self.nodes)) ** (-1 / alpha)
        line = weights.clamp_(max=self.nodes ** (1 / alpha)).cumsum(0)
        line = torch.cat([line.new_zeros(1), line])
        nodes = torch.arange(self.nodes, device=device)
        sizes = torch.bincount(self.community(nodes), minlength=self.num_communities)
        borders = line[torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])]

        def node_at(place: torch.Tensor) -> torch.Tensor:
            return torch.searchsorted(line, place, right=True).sub_(1).clamp_(0, self.nodes - 1)

        def drawn(count: int) -> torch.Tensor:
            dst = node_at(line[-1] * uniform(count))
            community = self.community(dst)
            is_inside = uniform(count) < self.inside
            begin = torch.where(is_inside, borders[community], 0.0)
            end = torch.where(is_inside, borders[community + 1], line[-1])
            return dst * self.nodes + node_at(begin + (end - begin) * uniform(count))

        return _without_repeats(drawn, self.edges, self.nodes, idtype, device)


def _without_repeats(
    drawn: Callable[[int], torch.Tensor],
    edges: int,
    nodes: int,
    idtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The graph of edges that are drawn, as destination times ``nodes`` plus source."""
    keys = torch.empty(edges, dtype=torch.int64, device=device)
    for part in keys.split(_CHUNK):
        part.copy_(drawn(len(part)))
    keys = torch.unique_consecutive(keys.sort()[0])
    indptr = torch.zeros(nodes + 1, dtype=torch.int64, device=device)
    indices = torch.empty(len(keys), dtype=idtype, device=device)
    for some, part in zip(keys.split(_CHUNK), indices.split(_CHUNK), strict=True):
        indptr[1:] += torch.bincount(some // nodes, minlength=nodes)
        part.copy_(some % nodes)
    return indptr.cumsum(0), indices


class Real:
    """The graph of a data set."""

    def __init__(self, dataset: Dataset) -> None:
        self.name, self._dataset = dataset.name, dataset
        self.nodes, self.edges = dataset.num_nodes, len(dataset.indices)

    def csc(
        self, device: torch.device, idtype: torch.dtype, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``indptr`` (int64) and ``indices`` on a device; there is nothing random."""
        indptr, indices = (
            torch.from_numpy(array.copy())
            for array in (self._dataset.indptr, self._dataset.indices)
        )
        return indptr.to(device), indices.to(device, idtype)


GENERATED = {"power-law": PowerLaw, "r-mat": RMAT, "communities": PlantedPartition}


def graph_options(parser: argparse.ArgumentParser) -> None:
    """Options of programs that run on any of these graphs, and have ``--nodes`` and ``--edges``."""
    parser.add_argument(
        "--graph",
        choices=(*GENERATED, *REAL),
        default="power-law",
        help="a generated one of so many nodes and edges, or a real one",
    )
    parser.add_argument(
        "--data",
        default=os.environ.get("DGL_MGPU_DATA", "data"),
        help="where files of real ones are",
    )


def graph_of(options: argparse.Namespace, **of_power_law: Any) -> GraphSource:
    """The one that is asked for, power laws with these arguments; sets ``options.nodes`` and
    ``options.edges`` to those of a real one.

    Ends the program where a real one's files are not there.
    """
    if options.graph in REAL:
        (dataset,) = datasets_here([options.graph], options.data).values()
        found = Real(dataset)
        options.nodes, options.edges = found.nodes, found.edges
        return found
    more = of_power_law if options.graph == "power-law" else {}
    return GENERATED[options.graph](options.nodes, options.edges, **more)


def facts(graph: GraphSource) -> dict[str, Any]:
    """What a graph is, for a report."""
    return {name: value for name, value in vars(graph).items() if not name.startswith("_")}
