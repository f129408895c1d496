"""Features of a store's graph as a DGLGraph has them: ``ndata``, ``edata``, ``nodes[…].data``."""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from dgl.view import EdgeSpace, NodeSpace

from dgl_mgpu.errors import InvalidInputError, UnsupportedByStoreError
from dgl_mgpu.store.graph_features import GraphFeatures
from dgl_mgpu.store.graph_structure import GraphStructure
from dgl_mgpu.store.lazy_rows import NodeOrEdgeType


class _Graph(Protocol):
    """The parts of a :class:`~dgl_mgpu.StoreGraph` that features are looked up by."""

    _structure: GraphStructure
    _features: GraphFeatures


class StoredData(MutableMapping[str, Any]):
    """Features of nodes or of edges by name: what ``store.graph.ndata`` and ``edata`` are.

    A feature is a :class:`~dgl_mgpu.store.feature_storage.TableStorage`: rows of it are read
    by ``data["feat"][ids]``, all by ``data["feat"][:]``, and replaced by ``data["feat"][ids] =
    rows`` or ``data["feat"] = rows``.  Where a graph has several types, those of all types, by
    type, as in DGL.

    Parameters
    ----------
    graph : StoreGraph
    types : sequence of str or (str, str, str)
        Of the nodes or edges.
    """

    def __init__(self, graph: _Graph, types: Sequence[NodeOrEdgeType]) -> None:
        self._types = list(types)
        self._structure, self._features = graph._structure, graph._features

    def __getitem__(self, name: str) -> Any:
        """A feature: a ``TableStorage``, or those of all types that have it, by type."""
        if len(self._types) == 1:
            return self._features.storage(self._types[0], name)
        storages = {of: self._features.find_storage(of, name) for of in self._types}
        return {of: storage for of, storage in storages.items() if storage is not None}

    def __setitem__(self, name: str, rows: Any) -> None:
        """Replace all rows of a feature; collective, with the same rows on all ranks."""
        by_type = rows
        if len(self._types) == 1:
            by_type = {self._types[0]: rows}
        elif not isinstance(rows, Mapping):
            raise InvalidInputError(
                f"set feature '{name}' of types {self._types}",
                f"the rows are of type {type(rows).__name__}, not a dict",
                "pass a dict of rows by type",
            )
        for of, new_rows in by_type.items():
            full = of if of in self._types else self._structure.to_canonical_etype(of)
            storage = self._features.find_storage(full, name)
            if storage is None:
                raise UnsupportedByStoreError(
                    f"add feature '{name}' to a store's graph",
                    f"the store was built for the features {self._features.names(full)} and "
                    "has no memory for more",
                    "give the graph the feature before from_dgl, or keep its rows beside the store "
                    "and look them up by blocks[0].srcdata[dgl.NID]",
                )
            storage[:] = new_rows

    def __delitem__(self, name: str) -> NoReturn:
        raise UnsupportedByStoreError(
            f"remove feature '{name}' of a store's graph",
            "a store keeps the features that it was built with",
            "leave the feature out of the graph before from_dgl",
        )

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def keys(self) -> KeysView[str]:
        """Names of the features."""
        return self._names().keys()

    def __repr__(self) -> str:
        return repr({name: self[name] for name in self})

    def _names(self) -> dict[str, None]:
        return dict.fromkeys(name for of in self._types for name in self._features.names(of))


class StoredNodes:
    """``store.graph.nodes``: ids of nodes by a call, and features by type."""

    def __init__(self, graph: _Graph) -> None:
        self._graph = graph

    def __call__(self, ntype: str | None = None) -> torch.Tensor:
        """Ids of all nodes of a type, the graph's idtype, shape (n,), on the store's device."""
        structure = self._graph._structure
        count = structure.num_nodes(structure.only_ntype(ntype))
        return torch.arange(count, dtype=structure.idtype, device=structure.device)

    def __getitem__(self, ntype: str | None) -> NodeSpace:
        """Features of a type, as ``.data``."""
        ntype = self._graph._structure.only_ntype(ntype)
        return NodeSpace(data=StoredData(self._graph, [ntype]))


class StoredEdges:
    """``store.graph.edges``: features of edges by type."""

    def __init__(self, graph: _Graph) -> None:
        self._graph = graph

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        raise UnsupportedByStoreError(
            "list all edges of a store's graph",
            "the edges are spread over several memories",
            "find some by ids, find_edges(ids), or by destinations, sample_neighbors(nodes, -1)",
        )

    def __getitem__(self, etype: Any) -> EdgeSpace:
        """Features of a type, as ``.data``."""
        full = self._graph._structure.to_canonical_etype(etype)
        return EdgeSpace(data=StoredData(self._graph, [full]))
