"""All hops of a mini-batch against one-hop sampling and relabelling by hand."""

from __future__ import annotations

from dataclasses import replace as with_fields

import numpy as np
import pytest
import torch

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.ops import check, sample_blocks
from tests.environment import needs_torch
from tests.ops import reference
from tests.ops.test_sample import GRAPHS, KEY
from tests.ops.views import LAYOUTS, row_view

GRAPH = GRAPHS["power law"]


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("seeds", [[], [3], [5, 0, 199, 42]])
def test_matches_reference(seeds, replace, weighted, idtype):
    weights = torch.arange(1, 3001, dtype=torch.float32) if weighted else None
    blocks = sample_blocks(
        GRAPH.view(LAYOUTS["three tiers"], idtype),
        torch.tensor(seeds, dtype=idtype),
        [4, 3, 2],
        KEY,
        replace=replace,
        weights=None if weights is None else row_view(weights),
    )
    nodes = seeds
    for hop, (block, fanout) in enumerate(zip(blocks[::-1], [2, 3, 4], strict=True)):
        key = with_fields(KEY, hop=KEY.hop + hop).fold()
        numbers = None if weights is None else weights.numpy()
        indptr, neighbors, eids = reference.sample(GRAPH, nodes, fanout, key, replace, numbers)
        assert block.num_dst == len(nodes)
        nodes, src = reference.append_unique(nodes, neighbors)
        assert block.indptr.tolist() == indptr
        assert block.eids.tolist() == eids
        assert block.src.tolist() == src
        assert block.src_nodes.tolist() == nodes
        tensors = block.indptr, block.src, block.eids, block.src_nodes
        assert {each.dtype for each in tensors} == {idtype}


def test_edges_of_blocks_are_edges_of_the_graph():
    blocks = sample_blocks(GRAPH.view(), torch.arange(50), [5, 5], KEY)
    for block in blocks:
        destinations = np.repeat(
            block.src_nodes[: block.num_dst].numpy(), block.indptr.diff().numpy()
        )
        for dst, src, eid in zip(
            destinations.tolist(),
            block.src_nodes[block.src].tolist(),
            block.eids.tolist(),
            strict=True,
        ):
            assert GRAPH.indptr[dst] <= eid < GRAPH.indptr[dst + 1]
            assert GRAPH.indices[eid] == src


def test_no_layers():
    assert sample_blocks(GRAPH.view(), torch.arange(3), [], KEY) == []


def test_one_batch_is_the_same_in_any_company():
    """A node's sample is its own: the union of two batches samples what they do alone."""
    both = sample_blocks(GRAPH.view(), torch.arange(40), [4], KEY)[0]
    half = sample_blocks(GRAPH.view(), torch.arange(20, 40), [4], KEY)[0]
    assert torch.equal(both.eids[both.indptr[20] :], half.eids)


def test_bad_arguments():
    with pytest.raises(InvalidInputError, match="sample_etype_blocks"):
        sample_blocks(GRAPHS["bipartite"].view(), torch.arange(3), [2, 2], KEY)
    with pytest.raises(IdOutOfRangeError, match="id 200 at place 1"):
        sample_blocks(GRAPH.view(), torch.tensor([0, 200]), [2, 2], KEY)


@pytest.mark.parametrize("weighted", [False, True])
def test_more_edges_in_a_hop_than_ids_count_are_refused(monkeypatch, weighted):
    monkeypatch.setitem(check._MAX_EDGES, torch.int32, 7)  # in place of 2^31 - 1
    weights = row_view(torch.ones(3000)) if weighted else None
    for idtype in (torch.int64, torch.int32):
        view = GRAPH.view(idtype=idtype)
        few, many = (torch.arange(count, dtype=idtype) for count in (3, 4))
        assert sample_blocks(view, few, [2], KEY, replace=True, weights=weights)[0].num_dst == 3
        if idtype == torch.int32:
            with pytest.raises(InvalidInputError, match="one hop has 8 edges"):
                sample_blocks(view, many, [2], KEY, replace=True, weights=weights)


@needs_torch("2.5", "2.4 does not compile it")
@pytest.mark.parametrize("weighted", [False, True])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
def test_compiled_without_a_break(weighted):
    view, weights = GRAPH.view(), row_view(torch.ones(3000)) if weighted else None

    def sample(seeds):
        return sample_blocks(view, seeds, [4, 3], KEY, weights=weights)

    seeds = torch.arange(20)
    found = torch.compile(sample, backend="aot_eager", fullgraph=True)(seeds)
    for block, expected in zip(found, sample(seeds), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(block[:4], expected[:4], strict=True))
