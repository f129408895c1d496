"""GraphBolt's loader against the chain of datapipes that it runs as one loop."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections import Counter
from functools import partial

import dgl
import dgl.graphbolt as gb
import pytest
import torch

from dgl_mgpu.dgl.graphbolt import mini_batches
from dgl_mgpu.dgl.graphbolt.graph import FusedCSCSamplingGraph
from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError, InvalidWeightError
from dgl_mgpu.graph.originals import originals
from tests.dgl.graphbolt.graphs import EDGES, ETYPES, NODES, random_graph
from tests.environment import search_path
from tests.sampling.side_streams import HostStream

SEEDS = torch.arange(NODES - 1, -1, -1)


def items(seeds=SEEDS):
    return gb.ItemSet((seeds, seeds * 2), names=("seed_nodes", "labels"))


def features(nodes=NODES):
    rows = torch.arange(nodes * 3.0).view(nodes, 3)
    return gb.BasicFeatureStore({("node", None, "x"): gb.TorchBasedFeature(rows)})


def sampled_pipe(graph, fanouts, *, batch_size=7, seeds=SEEDS, method="sample_neighbor", **options):
    pipe = gb.ItemSampler(items(seeds), batch_size=batch_size)
    return getattr(pipe, method)(graph, fanouts, **options)


@pytest.fixture
def calls(monkeypatch):
    """The fanouts of calls of the operator for all layers."""
    calls = []
    sample = FusedCSCSamplingGraph.sample_layers_async

    def noted(self, seeds, fanouts, *arguments):
        calls.append(fanouts)
        return sample(self, seeds, fanouts, *arguments)

    monkeypatch.setattr(FusedCSCSamplingGraph, "sample_layers_async", noted)
    return calls


@pytest.fixture
def side_stream(monkeypatch):
    """Has loaders look ahead on the CPU."""
    stream = HostStream()
    monkeypatch.setattr(mini_batches, "side_stream_of", lambda device: stream)
    monkeypatch.setattr(
        mini_batches, "_may_prefetch", lambda it: it.is_known and it.tables() is not None
    )
    return stream


def chained(pipe):
    """What the chain of pipes makes itself."""
    return [str(batch) for batch in pipe]


def check_samples(graph, batch, seeds, fanouts, allowed=None):
    """A batch has samples of the graph without replacement, each node of a layer once."""
    expected = seeds
    for subgraph, fanout in zip(reversed(batch.sampled_subgraphs), reversed(fanouts), strict=True):
        rows, columns = subgraph.original_row_node_ids, subgraph.original_column_node_ids
        assert torch.equal(columns, expected)
        assert torch.equal(rows[: len(columns)], columns)
        assert len(rows.unique()) == len(rows)
        csc, eids = subgraph.sampled_csc, subgraph.original_edge_ids - 1000
        assert torch.equal(rows[csc.indices.long()], graph.indices[eids])
        assert set(rows[len(columns) :].tolist()) <= set(rows[csc.indices.long()].tolist())
        for at, node in enumerate(columns.tolist()):
            own = eids[csc.indptr[at] : csc.indptr[at + 1]].tolist()
            first, last = graph.csc_indptr[node : node + 2].tolist()
            candidates = set(range(first, last)) if allowed is None else allowed(first, last)
            assert set(own) <= candidates
            most = len(candidates) if fanout == -1 else min(fanout, len(candidates))
            assert len(own) == len(set(own)) == most
        expected = rows
    assert torch.equal(batch.input_nodes, expected)


@pytest.mark.parametrize("fanouts", [[3, 2], [-1, 4, 1], [2]])
@pytest.mark.parametrize("with_lookahead", [False, True])
def test_a_loader_samples_all_layers_at_once(fanouts, with_lookahead, calls, request):
    if with_lookahead:
        request.getfixturevalue("side_stream")
    graph = random_graph()
    pipe = sampled_pipe(graph, fanouts).fetch_feature(features(), node_feature_keys=["x"])
    batches = [*gb.DataLoader(pipe)]
    assert len(batches) == len(calls) == 9
    assert calls[0] == fanouts
    rows = torch.arange(NODES * 3.0).view(NODES, 3)
    for batch, seeds in zip(batches, SEEDS.split(7), strict=True):
        assert torch.equal(batch.seed_nodes, seeds)
        assert torch.equal(batch.labels, 2 * seeds)
        check_samples(graph, batch, seeds, fanouts)
        assert torch.equal(batch.node_features["x"], rows[batch.input_nodes])
        assert not hasattr(batch, "_seed_nodes")


def test_weights_of_0_are_never_sampled_even_where_a_node_has_no_others(calls):
    weights = torch.rand(600)
    weights[::3] = 0
    graph = random_graph(w=weights)
    first, last = graph.csc_indptr[5:7].tolist()
    weights[first:last] = 0
    loader = gb.DataLoader(sampled_pipe(graph, [2, 3], prob_name="w"))
    for batch, seeds in zip(loader, SEEDS.split(7), strict=True):
        check_samples(
            graph,
            batch,
            seeds,
            [2, 3],
            lambda first, last: {edge for edge in range(first, last) if weights[edge] > 0},
        )
    assert calls
    weights[first] = -1
    with pytest.raises(InvalidWeightError):
        list(loader)


CHAINS = {
    "all neighbors": lambda: sampled_pipe(random_graph(), [-1, -1]),
    "int32": lambda: sampled_pipe(random_graph(torch.int32), [-1], seeds=SEEDS.int()),
    "repeated seeds": lambda: sampled_pipe(random_graph(), [-1, -1], seeds=SEEDS % 5),
    "by layer": lambda: sampled_pipe(random_graph(), [-1, -1], method="sample_layer_neighbor"),
    "not compacted": lambda: sampled_pipe(random_graph(), [-1, -1], deduplicate=False),
    "subgraph": lambda: gb.ItemSampler(items(), batch_size=9).sample_in_subgraph(random_graph()),
    "features": lambda: sampled_pipe(random_graph(), [-1]).fetch_feature(features(), ["x"]),
    "copied": lambda: sampled_pipe(random_graph(), [-1]).copy_to("cpu"),
    "copied before": lambda: (
        gb.ItemSampler(items(), batch_size=4)
        .copy_to("cpu", extra_attrs=["seed_nodes"])
        .sample_neighbor(random_graph(), [-1])
    ),
    "a user's stage": lambda: sampled_pipe(random_graph(), [-1]).transform(_with_mark),
    "a user's pipe": lambda: sampled_pipe(random_graph(), [-1]).buffer(2).transform(_with_mark),
    "no sampler": lambda: gb.ItemSampler(items(), batch_size=4).transform(_with_mark),
    "fanouts by type": lambda: _typed_pipe([torch.tensor([-1, -1, -1]), torch.tensor([-1])]),
    "links": lambda: gb.ItemSampler(_links(), batch_size=5).sample_neighbor(random_graph(), [-1]),
}


def _with_mark(batch):
    batch.labels = batch.labels + 1000
    return batch


def _typed_pipe(fanouts, **options):
    seeds = gb.ItemSetDict(
        {
            "a": gb.ItemSet(torch.arange(40), names="seed_nodes"),
            "b": gb.ItemSet(torch.arange(20), names="seed_nodes"),
        }
    )
    pipe = gb.ItemSampler(seeds, batch_size=7)
    draw = torch.Generator().manual_seed(1)
    graph = random_graph(with_types=True, w=torch.rand(EDGES, generator=draw) + 0.1)
    return pipe.sample_neighbor(graph, fanouts, **options)


def _links():
    return gb.ItemSet(torch.stack([SEEDS, SEEDS.flip(0)], 1), names="node_pairs")


def without_numbers(batch):
    """What was sampled of several types, by original ids: nodes are numbered in another order."""
    layers = []
    for subgraph in batch.sampled_subgraphs:
        rows, columns = subgraph.original_row_node_ids, subgraph.original_column_node_ids
        assert batch.input_nodes is not None
        for ntype, ids in columns.items():
            assert torch.equal(rows[ntype][: len(ids)], ids)
            assert len(rows[ntype].unique()) == len(rows[ntype])
        edges = {}
        for etype, csc in subgraph.sampled_csc.items():
            source, _, target = etype.split(":")
            ends = columns[target].repeat_interleave(csc.indptr.diff())
            eids = subgraph.original_edge_ids[etype]
            triples = torch.stack([rows[source][csc.indices], ends, eids], 1)
            edges[etype] = sorted(map(tuple, triples.tolist()))
        layers.append((edges, {ntype: sorted(ids.tolist()) for ntype, ids in rows.items()}))
    return layers


@pytest.mark.parametrize("options", [{}, {"prob_name": "w"}])
@pytest.mark.parametrize("with_lookahead", [False, True])
def test_layers_of_several_types_are_sampled_at_once(options, with_lookahead, calls, request):
    if with_lookahead:
        request.getfixturevalue("side_stream")
    every = [torch.tensor([-1]), torch.tensor([-1])]
    expected = [without_numbers(batch) for batch in _typed_pipe(every, **options)]
    made = [*gb.DataLoader(_typed_pipe(every, **options))]
    assert [without_numbers(batch) for batch in made] == expected
    assert len(calls) == len(made)
    fanouts = [torch.tensor([3]), torch.tensor([2])]
    graph = random_graph(with_types=True)
    degrees = graph.csc_indptr.diff()
    for batch in gb.DataLoader(_typed_pipe(fanouts, **options)):
        for subgraph, fanout in zip(batch.sampled_subgraphs, fanouts, strict=True):
            for number, ntype in enumerate("ab"):
                picked = sum(
                    csc.indptr.diff()
                    for etype, csc in subgraph.sampled_csc.items()
                    if etype.endswith(f":{ntype}")
                )
                ids = subgraph.original_column_node_ids[ntype] + 40 * number
                assert torch.equal(picked, degrees[ids].clamp(max=int(fanout)))
            for etype, csc in subgraph.sampled_csc.items():
                source, _, target = etype.split(":")
                eids = subgraph.original_edge_ids[etype] - 1000
                assert (graph.type_per_edge[eids] == ETYPES[etype]).all()
                ids = subgraph.original_row_node_ids[source][csc.indices]
                assert torch.equal(ids + 40 * (source == "b"), graph.indices[eids])
                ends = subgraph.original_column_node_ids[target] + 40 * (target == "b")
                ends = ends.repeat_interleave(csc.indptr.diff())
                assert (graph.csc_indptr[ends] <= eids).all()
                assert (eids < graph.csc_indptr[ends + 1]).all()


def test_types_that_are_no_sources_are_sampled_layer_by_layer(calls):
    def pipe():
        graph = gb.fused_csc_sampling_graph(
            torch.tensor([0, 0, 0, 2, 3]),
            torch.tensor([0, 1, 1]),
            node_type_offset=torch.tensor([0, 2, 4]),
            type_per_edge=torch.tensor([0, 0, 0]),
            node_type_to_id={"a": 0, "b": 1},
            edge_type_to_id={"a:to:b": 0},
        )
        seeds = gb.ItemSetDict({"b": gb.ItemSet(torch.arange(2), names="seed_nodes")})
        return gb.ItemSampler(seeds, batch_size=2).sample_neighbor(graph, [-1, -1])

    assert chained(gb.DataLoader(pipe())) == chained(pipe())
    assert not calls


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("with_lookahead", [False, True])
def test_a_loader_gives_what_its_chain_gives(name, with_lookahead, request):
    if with_lookahead:
        request.getfixturevalue("side_stream")
    make = CHAINS[name]
    expected = chained(make())
    loader = gb.DataLoader(make())
    assert chained(loader) == expected
    assert chained(loader) == expected


@pytest.mark.parametrize("name", ["all neighbors", "fanouts by type", "features", "copied"])
def test_workers_give_what_the_chain_gives(name):
    make = CHAINS[name]
    loader = gb.DataLoader(make(), num_workers=2)
    assert Counter(chained(loader)) == Counter(chained(make()))


def test_workers_sample_their_own_seeds_and_draw_other_numbers(calls):
    graph = random_graph()
    pipe = sampled_pipe(graph, [2, 2], seeds=SEEDS.repeat(2), batch_size=NODES)
    pipe = pipe.fetch_feature(features(), ["x"])
    one, other = gb.DataLoader(pipe, num_workers=2)
    for batch in (one, other):
        check_samples(graph, batch, SEEDS, [2, 2])
    assert str(one.sampled_subgraphs) != str(other.sampled_subgraphs)


@pytest.mark.parametrize("method", ["sample_neighbor", "sample_layer_neighbor"])
def test_a_seed_gives_the_same_batches_ahead_or_not(method, monkeypatch, request):
    def passes():
        gb.seed(5)
        torch.manual_seed(5)
        pipe = gb.ItemSampler(_links(), batch_size=5).sample_uniform_negative(random_graph(), 2)
        loader = gb.DataLoader(getattr(pipe, method)(random_graph(), [2, 2]))
        made = []
        for batch in loader:
            made.append(str(batch.sampled_subgraphs))
            gb.expand_indptr(torch.tensor([0, 1]), torch.int64)
        return made, chained(loader)

    stream = request.getfixturevalue("side_stream")
    ahead = passes()
    assert ahead == passes()
    assert ahead[0] != ahead[1]
    stream.is_idle = True
    assert passes() == ahead


def test_negatives_are_torchs_as_in_the_chain():
    def pipe():
        torch.manual_seed(3)
        pipe = gb.ItemSampler(_links(), batch_size=5).sample_uniform_negative(random_graph(), 2)
        return pipe.sample_neighbor(random_graph(), [-1])

    expected = [batch.negative_dsts.tolist() for batch in gb.DataLoader(pipe())]
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()  # torch's loader draws two seeds
    torch.empty((), dtype=torch.int64).random_()
    assert expected == [batch.negative_dsts.tolist() for batch in pipe_without_seeding()]


def pipe_without_seeding():
    pipe = gb.ItemSampler(_links(), batch_size=5).sample_uniform_negative(random_graph(), 2)
    return pipe.sample_neighbor(random_graph(), [-1])


def test_what_is_written_to_features_and_graphs_is_in_the_next_batch(side_stream):
    store, graph = features(), random_graph()
    pipe = sampled_pipe(graph, [-1]).fetch_feature(store, ["x"])
    batches = iter(gb.DataLoader(pipe))
    next(batches)
    next(batches)
    store.update("node", None, "x", torch.full((NODES, 3), -1.0))
    assert next(batches).node_features["x"].unique().tolist() == [-1]
    store.update("node", None, "x", torch.full((1, 3), 7.0), torch.tensor([30]))
    batch = next(batches)
    assert (batch.node_features["x"] == 7).any(1).equal(batch.input_nodes == 30)
    graph.edge_attributes[gb.ORIGINAL_EDGE_ID] += 5000
    assert next(batches).sampled_subgraphs[0].original_edge_ids.min() >= 6000


class OneOfTwo:
    """Samples edges of even ids alone."""

    def __init__(self, graph):
        self.graph = graph

    def __call__(self, nodes, *arguments):
        sampled = self.graph.in_subgraph(nodes)
        ends = sampled.sampled_csc
        kept = sampled.original_edge_ids % 2 == 0
        counts = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
        csc = gb.CSCFormatBase(counts[ends.indptr], ends.indices[kept])
        return gb.SampledSubgraphImpl(csc, original_edge_ids=sampled.original_edge_ids[kept])


class EvenSeeds(gb.NeighborSampler):
    """Samples for every other seed."""

    def sampling_stages(self, datapipe, graph, *arguments):
        return super().sampling_stages(datapipe.transform(self._even), graph, *arguments)

    @staticmethod
    def _even(batch):
        batch._seed_nodes = batch._seed_nodes[batch._seed_nodes % 2 == 0]
        return batch


@pytest.mark.parametrize("with_lookahead", [False, True])
def test_a_sampler_of_the_users_own_is_called(with_lookahead, calls, request):
    if with_lookahead:
        request.getfixturevalue("side_stream")

    graph = random_graph()
    pipe = EvenSeeds(gb.ItemSampler(items(), batch_size=10), graph, [2])
    for batch, seeds in zip(gb.DataLoader(pipe), SEEDS.split(10), strict=True):
        check_samples(graph, batch, seeds[seeds % 2 == 0], [2])
    calls.clear()
    first = gb.ItemSampler(items(), batch_size=30)
    pipe = gb.NeighborSampler(first, graph, [2], sampler=OneOfTwo(graph))
    for batch in gb.DataLoader(pipe):
        assert not (batch.sampled_subgraphs[0].original_edge_ids % 2).any()
    assert not calls


class OwnEnd(gb.NeighborSampler):
    """Has a last stage of its own."""

    @staticmethod
    def _set_input_nodes(batch):
        batch.input_nodes = batch._seed_nodes
        return batch


class OwnStages(gb.NeighborSampler):
    """Looks at what was sampled between its stages, and leaves every other edge out."""

    def sampling_stages(self, datapipe, graph, fanouts, replace, prob_name, deduplicate, sampler):
        datapipe = datapipe.transform(partial(self._prepare, graph.node_type_to_id))
        for number, fanout in enumerate(reversed(fanouts)):
            datapipe = datapipe.sample_per_layer(
                sampler, torch.tensor([fanout]), replace, prob_name
            )
            datapipe = datapipe.transform(self._thin)
            datapipe = datapipe.compact_per_layer(deduplicate)
            datapipe = datapipe.transform(partial(self._count, number + 1))
        return datapipe.transform(self._set_input_nodes)

    @staticmethod
    def _thin(batch):
        subgraph = batch.sampled_subgraphs[0]
        csc, eids = subgraph.sampled_csc, subgraph.original_edge_ids
        kept = eids % 2 == 0
        counts = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
        subgraph.sampled_csc = gb.CSCFormatBase(counts[csc.indptr], csc.indices[kept])
        subgraph.original_edge_ids = eids[kept]
        return batch

    @staticmethod
    def _count(number, batch):
        assert len(batch.sampled_subgraphs) == number
        return batch


class OwnTransform(gb.NeighborSampler):
    """Changes what it has sampled."""

    def _transformer(self, batch):
        return _with_mark(batch)


@pytest.mark.parametrize("sampler", [OwnEnd, OwnStages, OwnTransform])
@pytest.mark.parametrize("with_lookahead", [False, True])
def test_samplers_with_stages_of_their_own_have_them(sampler, with_lookahead, request):
    if with_lookahead:
        request.getfixturevalue("side_stream")

    def pipe():
        return sampler(gb.ItemSampler(items(), batch_size=9), random_graph(), [-1, -1])

    expected = chained(pipe())
    assert chained(gb.DataLoader(pipe())) == expected
    assert "sampled_subgraphs=None" not in expected[0]


def _ends_after(count, batch):
    if batch.seed_nodes[0] <= NODES - count:
        raise StopIteration
    return batch


@pytest.mark.parametrize("with_lookahead", [False, True])
@pytest.mark.parametrize("is_before", [False, True])
def test_a_stage_cannot_end_a_pass(with_lookahead, is_before, request):
    if with_lookahead:
        request.getfixturevalue("side_stream")
    pipe, stage = gb.ItemSampler(items(), batch_size=10), partial(_ends_after, 25)
    pipe = pipe.transform(stage) if is_before else pipe
    pipe = pipe.sample_neighbor(random_graph(), [-1])
    batches = iter(gb.DataLoader(pipe if is_before else pipe.transform(stage)))
    assert len([next(batches) for _ in range(3)]) == 3
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(batches)


def test_a_batch_that_is_made_again_begins_anew(side_stream):
    store, links = features(), gb.ItemSet(torch.stack([SEEDS, SEEDS.flip(0)], 1), names="seeds")
    pipe = gb.ItemSampler(links, batch_size=10).sample_uniform_negative(random_graph(), 2)
    pipe = pipe.sample_neighbor(random_graph(), [-1]).fetch_feature(store, ["x"])
    batches = iter(gb.DataLoader(pipe))
    for number in range(6):
        batch = next(batches)
        assert batch.labels.tolist() == [True] * 10 + [False] * 20
        assert batch.compacted_seeds.shape == (30, 2)
        if number == 2:  # the next one is made by now
            store.update("node", None, "x", torch.zeros(NODES, 3))
    assert not batch.node_features["x"].any()


def sampled_inputs(loader):
    return [batch.input_nodes.tolist() for batch in loader]


def test_torchs_seed_counts_where_no_other_was_set():
    code = """
        import dgl_mgpu, torch
        import dgl.graphbolt as gb
        from tests.dgl.graphbolt.test_pipeline import sampled_inputs, sampled_pipe, random_graph
        loader = gb.DataLoader(sampled_pipe(random_graph(), [2, 2]))
        def run():
            torch.manual_seed(5)
            return sampled_inputs(loader), sampled_inputs(loader)
        one, other = run(), run()
        assert one == other and one[0] != one[1]
    """
    path = search_path()
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.mark.parametrize("with_lookahead", [False, True])
def test_a_seed_in_mid_pass_holds_for_the_rest(with_lookahead, request):
    if with_lookahead:
        request.getfixturevalue("side_stream")
    loader = gb.DataLoader(sampled_pipe(random_graph(), [2, 2]))

    def run():
        batches = iter(loader)
        first = next(batches).input_nodes.tolist()
        gb.seed(9)
        return first, sampled_inputs(batches)

    (first, rest), (other_first, other_rest) = run(), run()
    assert rest == other_rest
    gb.seed(10)
    assert sampled_inputs(loader)[1:] != rest
    assert len(first) and len(other_first)


def test_names_of_features_may_change_in_mid_pass(side_stream):
    pipe = sampled_pipe(random_graph(), [-1]).fetch_feature(features(), ["x"])
    batches = iter(gb.DataLoader(pipe))
    next(batches)
    assert next(batches).node_features
    pipe.node_feature_keys = []
    assert not next(batches).node_features


def test_seeds_beyond_their_type_are_an_error():
    for ids in ({"a": torch.tensor([3, 41])}, {"b": torch.tensor([-1])}):
        sets = {ntype: gb.ItemSet(it, names="seed_nodes") for ntype, it in ids.items()}
        pipe = gb.ItemSampler(gb.ItemSetDict(sets), batch_size=2)
        pipe = pipe.sample_neighbor(random_graph(with_types=True), [-1])
        with pytest.raises(IdOutOfRangeError, match="of another type"):
            next(iter(gb.DataLoader(pipe)))


def test_edges_of_no_type_are_left_out():
    def pipe():
        graph = random_graph(with_types=True)
        last = graph.csc_indptr[1:][graph.csc_indptr.diff() > 0] - 1
        graph.type_per_edge[last[-3:]] = 7
        ids = gb.ItemSetDict({"b": gb.ItemSet(torch.arange(20), names="seed_nodes")})
        return gb.ItemSampler(ids, batch_size=20).sample_neighbor(graph, [-1])

    (batch,), (expected,) = gb.DataLoader(pipe()), pipe()
    assert without_numbers(batch) == without_numbers(expected)


def test_errors_of_stages_come_where_the_batch_is_due(side_stream):
    graph = random_graph()
    pipe = sampled_pipe(graph, [2], seeds=torch.tensor([1, 2, 3, NODES, 4]), batch_size=1)
    batches = iter(gb.DataLoader(pipe))
    for expected in (1, 2, 3):
        assert next(batches).seed_nodes.tolist() == [expected]
    with pytest.raises(Exception, match="60"):
        next(batches)


@pytest.mark.parametrize("error", [AssertionError, InvalidInputError])
def test_what_graphbolt_asserts_is_a_typed_error(error):
    with pytest.raises(error, match="cannot sample neighbors: Data type of nodes must be"):
        list(gb.DataLoader(sampled_pipe(random_graph(), [2], seeds=SEEDS.int())))
    with pytest.raises(error, match="either -1 or"):
        list(gb.DataLoader(sampled_pipe(random_graph(), [-3])))
    with pytest.raises(error, match="Unknown edge attribute 'w'"):
        list(gb.DataLoader(sampled_pipe(random_graph(), [2], prob_name="w")))
    with pytest.raises(error, match="cannot make a graph: Passed-in canonical etype"):
        gb.fused_csc_sampling_graph(
            torch.tensor([0, 1]),
            torch.tensor([0]),
            node_type_to_id={"a": 0},
            edge_type_to_id={"a:a": 0},
            type_per_edge=torch.tensor([0]),
            node_type_offset=torch.tensor([0, 1]),
        )
    with pytest.raises(error, match="greater than 1, but got 1 dimension; pass a tensor of two"):
        gb.TorchBasedFeature(torch.ones(3))
    with pytest.raises(error, match="same length, but got 2 and 1"):
        gb.TorchBasedFeature(torch.ones(3, 2)).update(torch.ones(1, 2), torch.tensor([0, 1]))


def described(block):
    frames = [{n: c.tolist() for n, c in frame.items()} for frame in block._node_frames]
    frames += [{n: c.tolist() for n, c in frame.items()} for frame in block._edge_frames]
    edges = {
        etype: [ends.tolist() for ends in block.edges(etype=etype, order="eid", form="all")]
        for etype in block.canonical_etypes
    }
    counts = [block.num_src_nodes(t) for t in block.srctypes]
    counts += [block.num_dst_nodes(t) for t in block.dsttypes]
    return block.srctypes, block.dsttypes, block.idtype, counts, edges, frames


@pytest.mark.parametrize(
    "name", [*("all neighbors", "int32", "types", "fanouts by type", "not compacted", "subgraph")]
)
@pytest.mark.parametrize("from_loader", [False, True])
def test_blocks_are_those_that_graphbolt_makes(name, from_loader):
    every = [torch.tensor([-1]), torch.tensor([-1])]
    pipe = _typed_pipe(every) if name == "types" else CHAINS[name]()
    for batch in gb.DataLoader(pipe) if from_loader else pipe:
        made = [described(block) for block in batch.blocks]
        expected = originals["dgl.graphbolt.minibatch:MiniBatch.blocks"].fget(batch)
        assert made == [described(block) for block in expected]


def test_blocks_of_nothing_and_of_sources_that_are_not_there():
    assert gb.MiniBatch().blocks is None
    batch = next(iter(gb.DataLoader(CHAINS["all neighbors"]())))
    assert batch.blocks
    csc = batch.sampled_subgraphs[0].sampled_csc
    csc.indices[3] = len(batch.input_nodes)
    with pytest.raises(dgl.DGLError, match=f"is {len(batch.input_nodes)}, and there"):
        batch.blocks  # noqa: B018
    csc.indices[3] = -2
    with pytest.raises(dgl.DGLError, match="subgraph is -2"):
        batch.blocks  # noqa: B018


@pytest.mark.parametrize("name", ["original_row_node_ids", "original_column_node_ids"])
def test_blocks_of_what_was_not_compacted_are_an_error(name):
    batch = next(iter(gb.DataLoader(CHAINS["all neighbors"]())))
    setattr(batch.sampled_subgraphs[0], name, None)
    for error in (InvalidInputError, AssertionError):
        with pytest.raises(error, match=f"Missing `{name}`"):
            batch.blocks  # noqa: B018


def test_ids_of_edges_are_as_many_as_edges():
    batch = next(iter(gb.DataLoader(CHAINS["all neighbors"]())))
    batch.sampled_subgraphs[0].original_edge_ids = torch.arange(2)
    with pytest.raises(dgl.DGLError, match="edges, and 2 original_edge_ids"):
        batch.blocks  # noqa: B018


def test_etypes_without_edges_have_blocks():
    pipe = _typed_pipe([torch.tensor([0, 0, 0])])
    block = next(iter(gb.DataLoader(pipe))).blocks[0]
    edges = {":".join(etype): block.num_edges(etype) for etype in block.canonical_etypes}
    assert edges == dict.fromkeys(ETYPES, 0)
