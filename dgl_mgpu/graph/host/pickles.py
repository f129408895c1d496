"""Graphs that DGL's C++ has pickled, and graphs in shared memory: ``heterograph_index``."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from dgl.heterograph_index import HeteroPickleStates

from dgl_mgpu.graph.errors import InvalidCallError
from dgl_mgpu.graph.host.stream import Reader
from dgl_mgpu.graph.index import GraphSchema, TensorIndex
from dgl_mgpu.graph.relation import FORMATS, Compressed, Coo, Relation
from dgl_mgpu.graph.shared_memory import map_shared_memory, shared_memory_path

_COO, _CSR = 1, 2


def create_states(version: int, meta: Any, arrays: Sequence[torch.Tensor]) -> HeteroPickleStates:
    """What a pickle has of a graph: some bytes, and arrays."""
    states = HeteroPickleStates.__new__(HeteroPickleStates)
    states.handle = SimpleNamespace(version=version, meta=bytes(meta), arrays=list(arrays))
    return states


def version_of(states: HeteroPickleStates) -> int:
    return states.handle.version


def meta_of(states: HeteroPickleStates) -> bytes:
    return states.handle.meta


def arrays_of(states: HeteroPickleStates) -> Any:
    return states.handle.arrays.__getitem__


def num_arrays_of(states: HeteroPickleStates) -> int:
    return len(states.handle.arrays)


def unpickle(states: HeteroPickleStates) -> TensorIndex:
    """The graph that DGL's C++ has pickled."""
    held = states.handle
    reader = Reader(io.BytesIO(held.meta), "a pickled graph")
    schema = GraphSchema(reader.metagraph())
    num_nodes = reader.list(reader.number)
    if held.version > 1:
        reader.flag()  # whether it was pinned
    arrays = iter(held.arrays)
    relations = []
    for src, dst in schema.ends:
        size = num_nodes[src], num_nodes[dst]
        kind = int.from_bytes(reader.bytes(4), "little")
        reader.flag()  # whether it is known to be sorted
        if kind == _COO:
            reader.flag()
            relations.append(Relation(*size, coo=Coo(next(arrays), next(arrays))))
        elif kind == _CSR:
            indptr, indices, eids = (next(arrays) for _ in range(3))
            matrix = Compressed(indptr, indices, eids if eids.numel() else None)
            relations.append(Relation(*size, csr=matrix))
        else:
            raise reader.error(f"a relation has format {kind}")
    return TensorIndex(schema, num_nodes, relations)


# -- shared memory -----------------------------------------------------------------------------
# Arrays are in memory of their own, and what they are is JSON.


def copy_to_shared_memory(
    index: TensorIndex,
    name: str,
    ntypes: Sequence[str],
    etypes: Sequence[str],
    formats: Sequence[str],
) -> TensorIndex:
    """A copy of a graph in shared memory, which is there as long as the copy."""
    index = index.on(torch.device("cpu"))
    relations, described = [], []
    for number, relation in enumerate(index.relations):
        held: dict[str, Any] = {}
        shapes: dict[str, list[list[Any]]] = {}
        for fmt in (fmt for fmt in FORMATS if fmt in formats and fmt in relation.formats):
            matrix = getattr(relation, fmt)()
            arrays = matrix if fmt == "coo" else (*matrix[:2], matrix.edge_ids())
            shared = []
            for at, array in enumerate(arrays):
                place = _place(name, number, fmt, at)
                shared.append(map_shared_memory(place, True, tuple(array.shape), array.dtype))
                shared[-1].copy_(array)
            held[fmt] = (Coo if fmt == "coo" else Compressed)(*shared)
            shapes[fmt] = [[array.numel(), str(array.dtype)[6:]] for array in shared]
        described.append({"num": [relation.num_src, relation.num_dst], "formats": shapes})
        relations.append(Relation(relation.num_src, relation.num_dst, formats=tuple(held), **held))
    meta = {
        "ends": index.schema.ends,
        "num_nodes": index._num_nodes,
        "ntypes": list(ntypes),
        "etypes": list(etypes),
        "relations": described,
    }
    data = json.dumps(meta).encode()
    memory = map_shared_memory(f"{name}_meta", True, (len(data),), torch.uint8)
    memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    copy = TensorIndex(index.schema, index._num_nodes, relations)
    copy._shared_meta = memory  # type: ignore[attr-defined]  # goes with the copy
    return copy


def from_shared_memory(name: str) -> tuple[TensorIndex, list[str], list[str]]:
    """The graph in shared memory of a name, and the names of its types."""
    path = shared_memory_path(f"{name}_meta")
    if not path.exists():
        raise InvalidCallError(
            f"find a graph in shared memory by {name!r}",
            "there is none",
            "call shared_memory of a graph, and keep what it returns",
        )
    meta = json.loads(path.read_bytes())
    relations = []
    for number, described in enumerate(meta["relations"]):
        held: dict[str, Any] = {}
        for fmt, shapes in described["formats"].items():
            arrays = [
                map_shared_memory(_place(name, number, fmt, at), False, (n,), getattr(torch, dtype))
                for at, (n, dtype) in enumerate(shapes)
            ]
            held[fmt] = (Coo if fmt == "coo" else Compressed)(*arrays)
        relations.append(Relation(*described["num"], formats=tuple(held), **held))
    ends = [(src, dst) for src, dst in meta["ends"]]
    schema = GraphSchema.of(len(meta["num_nodes"]), ends)
    return TensorIndex(schema, meta["num_nodes"], relations), meta["ntypes"], meta["etypes"]


def _place(name: str, relation: int, fmt: str, number: int) -> str:
    return f"{name}_{relation}_{fmt}_{number}"
