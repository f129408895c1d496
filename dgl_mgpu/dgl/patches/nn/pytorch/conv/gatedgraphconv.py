"""GatedGraphConv where other processes may have edges of types that this one has not."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.graph.originals import originals


def forward(self: Any, graph: Any, feat: Any, etypes: Any = None) -> Any:
    """In place of ``GatedGraphConv.forward``: a sum for each edge type, on every rank."""
    from dgl_mgpu.graph.distributed import DistributedGraphIndex

    if not isinstance(graph._graph, DistributedGraphIndex) or etypes is None:
        original = originals["dgl.nn.pytorch.conv.gatedgraphconv:GatedGraphConv.forward"]
        return original(self, graph, feat, etypes)
    from dgl.ops import u_mul_e_sum
    from torch.nn.functional import pad

    from dgl_mgpu.errors import InvalidInputError

    if len(etypes) and not 0 <= int(etypes.min()) <= int(etypes.max()) < self._n_etypes:
        raise InvalidInputError(
            "run GatedGraphConv",
            f"the edge types run from {int(etypes.min())} to {int(etypes.max())}",
            f"pass types in [0, {self._n_etypes})",
        )
    hidden = pad(feat, (0, self._out_feats - feat.shape[1]))
    # Of an edge's type, 1: of which no gradient is asked for.
    of_type = [(etypes == kind).to(feat.dtype).unsqueeze(1) for kind in range(self._n_etypes)]
    for _ in range(self._n_steps):
        total = sum(
            u_mul_e_sum(graph, linear(hidden), chosen)
            for linear, chosen in zip(self.linears, of_type, strict=True)
        )
        hidden = self.gru(total, hidden)
    return hidden
