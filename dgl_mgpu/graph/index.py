"""DGL's graph index, made of torch tensors: what a DGLGraph on a GPU is.

DGL's own index is a C++ object, and the wheel's C++ knows CPUs alone.  `TensorIndex` takes its
place below DGLGraph and overrides the methods of `HeteroGraphIndex` one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
from dgl import backend as F
from dgl import heterograph_index
from dgl._ffi.runtime_ctypes import DGLContext
from dgl.base import DGLError
from dgl.graph_index import GraphIndex, from_coo
from dgl.heterograph_index import HeteroGraphIndex
from dgl.utils import to_dgl_context, toindex

from dgl_mgpu.graph.dispatch import TensorBacked, has_library, tensor_backed_graphs
from dgl_mgpu.graph.errors import raising_dgl_errors
from dgl_mgpu.graph.host_ids import moved, takes_ids_of_gpus
from dgl_mgpu.graph.relation import FORMATS, Compressed, Coo, Relation, Unnumbered, ranges

T = TypeVar("T")

_CPU = 1  # DGLContext's device type
_context = cache(to_dgl_context)


class GraphSchema:
    """Node and edge types of an index, by number: DGL's metagraph, and what is read of it often."""

    def __init__(self, metagraph: GraphIndex) -> None:
        self.metagraph = metagraph
        self.num_ntypes: int = metagraph.num_nodes()
        self.ends: list[tuple[int, int]] = [
            metagraph.find_edge(etype) for etype in range(metagraph.num_edges())
        ]
        #: Whether there is one relation, and no node type that is not in it.
        self.is_single = len(self.ends) == 1 and self.num_ntypes == len(set(self.ends[0]))

    @classmethod
    def of(cls, num_ntypes: int, ends: Sequence[tuple[int, int]]) -> GraphSchema:
        return cls(from_coo(num_ntypes, [s for s, _ in ends], [d for _, d in ends], True))

    @cached_property
    def is_unibipartite(self) -> bool:
        """Whether no node type is both a source and a destination."""
        return {s for s, _ in self.ends}.isdisjoint(d for _, d in self.ends)

    @cached_property
    def block(self) -> GraphSchema:
        """The schema of blocks made from graphs of this one: each type once on either side."""
        count = self.num_ntypes
        return GraphSchema.of(2 * count, [(s, count + d) for s, d in self.ends])

    @cached_property
    def reverse(self) -> GraphSchema:
        reversed_schema = GraphSchema.of(self.num_ntypes, [(d, s) for s, d in self.ends])
        reversed_schema.__dict__["reverse"] = self
        return reversed_schema


_SINGLE: list[GraphSchema] = []


def single_schema(num_ntypes: int) -> GraphSchema:
    """The schema of one relation, within one node type or from one to another."""
    if not _SINGLE:
        _SINGLE.extend((GraphSchema.of(1, [(0, 0)]), GraphSchema.of(2, [(0, 1)])))
    return _SINGLE[num_ntypes - 1]


class TensorIndex(HeteroGraphIndex, TensorBacked):
    """A heterogeneous graph whose relations, one an edge type, are tensors on one device."""

    def __new__(cls, *arguments: Any) -> TensorIndex:
        return HeteroGraphIndex.__new__(cls)

    def __init__(
        self, schema: GraphSchema, num_nodes: Sequence[int], relations: Sequence[Relation]
    ) -> None:
        self.schema = schema
        self.relations = list(relations)
        self._num_nodes = list(num_nodes)

    @classmethod
    def single(cls, relation: Relation, num_ntypes: int) -> TensorIndex:
        """An index of one relation, within one node type or between two."""
        nodes = [relation.num_src] if num_ntypes == 1 else [relation.num_src, relation.num_dst]
        return cls(single_schema(num_ntypes), nodes, [relation])

    # -- to and from DGL's C++ --------------------------------------------------------------

    @classmethod
    def from_dgl(cls, index: HeteroGraphIndex, device: torch.device | str) -> TensorIndex:
        """Copy DGL's index, which is on the CPU, with the formats it has, to a device."""
        if isinstance(index, TensorIndex):  # as every index is without DGL's binary
            return index.on(torch.device(device))
        schema = GraphSchema(index.metagraph)
        relations = [
            _from_unit_graph(index.get_relation_graph(etype), torch.device(device))
            for etype in range(len(schema.ends))
        ]
        return cls(schema, [index.num_nodes(t) for t in range(schema.num_ntypes)], relations)

    def to_dgl(self) -> HeteroGraphIndex:
        """Copy to DGL's C++ index on the CPU; without DGL's binary, to one of tensors there."""
        if not has_library():
            return self.on(torch.device("cpu"))
        with tensor_backed_graphs(False):
            units = [
                _to_unit_graph(relation.to(torch.device("cpu")), 1 if src == dst else 2)
                for relation, (src, dst) in zip(self.relations, self.schema.ends, strict=True)
            ]
            return heterograph_index.create_heterograph_from_relations(
                self.schema.metagraph, units, toindex(self._num_nodes)
            )

    def on(self, device: torch.device) -> TensorIndex:
        """The index on a device: itself if it is there."""
        if device == self.device:
            return self
        return TensorIndex(self.schema, self._num_nodes, [r.to(device) for r in self.relations])

    def __reduce__(self) -> tuple[Any, ...]:
        states = list(map(_state, self.relations))
        return _rebuild, (self.schema.metagraph, self._num_nodes, states, self.is_pinned())

    def __copy__(self) -> TensorIndex:
        return TensorIndex(self.schema, self._num_nodes, self.relations)

    # DGL's two look attributes up in a C++ object, which is not there.
    __getattribute__ = object.__getattribute__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def same_as(self, other: object) -> bool:
        return self is other

    def __dir__(self) -> list[str]:
        return list(object.__dir__(self))

    # -- what it is -------------------------------------------------------------------------

    @property
    def metagraph(self) -> GraphIndex:
        return self.schema.metagraph

    def is_metagraph_unibipartite(self) -> bool:
        return self.schema.is_unibipartite

    def number_of_ntypes(self) -> int:
        return self.schema.num_ntypes

    def number_of_etypes(self) -> int:
        return len(self.relations)

    @property
    def dtype(self) -> str:
        return "int32" if self.idtype == torch.int32 else "int64"

    @property
    def idtype(self) -> torch.dtype:
        return self.relations[0].idtype

    @property
    def device(self) -> torch.device:
        return self.relations[0].device

    @property
    def ctx(self) -> DGLContext:  # type: ignore[override]
        return _context(self.device)

    def num_nodes(self, ntype: int) -> int:
        return self._num_nodes[ntype]

    def num_edges(self, etype: int) -> int:
        return self.relations[etype].num_edges

    number_of_nodes = num_nodes
    number_of_edges = num_edges

    def is_readonly(self) -> bool:
        return True

    def is_multigraph(self) -> bool:
        return any(_has_parallel_edges(relation) for relation in self.relations)

    def get_relation_graph(self, etype: int) -> TensorIndex:
        etype = int(etype)
        src, dst = self.schema.ends[etype]
        return TensorIndex.single(self.relations[etype], 1 if src == dst else 2)

    # -- changes: an index is never changed in place ---------------------------------------------

    def add_nodes(self, ntype: int, num: int) -> None:
        raise DGLError("A graph index cannot be changed; use dgl.add_nodes")

    def add_edges(self, etype: int, u: Any, v: Any) -> None:
        raise DGLError("A graph index cannot be changed; use dgl.add_edges")

    add_edge = add_edges

    def clear(self) -> None:
        raise DGLError("A graph index cannot be changed; make a new graph")

    def asbits(self, bits: int) -> TensorIndex:
        dtype = torch.int32 if bits == 32 else torch.int64
        if dtype == self.idtype:
            return self
        return TensorIndex(
            self.schema, self._num_nodes, [r.to(dtype=dtype) for r in self.relations]
        )

    def reverse(self) -> TensorIndex:
        reversed_index = self._cache.get("reverse")
        if reversed_index is None:
            reversed_index = TensorIndex(
                self.schema.reverse, self._num_nodes, [r.reverse() for r in self.relations]
            )
            self._cache["reverse"] = reversed_index
        return reversed_index

    # -- memory ----------------------------------------------------------------------------------

    def copy_to(self, ctx: DGLContext) -> HeteroGraphIndex:
        if ctx.device_type == _CPU:
            return self.to_dgl()
        return self.on(F.to_backend_ctx(ctx))

    # On the CPU, where graphs are made of tensors without DGL's binary, DGL's methods pin them.

    def pin_memory(self) -> HeteroGraphIndex:
        self._check_on_cpu()
        return super().pin_memory()

    def pin_memory_(self) -> HeteroGraphIndex:
        self._check_on_cpu()
        return super().pin_memory_()

    def _check_on_cpu(self) -> None:
        if self.device.type != "cpu":
            raise DGLError(f"Cannot pin a graph on {self.device}: only graphs on the CPU can be")

    def unpin_memory_(self) -> HeteroGraphIndex:
        return super().unpin_memory_() if self.device.type == "cpu" else self

    def is_pinned(self) -> bool:
        return self.device.type == "cpu" and bool(super().is_pinned())

    def record_stream(self, stream: torch.cuda.Stream) -> TensorIndex:
        for relation in self.relations:
            for tensor in relation.tensors():
                tensor.record_stream(stream)
        return self

    def shared_memory(
        self,
        name: str,
        ntypes: Sequence[str] | None = None,
        etypes: Sequence[str] | None = None,
        formats: Sequence[str] = ("coo", "csr", "csc"),
    ) -> HeteroGraphIndex:
        with tensor_backed_graphs(False):
            return HeteroGraphIndex.shared_memory(self.to_dgl(), name, ntypes, etypes, formats)

    # -- formats -----------------------------------------------------------------------------------

    def formats(self, formats: str | Sequence[str] | None = None) -> Any:
        if formats is None:
            created = self.relations[0].created
            allowed = [name for name in FORMATS if name in self.relations[0].formats]
            return {
                "created": [name for name in allowed if name in created],
                "not created": [name for name in allowed if name not in created],
            }
        wanted = {formats} if isinstance(formats, str) else set(formats)
        kept = tuple(name for name in FORMATS if name in wanted)
        if not kept or len(kept) != len(wanted):
            raise DGLError(f"Sparse format not recognized: {formats}; use {', '.join(FORMATS)}")
        return TensorIndex(
            self.schema, self._num_nodes, [r.with_formats(kept) for r in self.relations]
        )

    def create_formats_(self) -> None:
        for relation in self.relations:
            relation.create_formats()

    def adjacency_matrix_tensors(self, etype: int, transpose: bool, fmt: str) -> tuple[Any, ...]:
        if not isinstance(transpose, bool):
            raise DGLError(f'Expect bool value for "transpose" arg, but got {type(transpose)}.')
        relation = self.relations[etype]
        if transpose:
            relation = relation.reverse()
        if fmt == "csr":
            matrix = relation.csr()
            unnumbered = isinstance(matrix, Unnumbered)
            ids = matrix.indices[:0] if unnumbered else matrix.edge_ids()
            return relation.num_src, relation.num_dst, matrix.indptr, matrix.indices, ids
        if fmt == "coo":
            return relation.num_src, relation.num_dst, *relation.coo()
        raise DGLError(f"unsupported adjacency matrix format: {fmt}")

    # -- queries -----------------------------------------------------------------------------------

    def has_nodes(self, ntype: int, vids: torch.Tensor) -> torch.Tensor:
        return ((vids >= 0) & (vids < self._num_nodes[ntype])).to(vids.dtype)

    @takes_ids_of_gpus
    def has_edges_between(self, etype: int, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        u, v = torch.broadcast_tensors(u, v)
        _, counts, _ = self.relations[etype].edges_between(u, v)
        return (counts > 0).to(self.idtype)

    def predecessors(self, etype: int, v: int) -> torch.Tensor:
        return self.in_edges(etype, self._node(v))[0]

    def successors(self, etype: int, v: int) -> torch.Tensor:
        return self.out_edges(etype, self._node(v))[1]

    def _node(self, node: int) -> torch.Tensor:
        return torch.tensor([int(node)], dtype=self.idtype, device=self.device)

    @takes_ids_of_gpus
    def edge_ids_all(
        self, etype: int, u: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        u, v = torch.broadcast_tensors(u, v)
        start, counts, eids = self.relations[etype].edges_between(u, v)
        eids = eids[ranges(start, counts)]
        ends = [end.repeat_interleave(counts, output_size=eids.numel()) for end in (u, v)]
        return ends[0], ends[1], eids

    @takes_ids_of_gpus
    def edge_ids_one(self, etype: int, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        u, v = torch.broadcast_tensors(u, v)
        start, counts, eids = self.relations[etype].edges_between(u, v)
        if eids.numel() == 0:
            return torch.full_like(u, -1)
        return torch.where(counts > 0, eids[start.clamp(max=eids.numel() - 1)], -1)

    @takes_ids_of_gpus
    def find_edges(
        self, etype: int, eid: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (*self.relations[etype].find(eid), eid)

    @takes_ids_of_gpus
    @raising_dgl_errors
    def in_edges(
        self, etype: int, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.relations[etype].in_edges(v)

    @takes_ids_of_gpus
    @raising_dgl_errors
    def out_edges(
        self, etype: int, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.relations[etype].out_edges(v)

    def edges(
        self, etype: int, order: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if order not in (None, "srcdst", "eid"):
            raise DGLError(f"Expect order to be one of None, 'srcdst', 'eid', got {order}")
        relation = self.relations[etype]
        if order == "srcdst":
            sorted_rows = relation.pairs()
            return sorted_rows.owners(), sorted_rows.indices, sorted_rows.edge_ids()
        row, col = relation.coo()
        return row, col, torch.arange(relation.num_edges, dtype=row.dtype, device=row.device)

    @takes_ids_of_gpus
    @raising_dgl_errors
    def in_degrees(self, etype: int, v: torch.Tensor | None) -> torch.Tensor:
        return self.relations[etype].in_degrees(v)

    @takes_ids_of_gpus
    @raising_dgl_errors
    def out_degrees(self, etype: int, v: torch.Tensor | None) -> torch.Tensor:
        return self.relations[etype].out_degrees(v)

    @raising_dgl_errors
    def of_degrees(self, etype: int, side: str, name: Hashable, make: Callable[[Any], T]) -> T:
        """`Relation.of_degrees` of an edge type."""
        return self.relations[etype].of_degrees(side, name, make)

    def lacks_in_edges(self, etype: int) -> bool:
        """Whether some node has no in-edges of a type; the host waits at the first call."""
        return self.of_degrees(etype, "in", "lacks", lambda counts: bool((counts == 0).any()))


def _has_parallel_edges(relation: Relation) -> bool:
    indptr, indices, _ = relation.pairs()
    if indices.numel() < 2:
        return False
    # Of each entry and of the end, whether it is that before it once more.
    again = torch.zeros(indices.numel() + 1, dtype=torch.bool, device=indices.device)
    again[1:-1] = indices[1:] == indices[:-1]
    again.index_fill_(0, indptr.long(), False)
    return bool(again.any())


def _from_unit_graph(unit: HeteroGraphIndex, device: torch.device) -> Relation:
    num_src, num_dst = unit.num_nodes(0), unit.num_nodes(unit.number_of_ntypes() - 1)
    status = unit.formats()
    held: dict[str, Any] = {}
    for name in status["created"]:
        if name == "coo":
            held[name] = Coo(*(end.to(device) for end in unit.edges(0, "eid")[:2]))
        else:
            indptr, indices, eids = unit.adjacency_matrix_tensors(0, name == "csc", "csr")[2:]
            kind = Compressed if eids.numel() else Unnumbered
            held[name] = kind(indptr.to(device), indices.to(device), _ids(eids, device))
    allowed = {*status["created"], *status["not created"]}
    formats = tuple(name for name in FORMATS if name in allowed)
    return Relation(num_src, num_dst, formats=formats, **held)


def _ids(eids: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    identity = torch.arange(eids.numel(), dtype=eids.dtype)
    return None if torch.equal(eids, identity) else eids.to(device)


def _to_unit_graph(relation: Relation, num_ntypes: int) -> HeteroGraphIndex:
    size = num_ntypes, relation.num_src, relation.num_dst
    formats = list(relation.formats)
    if "coo" in relation.created:
        return heterograph_index.create_unitgraph_from_coo(*size, *relation.coo(), formats)
    by_source = "csr" in relation.created
    matrix = relation.csr() if by_source else relation.csc()
    return heterograph_index.create_unitgraph_from_csr(
        *size, matrix.indptr, matrix.indices, matrix.edge_ids(), formats, not by_source
    )


def _state(relation: Relation) -> tuple[Any, ...]:
    held = {name: tuple(relation.held(name)) for name in relation.created}  # type: ignore[arg-type]
    return relation.num_src, relation.num_dst, relation.formats, held


def _rebuild(
    metagraph: GraphIndex,
    num_nodes: list[int],
    states: list[tuple[Any, ...]],
    is_pinned: bool = False,
) -> TensorIndex:
    relations = []
    for num_src, num_dst, formats, held in states:
        matrices: dict[str, Any] = {
            name: (Coo if name == "coo" else Compressed)(*tensors) for name, tensors in held.items()
        }
        relations.append(Relation(num_src, num_dst, formats=formats, **matrices))
    index = TensorIndex(GraphSchema(metagraph), num_nodes, relations)
    if is_pinned:
        from dgl_mgpu.graph.pinning.pinned_graphs import pin_where_gpus_are  # imports this module

        pin_where_gpus_are(index)
    return index


@dataclass(eq=False)
class SubgraphIndex(TensorBacked):
    """A part of a graph, with the ids its nodes of each type and edges of each type had there."""

    graph: TensorIndex
    induced_nodes: list[torch.Tensor]
    induced_edges: list[torch.Tensor]

    def on(self, device: torch.device) -> SubgraphIndex:
        """The same on a device."""
        return SubgraphIndex(
            self.graph.on(device),
            moved(self.induced_nodes, device),
            moved(self.induced_edges, device),
        )
