"""How often sampling will read each node: by degree, or by sampling for a while and counting."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from dgl_mgpu.comm.cuda_runtime import Runtime
from dgl_mgpu.ops import workspace
from dgl_mgpu.ops.view import GraphView
from dgl_mgpu.store.accesses import add_accesses
from dgl_mgpu.store.graph import StoreGraph
from dgl_mgpu.store.graph_structure import Nodes, topology_table
from dgl_mgpu.store.memory import TopologySource
from dgl_mgpu.store.memory.format import Source, numpy_dtype
from dgl_mgpu.utils.types import CanonicalEtype

log = logging.getLogger(__name__)

# Edges counted at a time, at least, and copied at a time.
_CHUNK = 1 << 23
# Share of a GPU's free memory that topology may take for a pre-sampling pass; the rest is for
# its samples.
_TOPOLOGY_SHARE = 0.75
# Mini-batches of a pre-sampling pass, from each node type: hot rows show within a few.
_BATCHES = 64
# Pre-sampling draws other samples than training does.
_FIRST_EPOCH = 2**62


def degree_hotness(
    num_nodes: Mapping[str, int], etypes: Sequence[CanonicalEtype], sources: Mapping[str, Source]
) -> dict[str, np.ndarray]:
    """How often each node is another's neighbour: what sampling reads it in proportion to."""
    counts = {ntype: np.zeros(num, np.int64) for ntype, num in num_nodes.items()}
    for etype in etypes:
        source = _topology(sources, etype)
        # bincount makes 8 bytes of every id: in chunks, so that they never all exist.
        chunk = max(_CHUNK, source.num_cols)
        for begin in range(0, source.num_edges, chunk):
            part = source.indices[begin : begin + chunk]
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
    runtime: Runtime | None = None,
) -> dict[str, np.ndarray]:
    """How often each node was an input node of mini-batches sampled for the purpose.

    GNNLab's pre-sampling, which XGNN uses too (XGNN, section 7).  Samples from the data as it
    lies, before any store is built.  Mini-batches of ``batch_size`` start from ``seeds``, and
    ``seed`` says which samples are drawn.  The topology is copied to the GPU of ``runtime`` for the
    time being; if there is too little room, the CPU samples instead, which is logged and gives the
    same counts: by node type, int64, shape (num_nodes,).
    """
    topologies = {topology_table(etype): _topology(sources, etype) for etype in etypes}

    def sample(
        view_of: Callable[[TopologySource], GraphView], device: torch.device
    ) -> dict[str, np.ndarray]:
        tables = {
            name: SimpleNamespace(view=view_of(source)) for name, source in topologies.items()
        }
        graph = StoreGraph(SimpleNamespace(tables=tables), num_nodes, list(etypes), seed)  # type: ignore[arg-type]
        return _count_input_nodes(graph, num_nodes, device, seeds, fanouts, batch_size, seed)

    if runtime is not None and _has_room(runtime, topologies.values(), num_nodes):
        try:
            return sample(partial(_copy_of, device=runtime.device), runtime.device)
        except torch.cuda.OutOfMemoryError as error:
            log.warning("pre-sampling on the CPU: %s", str(error).splitlines()[0])
        finally:
            # What the store is built in has to be free, not kept by torch for later.
            workspace.release()
            runtime.trim()
    return sample(_view_of, torch.device("cpu"))


def _count_input_nodes(
    graph: StoreGraph,
    num_nodes: Mapping[str, int],
    device: torch.device,
    seeds: Nodes,
    fanouts: Sequence[int],
    batch_size: int,
    seed: int,
) -> dict[str, np.ndarray]:
    counts = {
        ntype: torch.zeros(num, dtype=torch.int64, device=device)
        for ntype, num in num_nodes.items()
    }
    by_type = seeds if isinstance(seeds, Mapping) else {graph.ntypes[0]: seeds}
    for ntype, ids in graph._structure.nodes_by_ntype(by_type).items():
        key = [seed, graph.ntypes.index(ntype)]
        random = np.random.Generator(np.random.Philox(key=key))
        for number in range(_BATCHES):
            graph.set_epoch(_FIRST_EPOCH + number)
            chosen = torch.from_numpy(random.choice(len(ids), min(batch_size, len(ids)), False))
            read = graph.input_nodes({ntype: ids[chosen]}, fanouts)
            for other, nodes in read.items():
                add_accesses(counts[other], nodes)
    return {ntype: reads.cpu().numpy() for ntype, reads in counts.items()}


def _has_room(
    runtime: Runtime, topologies: Collection[TopologySource], num_nodes: Mapping[str, int]
) -> bool:
    """Whether a GPU has room for topologies, counts and samples."""
    needed = 8 * sum(num_nodes.values()) + sum(
        8 * (source.num_rows + 1) + source.idtype.itemsize * source.num_edges
        for source in topologies
    )
    runtime.trim()
    free = runtime.device_info().free
    if needed <= _TOPOLOGY_SHARE * free:
        return True
    log.warning(
        "pre-sampling on the CPU: the topology takes %s bytes, more than %d %% of the %s that are "
        "free on the GPU",
        f"{needed:,}",
        100 * _TOPOLOGY_SHARE,
        f"{free:,}",
    )
    return False


def _topology(sources: Mapping[str, Source], etype: CanonicalEtype) -> TopologySource:
    source = sources[topology_table(etype)]
    assert isinstance(source, TopologySource)
    return source


def _view_of(source: TopologySource) -> GraphView:
    """The data itself as one segment."""
    indptr = np.ascontiguousarray(source.indptr, np.int64)
    indices = np.ascontiguousarray(source.indices, numpy_dtype(source.idtype))
    addresses = [indptr.ctypes.data, indices.ctypes.data]
    return _one_segment(source, addresses, torch.device("cpu"), (indptr, indices))


def _copy_of(source: TopologySource, device: torch.device) -> GraphView:
    """The same in a device's memory."""
    indptr = _copy_in_chunks(source.indptr, torch.int64, device)
    indices = _copy_in_chunks(source.indices, source.idtype, device)
    addresses = [indptr.data_ptr(), indices.data_ptr()]
    return _one_segment(source, addresses, device, (indptr, indices))


def _one_segment(
    source: TopologySource, addresses: list[int], device: torch.device, owner: object
) -> GraphView:
    return GraphView(
        torch.tensor([[0, source.num_rows, 1, 0]], device=device),
        torch.tensor([[*addresses, 0]], device=device),  # sampled edges do not depend on their ids
        source.num_rows,
        source.num_cols,
        source.num_edges,
        source.idtype,
        torch.empty(0, dtype=torch.int64, device=device),
        owner,
    )


def _copy_in_chunks(array: np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    copy = torch.empty(len(array), dtype=dtype, device=device)
    # In chunks: an array mapped from a file is then never in memory as a whole.
    for begin in range(0, len(array), _CHUNK):
        part = np.array(array[begin : begin + _CHUNK])
        copy[begin : begin + len(part)] = torch.from_numpy(part).to(device)
    return copy
