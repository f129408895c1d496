"""Random walks and PinSAGE's neighbors: bit for bit against the reference, and statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.ops import SampleKey, pinsage_neighbors, random_walk
from tests.ops import reference
from tests.ops.test_sample import FALSE_ALARM, GRAPHS, KEY, regular, same
from tests.ops.views import LAYOUTS, Graph, elsewhere, power_law_graph

TO_ITEMS = Graph.of_lists([[3, 1, 4], [0, 2], [], [1, 1, 1], [4]], num_cols=6)
TO_USERS = Graph.of_lists([[0, 1], [2, 3, 4], [], [0], [4, 3], []], num_cols=5)


def occurrences(starts: list[int]) -> list[int]:
    return [starts[:place].count(start) for place, start in enumerate(starts)]


@pytest.mark.parametrize("restart", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", sorted(set(GRAPHS) - {"bipartite"}))
def test_matches_reference(name, restart):
    graph = GRAPHS[name]
    starts = np.random.default_rng(0).integers(0, graph.num_rows, 60).tolist()
    traces = random_walk(graph.view(), torch.tensor(starts), 5, KEY, restart_prob=restart)
    expected = [
        reference.walk([graph], start, number, [restart] * 5, KEY.fold())
        for start, number in zip(starts, occurrences(starts), strict=True)
    ]
    assert traces.tolist() == expected


def test_metapath_with_a_probability_for_each_step():
    starts = list(range(5)) * 8
    stop = [0.0, 0.0, 0.5, 0.0, 0.25]
    views = [TO_ITEMS.view(), TO_USERS.view(LAYOUTS["four parts"])]
    traces = random_walk(views, torch.tensor(starts), 5, KEY, restart_prob=stop)
    expected = [
        reference.walk([TO_ITEMS, TO_USERS], start, number, stop, KEY.fold())
        for start, number in zip(starts, occurrences(starts), strict=True)
    ]
    assert traces.tolist() == expected


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_id_types_give_the_same_walks(layout, shuffled, idtype):
    graph = GRAPHS["power law"]
    view = graph.view(LAYOUTS[layout], idtype, np.random.default_rng(0) if shuffled else None)
    starts = torch.arange(200).repeat(3)
    expected = random_walk(graph.view(), starts, 6, KEY, restart_prob=0.1)
    assert torch.equal(random_walk(view, starts.to(idtype), 6, KEY, restart_prob=0.1), expected)


def edges_along(graphs: list[Graph], traces: torch.Tensor, edges: torch.Tensor) -> bool:
    """Whether the edges are those from each node of a trace to the next, and -1 after its end."""
    for trace, taken in zip(traces.tolist(), edges.tolist(), strict=True):
        for step, (node, to, edge) in enumerate(zip(trace, trace[1:], taken, strict=False)):
            graph = graphs[step % len(graphs)]
            ids = [-1] if to < 0 else graph.edge_ids(node)[graph.neighbors(node) == to]
            if edge not in ids:
                return False
    return True


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_edges_of_walks(layout, idtype):
    random = np.random.default_rng(0)
    plain = GRAPHS["power law"]
    named = Graph(plain.indptr, plain.indices, eids=random.permutation(len(plain.indices)))
    starts = torch.arange(200)
    for graph in (plain, named):
        view = graph.view(LAYOUTS[layout], idtype, random)
        edges = torch.empty(200, 4, dtype=torch.int64)
        traces = random_walk(view, starts, 4, KEY, restart_prob=0.1, edges=edges)
        assert torch.equal(traces, random_walk(view, starts, 4, KEY, restart_prob=0.1))
        assert (traces[:, 1:] >= 0).any() and edges_along([graph], traces, edges)


def test_a_metapath_that_does_not_come_back():
    starts, edges = torch.arange(5).repeat(4), torch.empty(20, 3, dtype=torch.int64)
    path = [TO_ITEMS, TO_USERS, TO_ITEMS]
    views = [graph.view() for graph in path]
    traces = random_walk(views, starts, 3, KEY, edges=edges)
    assert torch.equal(traces, random_walk(views[:2], starts, 3, KEY))
    assert edges_along(path, traces, edges)
    assert torch.equal(random_walk(views, starts, 2, KEY), traces[:, :3])
    with pytest.raises(InvalidInputError, match="a step ends at one of 6 nodes"):
        random_walk(views, starts, 4, KEY)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_threads(on_threads, number):
    view, starts = power_law_graph(3000, 30_000, seed=4).view(), torch.arange(3000)

    def walk():
        chosen = pinsage_neighbors(
            view,
            starts,
            num_traversals=3,
            termination_prob=0.1,
            num_random_walks=4,
            num_neighbors=5,
            key=KEY,
        )
        return random_walk(view, starts, 4, KEY), *chosen

    assert same(on_threads(number, walk), on_threads(1, walk))


def test_children(in_children):
    view, starts = GRAPHS["power law"].view(), torch.arange(200).repeat(10)
    expected = random_walk(view, starts, 4, KEY)
    for (answer,) in in_children(lambda: (random_walk(view, starts, 4, KEY),)):
        assert torch.equal(answer, expected)


def test_no_walks_and_no_steps():
    view = GRAPHS["power law"].view()
    assert random_walk(view, torch.empty(0, dtype=torch.int64), 3, KEY).shape == (0, 4)
    assert random_walk(view, torch.tensor([4, 2]), 0, KEY).tolist() == [[4], [2]]


def test_steps_are_uniform_and_independent():
    nodes = 40_000
    graph = Graph(np.arange(nodes + 1) * 4, np.tile(np.arange(4), nodes), nodes)
    traces = random_walk(graph.view(), torch.arange(nodes), 3, KEY).numpy()[:, 1:]
    counts = np.histogramdd(traces, bins=4)[0].ravel()
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_walk_lengths_are_geometric():
    traces = random_walk(regular(40_000, 4).view(), torch.arange(40_000), 4, KEY, restart_prob=0.3)
    lengths = np.bincount((traces >= 0).sum(dim=1).numpy() - 1, minlength=5)
    expected = [0.3, 0.7 * 0.3, 0.7**2 * 0.3, 0.7**3 * 0.3, 0.7**4]
    assert stats.chisquare(lengths, np.array(expected) * 40_000).pvalue > FALSE_ALARM


def test_a_walk_ends_exactly_below_its_probability():
    view, end = regular(4, 4).view(), reference.block(0, 0, 2**31, KEY.fold())[1] >> 11
    for below, steps in ((end, 1), (end + 1, 0)):
        trace = random_walk(view, torch.tensor([0]), 1, KEY, restart_prob=below / 2**53)
        assert (trace >= 0).sum() == 1 + steps


def test_walks_from_one_start_are_independent():
    starts = torch.arange(20_000).repeat_interleave(2)
    traces = random_walk(regular(20_000, 4).view(), starts, 1, KEY)[:, 1].reshape(-1, 2).numpy()
    table = np.histogram2d(traces[:, 0], traces[:, 1], bins=4)[0]
    assert stats.chisquare(table.ravel()).pvalue > FALSE_ALARM


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_neighbors", [0, 2, 5, 100])
@pytest.mark.parametrize("path", [[GRAPHS["power law"]], [TO_ITEMS, TO_USERS]])
def test_pinsage_matches_reference(path, num_neighbors, idtype):
    seeds = [0, 4, 2, 1, 0]
    chosen = pinsage_neighbors(
        [graph.view(idtype=idtype) for graph in path],
        torch.tensor(seeds),
        num_traversals=3,
        termination_prob=0.2,
        num_random_walks=4,
        num_neighbors=num_neighbors,
        key=KEY,
    )
    assert chosen.neighbors.dtype == idtype
    hops = len(path)
    stop = [0.2 if step and step % hops == 0 else 0.0 for step in range(3 * hops)]
    for place, seed in enumerate(seeds):
        traces = [reference.walk(path, seed, number, stop, KEY.fold()) for number in range(4)]
        expected = reference.select_visited(traces, hops, num_neighbors)
        begin, end = chosen.indptr[place : place + 2]
        found = zip(
            chosen.neighbors[begin:end].tolist(), chosen.counts[begin:end].tolist(), strict=True
        )
        assert list(found) == expected
    assert chosen.indptr[-1] == len(chosen.neighbors) == len(chosen.counts)


def test_start_out_of_range():
    starts = torch.tensor([0, 199, 200, -1])
    with pytest.raises(IdOutOfRangeError, match="id 200 at place 2"):
        random_walk(GRAPHS["power law"].view(), starts, 3, KEY)


def test_bad_arguments():
    view, starts = GRAPHS["power law"].view(), torch.arange(3)
    with pytest.raises(InvalidInputError, match="dtype"):
        random_walk(view, starts.float(), 3, KEY)
    with pytest.raises(InvalidInputError, match="length"):
        random_walk(view, starts, -1, KEY)
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidInputError, match="restart_prob"):
            random_walk(view, starts, 3, KEY, restart_prob=bad)
    with pytest.raises(InvalidInputError, match="2 restart probabilities"):
        random_walk(view, starts, 3, KEY, restart_prob=[0.5, 0.5])
    for edges in (torch.empty(3, 3), torch.empty(3, 2, dtype=torch.int64)):
        with pytest.raises(InvalidInputError, match=r"shape \(3, 3\)"):
            random_walk(view, starts, 3, KEY, edges=edges)
    for path in (
        [],
        [TO_ITEMS.view()],
        [TO_ITEMS.view(), TO_USERS.view(idtype=torch.int32)],
        [TO_ITEMS.view(), elsewhere(TO_USERS.view())],
    ):
        with pytest.raises(InvalidInputError, match="pass"):
            random_walk(path, starts, 3, KEY)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_traversals", 0),
        ("num_random_walks", 0),
        ("num_neighbors", -1),
        ("termination_prob", 2.0),
    ],
)
def test_bad_pinsage_arguments(name, value):
    arguments = {
        "num_traversals": 3,
        "termination_prob": 0.2,
        "num_random_walks": 4,
        "num_neighbors": 5,
    }
    with pytest.raises(InvalidInputError, match=name):
        pinsage_neighbors(
            GRAPHS["power law"].view(), torch.arange(3), key=KEY, **{**arguments, name: value}
        )


def test_keys_name_walks():
    view, starts = GRAPHS["power law"].view(), torch.arange(200)
    assert not torch.equal(
        random_walk(view, starts, 3, SampleKey(1)), random_walk(view, starts, 3, SampleKey(2))
    )


def test_registration():
    view = GRAPHS["power law"].view()
    graph = ([view.tiers], [view.pointers], [view.position], [view.num_rows], view.idtype)
    nodes, stops = torch.arange(20), [0, 1 << 52, 1 << 53]
    operators = torch.ops.dgl_mgpu
    torch.library.opcheck(
        operators.random_walk.default,
        (nodes, torch.zeros_like(nodes), *graph, stops, KEY.fold()),
    )
    torch.library.opcheck(
        operators.random_walk.default,
        (nodes, torch.zeros_like(nodes), *graph, stops, KEY.fold(), torch.empty(20, 3).long()),
    )
    torch.library.opcheck(
        operators.pinsage_neighbors.default, (nodes, *graph, stops, 4, 3, KEY.fold())
    )
