"""DGL's distributed graphs, of which hardly any is GraphBolt's."""

from __future__ import annotations

import sys
from typing import Any


class _GraphboltTypes:
    """`dgl.graphbolt` as seen by `dgl.distributed.dist_graph`.

    Every partition is checked for being a `FusedCSCSamplingGraph`.  As long as GraphBolt has not
    been used none is, and GraphBolt need not be imported to know.
    """

    class _Nothing:
        pass

    @property
    def FusedCSCSamplingGraph(self) -> Any:
        name = "dgl.graphbolt.impl.fused_csc_sampling_graph"
        module = sys.modules.get(name)
        return self._Nothing if module is None else module.FusedCSCSamplingGraph

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["dgl.graphbolt"], name)


gb = _GraphboltTypes()
