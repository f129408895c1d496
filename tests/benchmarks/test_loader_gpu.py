"""The benchmark of loaders, as far as small graphs on a CPU show."""

from __future__ import annotations

import importlib.util
import json
import sys

import dgl
import pytest
import torch

from benchmarks import loader_gpu, minibatch_gpu
from benchmarks.loader_gpu import as_edges, hops_of_edges
from benchmarks.peers.wholegraph import WholeGraph
from tests.benchmarks.fake_wholegraph import Memory, fake_peer

HAS_GEOMETRIC = importlib.util.find_spec("torch_geometric") is not None


@pytest.fixture
def peer(monkeypatch) -> WholeGraph:
    """The peer's loader."""
    found = fake_peer(monkeypatch)
    monkeypatch.setattr(loader_gpu, "connect", lambda ranks, wanted: found)
    return found


@pytest.fixture
def small(monkeypatch) -> None:
    """Models and mini-batches that take no time; of no effect on ranks that are launched."""
    monkeypatch.setattr(loader_gpu, "FANOUTS", ((3, 2, 2),))
    for module in (loader_gpu, minibatch_gpu):
        monkeypatch.setattr(module, "FEATURES", 8)
        monkeypatch.setattr(module, "HIDDEN", 8)


def run(monkeypatch, tmp_path, arguments: str) -> list[dict]:
    out = tmp_path / "found.json"
    few = f"--nodes 400 --edges 3000 --batch 10 --window 2 --repeats 1 --out {out}"
    monkeypatch.setattr(sys, "argv", ["program", *few.split(), *arguments.split()])
    loader_gpu.main()
    return json.loads(out.read_text())["figures"]


def test_our_loader_is_measured(monkeypatch, tmp_path):
    *_, figure, captured = run(monkeypatch, tmp_path, "--ranks 2 --no-peer")
    assert captured["case"] == "DGL's layers, captured; peer torch-geometric, 10 at 25,10"
    assert captured["ours"] == figure["more"]["median_ms"]["ours, DGL's layers, captured"]
    assert figure["case"] == "DGL's layers; peer torch-geometric, 10 at 25,10"
    assert figure["ours"] > 0 and figure["reached"] is None
    median = figure["more"]["median_ms"]["ours, DGL's layers"]
    assert median == max(rank["ours, DGL's layers"][0] for rank in figure["more"]["each_rank_ms"])
    assert figure["more"]["seeds_per_second"]["ours, DGL's layers"] == pytest.approx(20e3 / median)


def test_a_loss_that_is_not_finite_is_refused(monkeypatch, tmp_path, small):
    true_step = loader_gpu.Training.step
    monkeypatch.setattr(
        loader_gpu.Training, "step", lambda *given: true_step(*given) * float("nan")
    )
    with pytest.raises(ValueError, match="a loss is not finite"):
        run(monkeypatch, tmp_path, "--ranks 1 --no-peer")


@pytest.mark.skipif(not HAS_GEOMETRIC, reason="torch-geometric is not installed")
def test_both_loaders_drive_one_model(monkeypatch, tmp_path, peer, small):
    figure, captured, with_dgl, _ = run(monkeypatch, tmp_path, "--ranks 1")
    more = figure["more"]
    assert set(more["median_ms"]) == {
        "ours", "ours, one by one", "ours, captured", "model alone", "peer", "ours, DGL's layers",
        "ours, DGL's layers, captured",
    }  # fmt: skip
    assert captured["ratio_to_peer"] == more["median_ms"]["peer"] / captured["ours"]
    assert captured["times_peer"] == 1.5
    assert figure["times_peer"] == 1.5 and figure["reached"] is (figure["ratio_to_peer"] >= 1.5)
    assert figure["ratio_to_peer"] == more["median_ms"]["peer"] / more["median_ms"]["ours"]
    assert with_dgl["peer"] == figure["peer"]


@pytest.mark.skipif(not HAS_GEOMETRIC, reason="torch-geometric is not installed")
def test_a_peer_with_wrong_features_is_refused(monkeypatch, tmp_path, peer, small):
    monkeypatch.setattr(Memory, "gather", lambda self, ids: self.rows[ids.long() - 1])
    with pytest.raises(ValueError, match="peer, 10 at 3,2,2: wrong features"):
        run(monkeypatch, tmp_path, "--ranks 1")


def test_the_peers_batches_are_for_torch_geometric(peer):
    indptr = torch.tensor([0, 3, 4, 6, 6])
    indices = torch.tensor([1, 2, 3, 0, 3, 1], dtype=torch.int32)

    def make(ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([ids, 10 * ids], 1).float()

    with peer.loader("cuda", indptr, indices, 2, make) as load:
        loaded = load(torch.tensor([2, 1], dtype=torch.int32), (1, 2))
    # From 2 the first neighbour is 3, from 1 it is 0; these have none, and 1 and 2.
    assert loaded.nodes.tolist() == [2, 1, 3, 0] and loaded.sizes == [4, 2]
    assert torch.equal(loaded.rows, make(loaded.nodes))
    assert loaded.edges[1].tolist() == [[2, 3], [0, 1]]
    assert loaded.edges[0].tolist() == [[2, 1, 3, 1, 0], [0, 0, 1, 3, 3]]
    assert loaded.edges[0].dtype == torch.int64
    hops = [[each.tolist() for each in hop] for hop in hops_of_edges(loaded)]
    assert hops[0] == [[2, 1], [0, 1, 2], [3, 0]]
    assert hops[1] == [[2, 1, 3, 0], [0, 2, 3, 3, 5], [3, 1, 0, 1, 2]]


def test_the_peers_table_is_numbered(peer):
    with peer.numbered_table("cuda", 5, 12) as gather:
        words = gather(torch.tensor([4, 0])).view(torch.int32)
    assert words.tolist() == [[12, 13, 14], [0, 1, 2]]


def test_blocks_are_edge_lists():
    g = dgl.rand_graph(50, 400)
    sampler = dgl.dataloading.NeighborSampler([3, 2])
    _, _, blocks = sampler.sample(g, torch.tensor([4, 30, 2]))
    blocks[0].srcdata["feat"] = torch.rand(blocks[0].num_src_nodes(), 3)
    loaded = as_edges(blocks)
    assert loaded.sizes == [block.num_dst_nodes() for block in blocks]
    assert loaded.rows is blocks[0].srcdata["feat"]
    for block, edges in zip(blocks, loaded.edges, strict=True):
        assert edges.dtype == torch.int64
        expected = sorted(zip(*(each.tolist() for each in block.edges()), strict=True))
        assert sorted(map(tuple, edges.T.tolist())) == expected
