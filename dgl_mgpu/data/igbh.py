"""Generated graphs of IGBH's schema and size, made in the memory of a device.

IGBH (Khatua et al., «IGB: Addressing the gaps in labeling, features, heterogeneity, and size of
public graph datasets for deep learning research», KDD 2023) has papers, authors, institutes and
fields of study.  MLPerf Training's GNN benchmark trains on it with reverse relations; citations are
one relation both ways, to which each paper's self-loop is added before it is doubled, too.

The edges are random:

* The numbers of citations, authors and fields of a paper, and of institutes of an author, have
  Pareto distributions.
* A node is drawn with probability proportional to ``rank ** (-1 / exponent)``, so that in-degrees
  have a power law, too.  Ids are ranks in a random-like order.
* A node's class is its rank modulo the number of classes.  With probability ``homophily`` a node
  draws one of its own class.
* Features are the class's centroid, of length ``signal * sqrt(2 ln classes)``, plus noise of unit
  variance per dimension.

The numbers of nodes and edges are interpolated between those of IGBH's five sizes.  The same seed
gives the same graph on the same kind of device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from dgl_mgpu.data import blockmodel
from dgl_mgpu.data.checks import require_options, require_ranges
from dgl_mgpu.data.csc import CSC
from dgl_mgpu.data.hetero import CanonicalEtype, HeteroDataset
from dgl_mgpu.errors import ConfigError

NAME = "generated-igbh"
#: Shares of papers for training, validation and test, as in IGBH.
_SPLIT = (0.6, 0.2, 0.2)

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


class _Relation(NamedTuple):
    """A relation whose sources draw their destinations."""

    src: str
    dst: str
    spread: float  # exponent of the number that a node draws
    fame: float  # exponent of the number of times that a node is drawn
    has_classes: bool


#: Relations, without reverse ones.
RELATIONS = {
    "cites": _Relation("paper", "paper", 2.0, 2.0, True),
    "written_by": _Relation("paper", "author", 2.5, 2.0, True),
    "topic": _Relation("paper", "fos", 3.0, 1.3, True),
    "affiliated_to": _Relation("author", "institute", 3.0, 1.5, False),
}

#: All relations, reverse ones too.
CANONICAL_ETYPES: tuple[CanonicalEtype, ...] = tuple(
    etype
    for name, relation in RELATIONS.items()
    for etype in (
        (relation.src, name, relation.dst),
        *([] if relation.src == relation.dst else [(relation.dst, f"rev_{name}", relation.src)]),
    )
)

#: Edges that are drawn, and elements of features, at a time.
_CHUNK = 1 << 26
_FEATURE_TYPES = (torch.float16, torch.float8_e4m3fn, torch.bfloat16, torch.float32)
#: Bytes of a node beside its features: bounds of rows, labels and the like.
_NODE_BYTES = 64


@dataclass(frozen=True)
class IgbhSpec:
    """Parameters of a graph; ConfigError if one is out of its range."""

    scale: float = 1.0  # papers, of the 269,346,174 of IGBH's full size
    num_classes: int = 2983  # as in MLPerf's benchmark
    num_features: int = 1024
    homophily: float = 0.7
    signal: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "scale": (1e-7, 4.0), "num_classes": (2, 2**31), "num_features": (1, 2**20),
            "homophily": (0.0, 1.0), "signal": (0.0, 1000.0), "seed": (0, 2**63 - 1),
        }  # fmt: skip
        require_ranges(self, "a graph like IGBH", ranges)

    @property
    def num_nodes(self) -> dict[str, int]:
        """Nodes of each type."""
        return {ntype: self._interpolated(counts) for ntype, counts in _NODES.items()}

    @property
    def num_edges(self) -> dict[CanonicalEtype, int]:
        """Edges of each relation; generated graphs have as many within a few per cent."""
        counts: dict[CanonicalEtype, int] = {}
        for src, name, dst in CANONICAL_ETYPES:
            count = self._interpolated(_EDGES[name.removeprefix("rev_")])
            counts[src, name, dst] = 2 * (count + self.num_nodes[src]) if src == dst else count
        return counts

    @property
    def max_ids(self) -> int:
        """An upper bound of the edges of a relation, and of the nodes of a type."""
        return round(1.05 * max(*self.num_edges.values(), *self.num_nodes.values()))

    def num_bytes(self, dtype: torch.dtype = torch.float16) -> int:
        """Memory of the graph with 32-bit ids and features of a dtype."""
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
    """The scale of the largest graph, up to IGBH's own size, that fits so much memory."""
    low, high = 1e-7, 1.0
    for _ in range(50):
        middle = math.sqrt(low * high)
        spec = IgbhSpec(middle, num_features=num_features)
        low, high = (middle, high) if spec.num_bytes(dtype) <= num_bytes else (low, middle)
    return low


class TensorCSC(NamedTuple):
    """A relation's edges by destination: edge ``i`` of the graph is entry ``i``."""

    indptr: torch.Tensor
    indices: torch.Tensor


@dataclass(frozen=True)
class Igbh:
    """A generated graph, on one device."""

    num_nodes: dict[str, int]
    edges: dict[CanonicalEtype, TensorCSC]  # int32 or int64
    features: torch.Tensor  # (nodes of all types in the order of NODE_TYPES, num_features)
    labels: torch.Tensor  # int64 (papers,)

    def features_of(self, ntype: str) -> torch.Tensor:
        """Features of one node type, without a copy."""
        counts = [self.num_nodes[name] for name in NODE_TYPES]
        return self.features.split(counts)[NODE_TYPES.index(ntype)]


def generate_igbh(
    spec: IgbhSpec,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float16,
    idtype: torch.dtype = torch.int32,
) -> Igbh:
    """Make a graph in a device's memory, with features of one of four dtypes.

    Before features are made, it takes about 40 bytes per citation besides its result.

    Raises
    ------
    ConfigError
        Ids do not fit `idtype`, or a dtype is another one.
    """
    if dtype not in _FEATURE_TYPES or idtype not in (torch.int32, torch.int64):
        raise ConfigError(
            asked=f"generate a graph like IGBH with features of {dtype} and ids of {idtype}",
            found="IGBH does not come in this type",
            fix=f"choose one of {', '.join(map(str, _FEATURE_TYPES))}, and int32 or int64",
        )
    if spec.max_ids > torch.iinfo(idtype).max:
        raise ConfigError(
            asked=f"generate a graph like IGBH at scale {spec.scale:g} with ids of {idtype}",
            found=f"a relation may have {spec.max_ids:.3g} edges, more than these ids can count",
            fix="choose int64, or a smaller scale",
        )
    device = torch.device(device)
    nodes = {
        ntype: _Nodes(count, place, spec, device)
        for place, (ntype, count) in enumerate(spec.num_nodes.items())
    }
    edges: dict[CanonicalEtype, TensorCSC] = {}
    for place, (name, relation) in enumerate(RELATIONS.items()):
        src, dst = nodes[relation.src], nodes[relation.dst]
        drawn = _draw(spec, relation, name, place, src, dst, idtype)
        if relation.src == relation.dst:
            edges[relation.src, name, relation.dst] = _both_ways(drawn)
        else:
            forward = _group(drawn.indices, _owners(drawn), dst.count)
            edges[relation.src, name, relation.dst] = forward
            edges[relation.dst, f"rev_{name}", relation.src] = drawn
    edges = {etype: edges[etype] for etype in CANONICAL_ETYPES}
    features = _features(spec, nodes, device, dtype)
    labels = nodes["paper"].classes(torch.arange(nodes["paper"].count, device=device))
    return Igbh(spec.num_nodes, edges, features, labels)


def named_spec(**parameters: float) -> IgbhSpec:
    """Return what `load` generates for its options, fields of `IgbhSpec`.

    By default it has a ten-thousandth of IGBH's papers, and the smaller of its two sets of classes.
    """
    require_options(NAME, parameters, [field.name for field in fields(IgbhSpec)])
    return IgbhSpec(**{"scale": 1e-4, "num_classes": 19, **parameters})  # type: ignore[arg-type]


def load(name: str, root: Path, **parameters: float) -> HeteroDataset:
    """Generate the graph of `named_spec` in the host's memory, with float16 features.

    `root` is not used.
    """
    spec = named_spec(**parameters)
    is_narrow = spec.max_ids <= torch.iinfo(torch.int32).max
    graph = generate_igbh(spec, idtype=torch.int32 if is_narrow else torch.int64)
    train, valid, test = blockmodel.split(spec.num_nodes["paper"], _SPLIT, spec.seed)
    return HeteroDataset(
        name=NAME,
        num_nodes=graph.num_nodes,
        edges={
            etype: CSC(indptr.long().numpy(), indices.numpy(), None)
            for etype, (indptr, indices) in graph.edges.items()
        },
        target="paper",
        num_classes=spec.num_classes,
        labels=graph.labels.numpy(),
        train=train,
        valid=valid,
        test=test,
        node_features={ntype: {"feat": graph.features_of(ntype)} for ntype in NODE_TYPES},
        description=f"generated, not real data, after IGBH's schema and size: {spec}",
        checked=True,
    )


class _Nodes:
    """Nodes of one type: their ranks, by falling degree, and ids."""

    def __init__(self, count: int, purpose: int, spec: IgbhSpec, device: torch.device) -> None:
        self.count, self.device, self._classes = count, device, spec.num_classes
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


def _generator(spec: IgbhSpec, purpose: int, device: torch.device) -> torch.Generator:
    key = int(blockmodel.stream(spec.seed, purpose)) >> 1
    return torch.Generator(device).manual_seed(key)


def _draw(
    spec: IgbhSpec, relation: _Relation, name: str, place: int, src: _Nodes, dst: _Nodes,
    idtype: torch.dtype,
) -> TensorCSC:  # fmt: skip
    """The reverse relation: by source, the destinations that it draws."""
    device = src.device
    draw = _generator(spec, 100 + place, device)

    def uniform(count: int) -> torch.Tensor:
        return torch.rand(count, generator=draw, device=device, dtype=torch.float64)

    # The smallest number gives the mean; numbers are rounded at random.
    mean = spec._interpolated(_EDGES[name]) / src.count
    least = mean * (relation.spread - 1) / relation.spread
    wanted = least * (1 - uniform(src.count)) ** (-1 / relation.spread) + uniform(src.count)
    indptr = torch.zeros(src.count + 1, dtype=torch.int64, device=device)
    torch.cumsum(wanted.long().clamp_(max=dst.count), 0, out=indptr[1:])
    del wanted
    indices = torch.empty(int(indptr[-1]), dtype=idtype, device=device)
    bend = relation.fame / (relation.fame - 1)
    for start in range(0, len(indices), _CHUNK):
        part = indices[start : start + _CHUNK]
        ranks = (dst.count * uniform(len(part)) ** bend).long().clamp_(max=dst.count - 1)
        if relation.has_classes:
            owner = torch.arange(start, start + len(part), device=device)
            owner = torch.searchsorted(indptr, owner, right=True) - 1
            alike = ranks - ranks % spec.num_classes + src.classes(owner)
            alike = torch.where(alike < dst.count, alike, alike - spec.num_classes)
            same = (uniform(len(part)) < spec.homophily) & (alike >= 0)
            ranks = torch.where(same, alike, ranks)
        part.copy_(dst.ids(ranks))
    return TensorCSC(indptr.to(idtype), indices)


def _owners(csc: TensorCSC) -> torch.Tensor:
    """The row of each entry."""
    rows = torch.arange(len(csc.indptr) - 1, dtype=csc.indices.dtype, device=csc.indices.device)
    return rows.repeat_interleave(csc.indptr.diff(), output_size=len(csc.indices))


def _both_ways(drawn: TensorCSC) -> TensorCSC:
    """Edges both ways, and each node's to itself twice."""
    num_rows = len(drawn.indptr) - 1
    own = torch.arange(num_rows, dtype=drawn.indices.dtype, device=drawn.indices.device)
    citing = _owners(drawn)
    dst = torch.cat([citing, drawn.indices, own, own])
    src = torch.cat([drawn.indices, citing, own, own])
    return _group(dst, src, num_rows)


def _group(dst: torch.Tensor, src: torch.Tensor, num_rows: int) -> TensorCSC:
    ordered, order = torch.sort(dst, stable=True)
    indices = src[order]
    del order
    rows = torch.arange(num_rows + 1, dtype=dst.dtype, device=dst.device)
    return TensorCSC(torch.searchsorted(ordered, rows, out_int32=dst.dtype == torch.int32), indices)


def _features(
    spec: IgbhSpec, nodes: dict[str, _Nodes], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    shape = (spec.num_classes, spec.num_features)
    draw = _generator(spec, blockmodel.CENTROID, device)
    centroids = torch.randn(shape, generator=draw, device=device)
    length = spec.signal * math.sqrt(2 * math.log(spec.num_classes))
    centroids *= length / torch.linalg.vector_norm(centroids, dim=1, keepdim=True)
    counts = [ntype_nodes.count for ntype_nodes in nodes.values()]
    features = torch.empty(sum(counts), spec.num_features, dtype=dtype, device=device)
    draw = _generator(spec, blockmodel.NOISE, device)
    step = max(1, _CHUNK // spec.num_features)
    for ntype_nodes, rows in zip(nodes.values(), features.split(counts), strict=True):
        for first in range(0, ntype_nodes.count, step):
            ids = torch.arange(first, min(first + step, ntype_nodes.count), device=device)
            chunk = torch.randn(len(ids), spec.num_features, generator=draw, device=device)
            rows[first : first + step].copy_(chunk.add_(centroids[ntype_nodes.classes(ids)]))
    return features
