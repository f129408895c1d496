"""Formats made of each other: whichever way, they are the same."""

from __future__ import annotations

import pytest
import torch

from dgl_mgpu.errors import IdOutOfRangeError
from dgl_mgpu.graph import relation as relations
from dgl_mgpu.graph.relation import FORMATS, Compressed, Coo, Relation
from tests.ops.test_transpose import ID_DTYPES, matrix

WHERE = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


@pytest.fixture(params=WHERE)
def where(request):
    return request.param


def held(name, where, dtype, permuted, formats=FORMATS):
    """A relation that has one format, of the columns of all lengths."""
    indptr, indices, eids, count = matrix("columns of all lengths", dtype, permuted)
    moved = [None if ids is None else ids.to(where) for ids in (indptr, indices, eids)]
    ends = (len(indptr) - 1, count) if name == "csr" else (count, len(indptr) - 1)
    return Relation(*ends, **{name: Compressed(*moved)}, formats=formats)


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("dtype", ID_DTYPES)
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize(("given", "asked"), [("csr", "csc"), ("csc", "csr")])
def test_with_few_edges_and_with_many(monkeypatch, where, dtype, permuted, given, asked):
    found = getattr(held(given, where, dtype, permuted), asked)()
    monkeypatch.setattr(relations, "_MAX_TRANSPOSED", 0)
    assert_same(found, getattr(held(given, where, dtype, permuted), asked)())
    # Of the reverse it is what is held by the same name.
    turned = held(given, where, dtype, permuted).reverse()
    assert_same(found, getattr(turned, given)())


@pytest.mark.parametrize("permuted", [False, True])
def test_edges_keep_their_ids(where, permuted):
    relation = held("csc", where, torch.int64, permuted)
    row, col = relation.coo()
    indptr, indices, eids = relation.csr()
    owners = Compressed(indptr, indices, eids).owners()
    assert torch.equal(row[eids], owners) and torch.equal(col[eids], indices)
    assert torch.equal(eids.sort().values, torch.arange(len(eids), device=where))


def test_of_edges_alone(where):
    row, col = torch.tensor([2, 0, 2, 1], device=where), torch.tensor([0, 1, 0, 0], device=where)
    csr, csc = (getattr(Relation(3, 2, coo=Coo(row, col)), name)() for name in ("csr", "csc"))
    assert [ids.tolist() for ids in csr] == [[0, 1, 2, 4], [1, 0, 0, 0], [1, 3, 0, 2]]
    assert [ids.tolist() for ids in csc] == [[0, 3, 4], [2, 2, 1, 0], [0, 2, 3, 1]]


@pytest.mark.parametrize(("given", "asked"), [("csr", "csc"), ("csc", "csr")])
def test_nothing_else_is_made_and_kept(where, given, asked):
    relation = held(given, where, torch.int32, permuted=True)
    made = getattr(relation, asked)()
    assert relation.created == ("csr", "csc")
    alone = held(given, where, torch.int32, permuted=True, formats=(given,))
    getattr(alone, asked)()
    assert alone.created == (given,)
    alone = alone.with_formats((asked,))
    assert alone.created == (asked,)
    assert_same(getattr(alone, asked)(), made)


def test_ends_that_are_no_nodes_are_refused_on_the_cpu():
    relation = Relation(3, 2, coo=Coo(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])))
    with pytest.raises(IdOutOfRangeError, match="id 2 at place 1"):
        relation.csc()


def test_what_is_made_of_degrees_is_made_once(where):
    made = []

    def numbers(degrees):
        made.append(degrees)
        return degrees.tolist()

    given = held("csc", where, torch.int64, False)
    backwards = given.reverse()
    indptr, sources, _ = (None if ids is None else ids.cpu() for ids in given.csc())
    expected = {
        "in": indptr.diff().tolist(),
        "out": torch.bincount(sources, minlength=given.num_src).tolist(),
    }
    for _ in range(2):
        for side, other in (("in", "out"), ("out", "in")):
            assert given.of_degrees(side, "numbers", numbers) == expected[side]
            assert backwards.of_degrees(other, "numbers", numbers) == expected[side]
    assert len(made) == 2
    assert given.of_degrees("in", "most", lambda degrees: int(degrees.max())) == max(expected["in"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_what_is_made_of_degrees_in_a_cuda_graph_is_not_kept():
    given = held("csc", "cuda", torch.int64, False)
    given.in_degrees()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given.of_degrees("in", "double", lambda degrees: 2 * degrees)
    # Not replayed: what the graph would have written is not there.
    assert torch.equal(given.of_degrees("in", "double", lambda it: 2 * it), 2 * given.in_degrees())
