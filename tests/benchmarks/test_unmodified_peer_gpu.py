"""The benchmark of unmodified scripts beside a peer, as far as a small graph on a CPU shows."""

from __future__ import annotations

import importlib.util
import json
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from benchmarks import unmodified_peer_gpu as program
from benchmarks.gpu import PowerLaw
from benchmarks.peers.geometric import LAYOUTS, Hop, Layout, csr, edge_list, sage_conv
from tests.benchmarks.fake_wholegraph import Structure, fake_peer

HAS_GEOMETRIC = importlib.util.find_spec("torch_geometric") is not None
needs_geometric = pytest.mark.skipif(not HAS_GEOMETRIC, reason="torch-geometric is not installed")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the program with a peer that is made up; ours takes 2 ms and 1 ms."""
    peer = fake_peer(monkeypatch)
    monkeypatch.setattr(Structure, "multilayer_sample_without_replacement", _with_int32_offsets)
    monkeypatch.setattr(program, "connect", lambda ranks, wanted: peer)
    monkeypatch.setattr(program, "_SAME_WORK", 0.5)
    monkeypatch.setattr(program, "SCHEDULES", {"one by one": program.one_by_one})

    def train(g, case, mode, steps):
        return {"eager": 2.0, "captured": 1.0}[mode], [3.0] * steps, None

    monkeypatch.setattr(program, "train", train)
    out = tmp_path / "found.json"

    def call(*more: str) -> dict:
        given = ["--nodes", "400", "--edges", "3000", "--batch", "40", "--steps", "16"]
        few = ["--turns", "1", "--fanouts", "3,2", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["program", *given, *few, *more])
        with pytest.raises(SystemExit) as ended:
            program.main()
        return {"code": ended.value.code, **json.loads(out.read_text())}

    return call


_sample = Structure.multilayer_sample_without_replacement


def _with_int32_offsets(self, seeds, fanouts):
    nodes, edges, offsets, sources = _sample(self, seeds, fanouts)
    return nodes, edges, [each.int() for each in offsets], sources


@needs_geometric
def test_all_layouts_are_timed(run):
    found = run()
    (row,) = found["figures"]
    assert found["code"] == 0 and row["peers_failures"] == {}
    assert set(row["peers_ms"]) == {f"{name}, one by one" for name in LAYOUTS}
    assert row["peer_ms"] == min(row["peers_ms"].values())
    assert row["ratio_eager"] == row["peer_ms"] / 2
    assert row["ratio_captured"] == row["peer_ms"]
    assert row["case"] == "40 at 3,2"
    assert all(work["edges"] > 40 for work in row["a_batch"].values())


@needs_geometric
def test_batches_that_are_not_alike_are_refused(run, monkeypatch):
    monkeypatch.setattr(program, "_SAME_WORK", -1.0)
    with pytest.raises(ValueError, match="batches of both sides are not alike"):
        run()


@needs_geometric
def test_fanouts_may_end_at_the_seeds(run):
    assert run("--dgl-order")["figures"][0]["fanouts_from_seeds"] == [2, 3]


def _fails(hop: Hop) -> torch.Tensor:
    raise RuntimeError("no such layout")


def _transposed(hop: Hop) -> torch.Tensor:
    return csr(hop._replace(sources=hop.sources.flip(0)))


@needs_geometric
def test_a_way_that_fails_or_is_wrong_is_said_and_left_out(run, monkeypatch, capsys):
    layouts = {
        "first": Layout(_fails, sage_conv),
        "second": Layout(edge_list, sage_conv),
        "third": Layout(_transposed, sage_conv),
    }
    monkeypatch.setattr(program, "LAYOUTS", layouts)
    (row,) = run()["figures"]
    assert row["peers_failures"]["first"] == "RuntimeError: no such layout"
    assert row["peers_failures"]["third"].startswith("ValueError: its loss or gradients are others")
    assert row["peers_way"] == "second, one by one"
    assert "the peer failed, first: RuntimeError: no such layout" in capsys.readouterr().err


@needs_geometric
def test_without_any_way_of_the_peer_it_fails(run, monkeypatch):
    monkeypatch.setattr(program, "LAYOUTS", {"first": Layout(_fails, sage_conv)})
    found = run()
    assert found["code"] == 1 and found["figures"][0]["ratio_eager"] is None


def test_the_steps_after_warming_up_are_timed(monkeypatch):
    clock = iter([0.0, 1.0, 2.0, 3.0, 3.016, 3.048, 3.096])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(program.time, "perf_counter", partial(next, clock))
    losses = (torch.tensor(1.0) for _ in range(64 + 48))
    assert program.milliseconds(losses) == pytest.approx(2.0)
    monkeypatch.setattr(program.time, "perf_counter", lambda: 0.0)
    with pytest.raises(ValueError, match="a loss is not finite"):
        program.milliseconds(iter([torch.tensor(float("nan"))] * 96))


@pytest.mark.parametrize("schedule", [program.ahead, program.ahead_in_a_thread])
def test_batches_ahead_are_those_of_the_seeds_in_order(monkeypatch, schedule):
    done: list[str] = []

    class Stream:
        def record_event(self) -> str:
            return f"{len(done)} trained"

        def wait_event(self, event: str) -> None:
            waited.append(event)

    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(program, "_side_stream", Stream)
    for batch in schedule(lambda seeds: f"of {seeds}", ["a", "b", "c"]):
        done.append(batch)
    assert done == ["of a", "of b", "of c"]
    # Before a batch is made: what was trained when the one before it began to be.
    assert {"0 trained", "1 trained", "2 trained"} <= set(waited)


def test_the_graphs_are_the_same(monkeypatch):
    library = fake_peer(monkeypatch)
    g = program.made_graph(*PowerLaw(50, 200).csc(torch.device("cpu"), torch.int32))
    with program.peer_of(library, g) as peer:
        sample = peer.sample(torch.tensor([3, 7], dtype=torch.int32), [100])
        batch = peer.batch(sample, LAYOUTS["edge list"])
    src, dst = batch.edges[0]
    expected = sorted(g.in_edges(torch.tensor([3, 7], dtype=torch.int32))[0].tolist())
    assert sorted(sample.nodes[0][src].tolist()) == expected
    assert dst.max() == 1 and batch.sizes == [2]
    assert torch.equal(batch.rows, g.ndata["feat"][sample.nodes[0].long()])
    assert torch.equal(batch.labels, g.ndata["label"][[3, 7]])
