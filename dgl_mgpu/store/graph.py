"""The store as a graph that DGL's DataLoader and samplers take in place of a DGLGraph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import dgl

from dgl_mgpu.errors import StoreClosedError, UnsupportedByStoreError
from dgl_mgpu.ops.check import check_integer
from dgl_mgpu.sampling.dataloading import serve_dataloading
from dgl_mgpu.store.batch_keys import BatchKeys
from dgl_mgpu.store.feature_storage import Traffic
from dgl_mgpu.store.graph_data import FeatureViews
from dgl_mgpu.store.memory import Store
from dgl_mgpu.store.table_names import CanonicalEtype

#: What DGL's samplers and users look for on a graph.
GRAPH_NAMES = frozenset(dir(dgl.DGLGraph)) | {"_graph", "_node_frames", "_edge_frames"}


class StoreGraph(FeatureViews):
    """A graph whose topology and features live in a store.

    Implements the part of DGL's graph interface that its DataLoader, neighbour samplers, samplers
    of edges and random walks use, so that it takes a DGLGraph's place there.  Node and edge ids are
    those of the graph the store was built from.

    Attributes
    ----------
    ntypes : list of str
    canonical_etypes : list of (str, str, str)
    idtype : torch.dtype
    device : torch.device
        Where it is sampled and its blocks are: the store's.
    traffic : Traffic
        Rows and bytes read through it since the last ``traffic.take()``, by tier.
    """

    def __init__(
        self,
        store: Store,
        num_nodes: Mapping[str, int],
        canonical_etypes: list[CanonicalEtype],
        seed: int,
    ) -> None:
        super().__init__(store, num_nodes, canonical_etypes)
        self.traffic = Traffic()
        self._batch_keys = BatchKeys(seed)
        self._epoch_is_set = False
        #: Over DataLoaders, whose epochs were not set.
        self._num_passes = 0
        self._checked_weights = {}
        self._places = {}
        self._features = {}
        self._fingerprints = {}
        self.device = self.view(canonical_etypes[0]).tiers.device
        # DGL's DataLoader looks here before it asks for a storage.
        self._gpu_caches: dict[str, dict] = {"node": {}, "edge": {}}
        serve_dataloading()

    def __repr__(self) -> str:
        try:
            num_edges: Any = {etype: self.num_edges(etype) for etype in self.canonical_etypes}
        except StoreClosedError:
            num_edges = "closed"
        return f"StoreGraph(num_nodes={self._num_nodes}, num_edges={num_edges})"

    def __getattr__(self, name: str) -> NoReturn:
        if name in GRAPH_NAMES:
            raise UnsupportedByStoreError(
                f"use '{name}' of a store's graph",
                "the store serves sampling and features, not all of a DGLGraph",
                "sample with NeighborSampler, as_edge_prediction_sampler, PinSAGESampler, "
                "random_walk or sample_neighbors, read features with ndata['feat'][ids], and use "
                "the DGLGraph itself for the rest, and for ClusterGCN's, SAINT's, ShaDow's and "
                "LABOR's samplers",
            )
        raise AttributeError(f"'StoreGraph' object has no attribute '{name}'")

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose samples are drawn from now on, until it is set again.

        Without it each pass over a DataLoader of the store is the next epoch, whichever loader it
        is, from 0 on.  A run that resumes, several loaders that should agree, and ranks of which
        some make passes of their own, set it before each epoch.
        """
        self._batch_keys.epoch = check_integer(epoch, "epoch", 0, "choose an epoch")
        self._epoch_is_set = True

    def for_pass(self) -> StoreGraph:
        """This graph for one pass over a DataLoader, which begins now."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._batch_keys = BatchKeys(self._batch_keys.seed)
        twin.begin_epoch(self)
        return twin

    def begin_epoch(self, shared: StoreGraph) -> None:
        """Go to the epoch set on ``shared``, the graph the user holds, or to its next one."""
        if shared._epoch_is_set:
            self._batch_keys.epoch = shared._batch_keys.epoch
        else:
            self._batch_keys.epoch = shared._num_passes
            shared._num_passes += 1
