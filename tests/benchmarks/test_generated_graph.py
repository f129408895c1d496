"""Generated graphs and their stores, as far as small ones on a CPU show."""

from __future__ import annotations

import dgl
import pytest
import torch

from benchmarks.generated_graph import (
    Data,
    MadeRows,
    all_in_gpu_memory,
    require_edges,
    require_rows,
    stored,
)
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.data.generate import GraphSpec
from dgl_mgpu.models.homogeneous import INV_SQRT_DEGREES

CPU = torch.device("cpu")
SPEC = GraphSpec(num_nodes=300, num_edges=4000, num_features=5, num_classes=3)


def test_edges_and_rows_are_those_of_the_data():
    data = Data(SPEC, CPU)
    nodes = torch.tensor([7, 250, 7])
    places = [p for n in nodes for p in range(int(data.indptr[n]), int(data.indptr[n + 1]))]
    assert data.in_edges(nodes).tolist() == places
    outgoing = torch.bincount(data.indices.long(), minlength=300)
    assert torch.equal(data.reads, outgoing)
    rows = MadeRows(300, data.rows()["feat"], CPU)
    assert (len(rows), rows.shape, rows.ndim) == (300, (300, 5), 2)
    every = torch.from_numpy(rows[torch.arange(300).numpy()])
    assert torch.equal(torch.from_numpy(rows[nodes.numpy()]), every[nodes])
    inv = data.rows()[INV_SQRT_DEGREES](nodes)
    expected = torch.stack([outgoing[nodes], data.indptr.diff()[nodes]], 1).clamp(min=1)
    assert torch.allclose(inv, expected.double().rsqrt().float())


def test_a_store_holds_what_it_is_said_to():
    data = Data(SPEC, CPU)
    with stored(data, Communicator(), all_in_gpu_memory(data, Communicator())) as graph:
        assert graph.num_edges() == data.num_edges
        ids = torch.tensor([299, 0, 5])
        for name, make in data.rows().items():
            assert torch.equal(graph.get_node_storage(name).fetch(ids, CPU), make(ids))
        frontier = graph.sample_neighbors(ids, -1)
        places = data.in_edges(ids)
        assert sorted(frontier.edata[dgl.EID].tolist()) == sorted(places.tolist())
        assert sorted(frontier.edges()[0].tolist()) == sorted(data.indices[places].tolist())


def test_wrong_batches_are_found():
    data = Data(SPEC, CPU)
    seeds = torch.tensor([5, 17])
    neighbors = data.indices[data.in_edges(seeds)].long()
    dst = torch.arange(2).repeat_interleave(data.indptr[seeds + 1] - data.indptr[seeds])
    inputs = torch.cat([seeds, torch.arange(300)])
    block = dgl.create_block((neighbors + 2, dst), num_src_nodes=302, num_dst_nodes=2)
    block.srcdata[dgl.NID], block.dstdata[dgl.NID] = inputs, seeds
    block.srcdata["feat"] = data.rows()["feat"](inputs)
    block.dstdata["label"] = data.rows()["label"](seeds)
    require_edges("right", data, [block])
    require_rows("right", data, [block])
    stranger = next(n for n in range(300) if n not in neighbors[dst == 1])
    others = dgl.create_block(([stranger + 2], [1]), num_src_nodes=302, num_dst_nodes=2)
    others.srcdata[dgl.NID], others.dstdata[dgl.NID] = inputs, seeds
    with pytest.raises(ValueError, match="wrong: block 1 has an edge that is not in the graph"):
        require_edges("wrong", data, [block, others])
    block.srcdata["feat"][3, 4] += 0.5
    with pytest.raises(ValueError, match="wrong 'feat', the first of node 1"):
        require_rows("wrong", data, [block])
    block.srcdata["feat"][3, 4] -= 0.5
    block.dstdata["label"][1] += 1
    with pytest.raises(ValueError, match="wrong 'label', the first of node 17"):
        require_rows("wrong", data, [block])
