"""All hops over edge types, by weight and by time, against the contract written out slowly."""

from __future__ import annotations

from dataclasses import replace as with_fields

import pytest
import torch

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.ops import EdgeTimes, SampleKey, sample_blocks, sample_etype_blocks
from tests.ops import reference
from tests.ops.etype_graphs import BUYS, ETYPES, FOLLOWS, GRAPHS, ITEMS, USERS, hetero_case
from tests.ops.test_sample_weighted import random_times
from tests.ops.views import LAYOUTS, elsewhere, power_law_graph, row_view

KEY = SampleKey(seed=3, epoch=1, batch=4, hop=2)


def numbers(rows):
    """The values behind a view of one tier and part."""
    return None if rows is None else rows.owner[0].numpy()


def check_hop(block, nodes, fanouts, hop, replace, weights=None, times=None):
    """Check a block from ``nodes``, lists of (node, time) by type; return its source nodes."""
    found: dict[str, list] = {"user": [], "item": []}
    joined = {ntype: list(each) for ntype, each in nodes.items()}
    for number, etype in enumerate(ETYPES):
        source, _, target = etype
        key = with_fields(KEY, hop=KEY.hop + hop, etype=number).fold()
        indptr, neighbors, eids = reference.sample(
            GRAPHS[etype],
            [node for node, _ in nodes[target]],
            fanouts[number],
            key,
            replace,
            numbers((weights or {}).get(etype)),
            numbers((times or {}).get(etype)),
            [time for _, time in nodes[target]],
        )
        assert block.edges[etype].indptr.tolist() == indptr
        assert block.edges[etype].eids.tolist() == eids
        moments = [nodes[target][i][1] for i in range(len(indptr) - 1)
                   for _ in range(indptr[i], indptr[i + 1])]  # fmt: skip
        found[source].append((etype, list(zip(neighbors, moments, strict=True))))
    for ntype, parts in found.items():
        reached = [pair for _, part in parts for pair in part]
        joined[ntype], local = reference.append_unique(nodes[ntype], reached)
        for etype, part in parts:
            assert block.edges[etype].src.tolist() == local[: len(part)]
            local = local[len(part) :]
        assert block.src_nodes[ntype].tolist() == [node for node, _ in joined[ntype]]
        assert block.num_dst[ntype] == len(nodes[ntype])
        if times:
            assert block.src_times[ntype].tolist() == [time for _, time in joined[ntype]]
    return joined


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("case", ["uniform", "weighted", "timed"])
def test_matches_reference(case, idtype, replace):
    views, seeds, options = hetero_case(case, idtype)
    rows = ([3, 2, 0], [2, 2, 3], [-1, 1, 2])
    fanouts = [dict(zip(ETYPES, row, strict=True)) for row in rows]
    blocks = sample_etype_blocks(views, seeds, fanouts, KEY, replace=replace, **options)
    until = options.pop("until", {})
    nodes = {}
    for ntype in ("user", "item"):
        moments = until[ntype].tolist() if until else [None] * len(seeds[ntype])
        nodes[ntype] = list(zip(seeds[ntype].tolist(), moments, strict=True))
    for hop, (block, row) in enumerate(zip(blocks[::-1], rows[::-1], strict=True)):
        nodes = check_hop(block, nodes, row, hop, replace, **options)
        assert (block.src_times is None) == (case != "timed")
        for etype in ETYPES:
            assert block.edges[etype].src.dtype == block.edges[etype].eids.dtype == idtype
            assert block.src_nodes[etype[0]].dtype == idtype


def test_an_edge_type_without_times_has_all_its_edges():
    views, seeds, options = hetero_case("timed", torch.int64)
    late = {ntype: torch.full_like(each, -1) for ntype, each in options["until"].items()}
    times = {FOLLOWS: options["times"][FOLLOWS]}
    (block,) = sample_etype_blocks(views, seeds, [-1], KEY, times=times, until=late)
    assert len(block.edges[FOLLOWS].eids) == 0
    degrees = [GRAPHS[BUYS].degree(item) for item in seeds["item"].tolist()]
    assert block.edges[BUYS].indptr.diff().tolist() == degrees


def test_types_without_seeds():
    views, seeds, _ = hetero_case("uniform", torch.int64)
    blocks = sample_etype_blocks(views, {"item": seeds["item"]}, [2, 2], KEY)
    assert blocks[1].num_dst == {"user": 0, "item": 3}
    assert blocks[0].num_dst["user"] == len(blocks[1].src_nodes["user"]) > 0
    assert sample_etype_blocks(views, {}, [], KEY) == []


GRAPH = power_law_graph(200, 3000, seed=0)


def seen(block_list, seed_row):
    """The edges that a row of the last layer depends on, as lists by layer."""
    rows, found = {seed_row}, []
    for block in reversed(block_list):
        edges = [e for row in sorted(rows) for e in range(block.indptr[row], block.indptr[row + 1])]
        found.append([int(block.eids[edge]) for edge in edges])
        rows |= {int(block.src[edge]) for edge in edges}
    return [sorted(set(layer)) for layer in found]


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_no_seed_sees_the_future_or_its_company(dtype):
    """Over three hops: edges in time only, and those it sees in a batch of its own."""
    edges, until = random_times(GRAPH, dtype, 40)
    seeds = torch.arange(0, 80, 2)
    seeds[1::2] = seeds[::2]  # every seed at two times
    together = sample_blocks(
        GRAPH.view(), seeds, [3, 3, 3], KEY, times=EdgeTimes(row_view(edges), until)
    )
    total = 0
    for row, seed in enumerate(seeds.tolist()):
        mine = seen(together, row)
        assert all(edges[eid] <= until[row] for layer in mine for eid in layer)
        alone = sample_blocks(
            GRAPH.view(), torch.tensor([seed]), [3, 3, 3], KEY,
            times=EdgeTimes(row_view(edges), until[row : row + 1]),
        )  # fmt: skip
        assert mine == seen(alone, 0)
        total += sum(map(len, mine))
    assert total > 100


def test_times_of_source_nodes():
    edges = torch.arange(3000)
    until = torch.tensor([1000, 3000, 1000])
    seeds = torch.tensor([7, 7, 9])
    blocks = sample_blocks(
        GRAPH.view(), seeds, [5, 5], KEY, times=EdgeTimes(row_view(edges), until)
    )
    assert blocks[1].src_times[:3].tolist() == [1000, 3000, 1000]
    pairs = list(zip(blocks[0].src_nodes.tolist(), blocks[0].src_times.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)  # the seeds differ in node or time
    assert {time for _, time in pairs} == {1000, 3000}
    for block in blocks:
        rows = torch.arange(block.num_dst).repeat_interleave(block.indptr.diff())
        assert torch.equal(block.src_times[block.src], block.src_times[rows])


def test_times_that_are_no_times():
    edges = torch.zeros(3000, dtype=torch.float64)
    until = torch.tensor([float("nan"), 1.0, float("nan")], dtype=torch.float64)
    times = EdgeTimes(row_view(edges), until)
    blocks = sample_blocks(GRAPH.view(), torch.tensor([3, 4, 3]), [2, 2], KEY, times=times)
    assert blocks[1].indptr.diff().tolist() == [0, min(2, GRAPH.degree(4)), 0]


def test_bad_arguments():
    views, seeds, options = hetero_case("timed", torch.int64)
    weights = {("user", "likes", "item"): None}
    for arguments, kwargs, message in (
        (({}, seeds, [2]), {}, "no edge types"),
        ((views, {"shop": seeds["item"]}, [2]), {}, "seeds names the unknown type 'shop'"),
        ((views, seeds, [2]), {"weights": weights}, "weights names the unknown type"),
        ((views, seeds, [{FOLLOWS: 2}]), {}, "no fanout for edge type"),
        ((views, seeds, [-2]), {}, "fanout is -2"),
        ((views, seeds, [2]), {"times": options["times"]}, "times of seeds of type"),
        ((views, seeds, [2]), {"until": options["until"]}, "pass times of edges and of seeds"),
        ((views, seeds, [2]), {"sms": -1}, "sms is -1"),
        ((views, {"item": seeds["item"].to("meta")}, [2]), {}, "ids are on 'meta'"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            sample_etype_blocks(*arguments, KEY, **kwargs)
    mixed = {**options["until"], "item": torch.zeros(3)}
    with pytest.raises(InvalidInputError, match="all integers or all floating-point"):
        sample_etype_blocks(views, seeds, [2], KEY, times=options["times"], until=mixed)
    other = views | {BUYS: GRAPHS[FOLLOWS].view()}
    with pytest.raises(InvalidInputError, match=f"{ITEMS}|{USERS} nodes of type"):
        sample_etype_blocks(other, seeds, [2], KEY)
    narrow = views | {BUYS: GRAPHS[BUYS].view(LAYOUTS["single"], torch.int32)}
    apart = views | {BUYS: elsewhere(GRAPHS[BUYS].view())}
    for mixed in (narrow, apart):
        with pytest.raises(InvalidInputError, match="same id type and device"):
            sample_etype_blocks(mixed, seeds, [2], KEY)


@pytest.mark.parametrize("case", ["uniform", "timed"])
@pytest.mark.parametrize(
    ("bad", "told"), [(-7, -7), (ITEMS, ITEMS), (ITEMS + 7, ITEMS + 7), (2**32, 2**31 - 1)]
)
def test_a_seed_that_is_no_node(case, bad, told):
    views, seeds, options = hetero_case(case, torch.int32)
    seeds["item"] = torch.tensor([3, bad, 4])
    with pytest.raises(IdOutOfRangeError, match=f"id {told} at place 1"):
        sample_etype_blocks(views, seeds, [2, 2], KEY, **options)


@pytest.mark.parametrize("case", ["uniform", "weighted", "timed"])
def test_registration(case):
    views, seeds, options = hetero_case(case, torch.int64)
    captured = []
    operator = torch.ops.dgl_mgpu.sample_etype_hops
    original = operator.default
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "default", lambda *a: captured.append(a) or original(*a))
        sample_etype_blocks(views, seeds, [2, 3], KEY, **options)
    torch.library.opcheck(original, captured[0], test_utils=("test_schema", "test_faketensor"))
