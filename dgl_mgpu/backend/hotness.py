"""How often sampling will read each node: by degree, or by sampling for a while and counting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import dgl
import numpy as np
import torch

from dgl_mgpu.backend.graph import CanonicalEtype, Nodes, StoreGraph, topology_table
from dgl_mgpu.ops.view import GraphView
from dgl_mgpu.placement import count_accesses
from dgl_mgpu.store import TopologySource
from dgl_mgpu.store.store import Source

# Edges counted at a time, at least.
_STRETCH = 1 << 23
# Mini-batches of a pre-sampling pass, from each node type: hot rows show within a few.
_BATCHES = 64
# Pre-sampling draws other samples than training does.
_FIRST_EPOCH = 2**62


def degree_hotness(
    num_nodes: Mapping[str, int],
    etypes: Sequence[CanonicalEtype],
    sources: Mapping[str, Source],
) -> dict[str, np.ndarray]:
    """How often each node is another's neighbour: what sampling reads it in proportion to."""
    counts = {ntype: np.zeros(num, np.int64) for ntype, num in num_nodes.items()}
    for etype in etypes:
        source = _topology(sources, etype)
        # bincount makes 8 bytes of every id: in stretches, so that they are never all there.
        stretch = max(_STRETCH, source.num_cols)
        for begin in range(0, source.num_edges, stretch):
            part = source.indices[begin : begin + stretch]
            counts[etype[0]] += np.bincount(part, minlength=source.num_cols)
    return counts


def presample_hotness(
    num_nodes: Mapping[str, int],
    etypes: Sequence[CanonicalEtype],
    sources: Mapping[str, Source],
    seeds: Nodes,
    fanouts: Sequence[int],
    batch_size: int,
    seed: int,
) -> dict[str, np.ndarray]:
    """How often each node was an input node of mini-batches sampled for the purpose.

    GNNLab's pre-sampling, which XGNN uses too (XGNN, section 7).  Samples from the data as it
    lies, before any store is built.

    Parameters
    ----------
    num_nodes, etypes, sources
        The graph.
    seeds : Tensor or dict of Tensor
        Nodes that mini-batches start from.
    fanouts, batch_size
        The mini-batches.
    seed : int
        Which samples are drawn.
    """
    tables = {
        topology_table(etype): SimpleNamespace(view=_view_of(_topology(sources, etype)))
        for etype in etypes
    }
    graph = StoreGraph(SimpleNamespace(tables=tables), num_nodes, list(etypes), seed)  # type: ignore[arg-type]
    by_type = dict(seeds) if isinstance(seeds, Mapping) else {graph.ntypes[0]: seeds}
    visited: dict[str, list[np.ndarray]] = {ntype: [] for ntype in num_nodes}
    for ntype, ids in by_type.items():
        key = [seed, graph.ntypes.index(ntype)]
        random = np.random.Generator(np.random.Philox(key=key))
        for number in range(_BATCHES):
            graph.set_epoch(_FIRST_EPOCH + number)
            chosen = torch.from_numpy(random.choice(len(ids), min(batch_size, len(ids)), False))
            _, _, blocks = graph.sample_blocks({ntype: ids[chosen].to(graph.idtype)}, fanouts)
            for read in num_nodes:
                visited[read].append(blocks[0].srcnodes[read].data[dgl.NID].numpy())
    return {ntype: count_accesses(visited[ntype], num) for ntype, num in num_nodes.items()}


def _topology(sources: Mapping[str, Source], etype: CanonicalEtype) -> TopologySource:
    source = sources[topology_table(etype)]
    assert isinstance(source, TopologySource)
    return source


def _view_of(source: TopologySource) -> GraphView:
    """The data itself as one segment."""
    arrays = [
        np.ascontiguousarray(source.indptr, np.int64),
        np.ascontiguousarray(source.indices),
        *([] if source.eids is None else [np.ascontiguousarray(source.eids)]),
    ]
    addresses = [array.ctypes.data for array in arrays] + [0] * (3 - len(arrays))
    return GraphView(
        torch.tensor([[0, source.num_rows, 1, 0]]),
        torch.tensor([addresses]),
        source.num_rows,
        source.num_cols,
        source.num_edges,
        source.idtype,
        owner=arrays,
    )
