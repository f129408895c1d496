"""DGL's distributed graphs where graphbolt is absent."""

from __future__ import annotations

import sys
from typing import Any


class _GraphboltTypes:
    """`dgl.graphbolt` as seen by `dgl.distributed.dist_graph`.

    Every partition is checked for being a `FusedCSCSamplingGraph`. Without graphbolt none is: the
    class has no instances. Everything else raises as `dgl.graphbolt` does.
    """

    class FusedCSCSamplingGraph:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["dgl.graphbolt"], name)


gb = _GraphboltTypes()
