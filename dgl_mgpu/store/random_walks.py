"""Random walks on a store's graph, and the neighbours that PinSAGE selects by them."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import dgl
import torch

from dgl_mgpu.errors import InvalidInputError, UnsupportedByStoreError
from dgl_mgpu.ops import gather_rows, pinsage_blocks_async, pinsage_neighbors, random_walk
from dgl_mgpu.ops.check import check_integer
from dgl_mgpu.ops.sample_future import SampleFuture
from dgl_mgpu.ops.view import GraphView
from dgl_mgpu.sampling.block_sampling import dgl_blocks, visited_block
from dgl_mgpu.sampling.seed_edges import all_edges, edge_rows
from dgl_mgpu.sampling.walks import EvenStepsByRow, Steps, StepsByRow, period, walk_by_steps
from dgl_mgpu.store.batch_keys import BatchKeys
from dgl_mgpu.store.graph_features import GraphFeatures
from dgl_mgpu.store.graph_structure import GraphStructure, Nodes, spread_over_machines
from dgl_mgpu.store.neighbor_sampling import SampledBlocks, StoreSampler, destinations
from dgl_mgpu.store.remote import OtherMachines
from dgl_mgpu.utils.types import CanonicalEtype

Metapath = Sequence[str | CanonicalEtype]

_ACTION = "walk at random"
#: Edge feature that says how often walks visited a neighbor.
_VISITS = "visits"


#: Edges that are read at a time, on average.
_EDGES_PER_READ = 1 << 20
#: An odd factor of 64 bits, as int64: the high half of a product depends on all bits of the other.
_FACTOR = 0xD6E8FEB86659FD93 - (1 << 64)
_LOW = (1 << 32) - 1


class Fingerprint(NamedTuple):
    """Sums over edges of hashes, modulo 2**64."""

    ends: int  # of source and destination
    ends_and_ids: int  # of source, destination and edge id


class ReversedEdges:
    """Finds the out-edges of a store's graph among its in-edges.

    A store has the in-edges of each node, and a walk follows out-edges.  The out-edges of an edge
    type are the in-edges of the type that has the same edges from destination to source, as the two
    edge types of a recommender's graph do.  Two types are compared by sums over all of their edges,
    of a hash of each edge.  The sums do not depend on the order of edges; those of different edges
    are equal with a probability of 2**-64.
    """

    def __init__(self, structure: GraphStructure) -> None:
        self._structure = structure
        #: Of the edge types that were compared, and of their edges reversed.
        self._fingerprints: dict[CanonicalEtype, tuple[Fingerprint, Fingerprint]] = {}

    def view_by_source(self, etype: CanonicalEtype, needs_ids: bool = False) -> GraphView:
        """The edges of a type by source.

        Raises UnsupportedByStoreError if no edge type has the edges of ``etype`` reversed; with
        ``needs_ids``, if none has them under the same ids.
        """
        num_edges = self._structure.views()[etype].num_edges  # raises if the store was closed
        # By whether edges have the same ids there.
        reversed_views: dict[bool, GraphView | None] = {False: None, True: None}
        for other, view in self._structure.views().items():
            if (etype[2], etype[0]) == (other[0], other[2]) and view.num_edges == num_edges:
                forward, _ = self._fingerprints_of(etype)
                _, backward = self._fingerprints_of(other)
                if forward.ends == backward.ends:
                    has_same_ids = forward == backward
                    reversed_views[has_same_ids] = reversed_views[has_same_ids] or view
                    if has_same_ids:
                        break
        source, name, target = etype
        if not any(reversed_views.values()):
            raise UnsupportedByStoreError(
                f"walk along edges of type {etype}",
                "the store has in-edges only, and no edge type has these the other way round",
                f"build it from a graph with the reversed edges, too, as ({target!r}, "
                f"'reverse-{name}', {source!r})",
            )
        reversal = reversed_views[True] or (None if needs_ids else reversed_views[False])
        if reversal is None:
            raise UnsupportedByStoreError(
                f"know the ids of edges of type {etype} on a walk",
                "the edge type that has them the other way round has them under other ids",
                "build the store from a graph whose edge i of one type is edge i of the other",
            )
        return reversal

    def compare_all(self, others: OtherMachines) -> None:
        """Compare all edge types, of which each machine has some of the edges; collective."""
        etypes = self._structure.canonical_etypes
        if len(self._fingerprints) < len(etypes):
            sums = self._sums(etypes)
            self._note(etypes, others.sum_over_machines("compare edge types", sums))

    def _fingerprints_of(self, etype: CanonicalEtype) -> tuple[Fingerprint, Fingerprint]:
        if etype not in self._fingerprints:
            self._note([etype], self._sums([etype]))
        return self._fingerprints[etype]

    def _sums(self, etypes: Sequence[CanonicalEtype]) -> torch.Tensor:
        """Of the edges of each type that this machine owns."""
        views, own_nodes = self._structure.views(), self._structure.own_nodes
        return torch.stack([fingerprint_sums(views[each], own_nodes(each[2])) for each in etypes])

    def _note(self, etypes: Sequence[CanonicalEtype], sums: torch.Tensor) -> None:
        for each, (forward, backward) in zip(etypes, sums.view(-1, 2, 2).tolist(), strict=True):
            self._fingerprints[each] = Fingerprint(*forward), Fingerprint(*backward)


def fingerprint_sums(view: GraphView, nodes: range) -> torch.Tensor:
    """Fingerprints of the in-edges of nodes and, behind them, of these edges reversed; int64.

    Reads all of these edges.
    """
    device = view.tiers.device
    sums = torch.zeros(4, dtype=torch.int64, device=device)
    rows = max(1, _EDGES_PER_READ * view.num_rows // max(1, view.num_edges))
    for begin in range(nodes.start, nodes.stop, rows):
        targets = torch.arange(begin, min(begin + rows, nodes.stop), device=device)
        edges = all_edges(view, targets)
        sources, eids = edges.neighbors.long(), edges.eids.long()
        destinations = edge_rows(edges) + begin
        hashes = _hash(_hash(sources) + destinations), _hash(_hash(destinations) + sources)
        for direction, ends in enumerate(hashes):
            sums[2 * direction] += ends.sum()
            sums[2 * direction + 1] += _hash(ends + eids).sum()
    return sums


def _hash(numbers: torch.Tensor) -> torch.Tensor:
    """A pseudo-random permutation of int64."""
    for _ in range(2):
        numbers = (numbers ^ (numbers >> 32 & _LOW)) * _FACTOR
    return numbers ^ (numbers >> 32 & _LOW)


@dataclass(frozen=True, eq=False)
class RandomWalker:
    """Walks on a store's graph, from sources of edges to their destinations."""

    structure: GraphStructure
    features: GraphFeatures
    reversed_edges: ReversedEdges
    sampler: StoreSampler
    batch_keys: BatchKeys

    def random_walk(
        self,
        nodes: torch.Tensor,
        *,
        metapath: Metapath | None = None,
        length: int | None = None,
        prob: str | None = None,
        restart_prob: float | torch.Tensor | None = None,
        return_eids: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Walk at random from each node: ``dgl.sampling.random_walk`` of a store's graph.

        The same walks for the same seed, epoch and nodes; see :meth:`set_epoch`.

        Parameters
        ----------
        nodes : Tensor, int32 or int64, shape (n,)
            Starts, of the type at which the metapath begins; one mentioned twice has two walks.
        metapath : sequence of str or (str, str, str), optional
            Edge types to go along, in turn.
        length : int, optional
            Steps, in place of a metapath in a homogeneous graph.
        prob : str, optional
            Edge feature of unnormalised probabilities.
        restart_prob : float or Tensor, optional
            Probability to end a walk before each step; of a tensor, shape (length,), by step.
        return_eids : bool
            Whether to return the ids of the edges taken.

        Returns
        -------
        traces : Tensor, the graph's idtype, shape (n, length + 1)
            -1 after the end of a walk, which comes early at a node without edges of positive
            probability.
        eids : Tensor, the graph's idtype, shape (n, length)
            If asked for; -1 after the end of a walk.
        types : Tensor, the graph's idtype, shape (length + 1,)
            Node types, on the CPU.

        Raises
        ------
        InvalidInputError, IdOutOfRangeError, InvalidWeightError
        UnsupportedByStoreError
            If no edge type has the edges of one of the metapath the other way round; with
            ``return_eids``, or probabilities of these edges, if none has them under the same ids.
        """

        others = self.structure.others

        def checked() -> tuple[list[CanonicalEtype], str, torch.Tensor, list[float]]:
            path = self._path(metapath, length)
            start = path[0][0] if path else self.structure.ntypes[0]
            # The kernel of walks looks at its starts; torch's functions, which make the others, do
            # not: to them -1 is a walk that has ended, and a GPU ends at an index out of range.
            has_kernel = bool(path) and prob is None and others is None
            starts = self.structure.seeds_by_ntype({start: nodes}, wait=not has_kernel)[start]
            return path, start, starts, _by_step(restart_prob, len(path))

        if others is None:
            return self._walk(*checked(), prob, return_eids)
        walk = others.run_all(_ACTION, checked)
        with others.told_of_errors():
            self.reversed_edges.compare_all(others)
            return self._walk(*walk, prob, return_eids)

    def _walk(
        self,
        path: list[CanonicalEtype],
        start: str,
        starts: torch.Tensor,
        restart: list[float],
        prob: str | None,
        return_eids: bool,
    ) -> tuple[torch.Tensor, ...]:
        others = self.structure.others
        key = self.batch_keys.next_key({start: starts})
        with self.structure.told(_ACTION):
            weights = {etype: self._weights_of(etype, prob) for etype in path}
            views = {
                etype: self.reversed_edges.view_by_source(etype, return_eids or rows is not None)
                for etype, rows in weights.items()
            }
        if path and not any(weights.values()) and others is None:
            shape, device = (len(starts), len(path)), self.structure.device
            edges = torch.empty(shape, dtype=torch.int64, device=device)
            traces = random_walk(
                [views[etype] for etype in period(path)],
                starts,
                len(path),
                key,
                restart_prob=restart,
                edges=edges,
            )
        else:
            steps: dict[CanonicalEtype, Steps] = {}
            for etype, view in views.items():
                is_even = not any(weights.values())
                kept = EvenStepsByRow(view) if is_even else StepsByRow(view, weights[etype])
                what = f"walk along {etype}" + ("" if prob is None else f" by '{prob}'")
                steps[etype] = (
                    kept if others is None else _StepsOverMachines(others, what, etype[0], kept)
                )
            traces, edges = walk_by_steps(
                [steps[etype] for etype in path], starts.long(), restart, key
            )
        types = [start, *(etype[2] for etype in path)]
        idtype = self.structure.idtype
        numbers = torch.tensor([self.structure.ntypes.index(ntype) for ntype in types]).to(idtype)
        traces, edges = traces.to(idtype), edges.to(idtype)
        return (traces, edges, numbers) if return_eids else (traces, numbers)

    def pinsage_neighbors(
        self,
        nodes: torch.Tensor,
        num_walks: int,
        walk_length: int,
        num_neighbors: int,
        metapath: Metapath | None = None,
        termination_prob: float = 0.0,
    ) -> dgl.DGLGraph:
        """The nodes that random walks visit most, as edges to ``nodes``.

        What DGL's ``RandomWalkNeighborSampler`` selects, all at once; of nodes that are visited
        equally often those that are visited first, where DGL takes those of higher ids.

        Parameters
        ----------
        nodes : Tensor, int32 or int64, shape (n,)
        num_walks, walk_length : int
            Walks from each node, and how often each goes through the metapath; visits count at the
            end of it.
        num_neighbors : int
            Nodes selected for each node at most.
        metapath : sequence of str or (str, str, str), optional
            Edge types to go along in turn, back to the type of ``nodes``.  Without it walks go
            from destinations to sources, in a homogeneous graph.
        termination_prob : float
            Probability to end a walk each time that it has gone through the metapath.

        Returns
        -------
        DGLGraph
            All nodes of the type and an edge from each selected node, with its visits in
            ``edata['visits']``.

        Raises
        ------
        InvalidInputError, IdOutOfRangeError
        UnsupportedByStoreError
            As :meth:`random_walk`.
        """
        if self.structure.others is not None:
            raise spread_over_machines("select PinSAGE neighbors")
        if metapath is None:
            ntype, views = self.structure.ntypes[0], [self.structure.view(self._only_etype())]
        else:
            path = self._path(metapath, None)
            if not path or path[0][0] != path[-1][2]:
                raise InvalidInputError(
                    "select PinSAGE neighbors",
                    f"the metapath {list(metapath)} does not end at the node type where it begins",
                    "pass edge types of which the last ends at the type where the first begins",
                )
            ntype, views = path[0][0], [self.reversed_edges.view_by_source(etype) for etype in path]
        seeds = self.structure.seeds_by_ntype({ntype: nodes})[ntype]
        visited = pinsage_neighbors(
            views,
            seeds,
            num_traversals=walk_length,
            termination_prob=termination_prob,
            num_random_walks=num_walks,
            num_neighbors=num_neighbors,
            key=self.batch_keys.next_key({ntype: seeds}),
        )
        structure = self.structure
        frontier = dgl.heterograph(
            {(ntype, "_E", ntype): (visited.neighbors, destinations(seeds, visited, structure))},
            {ntype: structure.num_nodes(ntype)},
            idtype=structure.idtype,
            device=structure.device,
        )
        frontier.edata[_VISITS] = visited.counts
        return frontier

    def pinsage_blocks_async(
        self,
        nodes: Nodes,
        num_layers: int,
        num_walks: int,
        walk_length: int,
        num_neighbors: int,
        *,
        on_host: Nodes | None = None,
    ) -> SampleFuture[SampledBlocks]:
        """Start to sample all layers of a mini-batch for PinSAGE, on a GPU without a wait.

        The same edges as :meth:`pinsage_neighbors`, of a homogeneous graph, and ``dgl.to_block``
        layer by layer, without the graph over all nodes in between.

        Parameters
        ----------
        nodes, on_host
            As in :meth:`sample_blocks_async`.
        num_layers : int
        num_walks, walk_length, num_neighbors
            As in :meth:`pinsage_neighbors`, alike in all layers.

        Returns
        -------
        SampleFuture
            As :meth:`sample_blocks_async` returns it, of blocks with visits in
            ``edata['visits']``.

        Raises
        ------
        InvalidInputError, IdOutOfRangeError
        """
        etype = self._only_etype()
        seeds = self.structure.seeds_by_ntype(nodes)
        visited = pinsage_blocks_async(
            self.structure.view(etype),
            seeds[etype[0]],
            num_layers,
            self.batch_keys.batch_key(
                self.structure.nodes_by_ntype(nodes if on_host is None else on_host)
            ),
            num_traversals=walk_length,
            termination_prob=0.0,
            num_random_walks=num_walks,
            num_neighbors=num_neighbors,
        )

        def blocks() -> SampledBlocks:
            self.structure.view(etype)  # raises if the store was closed since
            layers = visited.result()
            sampled = [visited_block(layer, etype) for layer in layers]
            filled = dgl_blocks(sampled, self.structure.ntypes, [etype], seeds)
            for block, layer in zip(filled, layers, strict=True):
                block.edata[_VISITS] = layer.counts
            return filled[0].srcdata[dgl.NID] if filled else nodes, nodes, filled

        return SampleFuture(blocks)

    def _path(self, metapath: Metapath | None, length: int | None) -> list[CanonicalEtype]:
        """The edge types of a walk, of which each begins where the one before it ends."""
        action = _ACTION
        if metapath is None:
            if not self.structure.is_homogeneous or length is None:
                raise InvalidInputError(
                    action,
                    f"the graph has the edge types {self.structure.etypes}, and length={length}",
                    "pass metapath=, or length= with a homogeneous graph",
                )
            return self.structure.canonical_etypes * check_integer(length, "length", 0, action)
        path = [self.structure.to_canonical_etype(etype) for etype in metapath]
        for before, after in pairwise(path):
            if before[2] != after[0]:
                raise InvalidInputError(
                    action,
                    f"in the metapath {after} follows {before}, but does not begin where that one "
                    "ends",
                    "pass edge types of which each begins where the one before it ends",
                )
        return path

    def _weights_of(
        self, etype: CanonicalEtype, prob: str | None
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The probabilities of edges of a type by their ids, if they have any."""
        rows = None if prob is None else self.features.weights(etype, prob)
        return None if rows is None else partial(gather_rows, rows)

    def _only_etype(self) -> CanonicalEtype:
        """The edge type that PinSAGE's walks follow."""
        if not self.structure.is_homogeneous:
            raise InvalidInputError(
                "select PinSAGE neighbors without a metapath",
                f"the graph has several edge types, {self.structure.etypes}",
                "use a homogeneous graph, or pinsage_neighbors with metapath=",
            )
        return self.structure.canonical_etypes[0]


@dataclass(frozen=True)
class _StepsOverMachines:
    """Steps from nodes of a type, each where its node's edges are."""

    others: OtherMachines
    what: str
    ntype: str
    #: Those that this machine has.
    steps: StepsByRow | EvenStepsByRow

    def step(self, nodes: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.others.walk_step(
            self.what, self.steps.view, self.ntype, nodes, draws, self.steps.step
        )


def _by_step(restart_prob: float | torch.Tensor | None, length: int) -> list[float]:
    """The probability to end a walk before each step."""
    action = f"walk {length} steps"
    if restart_prob is None:
        return [0.0] * length
    if isinstance(restart_prob, torch.Tensor):
        by_step = restart_prob.tolist()
        if restart_prob.shape != (length,):
            raise InvalidInputError(
                action,
                f"the restart probabilities have shape {tuple(restart_prob.shape)}",
                "pass one for each step",
            )
    elif isinstance(restart_prob, numbers.Real):
        by_step = [float(restart_prob)] * length
    else:
        raise InvalidInputError(
            action,
            f"restart_prob={restart_prob!r} is not a number",
            "pass a number, or a tensor with one number for each step",
        )
    for probability in by_step:
        if not 0 <= probability <= 1:
            raise InvalidInputError(
                action, f"a restart probability is {probability}", "pass a probability in [0, 1]"
            )
    return by_step
