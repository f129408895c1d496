"""Mini-batches of edges of a store's graph: their subgraphs, and negative edges for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import dgl
import torch
from dgl.base import EID
from dgl.sampling.negative import _calc_redundancy

from dgl_mgpu.ops import SampleKey, negative_destinations, negative_edges
from dgl_mgpu.store.batch_keys import BatchKeys
from dgl_mgpu.store.edges import EdgeQueries, Edges, Ends
from dgl_mgpu.store.graph_features import GraphFeatures
from dgl_mgpu.store.graph_structure import GraphStructure
from dgl_mgpu.utils.types import CanonicalEtype

#: Candidates for a negative edge, for each that DGL would draw for the average one.
_TRIES = 12


@dataclass(frozen=True, eq=False)
class EdgeSampler:
    """Makes subgraphs of a store's graph from edges, and draws negative edges for them."""

    structure: GraphStructure
    features: GraphFeatures
    edges: EdgeQueries
    batch_keys: BatchKeys

    def edge_subgraph(
        self,
        edges: Edges,
        *,
        relabel_nodes: bool = True,
        store_ids: bool = True,
        output_device: torch.device | str | None = None,
    ) -> dgl.DGLGraph:
        """The subgraph of edges, as ``dgl.edge_subgraph`` makes it.

        It also begins a mini-batch of edges: the negative edges that are drawn next depend on these
        edges, the seed and the epoch, but not on the process that draws them.

        Parameters
        ----------
        edges : Tensor or dict of Tensor, the graph's idtype, shape (n,)
            Edge ids, by edge type in a heterogeneous graph.
        relabel_nodes : bool
            Whether nodes at none of the edges are left out.
        store_ids : bool
            Whether ids go into ``edata[dgl.EID]``, and of nodes with other ids now into
            ``ndata[dgl.NID]``.
        output_device : torch.device, optional

        Returns
        -------
        DGLGraph
            With the features of its nodes and edges, read from the store when they are looked at.

        Raises
        ------
        InvalidInputError, IdOutOfRangeError, UnsupportedByStoreError
            As :meth:`StoreGraph.find_edges`.
        """
        structure = self.structure
        by_type = edges if isinstance(edges, Mapping) else {None: edges}
        by_etype = {structure.to_canonical_etype(etype): eids for etype, eids in by_type.items()}
        idtype, device, none = structure.idtype, structure.device, structure.no_ids()
        induced, ends = {}, {}
        for etype in structure.canonical_etypes:
            induced[etype], ends[etype] = none, Ends(none, none)
            if etype in by_etype:
                action = f"take edges of type {etype}"
                count = structure.num_edges(etype)
                induced[etype] = structure.checked_ids(by_etype[etype], count, action, "edge")
                ends[etype] = Ends(*self.edges.find_edges(induced[etype], etype))
        self.batch_keys.start_edges({":".join(etype): induced[etype] for etype in by_etype})
        num_nodes = structure.num_nodes_by_type
        graph = dgl.heterograph(ends, num_nodes, idtype=idtype, device=device)
        for etype, eids in induced.items():
            graph.edges[etype].data[EID] = eids
        self.features.add_to_graph(graph)
        if relabel_nodes:
            all_edges = {
                etype: torch.arange(len(eids), dtype=idtype, device=device)
                for etype, eids in induced.items()
            }
            graph = dgl.edge_subgraph(graph, all_edges, store_ids=store_ids)
        for etype, eids in induced.items():
            if store_ids:
                graph.edges[etype].data[EID] = eids
            else:
                graph.edges[etype].data.pop(EID)
        return graph if output_device is None else graph.to(output_device)

    def global_uniform_negative_sampling(
        self,
        num_samples: int,
        exclude_self_loops: bool = True,
        replace: bool = False,
        etype: str | CanonicalEtype | None = None,
        redundancy: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw pairs of nodes that are no edges, each such pair with the same probability.

        Parameters
        ----------
        num_samples : int
            Pairs to draw at most.
        exclude_self_loops : bool
            Whether to draw no pairs of a node and itself.
        replace : bool
            Whether a pair may be drawn more than once.
        etype : str or (str, str, str), optional
            The first one by default.
        redundancy : float, optional
            Ignored: as DGL does by default, it follows from the graph's density.

        Returns
        -------
        sources, destinations : Tensor, the graph's idtype, shape (n,)

        Raises
        ------
        InvalidInputError
        """
        structure, number = self.structure, 0
        if etype is not None:
            number = structure.canonical_etypes.index(structure.to_canonical_etype(etype))
        source, _, target = full = structure.canonical_etypes[number]
        view = structure.view(full)
        pairs = view.num_rows * view.num_cols
        if num_samples < 1 or view.num_edges >= pairs:
            # With repeated edges some pairs may still be none: those are too few to be drawn.
            redundancy = 0.0
        else:
            redundancy = _calc_redundancy(num_samples, view.num_edges, pairs)
        drawn = negative_edges(
            view,
            num_samples,
            self.batch_keys.negative_key(number),
            replace=replace,
            exclude_self_loops=exclude_self_loops and source == target,
            max_tries=math.ceil(_TRIES * (1.0 + redundancy)),
        )
        return drawn.sources, drawn.destinations

    def negative_destinations(
        self,
        sources: torch.Tensor,
        k: int,
        etype: str | CanonicalEtype | None = None,
        key: SampleKey | None = None,
    ) -> torch.Tensor:
        """Draw for each source nodes to which it has no edge, with replacement.

        For a source that has edges to nearly all nodes, some may be nodes to which it has one.

        Parameters
        ----------
        sources : Tensor, int32 or int64, shape (n,)
        k : int
            Nodes for each.
        etype : str or (str, str, str), optional
        key : SampleKey, optional
            Names the experiment; by default that of the seed, the epoch and the edges of the last
            :meth:`edge_subgraph`, as for :meth:`global_uniform_negative_sampling`.

        Returns
        -------
        Tensor, the graph's idtype, shape (n, k)

        Raises
        ------
        InvalidInputError, IdOutOfRangeError
        """
        full = self.structure.to_canonical_etype(etype)
        view = self.structure.view(full)
        if key is None:
            key = self.batch_keys.negative_key(self.structure.canonical_etypes.index(full))
        is_of_one_type = full[0] == full[2]
        drawn = negative_destinations(view, sources, k, key, exclude_self_loops=is_of_one_type)
        next_node = ((sources + 1) % view.num_rows).to(drawn.dtype)
        return torch.where(drawn < 0, next_node[:, None], drawn)
