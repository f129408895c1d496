"""Files of graphs and tensors in DGL's format: C functions of its ``data``.

Version 2 is what `dgl.save_graphs` writes; version 1, of DGL before 0.5, is only read.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import torch
from dgl import ndarray as nd
from dgl.data.heterograph_serialize import HeteroGraphData

from dgl_mgpu.graph.errors import InvalidCallError
from dgl_mgpu.graph.host.stream import Chunks, MappedReader, Named, Reader, Writer
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.graph.relation import Compressed, Relation
from dgl_mgpu.utils.types import ETYPE, NTYPE

_GRAPHS = 0xDD2E4FF046B4A13F
_TENSORS = 0xDD5A9FBE3FA2443F
_HETEROGENEOUS = 2
#: What is said of all graphs takes these bytes, whatever there is.
_HEADER_BYTES = 4096


@dataclass
class _Content:
    """A graph of a file, with its types and features."""

    index: TensorIndex
    nodes: Sequence[Named]
    edges: Sequence[Named]
    ntypes: list[str]
    etypes: list[str]


def _open(filename: str, mode: str, action: str) -> BinaryIO:
    path = Path(filename.removeprefix("file://"))
    if "://" in str(filename) and not str(filename).startswith("file://"):
        raise InvalidCallError(
            f"{action} {filename}",
            "only DGL's binary, which is not used here, has other than local files",
            "copy it to or from a local file",
        )
    try:
        return path.open(mode)  # type: ignore[return-value]
    except OSError as error:
        raise InvalidCallError(f"{action} {filename}", str(error), "pass another file") from error


def _named(tensors: Any) -> Named:
    """Tensors by name of a map of DGL's, or of Python's."""
    items = [] if tensors is None else tensors.items()
    return [(name, getattr(value, "handle", value)) for name, value in items]


# -- graphs ------------------------------------------------------------------------------------


def make_graph_data(
    index: TensorIndex, nodes: Any, edges: Any, ntypes: Sequence[str], etypes: Sequence[str]
) -> HeteroGraphData:
    """A graph as a file has it."""
    content = _Content(
        index, [*map(_named, nodes)], [*map(_named, edges)], list(ntypes), list(etypes)
    )
    return _as_dgls(content)


def _as_dgls(content: _Content) -> HeteroGraphData:
    data = HeteroGraphData.__new__(HeteroGraphData)
    data.handle = content
    return data


def save_graphs(
    filename: str, graphs: Sequence[HeteroGraphData], labels: Any, formats: Sequence[str]
) -> bool:
    """Write graphs, and labels by name."""

    def write(writer: Writer, content: _Content) -> None:
        writer.graph(content.index, formats)
        writer.list(writer.named, content.nodes)
        writer.list(writer.named, content.edges)
        writer.list(writer.text, content.ntypes)
        writer.list(writer.text, content.etypes)

    _write_graphs(filename, _named(labels), [partial(write, content=g.handle) for g in graphs])
    return True


def save_coo_graph(
    filename: str, num_nodes: int, row: Chunks, col: Chunks, ndata: Named, edata: Named
) -> None:
    """Write a graph of one type of nodes and edges, arrays of which are made meanwhile."""

    def write(writer: Writer) -> None:
        writer.coo_graph(num_nodes, row, col)
        for data in ndata, edata:
            writer.list(writer.named, [data])
        for name in NTYPE, ETYPE:
            writer.list(writer.text, [name])

    _write_graphs(filename, [], [write])


def _write_graphs(filename: str, labels: Named, graphs: list[Callable[[Writer], None]]) -> None:
    with _open(filename, "wb", "write graphs to") as file:
        header = io.BytesIO()
        Writer(header).number(_GRAPHS, 2, _HETEROGENEOUS, len(graphs))
        file.write(header.getvalue().ljust(_HEADER_BYTES, b"\0"))
        blob = io.BytesIO()
        Writer(blob).named(labels)
        writer = Writer(file)
        writer.number(file.tell() + 8 + len(blob.getvalue()))
        file.write(blob.getvalue())
        places = []
        for write in graphs:
            places.append(file.tell())
            write(writer)
        # Their places as a text of 64-bit numbers, and how long it is.
        table_bytes = 8 * (len(places) + 1)
        writer.number(table_bytes, len(places), *places, table_bytes)


def file_version(filename: str) -> int:
    with _open(filename, "rb", "read graphs from") as file:
        return _header(Reader(file, filename))[0]


def _header(reader: Reader) -> tuple[int, int]:
    """The version of a file, and how many graphs there are in one of version 2."""
    reader.expect(_GRAPHS, "file of graphs")
    version, _, count = (reader.number() for _ in range(3))
    reader.file.seek(_HEADER_BYTES)
    return version, count


def load_graphs(filename: str, chosen: Sequence[int]) -> list[HeteroGraphData]:
    """The chosen graphs of a file, or all."""
    with _open(filename, "rb", "read graphs from") as file:
        reader = Reader(file, filename)
        _, count = _header(reader)
        start = reader.length()
        if not chosen:
            file.seek(start)
            return [_as_dgls(_content(reader)) for _ in range(count)]
        end = file.seek(-8, io.SEEK_END)
        file.seek(end - reader.number())
        places = reader.list(reader.number)
        graphs = []
        for place in _chosen(places, chosen, filename):
            file.seek(place)
            graphs.append(_as_dgls(_content(reader)))
        return graphs


@dataclass(frozen=True)
class MappedGraph:
    """A graph of one type of nodes and edges, mapped from a file.

    ``matrices`` has the arrays of each format that is there: the ends of edges of "coo", "csr" and
    "csc"'s indptr and indices; and ids of edges, empty where edges come by their ids.
    """

    matrices: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
    ndata: dict[str, np.ndarray]
    edata: dict[str, np.ndarray]


def map_graph(filename: str) -> MappedGraph:
    """The first graph of a file, which has one type of nodes and edges, mapped from it."""
    with _open(filename, "rb", "read graphs from") as file:
        reader = MappedReader(file, filename)
        version, count = _header(reader)
        if version != 2 or not count:
            raise reader.error(f"it has {count} graphs in version {version} of the format")
        file.seek(reader.length())
        relations = reader.graph()
        (ndata, *_), (edata, *_) = (reader.list(reader.named) for _ in range(2))
    if len(relations) != 1:
        raise reader.error(f"the graph has edges of {len(relations)} types")
    return MappedGraph(relations[0], ndata, edata)


def _chosen(places: list[int], chosen: Sequence[int], filename: str) -> list[int]:
    for number in chosen:
        if not 0 <= number < len(places):
            raise InvalidCallError(
                f"read graph {number} of {filename}",
                f"there are {len(places)}",
                f"pass numbers in [0, {len(places)})",
            )
    return [places[number] for number in chosen]


def _content(reader: Reader) -> _Content:
    index = reader.graph()
    nodes, edges = (
        [list(tensors.items()) for tensors in reader.list(reader.named)] for _ in range(2)
    )
    return _Content(index, nodes, edges, reader.list(reader.text), reader.list(reader.text))


def load_labels(filename: str) -> dict[str, torch.Tensor]:
    with _open(filename, "rb", "read labels from") as file:
        reader = Reader(file, filename)
        _header(reader)
        reader.number()
        return reader.named()


def index_of(data: HeteroGraphData) -> TensorIndex:
    return data.handle.index


def ntypes_of(data: HeteroGraphData) -> list[str]:
    return data.handle.ntypes


def etypes_of(data: HeteroGraphData) -> list[str]:
    return data.handle.etypes


def nodes_of(data: HeteroGraphData) -> list[list[Any]]:
    """Names and tensors in turn, of each node type."""
    return [[part for item in tensors for part in item] for tensors in data.handle.nodes]


def edges_of(data: HeteroGraphData) -> list[list[Any]]:
    """The same of each edge type."""
    return [[part for item in tensors for part in item] for tensors in data.handle.edges]


# -- files of version 1 ------------------------------------------------------------------------


def load_old_graphs(filename: str, chosen: Sequence[int], only_meta: bool) -> Any:
    """What DGL calls the metadata of a file, with the graphs themselves."""
    from dgl.data.graph_serialize import GraphData

    with _open(filename, "rb", "read graphs from") as file:
        reader = Reader(file, filename)
        _header(reader)
        count = reader.number()
        places, _, _ = (reader.list(reader.number) for _ in range(3))
        labels = reader.named()
        graphs = []
        if not only_meta:
            for place in _chosen(places, chosen or range(count), filename):
                file.seek(place)
                data = GraphData.__new__(GraphData)
                data.handle = _old_content(reader)
                graphs.append(data)
    return SimpleNamespace(num_graph=count, labels=labels, graph_data=graphs)


def _old_content(reader: Reader) -> _Content:
    indptr, indices, eids = (reader.array() for _ in range(3))
    count = indptr.numel() - 1
    matrix = Compressed(indptr, indices, eids if eids.numel() else None)
    index = TensorIndex.single(Relation(count, count, csc=matrix), 1)
    nodes, edges = (list(reader.named().items()) for _ in range(2))
    return _Content(index, [nodes], [edges], ["_U"], ["_E"])


def old_index_of(data: Any) -> TensorIndex:
    return data.handle.index


def as_heterograph(index: TensorIndex) -> TensorIndex:
    """A graph without types as one with a type: every graph here is."""
    return index


def old_nodes_of(data: Any) -> dict[str, torch.Tensor]:
    return dict(data.handle.nodes[0])


def old_edges_of(data: Any) -> dict[str, torch.Tensor]:
    return dict(data.handle.edges[0])


# -- tensors -----------------------------------------------------------------------------------


def save_tensors(filename: str, tensors: Any, is_empty: bool) -> bool:
    """Write tensors by name."""
    items = [] if is_empty else _named(tensors)
    with _open(filename, "wb", "write tensors to") as file:
        writer = Writer(file)
        writer.number(_TENSORS, len(items))
        writer.named(items)
    return True


def load_tensors(filename: str) -> dict[str, nd.NDArray]:
    """Tensors by name, as DGL's arrays, which `dgl.data.load_tensors` can return."""
    with _open(filename, "rb", "read tensors from") as file:
        reader = Reader(file, filename)
        reader.expect(_TENSORS, "file of tensors")
        reader.number()
        return {name: nd.NDArray(tensor) for name, tensor in reader.named().items()}


def map_tensors(filename: str) -> dict[str, np.ndarray]:
    """The same mapped from the file: of them is in memory what is looked at."""
    with _open(filename, "rb", "read tensors from") as file:
        reader = Reader(file, filename)
        reader.expect(_TENSORS, "file of tensors")
        reader.number()
        return dict(reader.list(lambda: (reader.text(), reader.mapped_array())))
