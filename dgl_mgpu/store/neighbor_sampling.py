"""What is sampled from a store's graph: neighbours and mini-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import dgl
import torch

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.graph.blocks import BlankBlock
from dgl_mgpu.ops import (
    EtypeBlock,
    SampledNeighbors,
    SampleKey,
    VisitedNeighbors,
    sample_neighbors,
)
from dgl_mgpu.sampling.block_sampling import begin_hops, blank_blocks, dgl_blocks
from dgl_mgpu.sampling.filter import IdFilter
from dgl_mgpu.store.edges import Edges
from dgl_mgpu.store.excluded_edges import sample_hops_without, without
from dgl_mgpu.store.graph_features import Features
from dgl_mgpu.store.table_names import CanonicalEtype, Nodes


class Sampling(Features):
    """What DGL's samplers ask of a store's graph.

    Attributes
    ----------
    features_are_stored : bool
        Features of blocks are the store's, all of them.
    """

    features_are_stored = True

    def sample_neighbors(
        self,
        nodes: Nodes,
        fanout: int | Mapping[str | CanonicalEtype, int],
        edge_dir: str = "in",
        prob: str | None = None,
        replace: bool = False,
        copy_ndata: bool = True,
        copy_edata: bool = True,
        _dist_training: bool = False,
        exclude_edges: Edges | None = None,
        output_device: torch.device | str | None = None,
    ) -> dgl.DGLGraph:
        """Sample in-edges of ``nodes``, as ``dgl.sampling.sample_neighbors`` does.

        Parameters
        ----------
        nodes : Tensor or dict of Tensor, int32 or int64, shape (n,)
            Seed nodes, by node type in a heterogeneous graph.
        fanout : int or dict
            Edges for each node (of each edge type); -1 takes all.
        edge_dir : str
            'in': the store keeps in-edges.
        prob : str, optional
            Edge feature of unnormalised probabilities, or of booleans as a mask.
        replace : bool
        exclude_edges : Tensor or dict of Tensor, int32 or int64, shape (m,), optional
            Edge ids to leave out of what is sampled, by edge type in a heterogeneous graph.
        copy_ndata, copy_edata : bool
            Whether it has the features of nodes and edges, read from the store when they are
            looked at.

        Returns
        -------
        DGLGraph
            All nodes and the sampled edges; ``edata[dgl.EID]`` holds their ids.

        Raises
        ------
        InvalidInputError, IdOutOfRangeError, InvalidWeightError
        """
        if edge_dir != "in":
            raise InvalidInputError(
                f"sample edges of direction '{edge_dir}'",
                "the store keeps in-edges only",
                "build the store from dgl.reverse(g) and sample its in-edges",
            )
        seeds = self._by_ntype(nodes)
        sampled = self._sample(
            seeds, self._by_etype(fanout), prob, replace, self._batch_keys.next_key(seeds)
        )
        for etype, left_out in self._left_out(exclude_edges).items():
            sampled[etype] = without(sampled[etype], left_out)
        edges = {
            etype: (sample.neighbors, self._destinations(seeds[etype[2]], sample))
            for etype, sample in sampled.items()
        }
        frontier = dgl.heterograph(edges, self._num_nodes, idtype=self.idtype, device=self.device)
        for etype, sample in sampled.items():
            frontier.edges[etype].data[dgl.EID] = sample.eids
        self._add_all_rows(frontier, copy_ndata, copy_edata)
        return frontier if output_device is None else frontier.to(output_device)

    def sample_blocks(
        self,
        nodes: Nodes,
        fanouts: Sequence[int | Mapping[str | CanonicalEtype, int]],
        prob: str | None = None,
        replace: bool = False,
        exclude_edges: Edges | None = None,
    ) -> tuple[Nodes, Nodes, list[dgl.DGLGraph]]:
        """Sample all hops of a mini-batch into blocks.

        The same edges as :meth:`sample_neighbors` and ``dgl.to_block`` hop by hop, without the
        graph over all nodes in between.

        Parameters
        ----------
        nodes : Tensor or dict of Tensor, int32 or int64, shape (n,)
            Seed nodes, distinct.
        fanouts : sequence of int or dict
            For each layer, the layer nearest the input first.
        prob, replace, exclude_edges
            As in :meth:`sample_neighbors`.

        Returns
        -------
        input nodes, output nodes, blocks
            As ``dgl.dataloading.NeighborSampler.sample_blocks`` gives them.

        Raises
        ------
        InvalidInputError, IdOutOfRangeError, InvalidWeightError
        """
        return self.begin_blocks(nodes, fanouts, prob, replace, exclude_edges)()

    def begin_blocks(
        self,
        nodes: Nodes,
        fanouts: Sequence[int | Mapping[str | CanonicalEtype, int]],
        prob: str | None = None,
        replace: bool = False,
        exclude_edges: Edges | None = None,
        *,
        on_host: Nodes | None = None,
    ) -> Callable[[], tuple[Nodes, Nodes, list[dgl.DGLGraph]]]:
        """Have a GPU begin with what :meth:`sample_blocks` does, where one kernel does it all.

        Parameters and errors are those of :meth:`sample_blocks`; what is returned is to be called
        once, on the stream on which it was begun, waits for the GPU and returns what that does.
        ``on_host`` are the same nodes in host memory, if they are there: a mini-batch is known by
        their ids, and for those of a GPU the host waits.
        """
        finish = self.begin_hops(nodes, fanouts, prob, replace, exclude_edges, on_host=on_host)
        blanks = self._blank_blocks(len(fanouts))
        return lambda: self.blocks_of(finish(), nodes, blanks)

    def begin_hops(
        self,
        nodes: Nodes,
        fanouts: Sequence[int | Mapping[str | CanonicalEtype, int]],
        prob: str | None = None,
        replace: bool = False,
        exclude_edges: Edges | None = None,
        *,
        on_host: Nodes | None = None,
    ) -> Callable[[], list[EtypeBlock]]:
        """Have a GPU begin with the hops of a mini-batch, of which no blocks are made yet.

        Parameters and errors are those of :meth:`begin_blocks`.

        Returns
        -------
        callable
            To be called once, on the stream on which it was begun; waits for the hops as
            :func:`dgl_mgpu.ops.sample_etype_blocks` returns them.
        """
        seeds = self._by_ntype(nodes)
        key = self._batch_keys.batch_key(self._named(nodes if on_host is None else on_host))
        finish = self._begin_hops(seeds, key, fanouts, prob, replace, exclude_edges)

        def hops() -> list[EtypeBlock]:
            for etype in self.canonical_etypes:
                self.view(etype)  # raises if the store was closed since
            return finish()

        return hops

    def blocks_of(
        self, hops: Sequence[EtypeBlock], nodes: Nodes, blanks: Sequence[BlankBlock] = ()
    ) -> tuple[Nodes, Nodes, list[dgl.DGLGraph]]:
        """Make blocks of sampled hops.

        Parameters
        ----------
        hops : sequence of EtypeBlock
            Of :meth:`begin_hops`.
        nodes : Tensor or dict of Tensor, shape (n,)
            The seed nodes that it was called with.
        blanks : sequence of BlankBlock
            Blocks that were prepared meanwhile, if any.

        Returns
        -------
        input nodes, output nodes, blocks
            As :meth:`sample_blocks` returns them.
        """
        filled = self._dgl_blocks(hops, self._by_ntype(nodes), blanks)
        return filled[0].srcdata[dgl.NID] if filled else nodes, nodes, filled

    def input_nodes(
        self, nodes: Nodes, fanouts: Sequence[int | Mapping[str | CanonicalEtype, int]]
    ) -> dict[str, torch.Tensor]:
        """The input nodes of a mini-batch: those of :meth:`sample_blocks`, without the blocks.

        Parameters
        ----------
        nodes, fanouts
            As of :meth:`sample_blocks`.

        Returns
        -------
        dict of Tensor, the graph's idtype, shape (m,)
            By node type, on the device where the store's operators run.

        Raises
        ------
        InvalidInputError, IdOutOfRangeError
        """
        seeds = self._by_ntype(nodes)
        key = self._batch_keys.batch_key(self._named(nodes))
        sampled = self._begin_hops(seeds, key, fanouts, None, False)()
        # Seeds of types without edges are their own sources.
        return {**seeds, **sampled[0].src_nodes} if sampled else seeds

    def _begin_hops(
        self,
        seeds: dict[str, torch.Tensor],
        key: SampleKey,
        fanouts: Sequence[int | Mapping[str | CanonicalEtype, int]],
        prob: str | None,
        replace: bool,
        exclude_edges: Edges | None = None,
    ) -> Callable[[], list[EtypeBlock]]:
        """Begin with all hops of a mini-batch where the store is."""
        weights = {}
        if prob is not None:
            found = {etype: self._weights(etype, prob) for etype in self.canonical_etypes}
            weights = {etype: rows for etype, rows in found.items() if rows is not None}
        left_out = self._left_out(exclude_edges)
        begin = partial(partial, sample_hops_without, left_out) if left_out else begin_hops
        return begin(
            {etype: self.view(etype) for etype in self.canonical_etypes},
            seeds,
            [self._by_etype(fanout) for fanout in fanouts],
            key,
            replace=replace,
            weights=weights,
        )

    def _sample(
        self,
        seeds: dict[str, torch.Tensor],
        fanouts: Mapping[CanonicalEtype, int],
        prob: str | None,
        replace: bool,
        key: SampleKey,
    ) -> dict[CanonicalEtype, SampledNeighbors]:
        """Sample every edge type; adds empty seeds for node types that have none."""
        empty = torch.empty(0, dtype=self.idtype, device=self.device)
        sampled = {}
        for index, etype in enumerate(self.canonical_etypes):
            seeds.setdefault(etype[2], empty)
            sampled[etype] = sample_neighbors(
                self.view(etype),
                seeds[etype[2]],
                fanouts[etype],
                dataclasses.replace(key, etype=index),
                replace=replace,
                weights=None if prob is None else self._weights(etype, prob),
            )
        return sampled

    def _blank_blocks(self, count: int) -> list[BlankBlock]:
        """Blocks to be filled, if a GPU samples meanwhile."""
        if self.device.type != "cuda":
            return []
        return blank_blocks(count, self, self.idtype, self.device)

    def _dgl_blocks(
        self,
        sampled: Sequence[EtypeBlock],
        seeds: Mapping[str, torch.Tensor],
        blanks: Sequence[BlankBlock] = (),
    ) -> list[dgl.DGLGraph]:
        """Blocks of what was sampled, with the features of their nodes and edges."""
        blocks = dgl_blocks(sampled, self, seeds, blanks)
        for block in blocks:
            self._add_block_rows(block)
        return blocks

    def _destinations(
        self, seeds: torch.Tensor, sampled: SampledNeighbors | VisitedNeighbors
    ) -> torch.Tensor:
        """The seed of each sampled edge."""
        seeds = seeds.to(self.device, self.idtype)
        return seeds.repeat_interleave(sampled.indptr.diff(), output_size=len(sampled.neighbors))

    def _by_ntype(self, nodes: Nodes) -> dict[str, torch.Tensor]:
        """Seed nodes by type, checked, where the graph is and in its id type."""
        return {
            ntype: self._checked_ids(ids, self._num_nodes[ntype])
            for ntype, ids in self._named(nodes).items()
        }

    def _named(self, nodes: Nodes) -> dict[str, torch.Tensor]:
        """Nodes by type, as they are."""
        by_type = nodes if isinstance(nodes, Mapping) else {None: nodes}
        return {
            self._only_ntype(ntype): torch.atleast_1d(torch.as_tensor(ids))
            for ntype, ids in by_type.items()
        }

    def _checked_ids(self, ids: torch.Tensor, num_nodes: int) -> torch.Tensor:
        # Before any conversion: a float or a mask would become ids that nobody asked for.
        if not len(ids):
            return ids.to(self.device, self.idtype)
        if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
            hint = "; of a mask, mask.nonzero().flatten()" if ids.dtype == torch.bool else ""
            raise InvalidInputError(
                "sample neighbors",
                f"the seed nodes have dtype {ids.dtype} and shape {tuple(ids.shape)}",
                f"pass a vector of int32 or int64 node ids{hint}",
            )
        if ids.is_cuda:
            return ids.to(self.device)  # operators check them, and need not wait for it
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= num_nodes:
            raise IdOutOfRangeError(
                "sample neighbors",
                f"there is no seed node {low if low < 0 else high}, the graph has {num_nodes} "
                "nodes",
                f"pass node ids in [0, {num_nodes})",
            )
        return ids.to(self.device, self.idtype)

    def _left_out(self, edges: Edges | None) -> dict[CanonicalEtype, IdFilter]:
        """Edges to leave out, by their type."""
        if edges is None:
            return {}
        by_type = edges if isinstance(edges, Mapping) else {None: edges}
        return {
            self.to_canonical_etype(etype): IdFilter(_edge_ids(eids, self.device))
            for etype, eids in by_type.items()
        }


def _edge_ids(edges: Any, device: torch.device) -> torch.Tensor:
    eids = torch.atleast_1d(torch.as_tensor(edges))
    if len(eids) and (eids.dtype not in (torch.int32, torch.int64) or eids.dim() != 1):
        raise InvalidInputError(
            "leave edges out of what is sampled",
            f"exclude_edges has dtype {eids.dtype} and shape {tuple(eids.shape)}",
            "pass a vector of int32 or int64 edge ids",
        )
    return eids.to(device)
