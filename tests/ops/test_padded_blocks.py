"""Padded mini-batches: what sample_blocks gives, in room that depends on nothing drawn."""

from __future__ import annotations

import pytest
import torch

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.ops import sample_blocks, sample_padded_blocks
from tests.ops.test_sample import GRAPHS, KEY
from tests.ops.views import LAYOUTS

GRAPH = GRAPHS["power law"]


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("seeds", [[], [3], [5, 0, 199, 42, 5]])
def test_holds_the_blocks(seeds, replace, idtype):
    view = GRAPH.view(LAYOUTS["three tiers"], idtype)
    seeds = torch.tensor(seeds, dtype=idtype)
    fanouts = [20, 3, 2]
    expected = sample_blocks(view, seeds, fanouts, KEY, replace=replace)
    found = sample_padded_blocks(view, seeds, fanouts, KEY, replace=replace)
    most = len(seeds)
    for padded, block, fanout in zip(found[::-1], expected[::-1], fanouts[::-1], strict=True):
        num_edges = len(block.src)
        assert (padded.num_dst, padded.num_edges) == (block.num_dst, num_edges)
        assert padded.num_src == len(block.src_nodes)
        assert padded.indptr.shape == (most + 1,)
        assert padded.src.shape == padded.eids.shape == (most * fanout,)
        most = min(most + most * fanout, len(seeds) + 200)
        assert padded.src_nodes.shape == (most,)
        assert torch.equal(padded.indptr[: block.num_dst + 1], block.indptr)
        assert (padded.indptr[block.num_dst :] == num_edges).all()
        for held, exact in ((padded.src, block.src), (padded.eids, block.eids)):
            assert held.dtype == idtype
            assert torch.equal(held[: len(exact)], exact)
            assert not held[len(exact) :].any()
        assert padded.src_nodes.dtype == idtype
        assert torch.equal(padded.src_nodes, found[0].src_nodes[:most])
        assert all(count.shape == () for count in padded[4:])
    held, exact = found[0].src_nodes, expected[0].src_nodes
    assert torch.equal(held[: len(exact)], exact)
    assert not held[len(exact) :].any()


def test_no_layers():
    assert sample_padded_blocks(GRAPH.view(), torch.arange(3), [], KEY) == []


def test_bad_arguments():
    for fanouts, message in (([-1], "fanout is -1"), ([1] * 7, "7 hops"), ([1 << 20] * 2, "edges")):
        with pytest.raises(InvalidInputError, match=message):
            sample_padded_blocks(GRAPH.view(), torch.arange(300) % 200, fanouts, KEY)
    with pytest.raises(InvalidInputError, match="sample_etype_blocks"):
        sample_padded_blocks(GRAPHS["bipartite"].view(), torch.arange(3), [2], KEY)
    with pytest.raises(IdOutOfRangeError, match="id 200 at place 1"):
        sample_padded_blocks(GRAPH.view(), torch.tensor([0, 200]), [2, 2], KEY)


def test_registration():
    view = GRAPH.view()
    torch.library.opcheck(
        torch.ops.dgl_mgpu.sample_hops_padded.default,
        (torch.arange(20), view.tiers, view.pointers, view.position, view.num_rows, view.num_cols,
         view.idtype, [3, 4], False, KEY.fold_hops(2)),
    )  # fmt: skip
