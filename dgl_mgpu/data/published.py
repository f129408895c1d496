"""Published sizes of real data sets, for plans and generated graphs of their shapes.

Edges are as the loaders give them by default: each direction of an undirected graph counted.

* OGB: Hu et al., «Open Graph Benchmark: Datasets for Machine Learning on Graphs», NeurIPS 2020,
  table 2, and the data sets' pages on ogb.stanford.edu.
* Planetoid: the table of data sets in the documentation of PyTorch Geometric's ``Planetoid``, whose
  edges are those of Yang, Cohen and Salakhutdinov (2016), each direction once.
* facebook: Rozemberczki, Allen and Sarkar, «Multi-scale attributed node embedding», 2021.
* reddit: Hamilton, Ying and Leskovec, «Inductive Representation Learning on Large Graphs», 2017;
  its edges as in the documentation of DGL's ``RedditDataset``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dgl_mgpu.data.hetero import CanonicalEtype

OGB = "Hu et al., Open Graph Benchmark, 2020"
PLANETOID = "PyTorch Geometric's table of Planetoid's data sets"


class Sizes(NamedTuple):
    """A data set of one type of nodes and edges."""

    nodes: int
    edges: int
    width: int  # float32 features of a node; 0: none
    classes: int  # or labels of which a node may have several
    source: str  # who published them
    edge_width: int = 0  # float32 features of an edge
    int_features: tuple[str, ...] = ()  # further features of nodes, an int64 each
    multi_label: bool = False  # whether a node may have several labels
    directed: bool = False  # whether edges have no reverse, so that the loader may add them


class HeteroSizes(NamedTuple):
    """A data set of several types of nodes and edges."""

    nodes: Mapping[str, int]
    edges: Mapping[CanonicalEtype, int]  # without reverse ones
    widths: Mapping[str, int]  # float32 features of node types
    target: str  # the type that is classified
    classes: int
    source: str  # who published them
    int_features: Mapping[str, tuple[str, ...]]  # further features of nodes, an int64 each


#: By name, of one type of nodes and edges.
PUBLISHED: dict[str, Sizes] = {
    "cora": Sizes(2_708, 10_556, 1_433, 7, PLANETOID),
    "citeseer": Sizes(3_327, 9_104, 3_703, 6, PLANETOID),
    "pubmed": Sizes(19_717, 88_648, 500, 3, PLANETOID),
    # 171,002 links, of which 179 are self-loops; words are projected to 128 numbers.
    "facebook": Sizes(22_470, 2 * (171_002 - 179), 128, 4, "Rozemberczki et al., 2021"),
    "reddit": Sizes(232_965, 114_615_892, 602, 41, "DGL's RedditDataset"),
    "ogbn-arxiv": Sizes(169_343, 1_166_243, 128, 40, OGB, int_features=("year",), directed=True),
    "ogbn-products": Sizes(2_449_029, 2 * 61_859_140, 100, 47, OGB),
    "ogbn-papers100M": Sizes(
        111_059_956, 1_615_685_872, 128, 172, OGB, int_features=("year",), directed=True
    ),
    "ogbn-proteins": Sizes(
        132_534,
        2 * 39_561_252,
        0,
        112,
        OGB,
        edge_width=8,
        int_features=("species",),
        multi_label=True,
    ),
}

#: By name, of several types.
PUBLISHED_HETERO: dict[str, HeteroSizes] = {
    "ogbn-mag": HeteroSizes(
        nodes={
            "author": 1_134_649,
            "field_of_study": 59_965,
            "institution": 8_740,
            "paper": 736_389,
        },
        edges={
            ("author", "affiliated_with", "institution"): 1_043_998,
            ("author", "writes", "paper"): 7_145_660,
            ("paper", "cites", "paper"): 5_416_271,
            ("paper", "has_topic", "field_of_study"): 7_505_078,
        },
        widths={"paper": 128},
        target="paper",
        classes=349,
        source=OGB,
        int_features={"paper": ("year",)},
    )
}
