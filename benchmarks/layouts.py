"""Where other systems leave graph and features, as placements of our own store.

Systems differ in more than that: what is compared is the layout, by one sampler, one gather and
one model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.generated_graph import Data

#: Less than all that there is room for is asked for: rows are whole, and parts of them equal.
_OF_ROOM = 0.99


@dataclass(frozen=True)
class Layout:
    """A placement of graph and features.

    Attributes
    ----------
    policy : str
        As :data:`dgl_mgpu.placement.POLICIES`.
    graph, features : float or str
        Share of it that GPUs have: all, nothing, 'auto' for what the solver finds best, or 'first'
        for as much as there is room for on each GPU, the other then getting what is left.
    """

    policy: str
    graph: float | Literal["auto", "first"] = "auto"
    features: float | Literal["auto", "first"] = "auto"

    def options(self, data: Data, gpu_memory: int) -> dict[str, Any]:
        """Those of a store with so much of each GPU's memory."""
        room = max(0, gpu_memory - 4 * data.spec.num_nodes)  # beside the order of rows
        graph, features = self.graph, self.features
        return {
            "policy": self.policy,
            "graph_ratio": _graph_in(room, data) if graph == "first" else graph,
            "feature_ratio": _features_in(room, data) if features == "first" else features,
            "gpu_memory": gpu_memory,
            # What the machine says of its memory may be less than it gives.
            "host_memory": 2 * data.nbytes,
        }


#: By system; those with an F or a G are of XGNN's figure 15a, where one GPU has no room for all.
LAYOUTS = {
    "auto": Layout("auto"),
    "XGNN": Layout("xgnn"),
    "DGL": Layout("replicated", graph=1.0, features=0.0),
    "DGL+C": Layout("replicated", graph=1.0),
    "DGL-Host": Layout("host"),
    "PyTorch-Direct": Layout("host"),
    "Quiver": Layout("clique", graph=0.0),
    "CliqueOpt": Layout("clique_opt", graph=1.0),
    "WholeGraph": Layout("partitioned"),
    "XGNN-G": Layout("replicated", graph="first"),
    "XGNN-F": Layout("replicated", features="first"),
}


def _graph_in(room: int, data: Data) -> float:
    """Share of the graph's rows, those first that are read most, that takes so many bytes."""
    degrees = data.indptr.diff()[data.reads.argsort(descending=True)]
    before = (16 + data.idtype.itemsize * degrees).cumsum(0)
    if int(before[-1]) <= room:
        return 1.0
    return _OF_ROOM * int(torch.searchsorted(before, room)) / len(degrees)


def _features_in(room: int, data: Data) -> float:
    total = data.spec.num_nodes * data.node_bytes
    return 1.0 if total <= room else _OF_ROOM * room / total
