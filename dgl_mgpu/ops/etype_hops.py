"""All hops of a mini-batch over edge types.

With times it knows *a node at a time* by one id::

    id = node + moment * (number of nodes of its type)

where ``moment`` is the number of the time among the times of the seeds.

The CPU samples one hop after another with the operators for one hop.  On CUDA nothing waits between
them: each is the kernels of the operators for one hop, launched for as many seeds as fanouts allow.
How many there are they read from the GPU, where the kernels before them have left it.  Neighbors of
all edge types with one source type follow each other in one buffer, numbered as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.check import raise_at_bad_id
from dgl_mgpu.ops.edges import LOOK_UP, HopOptions, HopsOptions
from dgl_mgpu.ops.library import Operator, Sizes
from dgl_mgpu.ops.sample import HopOutputs, hop_launch
from dgl_mgpu.ops.sample_future import SampleFuture
from dgl_mgpu.ops.sample_weighted import Weighting
from dgl_mgpu.ops.sample_weighted_cuda import (
    CONTROL,
    END,
    MAX_PICKS,
    Weighed,
    edge_weights,
    raise_if_bad,
)
from dgl_mgpu.ops.unique import numbering_launch, raise_at_negative_id
from dgl_mgpu.ops.view import TieredRows
from dgl_mgpu.ops.workspace import NodePrefix, Workspace, beginning, workspace

# By node type: `seeds`, and `moments`, the number of each seed's time in `until`; without times
# both are left out. By edge type: `ends`, the numbers of its source and destination type; `graphs`,
# tiers, pointers and position; `weights` and `times`, the same and an empty tensor of their dtype,
# or four times None; `ordered_from`, which may be left out. By hop, and by edge type in it:
# `fanouts` and `keys`; `indptrs`, `sources` and `eids`. `nodes` are those of the last hop by type,
# as nodes at a time (int64) if there are times; those of other hops are beginnings of them, in
# `sizes`, (hops + 1, node types) on the CPU.
#: What the operator returns.
Hops = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], Tensor]


class EdgeTypeArguments(NamedTuple):
    """All edge types of a graph, as the operator takes them; see the comment above."""

    ends: Sequence[int]
    graphs: Sequence[Tensor]
    num_rows: Sizes
    num_cols: Sizes
    idtype: torch.dtype
    weights: Sequence[Tensor | None]
    times: Sequence[Tensor | None]


class TypedSeeds(NamedTuple):
    """Seeds by node type; see the comment above."""

    seeds: Sequence[Tensor]
    moments: Sequence[Tensor]
    until: Tensor | None


@Operator
def sample_etype_hops_op(
    of_types: TypedSeeds,
    etypes: EdgeTypeArguments,
    options: HopsOptions,
    ordered_from: Sequence[int] = (),
) -> Hops:
    context = torch.library.get_ctx()
    seeds, _, until = of_types
    num_types, idtype, fanouts = len(etypes.num_rows), etypes.idtype, options.fanouts
    indptrs, sources, eids = [], [], []
    for hop in range(len(fanouts) // num_types):
        for target in etypes.ends[1::2]:
            # A size has to be one of a tensor itself, not of one less.
            starts = context.new_dynamic_size() if hop else len(seeds[target]) + 1
            indptrs.append(seeds[0].new_empty(starts, dtype=torch.int64))
            sources.append(seeds[0].new_empty(context.new_dynamic_size(), dtype=idtype))
            eids.append(torch.empty_like(sources[-1]))
    dtype = idtype if until is None else torch.int64
    nodes = [seeds[0].new_empty(context.new_dynamic_size(), dtype=dtype) for _ in seeds]
    sizes = torch.empty(len(fanouts) // num_types + 1, len(seeds), dtype=torch.int64, device="cpu")
    return nodes, indptrs, sources, eids, sizes


@dataclass(frozen=True)
class EdgeType:
    """One edge type of the operator's arguments."""

    source: int  # number of its source nodes' type
    target: int
    rows: TieredRows
    num_sources: int
    weighting: Weighting  # without `until`, which all edge types share
    ordered_from: int = 0  # as many nodes a GPU takes in the order of addresses; 0 for never

    @property
    def is_uniform(self) -> bool:
        """Whether all edges are drawn alike."""
        return self.weighting.weight_dtype is None and self.weighting.time_dtype is None


def edge_types(arguments: EdgeTypeArguments, ordered_from: Sequence[int] = ()) -> list[EdgeType]:
    """The edge types of the operator's arguments."""
    ends, graphs, num_rows, num_cols, _, weights, times = arguments
    types = []
    for number, (rows, cols) in enumerate(zip(num_rows, num_cols, strict=True)):
        source, target = ends[2 * number : 2 * number + 2]
        tiers, pointers, position = graphs[3 * number : 3 * number + 3]
        types.append(
            EdgeType(
                source,
                target,
                TieredRows(tiers, pointers, position, rows),
                cols,
                Weighting(
                    *_values(weights[4 * number : 4 * number + 4]),
                    *_values(times[4 * number : 4 * number + 4]),
                    None,
                ),
                ordered_from[number] if ordered_from else 0,
            )
        )
    return types


def _values(values: Sequence[Tensor | None]) -> tuple[list[Tensor], torch.dtype | None]:
    there = [value for value in values if value is not None]
    return (there[:-1], there[-1].dtype) if there else ([], None)


def by_hop(options: HopsOptions, num_types: int) -> list[list[HopOptions]]:
    """The options of each hop, by edge type."""
    hops = options.by_hop()
    return [hops[first : first + num_types] for first in range(0, len(hops), num_types)]


def num_nodes(types: Sequence[EdgeType]) -> dict[int, int]:
    """Nodes of each node type, by its number."""
    counts = {}
    for etype in types:
        counts[etype.source], counts[etype.target] = etype.num_sources, etype.rows.num_rows
    return counts


def at_moments(seeds: Tensor, moments: Tensor, num_nodes: int) -> Tensor:
    """Ids of nodes at times; -1 for a seed that is no node."""
    ids = seeds.to(torch.int64)
    return torch.where((ids < 0) | (ids >= num_nodes), -1, ids + moments * num_nodes)


@sample_etype_hops_op.cpu
def hop_by_hop(
    of_types: TypedSeeds,
    etypes: EdgeTypeArguments,
    options: HopsOptions,
    ordered_from: Sequence[int],
) -> Hops:
    """``sample_etype_hops`` on the device of the seeds, whatever it is."""
    seeds, moments, until = of_types
    types, idtype = edge_types(etypes), etypes.idtype
    counts = num_nodes(types)
    # Nodes by type and their times, and what they are numbered by.
    nodes, ids = seeds, seeds
    if until is not None:
        ids = [at_moments(of_type, moments[n], counts[n]) for n, of_type in enumerate(seeds)]
    indptrs, sources, eids = [], [], []
    sizes = [[len(of_type) for of_type in ids]]
    for hop in by_hop(options, len(types)):
        neighbors = []
        for etype, of_type in zip(types, hop, strict=True):
            at = None if until is None else moments[etype.target]
            sampled = _sample_hop(etype, nodes[etype.target], at, until, idtype, of_type)
            neighbors.append(sampled[1])
            indptrs.append(sampled[0])
            eids.append(sampled[2])
        numbered: dict[int, Tensor] = {}
        joined = list(ids)
        for ntype, known in enumerate(ids):
            mine = [n for n, etype in enumerate(types) if etype.source == ntype]
            if mine:
                new = [neighbors[n] for n in mine]
                all_new = new[0] if len(new) == 1 else torch.cat(new)
                joined[ntype], local = torch.ops.dgl_mgpu.append_unique.default(known, all_new)
                parts = local.to(idtype).split([len(part) for part in new])
                # What an operator returns must not share memory.
                parts = parts if len(new) == 1 else tuple(part.clone() for part in parts)
                numbered.update(zip(mine, parts, strict=True))
        sources += [numbered[n] for n in range(len(types))]
        nodes = ids = joined
        if until is not None:
            moments = [of_type // counts[n] for n, of_type in enumerate(ids)]
            nodes = [(of_type % counts[n]).to(idtype) for n, of_type in enumerate(ids)]
        sizes.append([len(of_type) for of_type in ids])
    # Nodes of a type that is no edge's source are the seeds themselves.
    ids = [
        of_type.clone() if any(of_type is seed for seed in seeds) else of_type for of_type in ids
    ]
    return ids, indptrs, sources, eids, torch.tensor(sizes, device="cpu")


def _sample_hop(
    etype: EdgeType,
    nodes: Tensor,
    moments: Tensor | None,
    until: Tensor | None,
    idtype: torch.dtype,
    options: HopOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """One hop of an edge type; the neighbors are at the nodes' times."""
    if etype.is_uniform:
        indptr, neighbors, eids = torch.ops.dgl_mgpu.sample_neighbors.default(
            nodes, *etype.rows, idtype, *options
        )
    else:
        weighting = etype.weighting
        if until is not None and weighting.time_dtype is not None:
            weighting = weighting._replace(until=until[moments])
        indptr, neighbors, eids = torch.ops.dgl_mgpu.sample_neighbors_weighted.default(
            nodes, *etype.rows, idtype, *weighting, *options
        )
    if moments is not None:
        at = moments.repeat_interleave(indptr.diff(), output_size=len(neighbors))
        neighbors = neighbors + at * etype.num_sources
    return indptr, neighbors, eids


#: Edges of all hops up to which room for the largest possible sample is made in advance.
_MAX_EDGES = 1 << 25
#: Words of a kernel's report: uniform sampling's first bad seed and end, and those of numbering,
#: the first bad place, overflow and nodes.
_UNIFORM_END, _NUMBERED, _NODES = 1, 3, 2


@sample_etype_hops_op.start
def sample_etype_hops_async(
    of_types: TypedSeeds,
    etypes: EdgeTypeArguments,
    options: HopsOptions,
    ordered_from: Sequence[int],
) -> SampleFuture[Hops]:
    """Launch ``sample_etype_hops`` without waiting for it.

    Ask for the result on the same stream, or drop the future.
    """
    device = of_types.seeds[0].device
    gpu.raise_faults(device, wait=False)
    types = edge_types(etypes, ordered_from)
    hops = by_hop(options, len(types))
    max_nodes = _max_nodes(types, hops, of_types)
    if max_nodes is not None:
        space = workspace(device)
        with space.lock:
            try:
                batch = _Batch(space, of_types, types, etypes.idtype, max_nodes[-1])
                for hop, most in zip(hops, max_nodes, strict=False):
                    batch.sample_hop(hop, most)
                batch.expect_reports()
                return SampleFuture(batch.finish)
            except torch.cuda.OutOfMemoryError:
                space.release()
    return SampleFuture(partial(hop_by_hop, *of_types, *etypes, *options))


@sample_etype_hops_op.cuda
def _sample_etype_hops_cuda(*arguments: Any) -> Hops:
    nodes, indptrs, sources, eids, sizes = sample_etype_hops_async(*arguments).result()
    # What an operator returns must not share memory, as the edges of types from one do.
    sources, eids = ([tensor.clone() for tensor in of_types] for of_types in (sources, eids))
    return nodes, indptrs, sources, eids, sizes


def _max_nodes(
    types: Sequence[EdgeType], hops: Sequence[Sequence[HopOptions]], of_types: TypedSeeds
) -> list[list[int]] | None:
    """The most nodes of each type before each hop and after the last one.

    None if the kernels cannot do it, or the largest possible sample is too large.
    """
    timed = of_types.until is not None
    if timed and any(etype.is_uniform for etype in types):
        return None
    counts, total = num_nodes(types), 0
    num_seeds = [len(ids) for ids in of_types.seeds]
    max_nodes = [num_seeds]
    for hop in hops:
        most = list(max_nodes[-1])
        for etype, (fanout, *_) in zip(types, hop, strict=True):
            if fanout < 0 or (fanout > MAX_PICKS and not etype.is_uniform):
                return None
            most[etype.source] += max_nodes[-1][etype.target] * fanout
            total += max_nodes[-1][etype.target] * fanout
        if not timed:
            most = [min(n, num_seeds[ntype] + counts[ntype]) for ntype, n in enumerate(most)]
        max_nodes.append(most)
    return max_nodes if total <= _MAX_EDGES else None


@dataclass(frozen=True)
class _Sampled:
    """One hop of an edge type that has been launched."""

    etype: EdgeType
    most: int  # seeds it was launched for; 0 if there was nothing to launch
    indptr: Tensor
    report: Tensor  # what its kernels report: a part of the batch's report
    end: int = _UNIFORM_END  # which word of it says where its edges end among its source type's
    weighed: Weighed | None = None


@dataclass(frozen=True)
class _NewNeighbors:
    """The neighbors of one hop that are of one type, and the report of numbering them."""

    neighbors: Tensor
    eids: Tensor
    report: Tensor


class _Batch:
    """A mini-batch on its way through the hops; ``max_nodes`` are those after the last hop."""

    def __init__(
        self,
        space: Workspace,
        of_types: TypedSeeds,
        types: Sequence[EdgeType],
        idtype: torch.dtype,
        max_nodes: Sequence[int],
    ) -> None:
        seeds, moments, until = of_types
        self._space, self._seeds, self._until, self._types = space, seeds, until, types
        self._idtype, self._device = idtype, seeds[0].device
        counts = num_nodes(types)
        self._nodes = []
        for ntype, ids in enumerate(seeds):
            if until is not None:
                ids = at_moments(ids, moments[ntype], counts[ntype])
            nodes = torch.empty(max_nodes[ntype], dtype=ids.dtype, device=self._device)
            nodes[: len(ids)] = ids
            self._nodes.append(nodes)
        # How many there are, on the device; None where the host knows it.
        self._known: list[Tensor | None] = [None] * len(seeds)
        self._hops: list[tuple[list[_Sampled], dict[int, _NewNeighbors]]] = []
        self._reports: list[Tensor] = []

    def sample_hop(self, hop: Sequence[HopOptions], most: Sequence[int]) -> None:
        """Launch one more hop.

        ``hop`` is by edge type; ``most`` has the largest number of nodes of each type that can be
        known by then.
        """
        report = torch.zeros(self._words, dtype=torch.int64, device=self._device)
        self._reports.append(report)
        max_edges = dict.fromkeys((etype.source for etype in self._types), 0)
        for etype, options in zip(self._types, hop, strict=True):
            max_edges[etype.source] += most[etype.target] * options.fanout
        new_neighbors = {}
        for ntype, edges in max_edges.items():
            neighbors = torch.empty(edges, dtype=self._nodes[ntype].dtype, device=self._device)
            eids = torch.empty(edges, dtype=self._idtype, device=self._device)
            first = len(self._types) * CONTROL + ntype * _NUMBERED
            new_neighbors[ntype] = _NewNeighbors(neighbors, eids, report[first : first + _NUMBERED])
        sampled = []
        end: dict[int, Tensor] = {}
        for number, (etype, options) in enumerate(zip(self._types, hop, strict=True)):
            part = report[number * CONTROL : (number + 1) * CONTROL]
            target, source = etype.target, etype.source
            seeds = NodePrefix(self._nodes[target], most[target], self._known[target])
            launched = self._sample(
                etype, seeds, options, end.get(source), new_neighbors[source], part
            )
            if launched.most:
                end[etype.source] = part[launched.end :]
            sampled.append(launched)
        for ntype, of_type in new_neighbors.items():
            if ntype in end:
                nodes = NodePrefix(self._nodes[ntype], most[ntype], self._known[ntype])
                max_nodes = min(len(nodes.nodes), most[ntype] + max_edges[ntype])
                numbering_launch(
                    self._space, nodes, of_type.neighbors, end[ntype], max_nodes, of_type.report
                )()
                self._known[ntype] = of_type.report[_NODES:]
        self._hops.append((sampled, new_neighbors))

    @property
    def _words(self) -> int:
        """Words of a hop's report."""
        return len(self._types) * CONTROL + len(self._nodes) * _NUMBERED

    def _sample(
        self,
        etype: EdgeType,
        seeds: NodePrefix,
        options: HopOptions,
        start: Tensor | None,
        new: _NewNeighbors,
        report: Tensor,
    ) -> _Sampled:
        most = seeds.most
        if most == 0:
            return _Sampled(
                etype, most, torch.zeros(1, dtype=torch.int64, device=self._device), report
            )
        if etype.is_uniform:
            indptr = torch.empty(most + 1, dtype=torch.int64, device=self._device)
            out = HopOutputs(indptr, start, new.neighbors, new.eids)
            launch = hop_launch(
                self._space, seeds, etype.rows, options, out, report, etype.ordered_from
            )
            launch()
            return _Sampled(etype, most, indptr, report)
        weights = edge_weights(etype.weighting._replace(until=self._until))
        targets, sources = (
            (0, 0) if self._until is None else (etype.rows.num_rows, etype.num_sources)
        )
        weighed = Weighed(seeds, etype.rows, self._idtype, weights, targets, options, report)
        weighed.fill(False, sources, start, new.neighbors, new.eids)
        return _Sampled(etype, most, weighed.indptr, report, END, weighed)

    def expect_reports(self) -> None:
        """Queue the copy of all reports to the host, after the last hop."""
        on_device = torch.cat(self._reports)
        self._host_report = gpu.driver.host_buffer(len(on_device))
        self._host_report.copy_(on_device, non_blocking=True)
        self._reported = gpu.driver.mark(self._device)

    def finish(self) -> Hops:
        """Wait for the GPU, and cut its results to size."""
        self._reported.synchronize()
        numbers = self._host_report.tolist()
        sizes = [[len(ids) for ids in self._seeds]]
        indptrs, sources, eids = [], [], []
        for hop, (sampled, new_neighbors) in enumerate(self._hops):
            first = hop * self._words
            end = dict.fromkeys(new_neighbors, 0)
            spans = []
            for number, launched in enumerate(sampled):
                etype, words = launched.etype, numbers[first + number * CONTROL :][:CONTROL]
                start = end[etype.source]
                if launched.most:
                    self._raise_if_bad(launched, words, hop)
                    end[etype.source] = words[launched.end]
                spans.append(slice(start, end[etype.source]))
                indptrs.append(beginning(launched.indptr, sizes[-1][etype.target] + 1))
            cut = {
                ntype: (beginning(new.neighbors, end[ntype]), beginning(new.eids, end[ntype]))
                for ntype, new in new_neighbors.items()
            }
            for launched, span in zip(sampled, spans, strict=True):
                neighbors, edges = cut[launched.etype.source]
                sources.append(neighbors[span].to(self._idtype))
                eids.append(edges[span])
            first += len(sampled) * CONTROL
            known = list(sizes[-1])
            for ntype, ids in enumerate(self._nodes):
                bad, _, count = numbers[first + ntype * _NUMBERED :][:_NUMBERED]
                if count:
                    if bad >= 0:
                        raise_at_negative_id(ids, bad)
                    known[ntype] = count
            sizes.append(known)
        nodes = [beginning(ids, size) for ids, size in zip(self._nodes, sizes[-1], strict=True)]
        return nodes, indptrs, sources, eids, torch.tensor(sizes, device="cpu")

    def _raise_if_bad(self, sampled: _Sampled, words: list[int], hop: int) -> None:
        etype, rows = sampled.etype, sampled.etype.rows.num_rows
        if sampled.weighed is None:
            raise_at_bad_id([words[0]], self._seeds[etype.target], rows, LOOK_UP)
        elif words[0] or words[1]:
            ids = self._nodes[etype.target] % rows if hop else self._seeds[etype.target]
            raise_if_bad(words, sampled.most, ids, rows, sampled.weighed.ranges)
