"""Generated graphs of IGBH's schema and size, made where they are used: in a GPU's memory, say.

IGBH (Khatua et al., «IGB: Addressing the gaps in labeling, features, heterogeneity, and size of
public graph datasets for deep learning research», KDD 2023) has papers, authors, institutes and
fields of study.  MLPerf Training's GNN benchmark trains on it with reverse relations; citations are
one relation both ways, to which each paper's self loop is added before it is doubled, too.

Here who is linked with whom is random:

* A paper draws as many citations, authors and fields, and an author as many institutes, as a Pareto
  distribution says.
* Whom it draws is a matter of rank, with probability proportional to ``rank ** (-1 / exponent)``,
  so that in-degrees have a power law, too.  Ids are ranks in random-like order.
* A node's class is its rank modulo the number of classes.  With probability ``homophily`` a node
  draws one of its own class.
* Features are the class's centroid, of length ``signal * sqrt(2 ln classes)``, plus noise of unit
  variance per dimension.

The numbers of nodes and edges follow those of IGBH's five sizes, between which they are
interpolated.  The same seed gives the same graph on the same kind of device.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dgl_mgpu.data import blockmodel
from dgl_mgpu.data.hetero import CanonicalEtype
from dgl_mgpu.errors import ConfigError

NODE_TYPES = ("paper", "author", "institute", "fos")
#: IGBH's tiny, small, medium, large and full: nodes by type, and edges without reverse ones.
_NODES = {
    "paper": (100_000, 1_000_000, 10_000_000, 100_000_000, 269_346_174),
    "author": (357_041, 1_926_066, 15_544_654, 116_959_896, 277_220_883),
    "institute": (8_738, 14_751, 23_256, 26_524, 26_918),
    "fos": (84_220, 190_449, 415_054, 649_707, 712_960),
}
_EDGES = {
    # Without self loops, one a paper.
    "cites": (347_416, 11_070_502, 110_077_694, 1_123_571_364, 3_727_095_830),
    "written_by": (471_443, 4_553_516, 39_854_592, 289_502_107, 716_761_549),
    "topic": (718_445, 7_234_122, 68_510_495, 457_577_294, 1_050_280_600),
    "affiliated_to": (325_410, 1_630_476, 11_049_412, 34_099_660, 48_521_486),
}


class _Kind(NamedTuple):
    """Who draws whom in a relation, and how unevenly.

    ``spread`` is the exponent of how many a node draws, ``fame`` that of how often one is drawn.
    """

    src: str
    dst: str
    spread: float
    fame: float
    has_classes: bool


#: Relations, without reverse ones.
KINDS = {
    "cites": _Kind("paper", "paper", 2.0, 2.0, True),
    "written_by": _Kind("paper", "author", 2.5, 2.0, True),
    "topic": _Kind("paper", "fos", 3.0, 1.3, True),
    "affiliated_to": _Kind("author", "institute", 3.0, 1.5, False),
}

#: All relations, reverse ones too.
CANONICAL_ETYPES: tuple[CanonicalEtype, ...] = tuple(
    each
    for name, kind in KINDS.items()
    for each in (
        (kind.src, name, kind.dst),
        *([] if kind.src == kind.dst else [(kind.dst, f"rev_{name}", kind.src)]),
    )
)

#: Edges that are drawn, and elements of features, at a time.
_CHUNK = 1 << 26
_FEATURE_TYPES = (torch.float16, torch.float8_e4m3fn, torch.bfloat16, torch.float32)
#: Bytes that are kept of a node beside features: bounds of rows, labels and the like.
_NODE_BYTES = 64


@dataclass(frozen=True)
class IgbhSpec:
    """What a graph is made of.

    Attributes
    ----------
    scale : float
        Papers, of the 269,346,174 of IGBH's full size.
    num_classes, num_features : int
        2,983 and 1,024 in MLPerf's benchmark.
    homophily, signal : float
        See this module.
    seed : int

    Raises
    ------
    ConfigError
        If a value is out of its range.
    """

    scale: float = 1.0
    num_classes: int = 2983
    num_features: int = 1024
    homophily: float = 0.7
    signal: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        within = {
            "scale": (1e-7, 4.0),
            "num_classes": (2, 2**31),
            "num_features": (1, 2**20),
            "homophily": (0.0, 1.0),
            "signal": (0.0, 1000.0),
            "seed": (0, 2**63 - 1),
        }
        for name, (low, high) in within.items():
            value = getattr(self, name)
            kind = numbers.Integral if isinstance(low, int) else numbers.Real
            if not isinstance(value, kind) or not low <= float(value) <= high:
                whole = " whole" * isinstance(low, int)
                raise ConfigError(
                    asked=f"generate a graph like IGBH with {name}={value!r}",
                    found=f"{name} takes a{whole} number from {low:g} to {high:g}",
                    fix=f"choose one for {name} (data.options.{name} on a command line)",
                )

    @property
    def num_nodes(self) -> dict[str, int]:
        """Nodes of each type."""
        return {ntype: self._interpolated(counts) for ntype, counts in _NODES.items()}

    @property
    def num_edges(self) -> dict[CanonicalEtype, int]:
        """Edges of each relation; what is generated has as many within a few per cent."""
        found: dict[CanonicalEtype, int] = {}
        for src, name, dst in CANONICAL_ETYPES:
            count = self._interpolated(_EDGES[name.removeprefix("rev_")])
            loops = self.num_nodes[src] if src == dst else 0
            found[src, name, dst] = 2 * (count + loops) if src == dst else count
        return found

    @property
    def most_ids(self) -> int:
        """As many as there may be of the edges of a relation, or of nodes of a type."""
        # With room for edges that are drawn beyond the number aimed at.
        return round(1.05 * max(*self.num_edges.values(), *self.num_nodes.values()))

    def num_bytes(self, dtype: torch.dtype = torch.float16) -> int:
        """Memory that the graph takes with 32-bit ids, features of ``dtype`` and all."""
        row = self.num_features * dtype.itemsize + _NODE_BYTES
        return sum(self.num_nodes.values()) * row + 4 * sum(self.num_edges.values())

    def _interpolated(self, counts: tuple[int, ...]) -> int:
        """A count at this scale, on logarithmic axes; in proportion to papers outside of them."""
        papers = self.scale * _NODES["paper"][-1]
        nearest = min(max(papers, _NODES["paper"][0]), _NODES["paper"][-1])
        inside = np.exp(np.interp(math.log(nearest), np.log(_NODES["paper"]), np.log(counts)))
        return max(1, round(float(inside) * papers / nearest))


def largest_scale(
    num_bytes: int, dtype: torch.dtype = torch.float16, num_features: int = 1024
) -> float:
    """The scale of the largest graph, up to IGBH's own size, that takes so much memory."""
    low, high = 1e-7, 1.0
    for _ in range(50):
        middle = math.sqrt(low * high)
        spec = IgbhSpec(middle, num_features=num_features)
        low, high = (middle, high) if spec.num_bytes(dtype) <= num_bytes else (low, middle)
    return low


class Csc(NamedTuple):
    """A relation's edges by destination: edge ``i`` of the graph is entry ``i``."""

    indptr: torch.Tensor
    indices: torch.Tensor


@dataclass(frozen=True)
class Igbh:
    """A generated graph, on one device.

    Attributes
    ----------
    num_nodes : dict of str to int
    edges : dict of (str, str, str) to Csc
        int32, or int64 as asked for.
    features : Tensor, shape (nodes of all types, num_features)
        Of all types in the order of ``NODE_TYPES``, so that rows of all can be read together.
    labels : Tensor, int64, shape (papers,)
    """

    num_nodes: dict[str, int]
    edges: dict[CanonicalEtype, Csc]
    features: torch.Tensor
    labels: torch.Tensor

    def features_of(self, ntype: str) -> torch.Tensor:
        """Those of one node type, without a copy."""
        counts = [self.num_nodes[each] for each in NODE_TYPES]
        return self.features.split(counts)[NODE_TYPES.index(ntype)]


def generate_igbh(
    spec: IgbhSpec,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float16,
    idtype: torch.dtype = torch.int32,
) -> Igbh:
    """Make a graph in a device's memory.

    Needs beside what it returns, before there are features, about 40 bytes an edge of citations.

    Parameters
    ----------
    spec : IgbhSpec
    device : torch.device
    dtype : torch.dtype
        Of features: float16, float8_e4m3fn, bfloat16 or float32.
    idtype : torch.dtype
        int32 or int64.

    Raises
    ------
    ConfigError
        If ids do not fit ``idtype``, or ``dtype`` is another one.
    """
    if dtype not in _FEATURE_TYPES or idtype not in (torch.int32, torch.int64):
        raise ConfigError(
            asked=f"generate a graph like IGBH with features of {dtype} and ids of {idtype}",
            found="IGBH does not come in this type",
            fix=f"choose one of {', '.join(map(str, _FEATURE_TYPES))}, and int32 or int64",
        )
    if spec.most_ids > torch.iinfo(idtype).max:
        raise ConfigError(
            asked=f"generate a graph like IGBH at scale {spec.scale:g} with ids of {idtype}",
            found=f"a relation may have {spec.most_ids:.3g} edges, more than these ids can count",
            fix="choose int64, or a smaller scale",
        )
    device = torch.device(device)
    nodes = {
        ntype: _Nodes(count, place, spec, device)
        for place, (ntype, count) in enumerate(spec.num_nodes.items())
    }
    edges: dict[CanonicalEtype, Csc] = {}
    for place, (name, kind) in enumerate(KINDS.items()):
        src, dst = nodes[kind.src], nodes[kind.dst]
        drawn = _drawn(spec, kind, name, place, src, dst, idtype)
        if kind.src == kind.dst:
            edges[kind.src, name, kind.dst] = _both_ways(drawn)
            continue
        edges[kind.src, name, kind.dst] = _reversed(drawn, dst.count)
        edges[kind.dst, f"rev_{name}", kind.src] = drawn
    edges = {etype: edges[etype] for etype in CANONICAL_ETYPES}
    return Igbh(
        spec.num_nodes, edges, _features(spec, nodes, device, dtype), nodes["paper"].labels()
    )


class _Nodes:
    """Nodes of one type: their ranks, from the most linked on, and ids."""

    def __init__(self, count: int, purpose: int, spec: IgbhSpec, device: torch.device) -> None:
        self.count, self._classes, self._device = count, spec.num_classes, device
        # Rank r has the id (r * factor + shift) % count: neighbours in rank lie far apart.
        draw = np.random.default_rng([spec.seed, purpose])
        self._factor, self._shift = 1, 0
        if count > 2:
            self._factor = int(draw.integers(1, count))
            while math.gcd(self._factor, count) != 1:
                self._factor = self._factor % (count - 1) + 1
            self._shift = int(draw.integers(count))

    def ids(self, ranks: torch.Tensor) -> torch.Tensor:
        """The ids of nodes of these ranks, int64."""
        return (ranks * self._factor + self._shift) % self.count

    def classes(self, ids: torch.Tensor) -> torch.Tensor:
        """The classes of nodes, int64."""
        back = pow(self._factor, -1, self.count) if self.count > 1 else 1
        return (ids.long() - self._shift) * back % self.count % self._classes

    def labels(self) -> torch.Tensor:
        """The classes of all nodes."""
        return self.classes(torch.arange(self.count, device=self._device))


def _generator(spec: IgbhSpec, purpose: int, device: torch.device) -> torch.Generator:
    key = int(blockmodel.stream(spec.seed, purpose)) >> 1
    return torch.Generator(device).manual_seed(key)


def _drawn(
    spec: IgbhSpec,
    kind: _Kind,
    name: str,
    place: int,
    src: _Nodes,
    dst: _Nodes,
    idtype: torch.dtype,
) -> Csc:
    """Whom every source draws: by source, which is by destination of the reverse relation."""
    device = src._device
    draw = _generator(spec, 100 + place, device)

    def uniform(count: int) -> torch.Tensor:
        return torch.rand(count, generator=draw, device=device, dtype=torch.float64)

    # The smallest number is that for which the mean is right, and rounded at random.
    mean = spec._interpolated(_EDGES[name]) / src.count
    least = mean * (kind.spread - 1) / kind.spread
    wanted = least * (1 - uniform(src.count)) ** (-1 / kind.spread) + uniform(src.count)
    indptr = torch.zeros(src.count + 1, dtype=torch.int64, device=device)
    torch.cumsum(wanted.long().clamp_(max=dst.count), 0, out=indptr[1:])
    del wanted
    indices = torch.empty(int(indptr[-1]), dtype=idtype, device=device)
    bend = kind.fame / (kind.fame - 1)
    for start in range(0, len(indices), _CHUNK):
        part = indices[start : start + _CHUNK]
        ranks = (dst.count * uniform(len(part)) ** bend).long().clamp_(max=dst.count - 1)
        if kind.has_classes:
            owner = torch.arange(start, start + len(part), device=device)
            owner = torch.searchsorted(indptr, owner, right=True) - 1
            alike = ranks - ranks % spec.num_classes + src.classes(owner)
            alike = torch.where(alike < dst.count, alike, alike - spec.num_classes)
            same = (uniform(len(part)) < spec.homophily) & (alike >= 0)
            ranks = torch.where(same, alike, ranks)
        part.copy_(dst.ids(ranks))
    return Csc(indptr.to(idtype), indices)


def _owners(csc: Csc) -> torch.Tensor:
    """The row that each entry is of."""
    rows = torch.arange(len(csc.indptr) - 1, dtype=csc.indices.dtype, device=csc.indices.device)
    return rows.repeat_interleave(csc.indptr.diff(), output_size=len(csc.indices))


def _reversed(csc: Csc, num_rows: int) -> Csc:
    """The same edges by their other end."""
    return _grouped(csc.indices, _owners(csc), num_rows)


def _both_ways(drawn: Csc) -> Csc:
    """Edges both ways, and each node's to itself twice."""
    num_rows = len(drawn.indptr) - 1
    own = torch.arange(num_rows, dtype=drawn.indices.dtype, device=drawn.indices.device)
    citing = _owners(drawn)
    dst = torch.cat([citing, drawn.indices, own, own])
    src = torch.cat([drawn.indices, citing, own, own])
    return _grouped(dst, src, num_rows)


def _grouped(dst: torch.Tensor, src: torch.Tensor, num_rows: int) -> Csc:
    ordered, order = torch.sort(dst, stable=True)
    indices = src[order]
    del order
    rows = torch.arange(num_rows + 1, dtype=dst.dtype, device=dst.device)
    return Csc(torch.searchsorted(ordered, rows, out_int32=dst.dtype == torch.int32), indices)


def _features(
    spec: IgbhSpec, nodes: dict[str, _Nodes], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    shape = (spec.num_classes, spec.num_features)
    draw = _generator(spec, blockmodel.CENTROID, device)
    centroids = torch.randn(shape, generator=draw, device=device)
    length = spec.signal * math.sqrt(2 * math.log(spec.num_classes))
    centroids *= length / torch.linalg.vector_norm(centroids, dim=1, keepdim=True)
    total = sum(each.count for each in nodes.values())
    found = torch.empty(total, spec.num_features, dtype=dtype, device=device)
    draw = _generator(spec, blockmodel.NOISE, device)
    parts = found.split([each.count for each in nodes.values()])
    most = max(1, _CHUNK // spec.num_features)
    for of, rows in zip(nodes.values(), parts, strict=True):
        for first in range(0, of.count, most):
            ids = torch.arange(first, min(first + most, of.count), device=device)
            chunk = torch.randn(len(ids), spec.num_features, generator=draw, device=device)
            rows[first : first + most].copy_(chunk.add_(centroids[of.classes(ids)]))
    return found
