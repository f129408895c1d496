"""Graphs of IGBH's schema: sizes, structure, and that there is something to learn."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from dgl_mgpu.data import load_hetero
from dgl_mgpu.data.igbh import (
    CANONICAL_ETYPES,
    NODE_TYPES,
    IgbhSpec,
    generate_igbh,
    largest_scale,
)
from dgl_mgpu.errors import ConfigError

SMALL = IgbhSpec(5e-5, num_classes=20, num_features=16)


@pytest.fixture(scope="module")
def small():
    return generate_igbh(SMALL)


def pairs(csc) -> np.ndarray:
    """Sorted rows of destination and source."""
    dst = torch.repeat_interleave(csc.indptr.long().diff())
    found = torch.stack([dst, csc.indices.long()], 1).numpy()
    return found[np.lexsort(found.T)]


def test_the_full_size_is_igbhs():
    full = IgbhSpec()
    assert sum(full.num_nodes[each] for each in NODE_TYPES) == 547_306_935
    once = {etype: n for etype, n in full.num_edges.items() if not etype[1].startswith("rev_")}
    # As MLPerf counts them: without reverse edges, and a self loop for each paper.
    once["paper", "cites", "paper"] //= 2
    assert sum(once.values()) == 5_812_005_639


def test_sizes_between_are_between_and_small_ones_in_proportion():
    medium, between = IgbhSpec(10_000_000 / 269_346_174), IgbhSpec(0.2)
    assert medium.num_nodes["author"] == 15_544_654
    for ntype in NODE_TYPES:
        sizes = [each.num_nodes[ntype] for each in (medium, between, IgbhSpec())]
        assert sizes == sorted(sizes)
    tiny = IgbhSpec(1e-5)
    assert tiny.num_nodes["author"] == pytest.approx(357_041 / 100_000 * 2693.46, rel=1e-3)


def test_every_relation_is_there_and_has_about_as_many_edges_as_asked_for(small):
    assert tuple(small.edges) == CANONICAL_ETYPES
    assert len(CANONICAL_ETYPES) == 7
    for etype, (indptr, indices) in small.edges.items():
        assert indptr.dtype == indices.dtype == torch.int32
        assert len(indptr) == small.num_nodes[etype[2]] + 1
        assert indptr[0] == 0 and indptr[-1] == len(indices) and (indptr.diff() >= 0).all()
        assert indices.min() >= 0 and indices.max() < small.num_nodes[etype[0]]
        assert len(indices) == pytest.approx(SMALL.num_edges[etype], rel=0.06)


def test_reverse_relations_have_the_same_edges_turned_round(small):
    for src, name, dst in CANONICAL_ETYPES:
        if name.startswith("rev_"):
            forward = small.edges[dst, name.removeprefix("rev_"), src]
            turned = pairs(small.edges[src, name, dst])[:, ::-1]
            np.testing.assert_array_equal(pairs(forward), turned[np.lexsort(turned.T)])


def test_citations_go_both_ways_and_papers_cite_themselves_twice(small):
    found = pairs(small.edges["paper", "cites", "paper"])
    turned = found[:, ::-1]
    np.testing.assert_array_equal(found, turned[np.lexsort(turned.T)])
    loops = found[found[:, 0] == found[:, 1], 0]
    times = np.bincount(loops, minlength=small.num_nodes["paper"])
    assert times.min() >= 2 and np.median(times) == 2


def test_degrees_are_skewed(small):
    for etype in (("paper", "cites", "paper"), ("paper", "topic", "fos")):
        degrees = small.edges[etype].indptr.diff().float().sort().values
        top = degrees[-len(degrees) // 100 :].sum() / degrees.sum()
        assert top > 0.04  # a hundredth of equal nodes would have 0.01
        assert degrees[-1] > 10 * degrees.mean()


def test_neighbours_and_features_tell_of_the_class(small):
    indptr, indices = small.edges["paper", "cites", "paper"]
    dst = torch.repeat_interleave(indptr.long().diff())
    others = dst != indices.long()
    alike = small.labels[dst] == small.labels[indices.long()]
    assert alike[others].float().mean() == pytest.approx(0.7 + 0.3 / 20, abs=0.03)

    assert set(small.labels.tolist()) == set(range(20))
    rows, labels = small.features_of("paper").float(), small.labels
    train, valid = torch.arange(len(rows)) % 2 == 0, torch.arange(len(rows)) % 2 == 1

    def accuracy(features: torch.Tensor) -> float:
        """Of the nearest class's mean."""
        means = torch.stack([features[train & (labels == each)].mean(0) for each in range(20)])
        return (torch.cdist(features[valid], means).argmin(1) == labels[valid]).float().mean()

    alone = accuracy(rows)
    mean = torch.segment_reduce(rows[indices.long()], "mean", offsets=indptr.long())
    assert 0.1 < alone < 0.6
    assert accuracy(mean) > alone + 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_the_seed_decides_all(dtype):
    first, again = (generate_igbh(SMALL, dtype=dtype) for _ in range(2))
    other = generate_igbh(IgbhSpec(5e-5, 20, 16, seed=1), dtype=dtype)
    assert first.features.dtype == dtype
    for a, b in zip(first.edges.values(), again.edges.values(), strict=True):
        assert torch.equal(a.indptr, b.indptr) and torch.equal(a.indices, b.indices)
    words = [each.features.view(torch.uint8) for each in (first, again, other)]
    assert torch.equal(words[0], words[1]) and not torch.equal(words[0], words[2])
    cites = "paper", "cites", "paper"
    assert not torch.equal(first.edges[cites].indptr, other.edges[cites].indptr)


def test_chunks_do_not_matter_to_structure(small, monkeypatch):
    monkeypatch.setattr("dgl_mgpu.data.igbh._CHUNK", 4096)
    pieces = generate_igbh(IgbhSpec(5e-5, 20, 16))
    for etype, (indptr, _) in small.edges.items():
        if etype[1] in ("rev_written_by", "rev_topic", "rev_affiliated_to"):
            assert torch.equal(pieces.edges[etype].indptr, indptr)
    counts = [small.num_nodes[each] for each in NODE_TYPES]
    bounds = list(itertools.accumulate(counts, initial=0))
    for ntype, (begin, end) in zip(NODE_TYPES, itertools.pairwise(bounds), strict=True):
        assert pieces.features_of(ntype).shape == (end - begin, 16)
        # Rows of every chunk were written: noise of unit variance.
        assert pieces.features_of(ntype).float().std(1).min() > 0.2


def test_what_fits():
    for dtype in (torch.float16, torch.float8_e4m3fn):
        scale = largest_scale(100 << 30, dtype)
        taken = IgbhSpec(scale).num_bytes(dtype)
        assert 0.999 * (100 << 30) < taken <= 100 << 30
    data = generate_igbh(SMALL)
    held = sum(t.nbytes for csc in data.edges.values() for t in csc)
    held += data.features.nbytes + data.labels.nbytes
    assert 0.5 * SMALL.num_bytes() < held < 1.05 * SMALL.num_bytes()


@pytest.mark.parametrize(
    "values", [{"scale": 0.0}, {"num_classes": 1}, {"homophily": 1.5}, {"seed": -1}]
)
def test_values_out_of_range(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        IgbhSpec(**values)


def test_types_that_do_not_fit():
    with pytest.raises(ConfigError, match="int64, or a smaller scale"):
        generate_igbh(IgbhSpec(0.9))
    with pytest.raises(ConfigError, match="float16"):
        generate_igbh(SMALL, dtype=torch.int8)


def test_as_a_data_set():
    data = load_hetero("generated-igbh", "/nowhere", scale=5e-5, num_classes=20, num_features=16)
    graph = generate_igbh(SMALL)
    assert data.target == "paper" and tuple(data.edges) == CANONICAL_ETYPES
    assert data.widths == dict.fromkeys(NODE_TYPES, 16)
    for etype, (indptr, indices) in graph.edges.items():
        np.testing.assert_array_equal(data.edges[etype].indptr, indptr)
        np.testing.assert_array_equal(data.edges[etype].indices, indices)
    for ntype in NODE_TYPES:
        assert torch.equal(data.node_features[ntype]["feat"], graph.features_of(ntype))
    np.testing.assert_array_equal(data.labels, graph.labels)
    split = np.concatenate([data.train, data.valid, data.test])
    np.testing.assert_array_equal(np.sort(split), np.arange(graph.num_nodes["paper"]))
    dataclasses.replace(data, checked=False)  # all of it is as it should be
