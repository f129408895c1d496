"""All hops over edge types, by weight and by time, on CUDA: bit for bit the CPU's results."""

from __future__ import annotations

from dataclasses import replace as with_fields

import numpy as np
import pytest
import torch

from dgl_mgpu.errors import IdOutOfRangeError, InvalidWeightError
from dgl_mgpu.ops import (
    EdgeTimes,
    SampleKey,
    library,
    sample_blocks,
    sample_etype_blocks,
    sample_etype_blocks_async,
    workspace,
)
from dgl_mgpu.ops import etype_hops as cuda
from dgl_mgpu.ops import view as view_module
from dgl_mgpu.ops.etype_hops import hop_by_hop
from tests.kernels.cuda_views import on_device
from tests.kernels.test_sample import memory_held, refuse_memory
from tests.ops.etype_graphs import ETYPES, hetero_case
from tests.ops.test_sample import GRAPHS, batches
from tests.ops.test_sample_weighted import random_times, random_weights
from tests.ops.views import LAYOUTS, power_law_graph, row_view

KEY = SampleKey(seed=3, epoch=1, batch=4, hop=0, etype=1)


class CountedMark:
    """A mark, for which the host waits as for the device."""

    def __init__(self, mark, waits: Waits) -> None:
        self._mark, self._waits = mark, waits

    def synchronize(self) -> None:
        self._waits.count += 1
        self._mark.synchronize()


class Waits:
    """Counts how often the host waits for the device."""

    def __init__(self, driver) -> None:
        self._driver, self.count = driver, 0

    def __getattr__(self, name):
        return getattr(self._driver, name)

    def synchronize(self, device) -> None:
        self.count += 1
        self._driver.synchronize(device)

    def mark(self, device) -> CountedMark:
        return CountedMark(self._driver.mark(device), self)


@pytest.fixture
def on_gpu(where, monkeypatch):
    """Call a public function as if its tensors lay on the device, and count the waits."""
    waits = Waits(cuda.gpu.driver)
    monkeypatch.setattr(cuda.gpu, "driver", waits)
    monkeypatch.setattr(cuda, "hop_by_hop", None)  # nothing here falls back to it

    def call(function, *args, **kwargs):
        with monkeypatch.context() as patch:
            if where.type == "cpu":
                start = cuda.sample_etype_hops_async
                patch.setitem(library._direct, ("sample_etype_hops_async", "cpu"), start)
            waits.count = 0
            found = function(*args, **kwargs)
            assert waits.count == 1
        return found

    return call


def same(found, expected) -> bool:
    if isinstance(found, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found.cpu(), expected)
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanouts", [[3, 2], [0, 40], [2, 2, 2]])
def test_by_weight(where, on_gpu, fanouts, replace):
    graphs = [graph for graph in GRAPHS.values() if graph.num_rows == graph.num_cols]
    for number, graph in enumerate(graphs):
        dtype = (torch.float32, torch.float64, torch.bool)[number % 3]
        weights = row_view(random_weights(graph, dtype))
        view = graph.view(idtype=(torch.int32, torch.int64)[number % 2])
        for seeds in batches(graph):
            seeds = seeds[:40].to(view.idtype)
            expected = sample_blocks(view, seeds, fanouts, KEY, replace=replace, weights=weights)
            found = on_gpu(
                sample_blocks, on_device(view, where), seeds.to(where), fanouts, KEY,
                replace=replace, weights=on_device(weights, where),
            )  # fmt: skip
            assert same(found, expected)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_by_time(where, on_gpu, idtype, dtype, replace):
    graph = power_law_graph(100, 900, seed=5)
    seeds = torch.arange(0, 100, 3, dtype=idtype).repeat(2)
    edges, until = random_times(graph, dtype, len(seeds))
    mask = row_view(random_weights(graph, torch.uint8))
    view = graph.view(LAYOUTS["three tiers"], idtype, np.random.default_rng(0))
    for weights in (None, mask):
        expected = sample_blocks(
            view, seeds, [4, 3], KEY, replace=replace, weights=weights,
            times=EdgeTimes(row_view(edges), until),
        )  # fmt: skip
        found = on_gpu(
            sample_blocks, on_device(view, where, host_segments=True), seeds.to(where), [4, 3],
            KEY, replace=replace, weights=None if weights is None else on_device(weights, where),
            times=EdgeTimes(on_device(row_view(edges), where), until.to(where)),
        )  # fmt: skip
        assert same(found, expected)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("case", ["uniform", "weighted", "timed", "uniform, in order"])
def test_edge_types(where, on_gpu, monkeypatch, case, idtype):
    case, in_order, _ = case.partition(", in order")
    views, seeds, options = hetero_case(case, idtype)
    if in_order:
        monkeypatch.setattr(view_module, "LISTED_ROWS", 3)
        views = {etype: with_fields(view, host_share=1.0) for etype, view in views.items()}
    given = {name: dict(each) for name, each in options.items()}
    for each in given.values():
        for name, value in each.items():
            moved = isinstance(value, torch.Tensor)
            each[name] = value.to(where) if moved else on_device(value, where)
    fanouts = [dict(zip(ETYPES, row, strict=True)) for row in ([3, 2, 0], [2, 2, 3])]
    for replace in (False, True):
        for chosen in (seeds, {"user": seeds["user"]}, {"item": seeds["item"][:0]}, {}):
            until = {n: u for n, u in options.get("until", {}).items() if n in chosen}
            until = {n: u[: len(chosen[n])] for n, u in until.items()}
            timed = {"until": until} if case == "timed" else {}
            expected = sample_etype_blocks(
                views, chosen, [*fanouts, 2], KEY, replace=replace, **options | timed
            )
            timed = {"until": {n: u.to(where) for n, u in until.items()}} if timed else {}
            found = on_gpu(
                sample_etype_blocks,
                {etype: on_device(view, where) for etype, view in views.items()},
                {ntype: ids.to(where) for ntype, ids in chosen.items()},
                [*fanouts, 2],
                KEY,
                replace=replace,
                **given | timed,
            )
            assert same(found, expected)
    kernels = getattr(cuda.gpu.driver, "launched", ())
    assert not in_order or where.type != "cpu" or any(
        "sample_hop<" in kernel.expression and kernel.expression.endswith("true>")
        for kernel in kernels
    )  # fmt: skip


def test_what_has_no_bound_is_sampled_hop_by_hop(where, monkeypatch):
    views, seeds, _ = hetero_case("uniform", torch.int64)
    expected = sample_etype_blocks(views, seeds, [2, -1], KEY)
    if where.type == "cpu":
        called = []
        monkeypatch.setattr(cuda, "hop_by_hop", lambda *a: called.append(a) or hop_by_hop(*a))
        start = cuda.sample_etype_hops_async
        monkeypatch.setitem(library._direct, ("sample_etype_hops_async", "cpu"), start)
    found = sample_etype_blocks(
        {etype: on_device(view, where) for etype, view in views.items()},
        {ntype: ids.to(where) for ntype, ids in seeds.items()},
        [2, -1],
        KEY,
    )
    assert same(found, expected)
    assert where.type != "cpu" or called


def test_samples_start_before_others_are_finished(where, monkeypatch):
    if where.type == "cpu":
        start = cuda.sample_etype_hops_async
        monkeypatch.setitem(library._direct, ("sample_etype_hops_async", "cpu"), start)
    views, seeds, _ = hetero_case("uniform", torch.int64)
    there = {etype: on_device(view, where) for etype, view in views.items()}
    keys = [SampleKey(3, 1, batch) for batch in range(3)]
    futures = [
        sample_etype_blocks_async(there, {n: ids.to(where) for n, ids in seeds.items()}, [2, 3], k)
        for k in keys
    ]
    del futures[1]  # given up
    found = [future.result() for future in reversed(futures)]
    monkeypatch.undo()
    for key, blocks in zip((keys[2], keys[0]), found, strict=True):
        assert same(blocks, sample_etype_blocks(views, seeds, [2, 3], key))


@pytest.mark.parametrize("bad", [-1, 200])
@pytest.mark.parametrize("timed", [False, True])
def test_a_seed_that_is_no_node(where, on_gpu, timed, bad):
    graph = GRAPHS["power law"]
    seeds = torch.tensor([5, 6, bad, 7, bad], device=where)
    weights = on_device(row_view(torch.ones(3000)), where)
    times = EdgeTimes(on_device(row_view(torch.zeros(3000)), where), torch.ones(5, device=where))
    with pytest.raises(IdOutOfRangeError, match=f"id {bad} at place 2"):
        on_gpu(
            sample_blocks, on_device(graph.view(), where), seeds, [3, 3], KEY,
            weights=weights, times=times if timed else None,
        )  # fmt: skip


def test_a_bad_weight_two_hops_away(where, on_gpu):
    graph = GRAPHS["power law"]
    seeds = torch.arange(10)
    first = sample_blocks(graph.view(), seeds, [3], KEY, weights=row_view(torch.ones(3000)))
    node = int(first[0].src_nodes[-1])
    weights = torch.ones(3000)
    weights[graph.edge_ids(node)[0]] = float("nan")
    message = f"edge {int(graph.edge_ids(node)[0])} of node {node} has a weight"
    with pytest.raises(InvalidWeightError, match=message):
        sample_blocks(graph.view(), seeds, [3, 3], KEY, weights=row_view(weights))
    with pytest.raises(InvalidWeightError, match=message):
        on_gpu(
            sample_blocks, on_device(graph.view(), where), seeds.to(where), [3, 3], KEY,
            weights=on_device(row_view(weights), where),
        )  # fmt: skip


def large_room():
    """A graph, seeds, fanouts and options, for much less than there must be room for."""
    graph = power_law_graph(3000, 20000, seed=8)
    weights = random_weights(graph, torch.float64)
    return graph.view(), torch.arange(2000), [900, 30], {"weights": row_view(weights)}


def test_a_small_sample_does_not_hold_room_for_a_large_one(where, on_gpu, monkeypatch):
    monkeypatch.setattr(workspace, "_LARGE_BUFFER", 32 << 20)
    view, seeds, fanouts, options = large_room()
    expected = sample_blocks(view, seeds, fanouts, KEY, **options)
    there = {name: on_device(each, where) for name, each in options.items()}
    found = on_gpu(sample_blocks, on_device(view, where), seeds.to(where), fanouts, KEY, **there)
    assert same(found, expected)
    tensors = [each for block in found for each in block if isinstance(each, torch.Tensor)]
    assert memory_held(tensors) < 4 << 20


def test_what_torch_gets_is_memory_of_its_own(where, monkeypatch):
    """As torch.compile takes results of an operator to be, which reads 16 bytes at a time."""
    operator, given = torch.ops.dgl_mgpu.sample_etype_hops, []
    views, seeds, _ = hetero_case("uniform", torch.int64)
    monkeypatch.setattr(operator, "default", lambda *arguments: given.append(arguments))
    monkeypatch.delitem(library._direct, ("sample_etype_hops_async", "cuda"))
    # The operator gets addresses of what is in it.
    placed = {etype: on_device(view, where) for etype, view in views.items()}
    with pytest.raises(TypeError):
        sample_etype_blocks(
            placed,
            {ntype: nodes.to(where) for ntype, nodes in seeds.items()},
            [3, 3],
            KEY,
        )
    found = cuda._sample_etype_hops_cuda(*given[0])
    expected = cuda.sample_etype_hops_async(*given[0]).result()
    pieces = [each for of_kind in found[:-1] for each in of_kind]
    assert same(pieces, [each.cpu() for of_kind in expected[:-1] for each in of_kind])
    assert {each.data_ptr() % 16 for each in pieces} == {0}
    assert len({each.untyped_storage().data_ptr() for each in pieces}) == len(pieces)


def test_without_room_for_the_largest_sample(where, monkeypatch):
    view, seeds, fanouts, options = large_room()
    expected = sample_blocks(view, seeds, fanouts, KEY, **options)
    if where.type == "cpu":
        operator = torch.ops.dgl_mgpu.sample_etype_hops
        monkeypatch.setattr(operator, "default", cuda._sample_etype_hops_cuda)
    there = {name: on_device(each, where) for name, each in options.items()}
    refused = refuse_memory(monkeypatch, 8 << 20)
    found = sample_blocks(on_device(view, where), seeds.to(where), fanouts, KEY, **there)
    assert refused and same(found, expected)
