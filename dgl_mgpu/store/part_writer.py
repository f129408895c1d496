"""Graphs cut into parts in DGL's format, of which no more than some bytes are in memory.

Edges and features are read where they are mapped from, a chunk at a time.  Which number each node
gets, and which nodes of others a part's edges begin at, is in files while parts are written.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import torch

from dgl_mgpu.config.schema import PARTITIONS
from dgl_mgpu.config.store_options import parse_bytes
from dgl_mgpu.data import Dataset, HeteroDataset
from dgl_mgpu.data.csc import CSC, Allocate, edge_chunks, edge_places, in_folder, index_dtype
from dgl_mgpu.errors import InvalidInputError, nearest
from dgl_mgpu.graph.host.files import save_coo_graph, save_tensors
from dgl_mgpu.graph.host.stream import Chunks
from dgl_mgpu.graph.metis import metis_parts
from dgl_mgpu.utils.atomic_write import atomic_write, typed_output
from dgl_mgpu.utils.types import ETYPE, NTYPE, CanonicalEtype
from dgl_mgpu.utils.units import human_bytes
from dgl_mgpu.utils.unused_memory import trim_heap

_ACTION = "write a partition"
#: Of the memory: what a node or an edge takes while it is looked at, a few numbers of 8 bytes each.
_BYTES_EACH = 256
#: Of a row of features: the row itself, and as it is written.
_COPIES = 4
#: What METIS takes of a graph of that many edges, about.
_METIS_BYTES_EDGE = 150
#: The least memory that can be asked for.
_LEAST = 64 << 20

#: The part of each node, or of each node by type; or how they are to be dealt out.
By = str | np.ndarray | torch.Tensor | Mapping[str, np.ndarray | torch.Tensor]


def write_partition(
    dataset: Dataset | HeteroDataset,
    folder: str | Path,
    num_parts: int,
    *,
    by: By = "random",
    seed: int = 0,
    memory: str | int = "1GiB",
) -> Path:
    """Cut a data set into parts in the format of ``dgl.distributed.partition_graph``.

    :meth:`GlobalStore.from_partition` reads them, each machine its own, and so does
    ``dgl.distributed``.  The data set's arrays may be memory maps: they are read in chunks, and in
    memory is no more than was asked for, beside what the process has.

    Parameters
    ----------
    dataset : Dataset or HeteroDataset
        Its labels become node feature 'label', its split the features 'train_mask', 'val_mask' and
        'test_mask', 0 or 1.
    folder : str or Path
        Where the parts go; made if need be.  Parts of a data set of the same name are replaced.  It
        also has files of about 30 bytes for each node meanwhile.
    num_parts : int
        One for each machine.
    by : str, or Tensor or ndarray of integers, shape (num_nodes,), or dict of these
        Which part a node is in.  'random'; 'order': as they come, parts of about the same number of
        bytes; 'metis': METIS keeps neighbours together, for which it needs all edges in memory.  A
        tensor or array has the part of each node, a dict of nodes of each type.
    seed : int
        For 'random'.
    memory : str or int
        Bytes that may be taken, such as '1GiB'; at least 64 MiB.

    Returns
    -------
    Path
        The JSON file to read the parts by, ``folder / (dataset.name + '.json')``.

    Raises
    ------
    InvalidInputError
        If there are no parts or too little memory, ``by`` is none of these, a feature is of
        bfloat16, or the folder has the parts of another data set.
    ConfigError
        If ``memory`` is no size.
    OutputError
        If the files cannot be written.

    Examples
    --------
    >>> dataset = dgl_mgpu.load("ogbn-products", "data")
    >>> path = dgl_mgpu.write_partition(dataset, "parts", 2)
    >>> store = dgl_mgpu.GlobalStore.from_partition(path)  # on each of two machines
    """
    limit = parse_bytes(memory, "memory") or 0
    if limit < _LEAST:
        raise InvalidInputError(
            _ACTION, f"memory is {human_bytes(limit)}", f"pass {human_bytes(_LEAST)} or more"
        )
    if type(num_parts) is not int or num_parts < 1:
        raise InvalidInputError(_ACTION, f"num_parts is {num_parts!r}", "pass 1 or more")
    if type(seed) is not int or seed < 0:
        raise InvalidInputError(_ACTION, f"seed is {seed!r}", "pass 0 or more")
    data = _Data.of(dataset)
    for name, rows in itertools.chain(*(of.items() for of in data.node_features.values())):
        if rows.dtype == torch.bfloat16:
            raise InvalidInputError(
                _ACTION,
                f"'{name}' is of torch.bfloat16, which parts cannot be read with",
                "pass it as float32, and have stores keep it narrow (feature_dtypes=)",
            )
    assign = _assignment(data, dataset, num_parts, by, seed, limit)
    folder = Path(folder)
    with typed_output(f"{_ACTION} into {folder}", "choose another folder, with free space"):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{dataset.name}.json"
        _require_no_other(folder, path)
        path.unlink(missing_ok=True)  # of other parts, which are written over
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as scratch:
            allocate = in_folder(Path(scratch))
            data = data.with_split(dataset, allocate, limit // _BYTES_EACH)
            writer = _Writer(data, num_parts, assign, allocate, limit)
            for part in range(num_parts):
                writer.write(part, folder / f"part{part}")
        method = by if isinstance(by, str) else "given"
        with atomic_write(path) as file:
            file.write(json.dumps(writer.metadata(dataset.name, method), indent=4).encode())
    return path


def _require_no_other(folder: Path, path: Path) -> None:
    """Raise if the folder has parts of another data set, whose files would be written over."""
    others = [each for each in sorted(folder.glob("*.json")) if each.name != path.name]
    if others and (folder / "part0").exists():
        raise InvalidInputError(
            f"{_ACTION} into {folder}",
            f"it has the parts of {others[0].name}",
            "choose another folder, or remove them",
        )


@dataclass(frozen=True)
class _Data:
    """A data set of one type of nodes and edges, or of several."""

    num_nodes: dict[str, int]
    edges: dict[CanonicalEtype, CSC]
    node_features: dict[str, dict[str, Any]]
    edge_features: dict[str, Any]  # of the only type of edges
    target: str

    @classmethod
    def of(cls, dataset: Dataset | HeteroDataset) -> _Data:
        if isinstance(dataset, HeteroDataset):
            features = {
                ntype: dict(dataset.node_features.get(ntype, {})) for ntype in dataset.num_nodes
            }
            features[dataset.target]["label"] = dataset.labels
            nodes = dict(sorted(dataset.num_nodes.items()))
            edges = {etype: csc._replace(eids=None) for etype, csc in sorted(dataset.edges.items())}
            return cls(nodes, edges, features, {}, dataset.target)
        if not isinstance(dataset, Dataset):
            raise InvalidInputError(
                _ACTION,
                f"the data set is of type {type(dataset).__name__}",
                "pass what dgl_mgpu.load gives, or a Dataset of your own arrays",
            )
        features = {NTYPE: {**dataset.node_features, "label": dataset.labels}}
        csc = CSC(dataset.indptr, dataset.indices, dataset.eids)
        edges = {(NTYPE, ETYPE, NTYPE): csc}
        nodes = {NTYPE: dataset.num_nodes}
        return cls(nodes, edges, features, dict(dataset.edge_features), NTYPE)

    def with_split(self, dataset: Dataset | HeteroDataset, allocate: Allocate, most: int) -> _Data:
        """The same with masks of the split's nodes, which ``allocate`` makes."""
        features = dict(self.node_features[self.target])
        for name, ids in (("train", dataset.train), ("val", dataset.valid), ("test", dataset.test)):
            mask = allocate(name, (self.num_nodes[self.target],), np.dtype(np.uint8))
            for begin in range(0, len(ids), most):
                mask[ids[begin : begin + most]] = 1
            features[f"{name}_mask"] = mask
        return _Data(
            self.num_nodes,
            self.edges,
            {**self.node_features, self.target: features},
            self.edge_features,
            self.target,
        )


_LookUp = Callable[[np.ndarray], np.ndarray]
#: The part of some nodes of a type, from the first up to the second.
_Assign = Callable[[str, int, int], np.ndarray]


def _assignment(
    data: _Data,
    dataset: Dataset | HeteroDataset,
    num_parts: int,
    by: By,
    seed: int,
    limit: int,
) -> _Assign:
    """Which part nodes are dealt out to; it is called for nodes in ascending order."""
    if isinstance(by, str) and by not in PARTITIONS:
        raise InvalidInputError(
            _ACTION, f"by is '{by}'", f"{nearest(by, PARTITIONS)} or pass the part of each node"
        )
    if isinstance(by, str) and by == "random":
        draws = {
            ntype: np.random.Generator(np.random.Philox(key=[seed, number]))
            for number, ntype in enumerate(data.num_nodes)
        }
        return lambda ntype, begin, stop: draws[ntype].integers(num_parts, size=stop - begin)
    if isinstance(by, str) and by == "order":
        stops = {ntype: _stops(data, ntype, num_parts, limit) for ntype in data.num_nodes}
        return lambda ntype, begin, stop: np.searchsorted(
            stops[ntype], np.arange(begin, stop), side="right"
        )
    if isinstance(by, str):
        needed = _METIS_BYTES_EDGE * sum(len(csc.indices) for csc in data.edges.values())
        if needed > limit:
            raise InvalidInputError(
                f"{_ACTION} by METIS",
                f"it has all edges in memory, about {human_bytes(needed)}, of {human_bytes(limit)}",
                "raise memory, or deal out by 'random' or 'order'",
            )
        by = metis_parts(dataset.to_dgl(), num_parts)
    given = dict(by) if isinstance(by, Mapping) else {next(iter(data.num_nodes)): by}
    for ntype, count in data.num_nodes.items():
        parts = given.get(ntype)
        if parts is None or getattr(parts, "ndim", 0) != 1 or len(parts) != count:
            raise InvalidInputError(
                _ACTION,
                f"by has no part for each of the {count:,} nodes of type '{ntype}'",
                "pass an array of integers of that length, or a dict of these by type",
            )

    def parts_of(ntype: str, begin: int, stop: int) -> np.ndarray:
        parts = np.asarray(given[ntype][begin:stop])
        if parts.dtype.kind not in "iu" or (
            len(parts) and not 0 <= parts.min() <= parts.max() < num_parts
        ):
            raise InvalidInputError(
                _ACTION,
                f"by has other values than parts, between nodes {begin} and {stop}",
                f"pass integers in [0, {num_parts})",
            )
        return parts.astype(np.int64)

    return parts_of


def _stops(data: _Data, ntype: str, num_parts: int, limit: int) -> np.ndarray:
    """Where all parts but the last end, of about as many bytes each."""
    row_bytes = sum(_row_bytes(rows) for rows in data.node_features[ntype].values())
    indptrs = [csc.indptr for etype, csc in data.edges.items() if etype[2] == ntype]
    count, most = data.num_nodes[ntype], limit // _BYTES_EACH
    total = 8 * sum(int(indptr[-1]) for indptr in indptrs) + (row_bytes + 8) * count
    targets = total * np.arange(1, num_parts) / num_parts
    stops = np.empty(0, np.int64)
    for begin in range(0, count, most):
        ids = np.arange(begin + 1, min(begin + most, count) + 1)
        so_far = 8 * sum(indptr[ids] for indptr in indptrs) + (row_bytes + 8) * ids
        new = targets[len(stops) :]
        new = new[new <= so_far[-1]]
        stops = np.concatenate([stops, begin + np.searchsorted(so_far, new, side="right")])
    return np.concatenate([stops, np.full(num_parts - 1 - len(stops), count)])


def _row_bytes(rows: Any) -> int:
    return int(np.prod(rows.shape[1:], dtype=np.int64)) * rows.dtype.itemsize


class _Numbers:
    """New numbers of a type's nodes, part by part: part ``p`` has those from ``bounds[p]`` on.

    ``new`` has the number of each node, ``old`` the node of each number.
    """

    def __init__(
        self, count: int, num_parts: int, assign: _Assign, ntype: str, allocate: Allocate, most: int
    ) -> None:
        parts = allocate(f"parts of {ntype}", (count,), np.dtype(np.int32))
        runs = [(begin, min(begin + most, count)) for begin in range(0, count, most)]
        counts = np.zeros(num_parts, np.int64)
        for begin, stop in runs:
            parts[begin:stop] = assign(ntype, begin, stop)
            counts += np.bincount(parts[begin:stop], minlength=num_parts)
        self.bounds = np.concatenate([[0], np.cumsum(counts)])
        self.new = allocate(f"new {ntype}", (count,), index_dtype(count))
        self.old = allocate(f"old {ntype}", (count,), index_dtype(count))
        free = self.bounds[:-1].copy()
        for begin, stop in runs:
            by_part = np.argsort(parts[begin:stop], kind="stable") + begin
            ends = np.cumsum(np.bincount(parts[begin:stop], minlength=num_parts))
            for part, nodes in enumerate(np.split(by_part, ends[:-1])):
                first = int(free[part])
                self.old[first : first + len(nodes)] = nodes
                self.new[nodes] = np.arange(first, first + len(nodes))
                free[part] += len(nodes)


class _Writer:
    """Writes parts.

    As DGL's, a part's nodes have numbers of their own, from 0: its own nodes, type by type, then
    those of others that its edges begin at.  Among the nodes of all parts they are numbered part by
    part and in a part type by type, and edges likewise, in a type by their destinations.
    """

    def __init__(
        self, data: _Data, num_parts: int, assign: _Assign, allocate: Allocate, limit: int
    ) -> None:
        self._data, self._num_parts, self._limit = data, num_parts, limit
        self._most = limit // _BYTES_EACH
        self._allocate = allocate
        self._numbers = {
            ntype: _Numbers(count, num_parts, assign, ntype, allocate, self._most)
            for ntype, count in data.num_nodes.items()
        }
        nodes = np.stack([np.diff(numbers.bounds) for numbers in self._numbers.values()], axis=1)
        edges = np.array(
            [[self._count(part, etype) for etype in data.edges] for part in range(num_parts)]
        )
        #: By part and type, the first number among all nodes, and all edges; and the end.
        self._nodes, self._edges = (
            np.concatenate([[0], np.cumsum(counts)]) for counts in (nodes, edges)
        )

    def metadata(self, name: str, method: str) -> dict[str, Any]:
        """What DGL has to know of all parts."""
        etypes = [":".join(etype) for etype in self._data.edges]
        return {
            "graph_name": name,
            "num_nodes": int(self._nodes[-1]),
            "num_edges": int(self._edges[-1]),
            "part_method": method,
            "num_parts": self._num_parts,
            "halo_hops": 1,
            "node_map": self._runs(self._nodes, list(self._data.num_nodes)),
            "edge_map": self._runs(self._edges, etypes),
            "ntypes": {ntype: number for number, ntype in enumerate(self._data.num_nodes)},
            "etypes": {etype: number for number, etype in enumerate(etypes)},
            **{
                f"part-{part}": {
                    "node_feats": f"part{part}/node_feat.dgl",
                    "edge_feats": f"part{part}/edge_feat.dgl",
                    "part_graph": f"part{part}/graph.dgl",
                }
                for part in range(self._num_parts)
            },
        }

    def _runs(self, firsts: np.ndarray, names: list[str]) -> dict[str, list[list[int]]]:
        """Of each type, its first number in each part, and the end."""
        runs = np.stack([firsts[:-1], firsts[1:]], axis=1).reshape(self._num_parts, len(names), 2)
        return {name: runs[:, number].tolist() for number, name in enumerate(names)}

    def write(self, part: int, folder: Path) -> None:
        """Write a part's graph and features to files in a folder."""
        folder.mkdir(exist_ok=True)
        node_features = {
            f"{ntype}/{name}": self._rows(
                rows, self._own_count(part, ntype), partial(self._own_nodes, part, ntype)
            )
            for ntype, features in self._data.node_features.items()
            for name, rows in features.items()
        }
        edge_features = {}
        for name, rows in self._data.edge_features.items():
            (etype,) = self._data.edges
            count = self._count(part, etype)
            edge_features[f"{':'.join(etype)}/{name}"] = self._rows(
                rows, count, partial(self._own_eids, part, etype)
            )
        for file, features in (("node_feat", node_features), ("edge_feat", edge_features)):
            save_tensors(str(folder / f"{file}.dgl"), features, not features)
        self._write_graph(part, str(folder / "graph.dgl"))

    def _write_graph(self, part: int, file: str) -> None:
        data, num_types, num_etypes = self._data, len(self._data.num_nodes), len(self._data.edges)
        own, own_stop = self._nodes[part * num_types :: num_types][:2].tolist()
        firsts = self._edges[part * num_etypes :][: num_etypes + 1]
        is_other, local, num_local = self._number_nodes(part, own, own_stop)

        def rows() -> Iterator[np.ndarray]:
            for etype in data.edges:
                for _, places in self._own_edges(part, etype):
                    yield local[self._sources(etype, places)].astype(np.int64)

        def columns() -> Iterator[np.ndarray]:
            ntypes = list(data.num_nodes)
            for etype in data.edges:
                first = self._nodes[part * num_types + ntypes.index(etype[2])] - own
                shift = first - self._numbers[etype[2]].bounds[part]
                for numbers, _ in self._own_edges(part, etype):
                    yield numbers + shift

        def node_ids() -> Iterator[np.ndarray]:
            yield from self._run(own, own_stop)
            yield from self._marked(is_other)

        def of_nodes(dtype: torch.dtype, look_up: _LookUp) -> Chunks:
            return _chunks((num_local,), dtype, lambda: map(look_up, node_ids()))

        first_edge, num_edges = int(firsts[0]), int(firsts[-1] - firsts[0])

        def of_edges(dtype: torch.dtype, look_up: _LookUp) -> Chunks:
            ids = partial(self._run, first_edge, first_edge + num_edges)
            return _chunks((num_edges,), dtype, lambda: map(look_up, ids()))

        def type_of(ids: np.ndarray, firsts: np.ndarray, count: int) -> np.ndarray:
            return ((np.searchsorted(firsts, ids, side="right") - 1) % count).astype(np.int32)

        def is_own(ids: np.ndarray) -> np.ndarray:
            return ((ids >= own) & (ids < own_stop)).astype(np.uint8)

        ndata = [
            (dgl.NID, of_nodes(torch.int64, lambda ids: ids)),
            ("inner_node", of_nodes(torch.uint8, is_own)),
        ]
        edata = [
            (dgl.EID, of_edges(torch.int64, lambda ids: ids)),
            ("inner_edge", of_edges(torch.uint8, lambda ids: np.ones(len(ids), np.uint8))),
        ]
        if num_types > 1 or num_etypes > 1:
            node_types = of_nodes(torch.int32, lambda ids: type_of(ids, self._nodes, num_types))
            edge_types = of_edges(torch.int32, lambda ids: type_of(ids, firsts, num_etypes))
            ndata.append((dgl.NTYPE, node_types))
            edata.append((dgl.ETYPE, edge_types))
        row, col = (_chunks((num_edges,), torch.int64, make) for make in (rows, columns))
        save_coo_graph(file, num_local, row, col, ndata, edata)

    def _number_nodes(
        self, part: int, own: int, own_stop: int
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Which other nodes a part's edges begin at, the number of each in the part, and how many
        nodes it has."""
        total = int(self._nodes[-1])
        is_other = self._allocate(f"others of {part}", (total,), np.dtype(np.uint8))
        for etype in self._data.edges:
            for _, places in self._own_edges(part, etype):
                sources = self._sources(etype, places)
                is_other[sources[(sources < own) | (sources >= own_stop)]] = 1
        local = self._allocate(f"numbers in {part}", (total,), index_dtype(total))
        for ids in self._run(own, own_stop):
            local[ids] = ids - own
        count = own_stop - own
        for others in self._marked(is_other):
            local[others] = np.arange(count, count + len(others))
            count += len(others)
        return is_other, local, count

    def _run(self, begin: int, stop: int) -> Iterator[np.ndarray]:
        """Numbers, some at a time."""
        for first in range(begin, stop, self._most):
            yield np.arange(first, min(first + self._most, stop))

    def _marked(self, is_other: np.ndarray) -> Iterator[np.ndarray]:
        """The nodes that are marked, some at a time, in ascending order."""
        for begin in range(0, len(is_other), self._most):
            yield begin + np.flatnonzero(is_other[begin : begin + self._most])

    def _own_count(self, part: int, ntype: str) -> int:
        return int(np.diff(self._numbers[ntype].bounds)[part])

    def _own_nodes(self, part: int, ntype: str, most: int) -> Iterator[np.ndarray]:
        """A part's nodes of a type, as the data set numbers them."""
        numbers = self._numbers[ntype]
        begin, stop = numbers.bounds[part : part + 2].tolist()
        for first in range(begin, stop, most):
            yield np.asarray(numbers.old[first : min(first + most, stop)]).astype(np.int64)

    def _own_edges(
        self, part: int, etype: CanonicalEtype, most: int | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Destinations of a part's edges of a type, by their new numbers, and the edges' places."""
        indptr, number = self._data.edges[etype].indptr, self._numbers[etype[2]].bounds[part]
        for nodes in self._own_nodes(part, etype[2], self._most):
            first = np.asarray(indptr[nodes])
            counts = indptr[nodes + 1] - first
            for rows, begins, some in edge_chunks(first, counts, most or self._most):
                yield (
                    number + np.repeat(np.arange(rows.start, rows.stop), some),
                    edge_places(begins, some),
                )
            number += len(nodes)
            trim_heap()

    def _own_eids(self, part: int, etype: CanonicalEtype, most: int) -> Iterator[np.ndarray]:
        """Ids of a part's edges in the data set."""
        eids = self._data.edges[etype].eids
        for _, places in self._own_edges(part, etype, most):
            yield places if eids is None else np.asarray(eids[places])

    def _count(self, part: int, etype: CanonicalEtype) -> int:
        indptr = self._data.edges[etype].indptr
        return sum(
            int((indptr[nodes + 1] - indptr[nodes]).sum())
            for nodes in self._own_nodes(part, etype[2], self._most)
        )

    def _sources(self, etype: CanonicalEtype, places: np.ndarray) -> np.ndarray:
        """Sources of edges, by their numbers among all nodes."""
        numbers = self._numbers[etype[0]]
        sources = numbers.new[self._data.edges[etype].indices[places]].astype(np.int64)
        number = list(self._data.num_nodes).index(etype[0])
        firsts = self._nodes[number :: len(self._data.num_nodes)][: self._num_parts]
        shifts = firsts - numbers.bounds[:-1]
        return sources + shifts[np.searchsorted(numbers.bounds, sources, side="right") - 1]

    def _rows(self, rows: Any, count: int, ids: Callable[[int], Iterator[np.ndarray]]) -> Chunks:
        """Rows of a feature, of ``count`` ids, so many of which ``ids`` gives at a time."""
        most = max(1, min(self._most, self._limit // (_COPIES * max(1, _row_bytes(rows)))))

        def make() -> Iterator[Any]:
            for some in ids(most):
                yield rows[torch.from_numpy(some) if isinstance(rows, torch.Tensor) else some]
                trim_heap()

        if isinstance(rows, torch.Tensor):
            dtype = rows.dtype
        else:
            dtype = torch.from_numpy(np.empty(0, rows.dtype)).dtype
        return _chunks((count, *rows.shape[1:]), dtype, make)


def _chunks(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    make: Callable[[], Iterable[np.ndarray | torch.Tensor]],
) -> Chunks:
    """An array of which ``make`` gives some rows at a time."""
    return Chunks(dtype, shape, lambda: map(torch.as_tensor, make()))
