"""What ``gcn_gpu`` trains: MG-GCN's models on graphs of its data sets' sizes, and what it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from benchmarks.fullgraph import SHAPES, Shape
from benchmarks.gcn_training import KEPT, ONE_D, PEER, TOLERANCES

#: All of them: products in every precision.
_CONTENDERS = (
    PEER,
    "GraphConv tf32",
    *(f"GCN {precision}{kept}" for precision in TOLERANCES for kept in ("", KEPT)),
)
#: Those that a figure of MG-GCN's needs, which computes in float32.
_FP32 = (PEER, "GCN fp32", f"GCN fp32{KEPT}")


@dataclass(frozen=True)
class Case:
    """What is trained on a graph of some shape.

    Attributes
    ----------
    shape : Shape
    hidden, layers : int
    contenders : tuple of str
        As `Setting.training` knows them; what others are compared with is the first.
    aim_ms : float or None
        For an epoch on 8 GPUs, rows being kept in float32.
    mg_gcn_ms : dict
        What MG-GCN's own code took on H200s, by number of GPUs: products in float32, and in tf32.
    mg_gcn_a100_ms : dict
        What MG-GCN states for a DGX-A100, by number of GPUs (sections 6.6 and 6.7).
    exchange : str
        Of partition_graph.
    fills_memory : bool
        Whether one model at a time fits in GPUs, and GraphConv does not.
    """

    shape: Shape
    hidden: int = 512
    layers: int = 2
    contenders: tuple[str, ...] = _FP32
    aim_ms: float | None = None
    mg_gcn_ms: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    mg_gcn_a100_ms: Mapping[int, float] = field(default_factory=dict)
    exchange: str = "halo"
    fills_memory: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the input and of each layer's output."""
        return (self.shape.features, *[self.hidden] * (self.layers - 1), self.shape.classes)

    def scaled(self, by: float) -> Case:
        """On a graph of so many times the nodes and edges."""
        return replace(self, shape=self.shape.scaled(by))


def _denser_arxivs() -> dict[str, Case]:
    """Arxiv's nodes with more edges (section 6.1: 512 features; figure 9)."""
    arxiv = replace(SHAPES["arxiv"], features=512)
    return {
        f"arxiv x{times}": Case(replace(arxiv, edges=times * arxiv.edges))
        for times in (1, 2, 4, 8, 16, 32, 64, 128)
    }


CASES = {
    "products": Case(
        SHAPES["products"],
        contenders=(*_CONTENDERS, ONE_D),
        aim_ms=9.0,
        mg_gcn_ms={1: (80.2, 67.3), 4: (23.4, 19.5), 8: (14.9, 13.0)},
    ),
    "reddit": Case(
        SHAPES["reddit"],
        contenders=(*_CONTENDERS, ONE_D),
        aim_ms=6.3,
        mg_gcn_ms={1: (65.8, 60.6), 4: (13.8, 12.4), 8: (9.5, 9.4)},
    ),
    # A halo has most nodes of all ranks: only a broadcast never has more than two ranks' rows.
    "papers100M": Case(
        SHAPES["papers100M"],
        hidden=208,
        layers=3,
        contenders=_CONTENDERS,
        aim_ms=1000.0,
        mg_gcn_a100_ms={8: 2890.0},
        exchange="broadcast",
        fills_memory=True,
    ),
    "arxiv": Case(SHAPES["arxiv"], contenders=(*_FP32, ONE_D)),
    "cora": Case(SHAPES["cora"]),
    # DistGNN's models (table 3).
    "products, 3 of 256": Case(
        SHAPES["products"],
        hidden=256,
        layers=3,
        mg_gcn_a100_ms={1: 355.0, 2: 202.0, 4: 110.0, 8: 67.0},
    ),
    "reddit, 2 of 16": Case(
        SHAPES["reddit"], hidden=16, mg_gcn_a100_ms={1: 33.0, 2: 17.0, 4: 12.0, 8: 12.0}
    ),
    "large proteins, 3 of 256": Case(
        SHAPES["large proteins"],
        hidden=256,
        layers=3,
        contenders=(PEER, "GCN fp32"),
        mg_gcn_a100_ms={1: 4221.0, 2: 2272.0, 4: 1191.0, 8: 641.0},
        fills_memory=True,
    ),
    **_denser_arxivs(),
}
