"""One relation of a graph as tensors: its edges as COO, CSR and CSC, made on first use.

Takes the place of DGL's C++ unit graph, on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.ops import transpose
from dgl_mgpu.ops.transpose import group_on_cpu
from dgl_mgpu.utils.streams import is_capturing

T = TypeVar("T")

FORMATS = ("coo", "csr", "csc")

#: Edges up to which CSR and CSC are made of each other by one operator.  A sort takes the host
#: longer, until there are so many that it waits for the GPU anyway.  They lie in no cache then, and
#: a sort writes them in runs.
_MAX_TRANSPOSED = 1 << 22


class Coo(NamedTuple):
    """Edges in the order of their ids: edge ``i`` goes from ``row[i]`` to ``col[i]``."""

    row: torch.Tensor
    col: torch.Tensor


class Compressed(NamedTuple):
    """Edges grouped by one of their ends.

    Parameters
    ----------
    indptr : Tensor, int32 or int64, shape (num_nodes + 1,)
    indices : Tensor, same dtype, shape (num_edges,)
        The other ends.
    eids : Tensor or None, same dtype, shape (num_edges,)
        Edge ids; None where entry ``i`` is edge ``i``.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    eids: torch.Tensor | None

    def edge_ids(self) -> torch.Tensor:
        """Edge ids of the entries, also where ``eids`` leaves them out."""
        if self.eids is not None:
            return self.eids
        return torch.arange(
            self.indices.numel(), dtype=self.indices.dtype, device=self.indices.device
        )

    def ids_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Edge ids of the entries at some positions."""
        return positions.to(self.indices.dtype) if self.eids is None else self.eids[positions]

    def owners(self) -> torch.Tensor:
        """The node by which each entry is grouped, shape (num_edges,)."""
        nodes = torch.arange(
            self.indptr.numel() - 1, dtype=self.indptr.dtype, device=self.indptr.device
        )
        return nodes.repeat_interleave(self.indptr.diff(), output_size=self.indices.numel())

    def entries(self, nodes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of the entries of ``nodes``, node after node, and how many each has; int64."""
        nodes = nodes.long()
        if nodes.numel() == 0:
            return nodes, nodes
        start, counts = self._bounds(nodes)
        unknown = ((nodes < 0) | (nodes > self.indptr.numel() - 2)).any()
        total, any_unknown = torch.stack([counts.sum(), unknown]).tolist()
        if any_unknown:
            raise IdOutOfRangeError(
                "find the edges of nodes",
                f"the ids run from {int(nodes.min())} to {int(nodes.max())}, but there are"
                f" {self.indptr.numel() - 1} nodes",
                f"pass ids in [0, {self.indptr.numel() - 1})",
            )
        return ranges(start, counts, total), counts

    def degrees(self, nodes: torch.Tensor | None = None) -> torch.Tensor:
        """How many entries nodes have, of the ids' dtype: all nodes, or those given.

        Ids out of range have none: checking would have to wait for the device.
        """
        if nodes is None:
            return self.indptr.diff()
        return self._bounds(nodes.long())[1].to(self.indptr.dtype)

    def _bounds(self, nodes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        last = self.indptr.numel() - 1
        start = self.indptr[nodes.clamp(0, last)].long()
        return start, self.indptr[(nodes + 1).clamp(0, last)].long() - start


class Unnumbered(Compressed):
    """A matrix that was given without edge ids: DGL expects an answer without them."""


def check_ids(ids: torch.Tensor, count: int, what: str) -> None:
    """Raise for ids out of range: an index out of range would end all work on a GPU."""
    if ids.numel() == 0:
        return
    low, high = torch.stack(ids.aminmax()).tolist()
    if low < 0 or high >= count:
        raise IdOutOfRangeError(
            f"look up {what}",
            f"the ids run from {low} to {high}, but there are {count} {what}",
            f"pass ids in [0, {count})",
        )


def ranges(start: torch.Tensor, counts: torch.Tensor, total: int | None = None) -> torch.Tensor:
    """``start[i], start[i] + 1, …`` for ``counts[i]`` numbers, one after the other; int64.

    ``total`` is the sum of ``counts``, where it is known already.
    """
    ends = counts.cumsum(0)
    if total is None:
        total = int(ends[-1]) if ends.numel() else 0
    shift = (start - ends + counts).repeat_interleave(counts, output_size=total)
    return torch.arange(total, device=start.device) + shift


class TypedSources(NamedTuple):
    """Pairs of a source and the type of an edge that leaves it, ordered by type.

    On partitioned graphs they are those of a process's own sources.
    """

    #: How many pairs there are of each type that there is, in any process; types ascend.
    counts: dict[int, int]
    #: From sources to pairs: an edge to each.
    pairs: Relation
    #: From pairs to destinations: the edges, by their ids.  A `Relation`, or the index of a
    #: partitioned graph.
    edges: Any
    #: Whether there are fewer pairs than edges, in all processes together.
    are_few: bool


class _Held:
    """The formats that exist; a relation and its reverse share one."""

    __slots__ = ("coo", "csc", "csr", "degrees", "ends", "kept", "pairs", "typed")

    def __init__(self, coo: Coo | None, csr: Compressed | None, csc: Compressed | None) -> None:
        self.coo = coo
        self.csr = csr
        self.csc = csc
        compressed = csr if csc is None else csc
        #: Ends of the edges in some order: asked for their number, dtype and device at every call.
        self.ends: torch.Tensor = coo.row if compressed is None else compressed.indices  # type: ignore[union-attr]
        #: `Relation.pairs` of the relation and, second, of its reverse.
        self.pairs: list[Compressed | None] = [None, None]
        #: `Relation.typed_sources` of the same, with the types and what they were.
        self.typed: list[tuple[torch.Tensor, Any, TypedSources | None] | None] = [None, None]
        #: `Relation.kept_with`, by format.
        self.kept: dict[str, dict[Any, Any]] = {}
        #: What `Relation.of_degrees` has made, by format and name.
        self.degrees: dict[tuple[str, Hashable], Any] = {}


class Relation:
    """Edges from ``num_src`` nodes to ``num_dst`` nodes, in at least one format.

    ``csr`` is grouped by source, ``csc`` by destination.  ``formats`` may be kept; another one that
    an operation needs is made for it alone.
    """

    __slots__ = ("_held", "_reversed", "formats", "num_dst", "num_src")

    def __init__(
        self,
        num_src: int,
        num_dst: int,
        *,
        coo: Coo | None = None,
        csr: Compressed | None = None,
        csc: Compressed | None = None,
        formats: tuple[str, ...] = FORMATS,
    ) -> None:
        self.num_src = num_src
        self.num_dst = num_dst
        self.formats = formats
        self._held = _Held(coo, csr, csc)
        self._reversed = False

    @property
    def num_edges(self) -> int:
        return self._held.ends.numel()

    @property
    def idtype(self) -> torch.dtype:
        return self._held.ends.dtype

    @property
    def device(self) -> torch.device:
        return self._held.ends.device

    # -- formats --------------------------------------------------------------------------

    def held(self, name: str) -> Coo | Compressed | None:
        if self._reversed:
            if name == "coo":
                coo = self._held.coo
                return None if coo is None else Coo(coo.col, coo.row)
            name = "csr" if name == "csc" else "csc"
        return getattr(self._held, name)

    @property
    def created(self) -> tuple[str, ...]:
        return tuple(name for name in FORMATS if self.held(name) is not None)

    def coo(self) -> Coo:
        coo = self.held("coo")
        if coo is None:
            with torch.inference_mode(False):  # kept, and may be saved for a backward pass
                coo = self._expanded()
            self._keep("coo", coo)
        return coo  # type: ignore[return-value]

    def csr(self) -> Compressed:
        return self._compressed("csr")

    def csc(self) -> Compressed:
        return self._compressed("csc")

    def _compressed(self, name: str) -> Compressed:
        matrix = self.held(name)
        if matrix is None:
            with torch.inference_mode(False):  # as coo
                matrix = self._grouped(name)
            self._keep(name, matrix)
        return matrix  # type: ignore[return-value]

    def _grouped(self, name: str) -> Compressed:
        """CSR or CSC, made anew."""
        count = self.num_src if name == "csr" else self.num_dst
        other: Compressed | None = self.held("csc" if name == "csr" else "csr")  # type: ignore[assignment]
        if other is not None and other.indices.numel() <= _MAX_TRANSPOSED:
            return Compressed(*transpose(*other, count))
        row, col = self.coo() if "coo" in self.formats else self._expanded()
        major, minor = (row, col) if name == "csr" else (col, row)
        # Edges that come grouped by one end are hardly ever in the order of the other.
        return compress(major, minor, count, may_be_sorted=other is None)

    def _expanded(self) -> Coo:
        """COO from another format, or the one that exists."""
        coo = self.held("coo")
        if coo is not None:
            return coo  # type: ignore[return-value]
        by_source = self.held("csr") is not None
        compressed: Compressed = self.held("csr" if by_source else "csc")  # type: ignore[assignment]
        ends = [compressed.owners(), compressed.indices]
        if compressed.eids is not None:
            at = compressed.eids.long()
            ends = [torch.empty_like(end).index_copy_(0, at, end) for end in ends]
        return Coo(*ends) if by_source else Coo(*reversed(ends))

    def _keep(self, name: str, matrix: Coo | Compressed) -> None:
        if name not in self.formats:
            return
        if self._reversed:
            if name == "coo":
                matrix = Coo(matrix[1], matrix[0])  # type: ignore[assignment]
            else:
                name = "csr" if name == "csc" else "csc"
        setattr(self._held, name, matrix)

    def kept_with(self, name: str) -> dict[Any, Any]:
        """Where callers keep what they derive from format ``name``."""
        if self._reversed:
            name = "csr" if name == "csc" else "csc"
        return self._held.kept.setdefault(name, {})

    def with_formats(self, formats: tuple[str, ...]) -> Relation:
        """The same edges, keeping ``formats`` alone; the first of them is made if none exists."""
        kept = {name: self.held(name) for name in formats if self.held(name) is not None}
        if not kept:
            name = next(name for name in FORMATS if name in formats)
            kept[name] = self._expanded() if name == "coo" else self._grouped(name)
        return Relation(self.num_src, self.num_dst, formats=formats, **kept)  # type: ignore[arg-type]

    def create_formats(self) -> None:
        """Make every format that may be kept."""
        for name in self.formats:
            getattr(self, name)()

    def reverse(self) -> Relation:
        """The reversed relation.

        Formats are shared, also those that either makes later: the CSC of one is the other's CSR.
        """
        swap = {"csr": "csc", "csc": "csr"}
        reversed_relation = Relation.__new__(Relation)
        reversed_relation.num_src, reversed_relation.num_dst = self.num_dst, self.num_src
        reversed_relation.formats = tuple(swap.get(name, name) for name in self.formats)
        reversed_relation._held = self._held
        reversed_relation._reversed = not self._reversed
        return reversed_relation

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Relation:
        """The relation on a device, with ids of a dtype and all formats that exist."""
        return self.mapped(lambda tensor: tensor.to(device=device, dtype=dtype))

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Relation:
        """The relation with what a function makes of each tensor, in all formats that exist."""
        made: dict[str, Any] = {}
        for name in FORMATS:
            if (held := self.held(name)) is not None:
                tensors = (None if t is None else function(t) for t in held)
                made[name] = type(held)(*tensors)  # type: ignore[arg-type]
        return Relation(self.num_src, self.num_dst, formats=self.formats, **made)

    def tensors(self) -> list[torch.Tensor]:
        formats = self._held.coo, self._held.csr, self._held.csc
        return [t for matrix in formats if matrix is not None for t in matrix if t is not None]

    # -- queries --------------------------------------------------------------------------

    def find(self, eids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        row, col = self.coo()
        eids = eids.long()
        return row[eids], col[eids]

    def in_edges(self, nodes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sources, destinations and ids of the in-edges of ``nodes``, node after node."""
        return _edges_of(self.csc(), nodes)

    def out_edges(self, nodes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sources, destinations and ids of the out-edges of ``nodes``, node after node."""
        destinations, nodes, eids = _edges_of(self.csr(), nodes)
        return nodes, destinations, eids

    def in_degrees(self, nodes: torch.Tensor | None = None) -> torch.Tensor:
        """In-degrees of ``nodes`` or of all, of the ids' dtype."""
        return self._degrees("csc", nodes)

    def out_degrees(self, nodes: torch.Tensor | None = None) -> torch.Tensor:
        """Out-degrees of ``nodes`` or of all, of the ids' dtype."""
        return self._degrees("csr", nodes)

    def _degrees(self, name: str, nodes: torch.Tensor | None) -> torch.Tensor:
        if name not in self.formats and self.held(name) is None:
            if "coo" not in self.formats:
                raise InvalidInputError(
                    f"count {'in' if name == 'csc' else 'out'}-degrees",
                    f"the graph keeps {', '.join(self.formats)} alone",
                    f"let it keep coo or {name} too, with g.formats()",
                )
            ends = self._expanded()
            of, count = (ends.col, self.num_dst) if name == "csc" else (ends.row, self.num_src)
            degrees = torch.bincount(of, minlength=count).to(self.idtype)
            return degrees if nodes is None else degrees[nodes.long()]
        other: Any = self.held("csr" if name == "csc" else "csc")
        if (
            nodes is None
            and self.held(name) is None
            and other is not None
            and self.device.type == "cuda"
        ):
            # In a tenth of the kernels that would make the other format.
            ends, count = other.indices, self.num_dst if name == "csc" else self.num_src
            return ends.new_zeros(count).index_add_(0, ends, torch.ones_like(ends))
        return self._compressed(name).degrees(nodes)

    def of_degrees(self, side: str, name: Hashable, make: Callable[[torch.Tensor], T]) -> T:
        """What is made of the "in"- or "out"-degrees of all nodes, kept by a name.

        Layers ask for it at every call, and a graph does not change.
        """
        is_csc = (side == "in") != self._reversed
        kept, key = self._held.degrees, ("csc" if is_csc else "csr", name)
        if key not in kept:
            with torch.inference_mode(False), torch.no_grad():
                found = make(self.in_degrees() if side == "in" else self.out_degrees())
            if is_capturing(self.device) or torch._C._len_torch_dispatch_stack():
                return found  # has its values at a replay, or is no tensor with values
            kept[key] = found
        return kept[key]

    def pairs(self) -> Compressed:
        """The CSR whose entries are also in the order of (destination, edge id) in each row."""
        kept = self._held.pairs
        side = int(self._reversed)
        pairs = kept[side]
        if pairs is None:
            row, col = self._expanded()
            by_col = compress(col, row, self.num_dst)
            by_row = compress(by_col.indices, by_col.owners(), self.num_src, may_be_sorted=False)
            eids = by_col.edge_ids()[by_row.edge_ids().long()]
            pairs = Compressed(by_row.indptr, by_row.indices, eids)
            kept[side] = pairs
        return pairs

    def typed_sources(self, etype: torch.Tensor) -> TypedSources | None:
        """Pairs of a source and a type, for edges with the types `etype`, shape (num_edges,).

        None if a type is negative.  Kept for the last types; the host waits when they are others.
        """
        side = int(self._reversed)
        kept = self._held.typed[side]
        if etype.is_inference():  # which do not say when they are written to
            return self._typed_sources(etype)
        state = etype.data_ptr(), etype.stride(), etype.dtype, etype._version
        if kept is None or kept[1] != state:
            with torch.inference_mode(False):  # as coo
                # With the types: no other tensor comes to lie where they are.
                kept = etype, state, self._typed_sources(etype)
            self._held.typed[side] = kept
        return kept[2]

    def _typed_sources(self, etype: torch.Tensor) -> TypedSources | None:
        indptr, indices, eids = self.csc()
        types = (etype if eids is None else etype[eids.long()]).long()
        keys, pair = (types * self.num_src + indices).unique(return_inverse=True)
        types = keys.div(max(1, self.num_src), rounding_mode="floor")
        counts = torch.stack(types.unique_consecutive(return_counts=True)).tolist()
        if counts[0] and counts[0][0] < 0:
            return None
        sources = (keys - types * self.num_src).to(self.idtype)
        starts = torch.arange(len(keys) + 1, dtype=self.idtype, device=self.device)
        return TypedSources(
            dict(zip(*counts, strict=True)),
            Relation(self.num_src, len(keys), csc=Compressed(starts, sources, None)),
            Relation(len(keys), self.num_dst, csc=Compressed(indptr, pair.to(self.idtype), eids)),
            len(keys) < len(indices),
        )

    def edges_between(
        self, src: torch.Tensor, dst: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The edges of pairs of nodes: a range of `pairs` for each, and the edge ids of all
        `pairs`.

        Starts and lengths of the ranges are int64.
        """
        indptr, indices, eids = self.pairs()
        src = src.long()
        low, high = indptr[src].long(), indptr[src + 1].long()
        start = _bound(indices, low, high, dst, left=True)
        counts = _bound(indices, start, high, dst, left=False) - start
        return start, counts, eids  # type: ignore[return-value]


def _edges_of(
    compressed: Compressed, nodes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    positions, counts = compressed.entries(nodes)
    owners = nodes.to(compressed.indices.dtype).repeat_interleave(
        counts, output_size=positions.numel()
    )
    return compressed.indices[positions], owners, compressed.ids_at(positions)


def compress(
    major: torch.Tensor, minor: torch.Tensor, num_major: int, may_be_sorted: bool = True
) -> Compressed:
    """Group edges by their end ``major``; edges of one node stay in the order of their ids.

    With ``may_be_sorted``, looks whether ``major`` is sorted, which saves the sorting and the edge
    ids but waits for the device.
    """
    dtype, device = major.dtype, major.device
    if may_be_sorted and bool((major[1:] >= major[:-1]).all()):
        ordered, eids = major, None
    elif device.type == "cpu":
        return Compressed(*group_on_cpu(major, minor, num_major))
    else:
        # Half the bytes are half the passes of a radix sort.
        keys = major.int() if num_major < 2**31 else major
        ordered, order = torch.sort(keys, stable=True)
        minor = minor[order]
        eids = order.to(dtype)
    nodes = torch.arange(num_major + 1, dtype=ordered.dtype, device=device)
    indptr = torch.searchsorted(ordered, nodes, out_int32=dtype == torch.int32)
    return Compressed(indptr, minor.contiguous(), eids)


def _bound(
    indices: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    values: torch.Tensor,
    *,
    left: bool,
) -> torch.Tensor:
    """In each sorted ``indices[low:high]``, the first place not below (or above) its value."""
    if indices.numel() == 0:
        return low
    low, high = low.clone(), high.clone()
    last = indices.numel() - 1
    for _ in range(indices.numel().bit_length()):
        middle = (low + high) // 2
        entry = indices[middle.clamp(max=last)]
        is_below = (entry < values) if left else (entry <= values)
        is_below &= low < high
        low = torch.where(is_below, middle + 1, low)
        high = torch.where(is_below, high, middle)
    return low
