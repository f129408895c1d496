"""How machines that share a store choose what each of them keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dgl_mgpu.config.store_options import StoreOptions
from dgl_mgpu.machine import Network, preset
from dgl_mgpu.placement import Reads, TableSpec, solve
from dgl_mgpu.store.memory import FeatureSource, TopologySource
from dgl_mgpu.store.span import Shares, best_ratio, choose_span, with_other_machines

NODES = 600


def _kept(shares: Shares, machine: int, ratio: float) -> np.ndarray:
    """Whether a machine keeps each node's features, then whether its in-edges."""
    kept = shares.kept(machine, ratio)
    return np.concatenate([kept.features["n"], kept.in_edges["n"]]) > 0


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.1, 0.5, 0.99, 1.0])
def test_what_is_replicated_saves_most_for_its_bytes(ratio: float) -> None:
    draw = np.random.default_rng(0)
    degrees = draw.integers(0, 9, NODES)
    indptr = np.concatenate([[0], degrees.cumsum()])
    topology = TopologySource(indptr, np.zeros(indptr[-1], np.int64), None, NODES, torch.int64, "n")
    rows = FeatureSource(np.zeros((NODES, 5), np.float32), "n")
    # Many are as likely as others.
    read, sampled = draw.integers(0, 4, NODES) / 4, draw.integers(0, 4, NODES) / 2
    reads = Reads({"n": sampled}, {"n": read}, 1.0, 3.0)
    shares = Shares.of({"rows": rows, "topology": topology}, reads, 3)
    nbytes = np.concatenate([np.full(NODES, 20), 8 * degrees + 8])
    saved = np.concatenate([read * 24, sampled * (8 + 8 * np.minimum(degrees, 3))]) / nbytes
    first, stop = shares.bounds["n"][1:3]
    kept = _kept(shares, 1, ratio)
    assert kept[first:stop].all() and kept[NODES + first : NODES + stop].all()
    replicated = _kept(shares, 0, ratio)
    others = np.tile(np.arange(NODES) >= shares.bounds["n"][1], 2)
    assert np.array_equal(replicated[~others], np.ones((~others).sum(), bool))
    # Of what machines 0 and 1 own the other one has the replicas.
    everywhere = np.where(others, replicated, kept)
    room = ratio * nbytes.sum() - nbytes[everywhere].sum()
    assert room >= 0
    assert saved[everywhere].min(initial=9) >= saved[~everywhere].max(initial=0)
    left = nbytes[~everywhere]
    assert not len(left) or room < 2 * left.max()


@pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
def test_the_modelled_bytes_are_those_of_the_nodes_that_are_not_kept(ratio: float) -> None:
    draw = np.random.default_rng(1)
    degrees = draw.integers(0, 9, NODES)
    indptr = np.concatenate([[0], degrees.cumsum()])
    topology = TopologySource(indptr, np.zeros(indptr[-1], np.int64), None, NODES, torch.int64, "n")
    sources = {
        "topology/n": topology,
        "node/n/x": FeatureSource(np.zeros((NODES, 5), np.float32), "n"),
        "node/n/y": FeatureSource(np.zeros(NODES, np.int64), "n"),
        "edge/e/w": FeatureSource(np.zeros((int(indptr[-1]), 3), np.float32)),
    }
    reads = Reads({"n": draw.random(NODES)}, {"n": draw.random(NODES)}, 100.0, 3.0)
    shares = Shares.of(sources, reads, 4)
    plan = solve(preset("single"), [TableSpec.features("node/n/x", NODES, 20)])
    network = Network(2.0, 1e-3)
    times_read = np.zeros((2, NODES), int)
    for machine in range(4):
        kept = shares.kept(machine, ratio)
        found = with_other_machines(plan, kept, sources, network, num_layers=3)
        nbytes = accesses = 0.0
        for node in range(NODES):
            if not kept.features["n"][node]:
                accesses += reads.nodes["n"][node]
                nbytes += reads.nodes["n"][node] * (4 + 20 + 4 + 8)
            if not kept.in_edges["n"][node]:
                words = 1 + 1 + 2 * min(degrees[node], 3.0)
                nbytes += reads.sampled["n"][node] * 4 * words
        (load,) = (load for load in found.loads if load.kind == "network")
        assert load.nbytes == pytest.approx(nbytes)
        # Three hops are a request and an answer each, and so are all features.
        assert load.seconds == pytest.approx(nbytes / 2e9 + 8 * 1e-3)
        assert found.step_seconds == pytest.approx(plan.step_seconds + load.seconds)
        share = found.share
        assert share is not None and share.num_machines == 4
        expected = accesses / reads.nodes["n"].sum()
        for table in ("node/n/x", "node/n/y"):
            assert share.remote_reads[table] == pytest.approx(expected)
        assert "edge/e/w" not in share.remote_reads
        # Replicas are read for their machine's mini-batches, other rows for all machines'.
        times_read += kept.features["n"], kept.in_edges["n"]
        whole = 28 * NODES + int((8 * degrees + 8).sum())
        kept_bytes = (28 * (kept.features["n"] > 0)).sum()
        kept_bytes += ((8 * degrees + 8) * (kept.in_edges["n"] > 0)).sum()
        assert share.replicated_bytes + share.own_bytes == kept_bytes
        assert share.replicated_bytes == pytest.approx(share.replica_ratio * whole)
        assert ratio - 0.01 < share.replica_ratio <= ratio
    assert (times_read == 4).all()


@pytest.mark.parametrize("best", [0.0, 0.03, 0.2, 0.7, 1.0])
def test_the_share_of_replicas_that_takes_least_time_is_found(best: float) -> None:
    found = best_ratio(lambda ratio: abs(ratio - best))
    assert abs(found - best) <= max(0.1 * best, 0.01)


def test_of_equally_good_shares_the_largest_that_fits_is_taken() -> None:
    assert best_ratio(lambda ratio: 1.0) == 1.0
    assert 0.4 < best_ratio(lambda ratio: 1.0 if ratio < 0.55 else np.inf) < 0.55
    assert best_ratio(lambda ratio: np.inf) == 0.0


@pytest.mark.parametrize(
    ("span", "shared", "each", "chosen", "reason"),
    [
        ("machine", 1.0, 2.0, None, "store.span=machine"),
        ("job", 2.0, 1.0, 0.5, "store.span=job"),
        ("auto", 1.0, 2.0, 0.5, "50% of it on each, takes 1.00 s a step, and a copy"),
        ("auto", 1.0, 1.0, None, "a copy on each machine takes 1.00 s a step, and one copy"),
        ("auto", 1.0, np.inf, 0.5, "a copy on each machine does not fit"),
        ("auto", np.inf, np.inf, 0.5, "does not fit"),
    ],
)
def test_machines_have_the_data_in_the_way_that_takes_less_time(
    span: str, shared: float, each: float, chosen: float | None, reason: str
) -> None:
    options = StoreOptions(span=span, replica_ratio=0.5)
    found = choose_span(3, options, lambda ratio: each if ratio is None else shared)
    assert found[0] == chosen and reason in found[1] and "\n" not in found[1]
