"""Uniform sampling, append-unique and all hops as CUDA kernels: bit for bit the CPU's results."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace as with_fields
from functools import partial

import numpy as np
import pytest
import torch

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.ops import (
    SampleFuture,
    SampleKey,
    append_unique,
    blocks_cuda,
    device,
    library,
    sample_blocks,
    sample_blocks_async,
    sample_neighbors,
    unique,
    workspace,
)
from dgl_mgpu.ops import view as view_module
from dgl_mgpu.ops.blocks import _blocks, hop_by_hop
from dgl_mgpu.ops.sample import _sample_neighbors_cuda
from tests.kernels.cuda_views import on_device
from tests.ops.test_sample import GRAPHS, batches
from tests.ops.views import LAYOUTS, Graph, power_law_graph

KEY = SampleKey(seed=3, epoch=1, batch=4, hop=0)


def sample(view, seeds, fanout, replace=False):
    return _sample_neighbors_cuda(
        seeds, view.tiers, view.pointers, view.position, view.num_rows, view.idtype,
        fanout, replace, KEY.fold(),
    )  # fmt: skip


def same(left, right) -> bool:
    return all(torch.equal(a.cpu(), b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [0, 1, 3, 5, 8, 13, 16, 30, 33, 100, -1])
def test_one_hop(where, fanout, replace):
    for number, graph in enumerate(GRAPHS.values()):
        idtype = (torch.int32, torch.int64)[number % 2]
        view = graph.view(idtype=idtype)
        for seeds in batches(graph):
            expected = sample_neighbors(view, seeds, fanout, KEY, replace=replace)
            found = sample(on_device(view, where), seeds.to(where), fanout, replace)
            assert same(found, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed_dtype", [torch.int32, torch.int64])
def test_one_hop_over_tiers(where, layout, seed_dtype):
    graph = power_law_graph(100, 900, seed=5)
    seeds = torch.arange(100, dtype=seed_dtype)
    for shuffle in (None, np.random.default_rng(0)):
        view = graph.view(LAYOUTS[layout], torch.int32, shuffle)
        expected = sample_neighbors(view, seeds, 4, KEY)
        found = sample(on_device(view, where, host_segments=True), seeds.to(where), 4)
        assert same(found, expected)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_many_picks_of_a_hub(where, idtype):
    """As many as would take minutes, were each compared with all before."""
    degree = 500_000
    view = Graph([0, degree, degree + 3], np.arange(degree + 3) % 2).view(idtype=idtype)
    seeds = torch.tensor([1, 0])
    for fanout in (400_000, 20_000):
        expected = sample_neighbors(view, seeds, fanout, KEY)
        assert same(sample(on_device(view, where), seeds.to(where), fanout), expected)


@pytest.mark.parametrize("fanout", [3, -1])
@pytest.mark.parametrize("bad", [-1, 200])
def test_a_seed_that_is_no_node(where, fanout, bad):
    seeds = torch.tensor([5, 6, bad, 7, bad], device=where)
    view = on_device(GRAPHS["power law"].view(), where)
    with pytest.raises(IdOutOfRangeError, match=f"id {bad} at place 2"):
        sample(view, seeds, fanout)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_append_unique(where, dtype):
    random = np.random.default_rng(1)
    for num_seeds, count, bound in ((0, 0, 1), (3, 0, 9), (0, 7, 3), (50, 2000, 300), (1, 1, 1)):
        # Repeated seeds, too: a neighbor gets the number of the first.
        seeds = torch.from_numpy(random.integers(0, bound, num_seeds)).to(dtype)
        neighbors = torch.from_numpy(random.integers(0, bound, count)).to(dtype)
        found = unique._append_unique_cuda(seeds.to(where), neighbors.to(where))
        assert same(found, append_unique(seeds, neighbors))


def test_append_unique_of_a_negative_id(where):
    with pytest.raises(IdOutOfRangeError, match="negative id -4 at place 3"):
        unique._append_unique_cuda(
            torch.tensor([1, 2], device=where), torch.tensor([5, -4, 1, -1], device=where)
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_append_unique_of_more_nodes_than_a_table_holds(where, dtype):
    seeds = torch.zeros(1, dtype=dtype, device=where).expand(700_000_000)
    neighbors = torch.ones(1, dtype=dtype, device=where).expand(732_000_000)
    with pytest.raises(InvalidInputError, match="there may be 1432000000 nodes"):
        unique._append_unique_cuda(seeds, neighbors)


def test_append_unique_raises_what_a_gather_found(where):
    seeds = torch.zeros(1, dtype=torch.int64, device=where)
    device.fault_record(seeds.device).copy_(torch.tensor([1, 7, 5]))
    with pytest.raises(IdOutOfRangeError, match="id 7 is not among the 5 rows"):
        unique._append_unique_cuda(seeds, seeds)


def hops(view, seeds, fanouts, replace=False, start=blocks_cuda.sample_hops_async, **more):
    keys = [SampleKey(3, 1, 4, hop).fold() for hop in range(len(fanouts))]
    return start(
        seeds, view.tiers, view.pointers, view.position, view.num_rows, view.num_cols,
        view.idtype, fanouts, replace, keys, **more,
    ).result()  # fmt: skip


def test_all_hops(where):
    graphs = [graph for graph in GRAPHS.values() if graph.num_rows == graph.num_cols]
    cases = [([5, 5, 5], False), ([3], False), ([2, 40], False), ([4, 3], True), ([0, 2], False)]
    for number, (fanouts, replace) in enumerate(cases):
        for graph in graphs:
            view = graph.view(idtype=(torch.int32, torch.int64)[number % 2])
            for seeds in batches(graph):
                seeds = seeds.to(view.idtype)
                blocks = sample_blocks(view, seeds, fanouts[::-1], KEY, replace=replace)
                found = hops(on_device(view, where), seeds.to(where), fanouts, replace)
                nodes, indptrs, sources, eids = found
                assert torch.equal(nodes.cpu(), blocks[0].src_nodes)
                for hop, block in enumerate(reversed(blocks)):
                    hop_found = (indptrs[hop], sources[hop], eids[hop])
                    assert same(hop_found, (block.indptr, block.src, block.eids))


def test_all_hops_over_tiers(where):
    graph: Graph = power_law_graph(300, 4000, seed=6)
    view = graph.view(LAYOUTS["three tiers"], torch.int32, np.random.default_rng(2))
    seeds = torch.arange(0, 300, 7, dtype=torch.int32)
    blocks = sample_blocks(view, seeds, [5, 4, 3], KEY)
    found = hops(on_device(view, where, host_segments=True), seeds.to(where), [3, 4, 5])
    assert torch.equal(found[0].cpu(), blocks[0].src_nodes)
    assert same([each[2] for each in found[1:]], (blocks[0].indptr, blocks[0].src, blocks[0].eids))


@pytest.mark.parametrize("ordered_from", [1, 60, 1000])
@pytest.mark.parametrize("shuffled", [False, True])
def test_hops_in_the_order_of_addresses(where, monkeypatch, shuffled, ordered_from):
    """The same samples, whether all hops, the last ones or none have so many nodes."""
    monkeypatch.setattr(device, "MAX_BUCKETS", 1 << 5)  # fewer than nodes
    graph: Graph = power_law_graph(300, 4000, seed=6)
    draw = np.random.default_rng(2) if shuffled else None
    repeated = torch.tensor([7, 290, 7, 3])
    for idtype in (torch.int32, torch.int64):
        view = graph.view(LAYOUTS["three tiers"], idtype, draw)
        there = on_device(view, where, host_segments=True)
        for replace in (False, True):
            for seeds in (torch.arange(0, 300, 7), repeated, repeated[:0]):
                seeds = seeds.to(idtype)
                blocks = sample_blocks(view, seeds, [5, 20, 3], KEY, replace=replace)
                found = hops(there, seeds.to(where), [3, 20, 5], replace, ordered_from=ordered_from)
                assert torch.equal(found[0].cpu(), blocks[0].src_nodes)
                for hop, block in enumerate(reversed(blocks)):
                    expected = block.indptr, block.src, block.eids
                    assert same([each[hop] for each in found[1:]], expected)


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_order_is_that_of_positions(where, monkeypatch, shuffled):
    monkeypatch.setattr(device, "MAX_BUCKETS", 1 << 5)
    draw = np.random.default_rng(2) if shuffled else None
    graph: Graph = power_law_graph(3000, 9000, seed=6)
    view = graph.view(LAYOUTS["three tiers"], torch.int64, draw)
    seeds = torch.from_numpy(np.random.default_rng(1).permutation(3000))
    workspace.release()
    hops(on_device(view, where, host_segments=True), seeds.to(where), [2], ordered_from=1)
    order = workspace.workspace(seeds.to(where).device)._buffers["order"][:3000].cpu().long()
    assert torch.equal(order.sort()[0], torch.arange(3000))
    nodes = seeds[order]
    bucket = (view.position[nodes].long() if shuffled else nodes) >> device.buckets_of(3000)[0]
    assert (bucket.diff() >= 0).all() and len(bucket.unique()) > 20


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_seeds_in_order_of_a_graph_with_hardly_a_node(where, rows):
    graph = Graph([0] * (rows + 1), [])
    view = on_device(graph.view(), where)
    seeds = torch.arange(rows, device=where).repeat(30)
    for from_ in (0, 1):
        assert len(hops(view, seeds, [3], ordered_from=from_)[2][0]) == 0
    with pytest.raises(IdOutOfRangeError, match=f"id {rows} at place 0"):
        hops(view, torch.full((30,), rows, device=where), [3], ordered_from=1)


@pytest.mark.parametrize(
    ("share", "least"), [(0.0, 0), (1.0, 1 << 14), (0.5, 1 << 15), (1e-17, 0), (-1, 0)]
)
def test_from_how_many_nodes_on_they_are_put_in_order(share, least):
    view = with_fields(power_law_graph(30, 90, seed=1).view(), host_share=share)
    assert view.ordered_from == least
    assert with_fields(view, host_share=float("nan")).ordered_from == 0


def test_a_seed_that_is_no_node_among_those_in_order(where):
    view = on_device(GRAPHS["power law"].view(), where)
    seeds = torch.tensor([5, 6, 200, 7, -1], device=where)
    with pytest.raises(IdOutOfRangeError, match="id 200 at place 2"):
        hops(view, seeds, [3, 3], ordered_from=1)


@pytest.mark.parametrize(("share", "ordered"), [(0.0, False), (0.02, False), (0.1, True)])
def test_nodes_are_put_in_order_where_many_are_read_from_the_host(
    where, started_at_once, monkeypatch, share, ordered
):
    monkeypatch.setattr(view_module, "LISTED_ROWS", 20)
    kernels = []
    monkeypatch.setattr(blocks_cuda, "_launch", lambda *asked, launch=blocks_cuda._launch, **more: (
        kernels.append(launch(*asked, **more)) or kernels[-1]
    ))  # fmt: skip
    view = power_law_graph(3000, 30000, seed=7).view(idtype=torch.int32)
    seeds = torch.arange(40, dtype=torch.int32)
    workspace.release()
    sample_blocks_async(
        on_device(with_fields(view, host_share=share), where), seeds.to(where), [5, 5], KEY
    ).result()
    assert [kernel.expression.endswith("true>") for kernel, _ in kernels] == [ordered]


def test_all_hops_into_a_table_that_was_too_small(where):
    view = on_device(power_law_graph(3000, 30000, seed=7).view(idtype=torch.int32), where)
    few = torch.zeros(40, dtype=torch.int32, device=where)
    many = torch.arange(0, 3000, 75, dtype=torch.int32, device=where)
    expected = hops(view, many, [30, 30])
    workspace.release()
    for seeds in (few, few, many):  # a sample of few nodes shrinks the table
        found = hops(view, seeds, [30, 30])
    assert torch.equal(found[0], expected[0])
    for left, right in zip(found[1:], expected[1:], strict=True):
        assert same(left, [each.cpu() for each in right])


@pytest.fixture
def started_at_once(where, monkeypatch):
    """Where kernels are emulated, operators on CPU tensors take the way of a GPU, too."""
    start = blocks_cuda.sample_hops_async
    monkeypatch.setitem(library._direct, ("sample_hops_async", where.type), start)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_samples_start_before_others_are_finished(where, started_at_once, order):
    view = power_law_graph(3000, 30000, seed=7).view(idtype=torch.int32)
    there = on_device(view, where)
    batches = [torch.arange(first, 3000, 75, dtype=torch.int32) for first in (0, 20, 50)]
    keys = [SampleKey(3, 1, batch) for batch in range(3)]
    workspace.release()
    few = torch.zeros(40, dtype=torch.int32, device=where)
    for _ in range(2):  # a sample of few nodes shrinks the table, which is too small for the others
        sample_blocks(there, few, [30, 30], KEY)
    futures = [
        sample_blocks_async(there, seeds.to(where), [30, 30], key)
        for seeds, key in zip(batches, keys, strict=True)
    ]
    found = {number: futures[number].result() for number in order}
    for number, (seeds, key) in enumerate(zip(batches, keys, strict=True)):
        for block, expected in zip(found[number], cpu_blocks(view, seeds, key), strict=True):
            assert same(block[:4], expected[:4]) and block.num_dst == expected.num_dst


@pytest.mark.parametrize("by", ["larger samples", "a release"])
def test_working_memory_made_anew_between_start_and_result(where, started_at_once, by):
    view = power_law_graph(3000, 30000, seed=7).view(idtype=torch.int32)
    there = on_device(view, where)
    few = torch.zeros(40, dtype=torch.int32, device=where)
    workspace.release()
    future = sample_blocks_async(there, few, [5, 5], KEY)
    if by == "a release":
        workspace.workspace(where).release()
    else:
        sample_blocks(there, torch.arange(2000, dtype=torch.int32, device=where), [30, 30], KEY)
    future.result()  # makes the table smaller
    seeds = torch.arange(40, dtype=torch.int32)
    found = sample_blocks(there, seeds.to(where), [5, 5], KEY)
    for block, expected in zip(found, cpu_blocks(view, seeds, KEY, [5, 5]), strict=True):
        assert same(block[:4], expected[:4])
    arguments = next(reversed(workspace.workspace(where).kept.values()))._arguments
    held = {each.data_ptr() for each in workspace.workspace(where)._buffers.values()}
    assert held <= {int(word) for word in np.frombuffer(arguments.tobytes(), np.int64)}


def test_a_sample_that_is_given_up_leaves_nothing(where, started_at_once):
    view = power_law_graph(3000, 30000, seed=7).view(idtype=torch.int32)
    there, seeds = on_device(view, where), torch.arange(40, dtype=torch.int32)
    workspace.release()
    space = workspace.workspace(where)
    for number in range(5):
        given_up = sample_blocks_async(there, seeds.to(where) + number, [5, 5], KEY)
        assert not space.reports
        del given_up
        assert len(space.reports) == 1
    found = sample_blocks_async(there, seeds.to(where), [5, 5], KEY).result()
    for block, expected in zip(found, cpu_blocks(view, seeds, KEY, [5, 5]), strict=True):
        assert same(block[:4], expected[:4])
    assert len(space.reports) == 1


def test_what_is_wrong_with_a_sample_is_raised_where_it_is_finished(where, started_at_once):
    there = on_device(GRAPHS["power law"].view(), where)
    bad = sample_blocks_async(there, torch.tensor([5, 200, 3], device=where), [3, 3], KEY)
    good = sample_blocks_async(there, torch.tensor([5, 3], device=where), [3, 3], KEY)
    with pytest.raises(IdOutOfRangeError, match="id 200 at place 1"):
        bad.result()
    assert good.result()[1].num_dst == 2


def cpu_blocks(view, seeds, key, fanouts=(30, 30)):
    """The oracle: the operator's CPU version, also where its GPU's is emulated."""
    hops = [*reversed(fanouts)]
    nodes, indptrs, sources, eids = hop_by_hop(
        seeds, view.tiers, view.pointers, view.position, view.num_rows, view.num_cols, view.idtype,
        hops, False, key.fold_hops(len(hops)),
    )  # fmt: skip
    return _blocks(nodes, indptrs, sources, eids)


def test_all_hops_from_a_seed_that_is_no_node(where):
    view = on_device(GRAPHS["power law"].view(), where)
    with pytest.raises(IdOutOfRangeError, match="id 200 at place 1"):
        hops(view, torch.tensor([5, 200, 3], device=where), [3, 3])


def test_all_hops_of_another_graph_at_the_same_addresses(where):
    """As of a store that was made when another had been closed."""
    graph = power_law_graph(100, 900, seed=5)
    views = [
        on_device(graph.view(LAYOUTS[layout], torch.int32, np.random.default_rng(number)), where)
        for number, layout in enumerate(["three tiers", "three tiers", "single"])
    ]
    seeds = torch.arange(0, 100, 3, dtype=torch.int32, device=where)
    expected = hops(views[0], seeds, [3, 4])
    for view in views[1:]:
        tiers, pointers = views[0].tiers[: len(view.tiers)], views[0].pointers
        tiers.copy_(view.tiers)
        pointers[: len(view.pointers)] = view.pointers
        found = hops(with_fields(view, tiers=tiers, pointers=pointers), seeds, [3, 4])
        assert torch.equal(found[0], expected[0])
        for left, right in zip(found[1:], expected[1:], strict=True):
            assert same(left, [each.cpu() for each in right])


def test_what_is_prepared_for_a_graph_does_not_hold_it(where):
    view = on_device(GRAPHS["power law"].view(shuffle=np.random.default_rng(0)), where)
    tensors = [weakref.ref(each) for each in (view.tiers, view.pointers, view.position)]
    hops(view, torch.arange(5, device=where), [3])
    del view
    gc.collect()  # a cycle does not hold it either
    assert all(tensor() is None for tensor in tensors)


def test_few_preparations_are_kept(where):
    view = on_device(GRAPHS["power law"].view(), where)
    kept = workspace.workspace(view.tiers.device).kept
    often = []
    for count in range(1, 50):
        hops(view, torch.arange(count, device=where), [2])
        hops(view, torch.arange(60, device=where), [2])
        often.append(next(reversed(kept.values())))
    assert len(kept) <= 32
    assert all(each is often[0] for each in often)


def memory_held(results) -> int:
    """Bytes of all that tensors are parts of."""
    storages = [each.untyped_storage() for each in results]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_a_small_sample_does_not_hold_room_for_a_large_one(where, monkeypatch):
    monkeypatch.setattr(workspace, "_LARGE_BUFFER", 32 << 20)
    graph = power_law_graph(3000, 20000, seed=8).view()
    view, seeds = on_device(graph, where), torch.arange(2000)
    nodes, indptrs, sources, eids = hops(view, seeds.to(where), [30, 1000])
    blocks = sample_blocks(graph, seeds, [1000, 30], KEY)
    assert torch.equal(nodes.cpu(), blocks[0].src_nodes)
    for hop, block in enumerate(reversed(blocks)):
        assert same((indptrs[hop], sources[hop], eids[hop]), (block.indptr, block.src, block.eids))
    assert memory_held([nodes, *indptrs, *sources, *eids]) < 4 << 20
    assert memory_held(sample(view, seeds.to(where), 3000)) < 4 << 20


def test_what_torch_gets_is_memory_of_its_own(where):
    """As torch.compile takes results of an operator to be, which reads 16 bytes at a time."""
    view = on_device(power_law_graph(3000, 20000, seed=8).view(), where)
    seeds = torch.arange(29, device=where)
    expected = hops(view, seeds, [3, 5])
    found = hops(
        view,
        seeds,
        [3, 5],
        start=lambda *arguments: SampleFuture(partial(blocks_cuda._sample_hops, *arguments)),
    )
    assert torch.equal(found[0], expected[0])
    for left, right in zip(found[1:], expected[1:], strict=True):
        assert same(left, [each.cpu() for each in right])
    pieces = [found[0], *found[1], *found[2], *found[3]]
    assert {each.data_ptr() % 16 for each in pieces} == {0}
    assert len({each.untyped_storage().data_ptr() for each in pieces}) == 7


def test_a_usual_sample_is_not_copied(where):
    view = on_device(power_law_graph(3000, 20000, seed=8).view(), where)
    nodes, _, sources, eids = hops(view, torch.arange(30, device=where), [10, 10])
    places = {each.untyped_storage().data_ptr() for each in (nodes, *sources, *eids)}
    assert len(places) == 1


def refuse_memory(monkeypatch, most_bytes: int) -> list[int]:
    """Have torch give no more bytes at a time; what it refuses from now on."""
    refused, empty = [], torch.empty

    def limited(*arguments, **options):
        made = empty(*arguments, **options)
        if made.nbytes > most_bytes:
            refused.append(made.nbytes)
            raise torch.cuda.OutOfMemoryError(f"{made.nbytes} bytes are not there")
        return made

    monkeypatch.setattr(torch, "empty", limited)
    return refused


def test_without_room_for_the_largest_sample(where, monkeypatch):
    graph = power_law_graph(3000, 20000, seed=8).view()
    view, seeds = on_device(graph, where), torch.arange(2000)
    blocks = sample_blocks(graph, seeds, [1000, 30], KEY)
    expected = sample_neighbors(graph, seeds, 3000, KEY)
    refused = refuse_memory(monkeypatch, 8 << 20)
    workspace.release()
    for _ in range(2):
        nodes, indptrs, sources, eids = hops(view, seeds.to(where), [30, 1000])
        assert torch.equal(nodes.cpu(), blocks[0].src_nodes)
        for hop, block in enumerate(reversed(blocks)):
            hop_found = (indptrs[hop], sources[hop], eids[hop])
            assert same(hop_found, (block.indptr, block.src, block.eids))
    assert refused
    refused.clear()
    assert same(sample(view, seeds.to(where), 3000), expected)
    assert refused


def padded(view, seeds, fanouts, replace=False):
    keys = [SampleKey(3, 1, 4, hop).fold() for hop in range(len(fanouts))]
    return blocks_cuda._sample_hops_padded(
        seeds, view.tiers, view.pointers, view.position, view.num_rows, view.num_cols,
        view.idtype, fanouts, replace, keys,
    )  # fmt: skip


def test_padded_hops(where, monkeypatch):
    """The same as the CPU's, whose padding tests/ops/test_padded_blocks.py checks; no wait."""
    monkeypatch.setattr(type(device.driver), "synchronize", None)
    graphs = [graph for graph in GRAPHS.values() if graph.num_rows == graph.num_cols]
    cases = [([5, 3], False), ([3], False), ([2, 40], False), ([4, 3], True), ([0, 2], False)]
    for number, (fanouts, replace) in enumerate(cases):
        for graph in graphs:
            view = graph.view(idtype=(torch.int32, torch.int64)[number % 2])
            for seeds in batches(graph):
                seeds = seeds[:40].to(view.idtype)
                expected = torch.ops.dgl_mgpu.sample_hops_padded(
                    seeds, view.tiers, view.pointers, view.position, view.num_rows, view.num_cols,
                    view.idtype, fanouts, replace,
                    [SampleKey(3, 1, 4, hop).fold() for hop in range(len(fanouts))],
                )  # fmt: skip
                found = padded(on_device(view, where), seeds.to(where), fanouts, replace)
                assert same(found[:-1], expected[:-1])
                assert torch.equal(found[-1][2:].cpu(), expected[-1][2:])


def test_padded_hops_from_a_seed_that_is_no_node(where):
    view = on_device(GRAPHS["power law"].view(), where)
    found = padded(view, torch.tensor([5, 200, 3], device=where), [3, 3])
    indptr = found[1][:4].cpu()
    assert indptr[1] == indptr[2]
    with pytest.raises(IdOutOfRangeError, match="id 200 is not among the 200 rows"):
        device.raise_faults(view.tiers.device, wait=True)
    device.raise_faults(view.tiers.device, wait=True)  # once
