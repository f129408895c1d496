"""Relations and edge features as operators see them."""

from __future__ import annotations

import dgl
import pytest
import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.relation import Compressed, Coo, Relation
from dgl_mgpu.ops import SampleKey, gather_rows, sample_neighbors
from dgl_mgpu.sampling.views import compressed_view, edges_view, scalars_view


def relation(device: torch.device, idtype: torch.dtype, **options) -> Relation:
    row, col = torch.tensor([[3, 0, 1, 3, 2, 0], [1, 1, 0, 0, 4, 4]], dtype=idtype)
    return Relation(4, 5, coo=Coo(row.to(device), col.to(device)), **options)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["csc", "csr"])
def test_edges_are_seen_where_they_lie(device, name, idtype):
    edges = relation(device, idtype)
    view = edges_view(edges, name, device)
    assert (view.num_rows, view.num_cols) == ((5, 4) if name == "csc" else (4, 5))
    assert view.num_edges == 6 and view.idtype == idtype
    matrix = getattr(edges, name)()
    assert view.pointers[0, 1] == matrix.indices.data_ptr()
    if idtype == torch.int64:
        assert view.pointers[0, 0] == matrix.indptr.data_ptr()
    nodes = torch.arange(view.num_rows, device=device)
    found = sample_neighbors(view, nodes, -1, SampleKey(0))
    assert torch.equal(found.indptr, matrix.indptr.long())
    assert torch.equal(found.neighbors, matrix.indices)
    assert torch.equal(found.eids, matrix.edge_ids())


def test_a_view_is_kept_with_its_relation_and_the_reverse(device):
    edges = relation(device, torch.int64)
    view = edges_view(edges, "csc", device)
    assert edges_view(edges, "csc", device) is view
    assert edges_view(edges.reverse(), "csr", device) is view
    assert edges_view(edges.reverse(), "csc", device) is edges_view(edges, "csr", device)
    # What the relation does not keep is made for every view anew, and kept by that.
    edges = relation(device, torch.int64, formats=("coo",))
    view = edges_view(edges, "csc", device)
    assert edges_view(edges, "csc", device) is not view
    assert sample_neighbors(
        view, torch.tensor([4], device=device), -1, SampleKey(0)
    ).eids.tolist() == [4, 5]


def test_what_does_not_begin_where_kernels_read_is_copied(device):
    indices = torch.tensor([9, 3, 0, 1, 2], device=device)
    indptr = torch.tensor([9, 0, 1, 4], device=device)
    view = compressed_view(Compressed(indptr[1:], indices[1:], None), 2, 4, device)
    found = sample_neighbors(view, torch.arange(2, device=device), -1, SampleKey(0))
    assert found.neighbors.tolist() == [3, 0, 1, 2]
    values = torch.arange(8.0, device=device)
    for vector in (values[1:], values[::2], values[3:3]):
        rows = gather_rows(scalars_view(vector, device), torch.arange(len(vector), device=device))
        assert torch.equal(rows, vector)


def test_features_on_the_cpu_are_to_be_pinned_for_a_gpu(device):
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    with pytest.raises(InvalidInputError, match="pin"):
        scalars_view(torch.rand(5), device)


def test_a_pinned_graph_is_sampled_where_it_lies(device):
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    from tests.sampling.graphs import multigraph

    for idtype in (torch.int32, torch.int64):
        g, here = multigraph(torch.device("cpu"), idtype), multigraph(device, idtype)
        g.create_formats_()
        g.pin_memory_()
        seeds = torch.arange(90, dtype=idtype, device=device)
        for call in (
            lambda g, seeds: dgl.sampling.sample_neighbors(g, seeds, 3),
            lambda g, seeds: dgl.sampling.sample_neighbors(g, seeds, 3, edge_dir="out", prob="w"),
            lambda g, seeds: dgl.sampling.sample_labors(g, seeds, 3)[0],
        ):
            dgl.seed(2)
            found = call(g, seeds)
            dgl.seed(2)
            expected = call(here, seeds)
            assert found.device == device
            for ours, theirs in zip(found.edges(), expected.edges(), strict=True):
                assert torch.equal(ours, theirs)
            assert torch.equal(found.edata[dgl.EID], expected.edata[dgl.EID])
        for prob in (None, "w"):
            dgl.seed(2)
            found = dgl.sampling.random_walk(g, seeds, length=4, prob=prob, return_eids=True)
            dgl.seed(2)
            expected = dgl.sampling.random_walk(here, seeds, length=4, prob=prob, return_eids=True)
            assert all(map(torch.equal, found, expected))
