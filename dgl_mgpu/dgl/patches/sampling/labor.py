"""LABOR sampling on GPUs."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches.sampling import copy_edge_ids


def sample_labors(
    g: Any, nodes: Any, fanout: Any, edge_dir: str = "in", prob: Any = None,
    importance_sampling: int = 0, random_seed: Any = None, seed2_contribution: float = 0,
    copy_ndata: bool = True, copy_edata: bool = True, exclude_edges: Any = None,
    output_device: Any = None,
) -> Any:  # fmt: skip
    """As `dgl.sampling.sample_labors`; the weights are those of the edges that stay.

    ``exclude_edges`` are not changed, as in :func:`_sample_neighbors`.
    """
    from dgl.sampling import labor

    frontier, importances = labor._sample_labors(
        g, nodes, fanout, edge_dir, prob, importance_sampling, random_seed, seed2_contribution,
        copy_ndata, copy_edata, copy_edge_ids(exclude_edges),
    )  # fmt: skip
    if output_device is None:
        return frontier, importances
    return frontier.to(output_device), [weights.to(output_device) for weights in importances]
