"""DGL's binary format: numbers, arrays and graphs as its C++ writes them, little-endian."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from dgl.graph_index import GraphIndex

from dgl_mgpu.graph.errors import InvalidCallError
from dgl_mgpu.graph.host.metagraph import create as create_metagraph
from dgl_mgpu.graph.index import GraphSchema, TensorIndex
from dgl_mgpu.graph.relation import FORMATS, Compressed, Coo, Relation

# What each kind of record begins with.
_ARRAY = 0xDD5E40F096B4A13F
_COO = 0xDD61FFD305DFF127
_CSR = 0xDD6CD31205DFF127
_METAGRAPH = 0xDD3C5FFE20046ABF
_UNIT_GRAPH = 0xDD2E60F0F6B4A127
_GRAPH = 0xDD589FBE35224ABF

_CODES = {"coo": 1, "csr": 2, "csc": 4}
#: Marks a format's code as a set of formats; older files have the number of one.
_SET_OF_FORMATS = 1 << 32
_INT, _UINT, _FLOAT, _BFLOAT = 0, 1, 2, 4
_KINDS = {"i": _INT, "u": _UINT, "f": _FLOAT}
_LETTERS = {_INT: "i", _UINT: "u", _FLOAT: "f"}

#: What stands for an array that is not there.
_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Chunks:
    """An array whose elements are made when they are written, some rows at a time."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Iterable[torch.Tensor]]


#: By name, in the order of the file.
Named = Sequence[tuple[str, torch.Tensor | Chunks]]


class Writer:
    """Writes records to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def number(self, *values: int) -> None:
        """Numbers of 64 bits, with or without a sign."""
        for value in values:
            self.file.write((value % (1 << 64)).to_bytes(8, "little"))

    def flag(self, value: bool) -> None:
        self.file.write(bytes([value]))

    def text(self, value: str) -> None:
        data = value.encode()
        self.number(len(data))
        self.file.write(data)

    def list(self, write: Callable[[Any], None], items: Sequence[Any]) -> None:
        """How many items, and each."""
        self.number(len(items))
        for item in items:
            write(item)

    def array(self, array: torch.Tensor | Chunks) -> None:
        kind, bits = _code_of(array.dtype)
        # It is said to be on the CPU.
        self.number(_ARRAY, 0)
        self.file.write(struct.pack("<iiiBBH", 1, 0, len(array.shape), kind, bits, 1))
        self.number(*array.shape)
        self.number(math.prod(array.shape) * bits // 8)
        for chunk in [array] if isinstance(array, torch.Tensor) else array.make():
            if chunk.numel():
                self.file.write(_bytes_of(chunk.detach().cpu().contiguous()))

    def named(self, tensors: Named) -> None:
        """Tensors with their names."""
        self.number(len(tensors))
        for name, tensor in tensors:
            self.text(name)
            self.array(tensor)

    def matrix(self, relation: Relation, name: str) -> None:
        """A relation in one of its formats."""
        if name == "coo":
            self._coo(relation.num_src, relation.num_dst, *relation.coo())
            return
        by_row = relation if name == "csr" else relation.reverse()
        indptr, indices, eids = by_row.csr()
        self.number(_CSR, by_row.num_dst, by_row.num_src)
        for array in (indptr, indices, _NONE if eids is None else eids):
            self.array(array)
        self.flag(False)

    def _coo(
        self, num_src: int, num_dst: int, row: torch.Tensor | Chunks, col: torch.Tensor | Chunks
    ) -> None:
        self.number(_COO, num_dst, num_src)
        for array in (row, col, _NONE):
            self.array(array)
        self.flag(False)  # whether it is known to be sorted
        self.flag(False)

    def coo_graph(self, num_nodes: int, row: Chunks, col: Chunks) -> None:
        """A graph of one type of nodes and edges by the ends of its edges."""
        self.number(_GRAPH)
        self.metagraph(1, [(0, 0)])
        self.number(1, _UNIT_GRAPH, _code(["coo"]), _code(FORMATS))
        self.metagraph(1, [(0, 0)])
        self._coo(num_nodes, num_nodes, row, col)
        self.list(self.number, [num_nodes])

    def metagraph(self, num_ntypes: int, ends: Sequence[tuple[int, int]]) -> None:
        row, col = (torch.tensor([pair[at] for pair in ends], dtype=torch.int64) for at in (0, 1))
        self.number(_METAGRAPH)
        self.matrix(Relation(num_ntypes, num_ntypes, coo=Coo(row, col)), "csr")

    def graph(self, index: TensorIndex, formats: Iterable[str]) -> None:
        """A graph, in the given formats or, if there are none, in one that it has."""
        self.number(_GRAPH)
        self.metagraph(index.schema.num_ntypes, index.schema.ends)
        self.number(len(index.relations))
        for relation, (src, dst) in zip(index.relations, index.schema.ends, strict=True):
            self._unit_graph(relation, 1 if src == dst else 2, tuple(formats))
        self.list(self.number, index._num_nodes)

    def _unit_graph(self, relation: Relation, num_ntypes: int, formats: tuple[str, ...]) -> None:
        created = relation.created
        first = next(name for name in ("coo", "csc", "csr") if name in created)
        saved = [name for name in FORMATS if name in (formats or (first,))]
        if absent := set(saved) - set(relation.formats):
            raise InvalidCallError(
                f"write a graph as {', '.join(sorted(absent))}",
                f"it may only have {', '.join(relation.formats)}",
                "name other formats, or allow these: g.formats([...])",
            )
        self.number(_UNIT_GRAPH, _code(saved), _code(relation.formats))
        for name in saved:
            self.metagraph(num_ntypes, [(0, num_ntypes - 1)])
            self.matrix(relation, name)


class Reader:
    """Reads records from a file."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file = file
        self.name = name
        begin = file.tell()
        self._size = file.seek(0, os.SEEK_END)
        file.seek(begin)

    def bytes(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) != count:
            raise self.error("it ends too early")
        return data

    def error(self, found: str) -> InvalidCallError:
        return InvalidCallError(
            f"read {self.name}", found, "pass a file that DGL wrote, and that is complete"
        )

    def number(self) -> int:
        return int.from_bytes(self.bytes(8), "little", signed=True)

    def length(self) -> int:
        """A number of things that come next, each of a byte or more."""
        count = self.number()
        if not 0 <= count <= self._size:
            raise self.error(f"it has {self._size:,} bytes, and says that {count:,} come")
        return count

    def expect(self, magic: int, what: str) -> None:
        """Raise unless this kind of record begins here."""
        if self.number() % (1 << 64) != magic:
            raise self.error(f"there is no {what} where one should be")

    def flag(self) -> bool:
        return self.bytes(1) != b"\0"

    def text(self) -> str:
        try:
            return self.bytes(self.length()).decode()
        except UnicodeDecodeError as error:
            raise self.error("a name in it is no text") from error

    def list(self, read: Callable[[], Any]) -> list[Any]:
        return [read() for _ in range(self.length())]

    def array(self) -> torch.Tensor:
        shape, dtype, num_bytes = self._array_head()
        tensor = torch.empty(shape, dtype=dtype)
        memory = _bytes_of(tensor) if num_bytes else b""
        if num_bytes and self.file.readinto(memory) != num_bytes:  # type: ignore[attr-defined]
            raise self.error("it ends too early")
        return tensor

    def mapped_array(self) -> np.ndarray:
        """An array that is mapped from the file, to be read where it is looked at."""
        shape, dtype, num_bytes = self._array_head()
        if dtype == torch.bfloat16:
            raise self.error("an array is of bfloat16, which NumPy has not")
        begin = self.file.tell()
        if self.file.seek(0, os.SEEK_END) < begin + num_bytes:
            raise self.error("it ends too early")
        self.file.seek(begin + num_bytes)
        of_numpy = torch.empty(0, dtype=dtype).numpy().dtype
        if not num_bytes:  # nothing can be mapped
            return np.empty(shape, of_numpy)
        return np.memmap(self.name, of_numpy, "r", begin, tuple(shape))

    def _array_head(self) -> tuple[Sequence[int], torch.dtype, int]:
        """Shape, element type and bytes of an array, whose elements come next."""
        self.expect(_ARRAY, "array")
        self.number()
        _, _, dimensions, kind, bits, _ = struct.unpack("<iiiBBH", self.bytes(16))
        shape = [self.number() for _ in range(dimensions)]
        num_bytes = self.length()
        is_array = min(shape, default=0) >= 0 and (kind, bits) in _DTYPES
        if not is_array or num_bytes != math.prod(shape) * bits // 8:
            raise self.error(f"an array of kind {kind} has {num_bytes} bytes and shape {shape}")
        return shape, _DTYPES[kind, bits], num_bytes

    def named(self) -> dict[str, torch.Tensor]:
        return dict(self.list(lambda: (self.text(), self.array())))

    def matrix(self, name: str) -> tuple[int, int, Coo | Compressed]:
        """How many sources and destinations there are, and the edges in a format."""
        num_cols, num_rows, first, second, eids = self._matrix_record(name)
        if name == "coo":
            if eids.numel():
                at = eids.long()
                first, second = (
                    torch.empty_like(end).index_copy_(0, at, end) for end in (first, second)
                )
            return num_rows, num_cols, Coo(first, second)
        matrix = Compressed(first, second, eids if eids.numel() else None)
        return (num_rows, num_cols, matrix) if name == "csr" else (num_cols, num_rows, matrix)

    def _matrix_record(self, name: str) -> tuple[int, int, Any, Any, Any]:
        """Columns and rows of a matrix, and its three arrays."""
        is_coo = name == "coo"
        self.expect(_COO if is_coo else _CSR, "matrix")
        num_cols, num_rows = self.number(), self.number()
        first, second, eids = (self.array() for _ in range(3))
        for _ in range(2 if is_coo else 1):
            self.flag()
        return num_cols, num_rows, first, second, eids

    def metagraph(self) -> GraphIndex:
        self.expect(_METAGRAPH, "metagraph")
        num_ntypes, _, matrix = self.matrix("csr")
        relation = Relation(num_ntypes, num_ntypes, csr=matrix)  # type: ignore[arg-type]
        return create_metagraph(*relation.coo(), num_ntypes, True)

    def graph(self) -> TensorIndex:
        self.expect(_GRAPH, "graph")
        metagraph = self.metagraph()
        relations = self.list(self._unit_graph)
        return TensorIndex(GraphSchema(metagraph), self.list(self.number), relations)

    def _unit_graph(self) -> Relation:
        self.expect(_UNIT_GRAPH, "relation")
        saved, allowed = self._formats(0), self._formats(1)
        held: dict[str, Any] = {}
        sizes = (0, 0)
        for name in saved:
            self.metagraph()
            *sizes, held[name] = self.matrix(name)  # type: ignore[assignment]
        return Relation(*sizes, formats=allowed, **held)

    def _formats(self, offset: int) -> tuple[str, ...]:
        code = self.number()
        if code & _SET_OF_FORMATS:
            return tuple(name for name in FORMATS if _CODES[name] & code)
        # The number of one; that of allowed formats is 0 if all are.
        return FORMATS if offset and code == 0 else (FORMATS[code - 1],)


class MappedReader(Reader):
    """Reads records whose arrays are mapped from the file: what is looked at is in memory."""

    def array(self) -> Any:
        return self.mapped_array()

    def metagraph(self) -> Any:
        """None: it is passed over."""
        self.expect(_METAGRAPH, "metagraph")
        self._matrix_record("csr")

    def graph(self) -> Any:
        """For each relation, by the formats that it is saved in, the arrays of each."""
        self.expect(_GRAPH, "graph")
        self.metagraph()
        relations = self.list(self._unit_graph)
        self.list(self.number)
        return relations

    def _unit_graph(self) -> Any:
        self.expect(_UNIT_GRAPH, "relation")
        saved, _ = self._formats(0), self._formats(1)
        arrays: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for name in saved:
            self.metagraph()
            arrays[name] = self._matrix_record(name)[2:]
        return arrays


def _bytes_of(tensor: torch.Tensor) -> Any:
    """A tensor's memory."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _code(formats: Iterable[str]) -> int:
    return _SET_OF_FORMATS | sum(_CODES[name] for name in formats)


def _code_of(dtype: torch.dtype) -> tuple[int, int]:
    """DGL's code of a type, and its bits; what is true or false has numbers of a byte."""
    if dtype == torch.bool:
        return _UINT, 8
    if dtype == torch.bfloat16:
        return _BFLOAT, 16
    try:
        numpys = np.dtype(str(dtype).removeprefix("torch."))
        return _KINDS[numpys.kind], 8 * numpys.itemsize
    except (TypeError, KeyError) as error:
        raise InvalidCallError(
            "write a tensor to a file of DGL's",
            f"it is {dtype}",
            "convert it to a type of integers or floating-point numbers",
        ) from error


_DTYPES = {
    (kind, bits): getattr(torch, {"i": "int", "u": "uint", "f": "float"}[letter] + str(bits))
    for kind, letter in _LETTERS.items()
    for bits in (8, 16, 32, 64)
    if letter != "f" or bits > 8
} | {(_BFLOAT, 16): torch.bfloat16}
