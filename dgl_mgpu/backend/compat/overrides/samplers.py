"""DGL's samplers that refuse graphs on GPUs, as functions of its C library once did."""

from __future__ import annotations

from typing import Any

from dgl import backend

from dgl_mgpu.backend.compat.importer import originals

from .modules import module_with


class _AnyDevice:
    """Equal to every device."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def cpu() -> Any:
    """In place of `dgl.backend.cpu`, with which modules compare a graph's device."""
    return _AnyDevice()


backend_for_samplers = module_with(backend, cpu=cpu)


def node2vec_random_walk(
    g: Any,
    nodes: Any,
    p: float,
    q: float,
    walk_length: int,
    prob: str | None = None,
    return_eids: bool = False,
) -> Any:
    """Generate random walk traces based on the node2vec model, also on a GPU.

    Parameters and results are those of `dgl.sampling.node2vec_random_walk`.
    """
    from dgl import utils
    from dgl.sampling import node2vec_randomwalk

    from dgl_mgpu.backend.index import TensorIndex

    if not isinstance(g._graph, TensorIndex):
        original = originals["dgl.sampling.node2vec_randomwalk:node2vec_random_walk"]
        return original(g, nodes, p, q, walk_length, prob, return_eids)
    nodes = utils.prepare_tensor(g, nodes, "nodes")
    weights = nodes.new_empty(0) if prob is None else g.edata[prob]
    traces, eids = node2vec_randomwalk._CAPI_DGLSamplingNode2vec(
        g._graph, nodes, p, q, walk_length, weights
    )
    return (traces, eids) if return_eids else traces
