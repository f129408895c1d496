"""DGL's distributed graphs where graphbolt is absent."""

from __future__ import annotations

import sys
from typing import Any


class _GraphboltTypes:
    """`dgl.graphbolt` as seen by `dgl.distributed.dist_graph`.

    The one question asked of every partition is whether it is a `FusedCSCSamplingGraph`; without
    graphbolt none is, so the class is one that nothing is an instance of. Everything else raises
    as `dgl.graphbolt` does.
    """

    class FusedCSCSamplingGraph:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["dgl.graphbolt"], name)


gb = _GraphboltTypes()
