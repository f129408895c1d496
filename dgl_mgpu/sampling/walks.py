"""Random walks on graphs of tensors: C functions of DGL's ``sampling.randomwalks``.

Walks without probabilities are a kernel's; others are put together of torch's functions.  A walk
depends on ``dgl.seed``, on how many calls there were since then, on its start and on how often that
was mentioned before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as with_fields
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from dgl.heterograph_index import HeteroGraphIndex

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError, InvalidWeightError
from dgl_mgpu.graph.dispatch import as_tensor, is_null
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.relation import Relation, ranges
from dgl_mgpu.ops import SampleKey
from dgl_mgpu.ops import random_walk as walk_uniformly
from dgl_mgpu.ops.philox import WALK_STREAM, as_below, as_uniform, draw_blocks
from dgl_mgpu.ops.view import GraphView
from dgl_mgpu.ops.walk import occurrences
from dgl_mgpu.sampling.seed_edges import all_edges, edge_rows, new_key, resolve_graph, values_at
from dgl_mgpu.sampling.views import edges_view

#: A row's largest weight as an integer, such that 2**32 edges' weights can be summed.
_WEIGHT_BITS = 31
#: The same where no more than `_MAX_LISTED` edges are.
_LISTED_BITS = 40
#: Random numbers that are drawn together, at most.
_DRAWN_TOGETHER = 1 << 22
#: Edges that are listed at a time, at most, to choose among them.
_MAX_LISTED = 1 << 22

_ACTION = "walk at random"

#: Nodes visited, edges taken, types of nodes.
Walks = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_walk(graph: HeteroGraphIndex, nodes: Any, metapath: Any, probs: Sequence[Any]) -> Walks:
    """Walk along a metapath: ``_CAPI_DGLSamplingRandomWalk``.

    ``metapath`` has edge types, and ``nodes`` are of the type at which it begins.  ``probs``, by
    edge type, shape (num_edges,), may have any sum; null for equal ones.

    Returns in the graph's idtype: the nodes visited, shape (n, length + 1), -1 after the end of a
    walk, at a node without edges of positive probability; the ids of the edges taken, shape (n,
    length), -1 for none; the node types, shape (length + 1,), on the CPU, as in DGL.  Raises
    InvalidInputError, IdOutOfRangeError or InvalidWeightError.
    """
    return _walk(graph, nodes, metapath, probs, None)


def random_walk_with_restart(
    graph: HeteroGraphIndex, nodes: Any, metapath: Any, probs: Sequence[Any], restart_prob: float
) -> Walks:
    """The same, each walk ending with ``restart_prob`` before each step."""
    return _walk(graph, nodes, metapath, probs, [restart_prob] * len(as_tensor(metapath)))


def random_walk_with_stepwise_restart(
    graph: HeteroGraphIndex, nodes: Any, metapath: Any, probs: Sequence[Any], restart_prob: Any
) -> Walks:
    """The same, each walk ending with ``restart_prob[step]`` before each step."""
    return _walk(graph, nodes, metapath, probs, as_tensor(restart_prob).tolist())


def _walk(
    graph: HeteroGraphIndex,
    nodes: Any,
    metapath: Any,
    probs: Sequence[Any],
    restart: list[float] | None,
) -> Walks:
    index, device = resolve_graph(graph, [nodes])
    path = as_tensor(metapath).tolist()
    if restart is None:
        restart = [0.0] * len(path)
    if len(restart) != len(path):
        raise InvalidInputError(
            f"walk {len(path)} steps",
            f"there are {len(restart)} restart probabilities",
            "pass one for each step",
        )
    types = _node_types(index, path)
    starts, key = as_tensor(nodes), new_key()
    if all(is_null(probs[etype]) for etype in path):
        edges = torch.empty((len(starts), len(path)), dtype=torch.int64, device=device)
        views = [edges_view(index.relations[etype], "csr", device) for etype in period(path)]
        traces = walk_uniformly(
            views or edges_view(index.relations[0], "csr", device),
            starts,
            len(path),
            key,
            restart_prob=restart,
            edges=edges,
        )
    else:
        steps = {etype: _steps(index.relations[etype], probs[etype], device) for etype in set(path)}
        starts = _checked_starts(starts, index.num_nodes(types[0]))
        traces, edges = walk_by_steps([steps[etype] for etype in path], starts, restart, key)
    return traces.to(index.idtype), edges.to(index.idtype), torch.tensor(types, dtype=index.idtype)


def _node_types(index: TensorIndex, path: list[int]) -> list[int]:
    """Types of the nodes along a metapath; raises if it is none."""
    types = [index.schema.ends[path[0]][0] if path else 0]
    for step, etype in enumerate(path):
        source, target = index.schema.ends[etype]
        if source != types[-1]:
            raise InvalidInputError(
                _ACTION,
                f"step {step} of the metapath, edge type {etype}, begins at node type {source},"
                f" where the step before it does not end",
                "pass edge types of which each begins where the one before it ends",
            )
        types.append(target)
    return types


def period(path: Sequence[Any]) -> Sequence[Any]:
    """The shortest beginning of which ``path`` is repetitions."""
    for length in range(1, len(path)):
        if all(path[step] == path[step % length] for step in range(length, len(path))):
            return path[:length]
    return path


class _Steps(NamedTuple):
    """A relation's edges by source, to step along.

    ``sums``, if edges have weights, are inclusive sums of these as integers, after a 0.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    eids: torch.Tensor | None
    sums: torch.Tensor | None

    def places(self, nodes: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
        """For each node the place of the edge that a number in [0, 1) chooses, or -1."""
        if not len(self.indices):
            return torch.full_like(nodes, -1)
        rows = nodes.clamp(min=0)
        first, last = self.indptr[rows].long(), self.indptr[rows + 1].long()
        if self.sums is None:
            place = first + _below(random, last - first)
            ends = first == last
        else:
            before, total = self.sums[first], self.sums[last] - self.sums[first]
            place = torch.searchsorted(self.sums[1:], before + _below(random, total), right=True)
            ends = total == 0
        return torch.where(ends | (nodes < 0), -1, place)

    def step(self, nodes: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For each node the next, and the edge to it, as a draw of 64 bits chooses; or -1."""
        return self.take(self.places(nodes, as_uniform(draws)))

    def take(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The nodes to which edges at places lead, and their ids; -1 for place -1."""
        if not len(self.indices):
            return places, places
        edges = places.clamp(min=0)
        eids = edges if self.eids is None else self.eids[edges].long()
        is_none = places < 0
        return torch.where(is_none, -1, self.indices[edges].long()), torch.where(is_none, -1, eids)


def _below(random: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) as integers in [0, bounds), or 0."""
    drawn = (random * bounds.double()).long()
    # Rounded up to the bound itself it can be.
    return torch.minimum(drawn, bounds - 1).clamp(min=0)


class StepsByRow(NamedTuple):
    """Edges to step along, read of the nodes where walks are.

    ``weights``, if edges have any, gives those of edges by their ids.
    """

    view: GraphView
    weights: Callable[[torch.Tensor], torch.Tensor] | None

    def step(self, nodes: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.view.num_rows:
            return nodes, nodes  # all of them -1
        here, row = nodes.clamp(min=0).unique(return_inverse=True)
        edges = all_edges(self.view, here)
        sums = None
        if self.weights is not None:
            weights = self.weights(edges.eids).double()
            sums = _sums(weights, edge_rows(edges), len(here))
        steps = _Steps(edges.indptr, edges.neighbors, edges.eids, sums)
        return steps.step(torch.where(nodes < 0, -1, row), draws)


class EvenStepsByRow(NamedTuple):
    """The same for edges of equal probability, as the kernel of walks chooses them."""

    view: GraphView

    def step(self, nodes: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.view.num_rows:
            return nodes, nodes  # all of them -1
        here, row = nodes.clamp(min=0).unique(return_inverse=True)
        edges = all_edges(self.view, here)
        degrees = edges.indptr.diff()[row]
        places = edges.indptr[:-1][row] + as_below(draws, degrees)
        places = torch.where((nodes < 0) | (degrees == 0), -1, places)
        return _Steps(edges.indptr, edges.neighbors, edges.eids, None).take(places)


class Steps(Protocol):
    """Edges to step along."""

    def step(self, nodes: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For each node the next, and the edge to it, as a draw of 64 bits chooses; or -1."""


def _steps(relation: Relation, prob: Any, device: torch.device) -> _Steps | StepsByRow:
    weights = None if is_null(prob) else as_tensor(prob)
    if weights is not None and weights.shape != (relation.num_edges,):
        raise InvalidInputError(
            f"{_ACTION} by probability",
            f"the probabilities have shape {tuple(weights.shape)}, but there are"
            f" {relation.num_edges} edges",
            "pass one for each edge",
        )
    if relation.device != device:
        weights_at = None if weights is None else partial(values_at, weights)
        return StepsByRow(edges_view(relation, "csr", device), weights_at)
    matrix = relation.csr()
    if weights is None:
        return _Steps(*matrix, sums=None)
    ordered = values_at(weights, matrix.edge_ids()).double()
    return _Steps(*matrix, sums=_sums(ordered, matrix.owners().long(), relation.num_src))


def _sums(weights: torch.Tensor, row: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Inclusive sums of weights, relative to others of their rows, after a 0; int64."""
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise InvalidWeightError(
            f"{_ACTION} by probability",
            "a probability is NaN, infinite or negative",
            "make all probabilities finite and at least 0",
        )
    scaled = _as_integers(weights, row, num_rows, _WEIGHT_BITS)
    return torch.nn.functional.pad(scaled.cumsum(0), (1, 0))


def _as_integers(
    weights: torch.Tensor, row: torch.Tensor, num_rows: int, bits: int
) -> torch.Tensor:
    """Weights relative to the largest of their rows, which is ``2**bits``; positive ones stay so.

    Sums of integers are the same in every order, and so on every device.
    """
    largest = weights.new_zeros(num_rows).scatter_reduce_(0, row, weights, "amax")
    scaled = (weights / largest[row] * 2.0**bits).nan_to_num_(0).long()
    return torch.where(weights > 0, scaled.clamp(min=1), 0)


def _checked_starts(starts: torch.Tensor, num_nodes: int) -> torch.Tensor:
    outside = (starts < 0) | (starts >= num_nodes)
    if bool(outside.any()):
        raise IdOutOfRangeError(
            _ACTION,
            f"node {int(starts[outside][0])} is not among the graph's {num_nodes} nodes",
            f"pass node ids in [0, {num_nodes})",
        )
    return starts.long()


def walk_by_steps(
    steps: Sequence[Steps],
    starts: torch.Tensor,
    restart: Sequence[float],
    key: SampleKey,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk from each start, each step along an edge that is chosen by its weight.

    For each step there are the edges to step along and the probability to end a walk before it.
    Returns nodes and edges as :func:`random_walk`, int64.  Raises InvalidWeightError.
    """
    device = starts.device
    numbers = occurrences(starts)
    traces = torch.empty((len(starts), len(steps) + 1), dtype=torch.int64, device=device)
    edges = torch.empty((len(starts), len(steps)), dtype=torch.int64, device=device)
    traces[:, 0] = node = starts
    together = max(1, _DRAWN_TOGETHER // max(1, len(starts)))
    for first in range(0, len(steps), together):
        streams = (
            torch.arange(first, min(first + together, len(steps)), device=device) + WALK_STREAM
        )
        picks, ends = draw_blocks(starts, numbers, streams[:, None], key.fold())
        for step, (pick, end) in enumerate(zip(picks, as_uniform(ends), strict=True), first):
            node = torch.where(end < restart[step], -1, node)
            node, edges[:, step] = steps[step].step(node, pick)
            traces[:, step + 1] = node
    return traces, edges


def pack_traces(
    traces: Any, types: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walks one after the other, without what follows their ends: ``_CAPI_DGLSamplingPackTraces``.

    ``traces``, shape (n, length), have -1 after the end of a walk, and ``types`` the shape
    (length,).  Returns nodes and their types, shape (m,), and the walks' lengths and offsets there.
    """
    traces, types = as_tensor(traces), as_tensor(types)
    types = types.to(traces.device)
    goes_on = (traces != -1).cumprod(dim=1)
    lengths = goes_on.sum(dim=1)
    walk, step = goes_on.nonzero(as_tuple=True)
    offsets = lengths.cumsum(0) - lengths
    return (traces[walk, step], types[step], lengths.to(traces.dtype), offsets.to(traces.dtype))


def node2vec(
    graph: HeteroGraphIndex, nodes: Any, p: float, q: float, length: int, prob: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walks that know where they came from: ``_CAPI_DGLSamplingNode2vec``.

    A step goes back with a weight of ``1 / p``, to a node that has an edge to the one before with
    1, and to others with ``1 / q``; times the probability of the edge, if there are any.  Returns
    nodes and edges as :func:`random_walk`, and raises the same errors.

    Where the walks' next edges are few, one is chosen from the list of them; else edges are
    proposed by their probabilities and accepted by how the walk goes on, until few are left.
    Source: Grover, Leskovec, «node2vec: Scalable Feature Learning for Networks» (KDD'16).
    """
    index, device = resolve_graph(graph, [nodes])
    if not (0 < p < float("inf") and 0 < q < float("inf")):
        raise InvalidInputError(_ACTION, f"p is {p} and q is {q}", "pass finite numbers above 0")
    (relation,) = index.relations
    steps = _steps(relation, prob, device)
    if isinstance(steps, StepsByRow):
        raise InvalidInputError(
            f"{_ACTION} with node2vec on {device}",
            "the graph is in the host's memory",
            f"move the graph with g.to('{device}')",
        )
    key = new_key()
    starts = _checked_starts(as_tensor(nodes), relation.num_src)
    walker = _Node2vec(relation, steps, 1 / p, 1 / q, key)
    numbers = occurrences(starts)
    traces = torch.empty((len(starts), length + 1), dtype=torch.int64, device=device)
    edges = torch.empty((len(starts), length), dtype=torch.int64, device=device)
    traces[:, 0] = node = starts
    for step in range(length):
        before = traces[:, step - 1] if step else None
        node, edges[:, step] = walker.steps.take(walker.places(starts, numbers, step, before, node))
        traces[:, step + 1] = node
    return traces.to(index.idtype), edges.to(index.idtype)


class _Node2vec(NamedTuple):
    """How node2vec steps along a relation."""

    relation: Relation
    steps: _Steps
    back: float
    away: float
    key: SampleKey

    def places(
        self,
        starts: torch.Tensor,
        numbers: torch.Tensor,
        step: int,
        before: torch.Tensor | None,
        nodes: torch.Tensor,
    ) -> torch.Tensor:
        """The place of the edge that each walk takes from ``nodes``, or -1."""
        indptr = self.steps.indptr
        chosen = torch.full_like(nodes, -1)
        left = (nodes >= 0).nonzero().flatten()
        attempt = 0
        while len(left):
            key = with_fields(self.key, hop=attempt).fold()
            draws = draw_blocks(starts[left], numbers[left], WALK_STREAM + step, key)
            pick, accept = map(as_uniform, draws)
            here = nodes[left]
            if before is None:
                chosen[left] = self.steps.places(here, pick)
                break
            degrees = indptr[here + 1].long() - indptr[here].long()
            if int(degrees.sum()) <= _MAX_LISTED:
                chosen[left] = self._listed(before[left], here, degrees, pick)
                break
            places = self.steps.places(here, pick)
            weights = self._weights(before[left], places)
            taken = (places < 0) | (accept * max(self.back, 1.0, self.away) < weights)
            chosen[left] = torch.where(taken, places, -1)
            left = left[~taken]
            attempt += 1
        return chosen

    def _weights(self, before: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Weights of edges by where they lead, seen from the nodes ``before``, float64."""
        to = self.steps.take(places)[0].clamp(min=0)
        near = self.relation.edges_between(to, before)[1] > 0
        weights = torch.full(to.shape, self.away, dtype=torch.float64, device=to.device)
        return weights.masked_fill_(near, 1.0).masked_fill_(to == before, self.back)

    def _listed(
        self, before: torch.Tensor, here: torch.Tensor, degrees: torch.Tensor, pick: torch.Tensor
    ) -> torch.Tensor:
        """The same as :meth:`places`, from a list of all edges of ``here``."""
        places = ranges(self.steps.indptr[here].long(), degrees)
        if not len(places):
            return torch.full_like(here, -1)
        row = torch.arange(len(here), device=here.device).repeat_interleave(
            degrees, output_size=len(places)
        )
        weights = self._weights(before[row], places)
        if self.steps.sums is not None:
            weights = weights * (self.steps.sums[places + 1] - self.steps.sums[places])
        scaled = _as_integers(weights, row, len(here), _LISTED_BITS)
        offsets = torch.nn.functional.pad(degrees.cumsum(0), (1, 0))
        sums = torch.nn.functional.pad(scaled.cumsum(0), (1, 0))
        listed = _Steps(offsets, places, None, sums)
        chosen = listed.places(torch.arange(len(here), device=here.device), pick)
        return torch.where(chosen < 0, -1, places[chosen.clamp(min=0)])
