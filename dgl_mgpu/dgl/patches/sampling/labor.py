"""LABOR sampling on GPUs."""

from __future__ import annotations

from typing import Any

from dgl_mgpu.dgl.patches.sampling import copy_edge_ids


def sample_labors(
    g: Any,
    nodes: Any,
    fanout: Any,
    edge_dir: str = "in",
    prob: Any = None,
    importance_sampling: int = 0,
    random_seed: Any = None,
    seed2_contribution: float = 0,
    copy_ndata: bool = True,
    copy_edata: bool = True,
    exclude_edges: Any = None,
    output_device: Any = None,
) -> Any:
    """Layer-neighbour sampling; the weights are those of the edges that stay, also on a GPU.

    ``exclude_edges`` stay as they are, as in :func:`_sample_neighbors`.  Parameters and results are
    those of `dgl.sampling.sample_labors`.
    """
    from dgl.sampling import labor

    frontier, importances = labor._sample_labors(
        g,
        nodes,
        fanout,
        edge_dir=edge_dir,
        prob=prob,
        importance_sampling=importance_sampling,
        random_seed=random_seed,
        seed2_contribution=seed2_contribution,
        copy_ndata=copy_ndata,
        copy_edata=copy_edata,
        exclude_edges=copy_edge_ids(exclude_edges),
    )
    if output_device is None:
        return frontier, importances
    return frontier.to(output_device), [each.to(output_device) for each in importances]
