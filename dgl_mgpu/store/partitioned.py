"""A graph in parts, of which each machine reads its own: DGL's partitions.

A machine has the features and in-edges of its own nodes, by ids of the whole graph.  What it keeps
of others' nodes, the replicas, their owners send once it is planned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch
from dgl.distributed.partition import load_partition

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import InvalidInputError, UnsupportedByStoreError
from dgl_mgpu.graph.host.files import map_tensors
from dgl_mgpu.store.content import Content, StoreSchema
from dgl_mgpu.store.graph_structure import node_table, topology_table
from dgl_mgpu.store.memory import Blueprint, FeatureSource, TopologySource
from dgl_mgpu.utils.types import CanonicalEtype

_ACTION = "read a partition of DGL's"
#: Nodes whose neighbours are counted at a time.
_CHUNK_NODES = 1 << 20


class PartRows:
    """A table's rows by ids of the whole graph, of which this machine has a run, and replicas.

    ``own`` are rows ``first`` and following of ``num_rows``.
    """

    def __init__(self, own: np.ndarray, first: int, num_rows: int) -> None:
        self._own, self._first = own, first
        self._ids, self._replicas = np.empty(0, np.int64), own[:0]
        self.shape, self.dtype, self.ndim = (num_rows, *own.shape[1:]), own.dtype, own.ndim

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        """Rows that are here."""
        places = ids - self._first
        is_own = (places >= 0) & (places < len(self._own))
        if is_own.all():
            return self._own[places]
        rows = np.empty((len(ids), *self.shape[1:]), self.dtype)
        rows[is_own] = self._own[places[is_own]]
        rows[~is_own] = self._replicas[np.searchsorted(self._ids, ids[~is_own])]
        return rows

    def add(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Have replicas, too; ids ascend."""
        self._ids, self._replicas = ids, rows

    def min(self) -> Any:
        """Of the own rows."""
        return self._own.min() if len(self._own) else 0

    def max(self) -> Any:
        """Of the own rows."""
        return self._own.max() if len(self._own) else 0


@dataclass(frozen=True)
class Partition:
    """What a machine has of a graph of one type of nodes and edges.

    Attributes
    ----------
    etype : (str, str, str)
    bounds : list of int
        Node ``n`` is in the part ``p`` for which ``bounds[p] <= n < bounds[p + 1]``.
    number : int
        The machine's part.
    degrees : ndarray of int64, shape (num_own,)
        In-edges of each node of the part.
    sources, eids : ndarray of int, shape (num_own_edges,)
        Source and id of these edges, node by node.
    num_edges : int
        Of the whole graph.
    features : mapping of str to ndarray, shape (num_own, ...)
    """

    etype: CanonicalEtype
    bounds: list[int]
    number: int
    degrees: np.ndarray
    sources: np.ndarray
    eids: np.ndarray
    num_edges: int
    features: Mapping[str, np.ndarray]

    @classmethod
    def read(cls, path: Path, number: int, num_machines: int) -> Partition:
        """Read a part from the files that ``dgl.distributed.partition_graph`` wrote.

        Raises
        ------
        InvalidInputError
            If they cannot be read, or there are more or fewer parts than machines.
        UnsupportedByStoreError
            If the graph has several types of nodes or edges.
        """
        try:
            metadata = json.loads(path.read_text())
            num_parts, node_map = metadata["num_parts"], metadata["node_map"]
        except (OSError, ValueError, KeyError) as error:
            raise InvalidInputError(
                _ACTION,
                f"{path} cannot be read ({error!r})",
                "name the JSON file that dgl.distributed.partition_graph wrote",
            ) from error
        if num_parts != num_machines:
            raise InvalidInputError(
                _ACTION,
                f"the graph has {num_parts} parts for {num_machines} machines",
                f"start {num_parts} machines, or partition it into {num_machines} parts",
            )
        if len(node_map) != 1 or len(metadata["edge_map"]) != 1:
            raise UnsupportedByStoreError(
                _ACTION,
                f"it has nodes of types {sorted(node_map)}, and edges of "
                f"{len(metadata['edge_map'])} types",
                "store the whole graph by from_dgl or from_dataset",
            )
        ((ntype, runs),) = node_map.items()
        graph, _, _, _, _, _, etypes = load_partition(str(path), number, load_feats=False)
        # Mapped, so that memory has them once, in the store.
        tensors = map_tensors(str(path.parent / metadata[f"part-{number}"]["node_feats"]))
        features = {name.partition("/")[2] or name: rows for name, rows in tensors.items()}
        (etype,) = etypes
        bounds = [0, *(stop for _, stop in runs)]
        return cls(
            etype if isinstance(etype, tuple) else (ntype, etype, ntype),
            bounds,
            number,
            *_own_edges(graph),
            metadata["num_edges"]
            if isinstance(metadata["num_edges"], int)
            else sum(metadata["num_edges"].values()),
            features,
        )

    @property
    def num_nodes(self) -> int:
        """Of the whole graph."""
        return self.bounds[-1]

    def facts(self) -> dict[str, str]:
        """What is the same on all machines."""
        facts = {"the parts' nodes": str(self.bounds), "edges": f"{self.num_edges:,}"}
        for name, rows in self.features.items():
            facts[f"rows of '{name}'"] = f"{rows.dtype} of shape {rows.shape[1:]}"
        return facts

    def content(self, machines: Communicator) -> Content:
        """The graph as tables, with what this machine has; collective of machines' first ranks."""
        (degrees,) = machines.all_gather_cat(_ACTION, [torch.from_numpy(self.degrees)])
        indptr = np.zeros(self.num_nodes + 1, np.int64)
        np.cumsum(degrees.numpy(), out=indptr[1:])

        def check() -> None:
            if indptr[-1] != self.num_edges or len(degrees) != self.num_nodes:
                raise InvalidInputError(
                    _ACTION,
                    f"its parts have {indptr[-1]:,} edges of {self.num_edges:,}, and "
                    f"{len(degrees):,} nodes of {self.num_nodes:,}",
                    "partition the graph anew",
                )

        machines.run_all(_ACTION, check)
        first = self.bounds[self.number]
        ntype = self.etype[0]
        part_of = {"sources": self.sources, "eids": self.eids}
        sources, eids = (
            PartRows(rows, int(indptr[first]), self.num_edges) for rows in part_of.values()
        )
        tables: dict[str, Any] = {
            topology_table(self.etype): TopologySource(
                indptr,
                sources,  # type: ignore[arg-type]
                eids,  # type: ignore[arg-type]
                self.num_nodes,
                torch.int64,
                ntype,
            )
        }
        for name, rows in self.features.items():
            table = node_table(ntype, name)
            tables[table] = FeatureSource(PartRows(rows, first, self.num_nodes), ntype)
        schema = StoreSchema({ntype: self.num_nodes}, [self.etype])
        return Content(
            schema,
            tables,
            torch.empty(0, dtype=torch.int64),
            bounds={ntype: self.bounds},
            degrees={ntype: self._out_degrees(machines)},
        )

    def _out_degrees(self, machines: Communicator) -> np.ndarray:
        """How often each node is another's neighbour, in all parts."""
        own = torch.from_numpy(np.bincount(self.sources, minlength=self.num_nodes))
        total = np.empty(self.num_nodes, np.int64)
        for begin in range(0, self.num_nodes, _CHUNK_NODES):
            chunk = own[begin : begin + _CHUNK_NODES]
            (counts,) = machines.all_gather_cat(_ACTION, [chunk])
            total[begin : begin + len(chunk)] = counts.view(machines.size, -1).sum(0).numpy()
        return total


def fetch_replicas(blueprint: Blueprint, bounds: list[int], machines: Communicator) -> None:
    """Have machines send each other what they keep of others' nodes; collective of first ranks."""
    first, stop = bounds[machines.rank : machines.rank + 2]
    for source in blueprint.sources.values():
        kept = np.sort(blueprint.orders[source.position])
        wanted = torch.from_numpy(kept[(kept < first) | (kept >= stop)].astype(np.int64))
        ends = torch.searchsorted(wanted, torch.tensor(bounds))
        counts = ends.diff().tolist()
        asked_of = [each[machines.rank] for each in machines.all_gather(counts)]
        asked = machines.all_to_all(wanted, counts, asked_of).numpy()
        if not isinstance(source, TopologySource):
            _send_rows(source.rows, wanted.numpy(), asked, counts, asked_of, machines)
            continue
        degrees, degrees_asked = source.degrees(wanted.numpy()), source.degrees(asked)
        ids = source.edge_positions(source.indptr[wanted.numpy()], degrees)
        asked_ids = source.edge_positions(source.indptr[asked], degrees_asked)
        sizes = [int(part.sum()) for part in torch.from_numpy(degrees).split(counts)]
        asked_sizes = [int(part.sum()) for part in torch.from_numpy(degrees_asked).split(asked_of)]
        for rows in (source.indices, source.eids):
            _send_rows(rows, ids, asked_ids, sizes, asked_sizes, machines)


def _send_rows(
    rows: Any,
    wanted: np.ndarray,
    asked: np.ndarray,
    counts: list[int],
    asked_of: list[int],
    machines: Communicator,
) -> None:
    """Send the rows that others ask for, and add those ``wanted`` here."""
    sent = torch.from_numpy(np.ascontiguousarray(rows[asked]))
    rows.add(wanted, machines.all_to_all(sent, asked_of, counts).numpy())


def _own_edges(graph: dgl.DGLGraph) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """In-degrees of a part's own nodes, and sources and ids of their edges, of the whole graph."""
    nodes = graph.ndata[dgl.NID]
    own = graph.ndata["inner_node"].bool().nonzero()[:, 0]
    own = own[nodes[own].argsort()]
    indptr, sources, eids = graph.adj_tensors("csc")
    degrees = indptr[own + 1] - indptr[own]
    num_edges = int(degrees.sum())
    places: torch.Tensor | slice = slice(num_edges)
    if not torch.equal(own, torch.arange(len(own))):  # they are not the first ones
        shift = (indptr[own] - degrees.cumsum(0) + degrees).repeat_interleave(degrees)
        places = torch.arange(num_edges) + shift
    return (
        degrees.numpy(),
        _narrow(nodes)[sources[places]].numpy(),
        _narrow(graph.edata[dgl.EID])[eids[places]].numpy(),
    )


def _narrow(ids: torch.Tensor) -> torch.Tensor:
    """Ids in half the memory where they fit."""
    largest = int(ids.max()) if len(ids) else 0
    return ids.int() if largest <= torch.iinfo(torch.int32).max else ids
