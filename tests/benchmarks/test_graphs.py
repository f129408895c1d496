"""The graphs that benchmarks run on have the structure that they say."""

from __future__ import annotations

import argparse
import json
import sys

import networkx
import numpy as np
import pytest
import torch

from benchmarks import gather_gpu, sampling_gpu, spmm_gpu, unmodified_gpu
from benchmarks.datasets import NO_FILES
from benchmarks.graphs import RMAT, PlantedPartition, facts, graph_of

CPU = torch.device("cpu")
GENERATED = (RMAT(1000, 20_000), PlantedPartition(1000, 20_000, communities=8))


def edges_of(graph, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Destinations and sources."""
    indptr, indices = graph.csc(CPU, torch.int32, seed)
    return torch.repeat_interleave(torch.arange(graph.nodes), indptr.diff()), indices.long()


@pytest.mark.parametrize("graph", GENERATED)
def test_a_generated_graph_is_a_csc_without_repeats(graph) -> None:
    indptr, indices = graph.csc(CPU, torch.int32)
    assert indptr.dtype == torch.int64 and indices.dtype == torch.int32
    assert indptr[0] == 0 and indptr[-1] == len(indices) and len(indptr) == graph.nodes + 1
    assert indices.min() >= 0 and indices.max() < graph.nodes
    assert len(indices) == pytest.approx(graph.edges, rel=0.35)  # so dense is a small one
    dst, src = edges_of(graph)
    assert len((dst * graph.nodes + src).unique()) == len(src)
    assert torch.equal(indices, graph.csc(CPU, torch.int32)[1])
    assert not torch.equal(edges_of(graph)[1][:100], edges_of(graph, seed=1)[1][:100])


def test_an_rmat_has_its_quarters_at_every_level() -> None:
    """Of a graph so sparse that few edges are drawn twice."""
    graph = RMAT(2**16, 30_000)
    dst, src = edges_of(graph)
    for level in (15, 14, 9):
        quarter = 2 * (dst >> level & 1) + (src >> level & 1)
        shares = torch.bincount(quarter, minlength=4) / len(dst)
        assert shares.tolist() == pytest.approx([0.57, 0.19, 0.19, 0.05], abs=0.02)
    # Whose side is no power of two: each node is one of the matrix's or two.
    dst, src = edges_of(RMAT(50_000, 30_000))
    assert max(int(dst.max()), int(src.max())) < 50_000 and int(src.max()) > 40_000


def test_communities_are_found_in_a_planted_partition() -> None:
    """By networkx, which knows nothing of them."""
    graph = PlantedPartition(1000, 20_000, communities=8)
    dst, src = edges_of(graph)
    community = graph.community(torch.arange(1000))
    assert community.unique_consecutive().tolist() == list(range(8))
    # Of the edges between communities an eighth is within one by chance.
    within = float((community[dst] == community[src]).double().mean())
    assert within == pytest.approx(0.8 + 0.2 / 8, abs=0.03)
    found = networkx.Graph(zip(dst.tolist(), src.tolist(), strict=True))
    planted = [set((community == each).nonzero().flatten().tolist()) for each in range(8)]
    for nodes in networkx.community.louvain_communities(found, seed=0):
        # Each that it finds is one that was planted, but for few nodes.
        assert max(len(nodes & each) / len(nodes | each) for each in planted) > 0.9
    degrees = np.bincount(dst.numpy(), minlength=1000)
    assert degrees.max() > 5 * degrees.mean()
    out = np.bincount(src.numpy(), minlength=1000)
    assert np.corrcoef(degrees, out)[0, 1] > 0.9  # hubs are hubs both ways


def test_a_real_graph_says_its_size(real_data) -> None:
    options = argparse.Namespace(graph="cora", data=real_data, nodes=1, edges=1)
    graph = graph_of(options)
    assert options.nodes == graph.nodes == 2708 and options.edges == graph.edges == 10556
    assert facts(graph) == {"name": "cora", "nodes": 2708, "edges": 10556}
    indptr, indices = graph.csc(CPU, torch.int64)
    assert len(indptr) == 2709 and indices.dtype == torch.int64


def test_a_real_graph_that_is_not_there_ends_the_program(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        graph_of(argparse.Namespace(graph="facebook", data=tmp_path))
    assert ended.value.code == NO_FILES
    assert "needs the files of facebook" in capsys.readouterr().out


@pytest.mark.parametrize("graph", ["power-law", "r-mat", "communities", "cora"])
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (sampling_gpu, "--memory gpu --idtypes int32 --ranks 1 --window 1 --repeats 1 --no-peer"),
        (gather_gpu, "--parts cached --batch 50 --row-bytes 64 --ranks 1 --window 1 --repeats 1"),
        (spmm_gpu, "--repeats 1"),
    ],
)
def test_programs_run_on_any_graph(
    program, arguments: str, graph: str, real_data, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(sampling_gpu, "SETTINGS", ((100, (4, 3)), (5000, (4, 3))))
    monkeypatch.setattr(spmm_gpu, "CASES", spmm_gpu.CASES[:1] + spmm_gpu.CASES[-1:])
    monkeypatch.setattr(spmm_gpu, "TRANSPOSED", ())
    out = tmp_path / "found.json"
    words = f"--graph {graph} --data {real_data} --nodes 2000 --edges 20000 --out {out}"
    monkeypatch.setattr(sys, "argv", ["program", *words.split(), *arguments.split()])
    program.main()
    found = json.loads(out.read_text())
    assert found["options"]["graph"] == graph and found["figures"]
    if program is spmm_gpu:
        # Aims are those of the power law's size.
        aims = [figure["aim_ms"] for figure in found["figures"]]
        assert aims == ([9, None] if graph == "power-law" else [None])


def test_unmodified_scripts_run_on_any_graph(real_data, tmp_path, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(unmodified_gpu, "_row", lambda g, case, options: seen.append(g) or _ROW)
    for graph, nodes in (("communities", 2000), ("cora", 2708)):
        words = f"--graph {graph} --data {real_data} --nodes 2000 --edges 20000"
        monkeypatch.setattr(sys, "argv", ["program", *words.split()])
        unmodified_gpu.main()
        assert seen[-1].num_nodes() == nodes and seen[-1].ndata["feat"].shape == (nodes, 128)
    cases = [case for case in unmodified_gpu.CASES if case.batch == 1024]
    assert len(seen) == 2 * len(cases)  # neither has 6000 nodes


_ROW = dict.fromkeys(("eager_ms", "captured_ms", "step_ms", "kernels_ms", "ratio"), 1.0)
