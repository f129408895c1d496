"""PinSAGE's sampler against layers by `StoreGraph.pinsage_neighbors` and `dgl.to_block`."""

from __future__ import annotations

import dgl
import pytest
import torch

import dgl_mgpu
from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.index import TensorIndex
from dgl_mgpu.train.minibatch.samplers import RandomWalkSampler
from tests.store.test_graph import hetero_graph, power_law_graph

WALKS, LENGTH, NEIGHBORS = 4, 3, 5


@pytest.fixture(params=[False, True], ids=["dgl's", "tensors"])
def on_tensors(request):
    """Whether blocks are made of tensors, as on a GPU."""
    return request.param


@pytest.fixture(autouse=True)
def one_thread():
    """On several, ``dgl.to_block`` numbers sources in the order in which threads come to them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def store_of(g):
    return dgl_mgpu.GlobalStore.from_dgl(g, device="cpu", seed=4).graph


def layer_by_layer(graph, seeds, layers):
    """Input nodes and blocks, by DGL's own means from one layer to the next."""
    blocks = []
    for _ in range(layers):
        frontier = graph.pinsage_neighbors(seeds, WALKS, LENGTH, NEIGHBORS)
        block = dgl.to_block(frontier, seeds)
        block.edata["visits"] = frontier.edata["visits"][block.edata[dgl.EID].long()]
        seeds = block.srcdata[dgl.NID]
        blocks.insert(0, block)
    return seeds, blocks


def contents(block):
    """All that there is in a block, by name."""
    columns = {"in-degrees": block.in_degrees(), "ends": torch.stack(block.edges(order="eid"))}
    for of in ("srcdata", "dstdata", "edata"):
        columns |= {f"{of} {name}": column for name, column in getattr(block, of).items()}
    return columns


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        assert found[name].dtype == column.dtype and torch.equal(found[name], column), name


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layers", [1, 3])
def test_blocks_are_those_of_dgl(layers, idtype, on_tensors):
    g = power_law_graph(num_edges=1500, idtype=idtype)
    graph, sampler = store_of(g), RandomWalkSampler(layers, NEIGHBORS, WALKS, LENGTH)
    assert (g.in_degrees() == 0).any()
    for epoch, seeds in enumerate((torch.arange(0, 800, 70), torch.tensor([7, 3]))):
        graph.set_epoch(epoch)
        expected_inputs, blocks = layer_by_layer(graph, seeds.to(idtype), layers)
        expected = [contents(block) for block in blocks]
        with tensor_backed_graphs(on_tensors):
            inputs, outputs, blocks = sampler.sample_blocks(graph, seeds)
            assert all(isinstance(block._graph, TensorIndex) == on_tensors for block in blocks)
            found = [contents(block) for block in blocks]
        assert outputs is seeds and torch.equal(inputs, expected_inputs)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs)


def test_gradients_go_back_through_the_blocks(on_tensors):
    graph, seeds = store_of(power_law_graph()), torch.arange(0, 800, 70)
    inputs, blocks = layer_by_layer(graph, seeds, 2)
    expected = gradient(blocks, len(inputs))
    with tensor_backed_graphs(on_tensors):
        sampler = RandomWalkSampler(2, NEIGHBORS, WALKS, LENGTH)
        _, _, blocks = sampler.sample_blocks(graph, seeds)
        found = gradient(blocks, len(inputs))
    torch.testing.assert_close(found, expected)


def gradient(blocks, num_inputs):
    rows = torch.linspace(-1, 1, 3 * num_inputs).reshape(-1, 3).requires_grad_()
    hidden = rows
    for block in blocks:
        hidden = dgl.ops.u_mul_e_sum(block, hidden, block.edata["visits"].float())
    hidden.square().sum().backward()
    return rows.grad


def test_bad_seeds_and_graphs():
    sampler = RandomWalkSampler(2, NEIGHBORS, WALKS, LENGTH)
    for bad in (-1, 800):
        with pytest.raises(IdOutOfRangeError, match=f"no seed node {bad}, the graph has 800"):
            sampler.sample_blocks(store_of(power_law_graph()), torch.tensor([3, bad]))
    with pytest.raises(InvalidInputError, match="homogeneous"):
        sampler.sample_blocks(store_of(hetero_graph()), torch.tensor([3]))
