"""node2vec's random walks on GPUs."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches import TENSOR_INDEX, override


@override("dgl.sampling.node2vec_randomwalk:node2vec_random_walk", TENSOR_INDEX)
def node2vec_random_walk(
    g: Any, nodes: Any, p: float, q: float, walk_length: int, prob: str | None = None,
    return_eids: bool = False,
) -> Any:  # fmt: skip
    """As `dgl.sampling.node2vec_random_walk`, on a GPU."""
    from dgl import utils
    from dgl.sampling import node2vec_randomwalk

    nodes = utils.prepare_tensor(g, nodes, "nodes")
    weights = nodes.new_empty(0) if prob is None else g.edata[prob]
    traces, eids = node2vec_randomwalk._CAPI_DGLSamplingNode2vec(
        g._graph, nodes, p, q, walk_length, weights
    )
    return (traces, eids) if return_eids else traces
