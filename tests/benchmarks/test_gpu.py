"""The benchmarks on GPUs as far as a machine without one shows: they measure what they say."""

from __future__ import annotations

import json
import sys
from functools import partial

import numpy as np
import pytest
import torch

from benchmarks import gather_gpu, gpu, links, placement_gpu, sampling_bytes, sampling_gpu
from benchmarks.figures import Figure, Report
from benchmarks.gather_gpu import narrowed, numbering, refilled, rows_of
from benchmarks.gpu import NumberedWords, PowerLaw, built_store, require_words, this_device
from benchmarks.nvlink import received_bytes
from benchmarks.sampling_bytes import Layout, Sectors, sectors_of
from benchmarks.sampling_gpu import Checker, our_hops
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.ops import GraphView, SampleKey, gather_rows, sample_blocks
from dgl_mgpu.store.memory import FeatureSource
from tests.benchmarks import fake_wholegraph
from tests.benchmarks.fake_wholegraph import fake_peer

WIDE = 256  # bytes a row


@pytest.mark.parametrize(
    ("unit", "ours", "reached"),
    [("GB/s", 115, True), ("GB/s", 114, False), ("ms", 86, True), ("MB", 88, False)],
)
def test_a_figure_is_reached_by_the_right_side(unit: str, ours: float, reached: bool) -> None:
    assert Figure("case", unit, ours, peer=100, times_peer=1.15).reached is reached


def test_a_figure_needs_every_target_and_all_to_compare_with() -> None:
    near = Figure("case", "GB/s", 100, peer=10, ceiling=120, times_peer=1.0, of_ceiling=0.9)
    assert near.ratio_to_ceiling == pytest.approx(1 / 1.2) and near.reached is False
    assert Figure("case", "GB/s", 100, times_peer=1.0).reached is None
    assert Figure("case", "GB/s", 100, peer=10).reached is None


def test_a_report_keeps_what_it_prints(tmp_path, capsys) -> None:
    out = tmp_path / "found.json"
    report = Report(Communicator(), out, ceilings={"ring_copy": 400.0})
    report.add(Figure("rows of 512 B", "GB/s", 350.0, peer=300.0, times_peer=1.15))
    report.add(Figure("rows of 400 B", "GB/s", 300.0))
    found = json.loads(out.read_text())
    assert found["ceilings"] == {"ring_copy": 400.0} and "commit" in found["machine"]
    assert [figure["reached"] for figure in found["figures"]] == [True, None]
    printed = capsys.readouterr().out
    assert "350.0" in printed and "1.17" in printed and "yes" in printed


def test_words_are_numbered() -> None:
    rows = NumberedWords(2**31, 16)[np.array([3, 2**30 + 1])]
    assert rows.dtype == np.float32
    assert rows.view(np.uint32).tolist() == [[12, 13, 14, 15], [4, 5, 6, 7]]  # modulo 2**32


@pytest.mark.parametrize("row_bytes", [16, 100, WIDE])
@pytest.mark.parametrize("tiers", [1, 2])
def test_rows_of_any_width_are_checked(row_bytes: int, tiers: int) -> None:
    source = FeatureSource(NumberedWords(1000, WIDE), "nodes" if tiers == 2 else "")
    hotness = {"nodes": np.random.default_rng(0).random(1000)} if tiers == 2 else {}
    options = {"policy": "host"}
    if tiers == 2:
        options = {"policy": "auto", "gpu_memory": 300 * WIDE + 4000, "feature_ratio": 0.3}
    with built_store({"rows": source}, hotness, Communicator(), options) as store:
        wide = rows_of(store.tables["rows"])
        assert len(wide.tiers) == tiers
        view = refilled(wide, row_bytes) if tiers == 1 else narrowed(wide, row_bytes)
        if tiers == 1:
            assert view.num_rows == 1000 * WIDE // row_bytes
        ids = torch.randint(view.num_rows, (500,), device=this_device())
        numbers = numbering(view, WIDE // 4)
        require_words("right", partial(gather_rows, view), ids, numbers)
        with pytest.raises(ValueError, match="moved: wrong rows"):
            require_words(
                "moved", lambda ids: gather_rows(view, ids - 1), ids.clamp(min=1), numbers
            )


def test_a_power_law_graph_has_its_tails() -> None:
    device = torch.device("cpu")
    law = PowerLaw(20_000, 320_000, source_exponent=1.25)
    indptr, indices = law.csc(device, torch.int32)
    assert indices.dtype == torch.int32 and indices.min() >= 0 and indices.max() < law.nodes
    assert int(indptr[-1]) == len(indices) == pytest.approx(law.edges, rel=0.2)
    again, _ = law.csc(device, torch.int32)
    assert torch.equal(indptr, again)
    # 1 % of the nodes are the sources of 0.01 ** (1 - 1 / 1.25) of the edges.
    counts = torch.bincount(indices, minlength=law.nodes).sort(descending=True)[0]
    assert int(counts[:200].sum()) / len(indices) == pytest.approx(0.01**0.2, rel=0.1)
    assert int(indptr.diff().max()) > 20 * law.edges / law.nodes


def test_wrong_samples_are_found() -> None:
    indptr, indices = PowerLaw(300, 3000).csc(torch.device("cpu"), torch.int64)
    checker, seeds, fanouts = Checker(indptr, indices), torch.arange(20), (8, 4)
    found, eids = our_hops(blocks_of(indptr, indices, seeds, fanouts))
    checker.require("right", seeds, fanouts, found, eids)
    dst, offsets, neighbors = found[0]
    row = indices[indptr[0] : indptr[1]]
    stranger = next(node for node in range(300) if node not in row)
    strange = torch.cat([torch.tensor([stranger]), neighbors[1:]])
    twice = torch.cat([eids[0][:1], eids[0][:1], eids[0][2:]])
    for found_first, eids_first, wrong in (
        ((dst, offsets, strange), eids[0], "edges"),
        ((dst, offsets, neighbors), twice, "edge ids"),
        ((dst, offsets.clamp(max=len(neighbors) - 1), neighbors[:-1]), None, "number of edges"),
        ((dst.flip(0)[1:], offsets[:-1], neighbors), None, "destinations"),
    ):
        with pytest.raises(ValueError, match=f"hop 0 .*{wrong}"):
            ids = None if eids_first is None else [eids_first]
            checker.require("wrong", seeds, fanouts[:1], [found_first], ids)


def blocks_of(indptr: torch.Tensor, indices: torch.Tensor, seeds: torch.Tensor, fanouts: tuple):
    view = GraphView(
        tiers=torch.tensor([[0, len(indptr) - 1, 1, 0]]),
        pointers=torch.tensor([[indptr.data_ptr(), indices.data_ptr(), 0]]),
        num_rows=len(indptr) - 1,
        num_cols=len(indptr) - 1,
        num_edges=len(indices),
        idtype=indices.dtype,
        owner=(indptr, indices),
    )
    return sample_blocks(view, seeds, fanouts[::-1], SampleKey(0))


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_store_is_calibrated_if_asked_for(calibrated, monkeypatch) -> None:
    asked = []

    def calibrate(store, options, ranks) -> None:
        asked.append((set(store.tables), options.batch_size))

    monkeypatch.setattr(gpu, "calibrate", calibrate)
    sources, options = {"rows": FeatureSource(torch.ones(10, 2))}, {"batch_size": 7}
    with built_store(sources, {}, Communicator(), options, calibrated=calibrated):
        assert asked == ([({"rows"}, 7)] if calibrated else [])


def test_every_window_but_the_first_is_kept_beside_the_medians(monkeypatch) -> None:
    spent = {"a": iter([9.0, 1.0, 5.0, 3.0]), "b": iter([9.0, 4.0, 6.0, 5.0])}
    monkeypatch.setattr(gpu, "window", lambda call, _, device: next(spent[call]))
    medians, samples = gpu.measure({name: name for name in spent}, lambda _: [], 3, Communicator())
    assert samples == {"a": [[1.0, 5.0, 3.0]], "b": [[4.0, 6.0, 5.0]]}
    assert medians == {"a": [3.0], "b": [5.0]}


@pytest.mark.parametrize(
    ("program", "arguments", "cases"),
    [
        (gather_gpu, "--parts uniform host --gb-per-gpu 0.001 --host-gb 0.001 --ids 500", 8),
        (gather_gpu, "--parts cached --nodes 2000 --edges 20000 --batch 50 --row-bytes 64", 2),
        (sampling_gpu, "--nodes 2000 --edges 20000 --idtypes int32 --calibrate", 3),
        (sampling_bytes, "--nodes 2000 --edges 20000", 2),
        (placement_gpu, "--nodes 2000 --edges 20000 --links dgx1-4gf --held 1.1 --batch 50", 6),
    ],
)
def test_programs_run(program, arguments: str, cases: int, tmp_path, monkeypatch) -> None:
    for module in (sampling_gpu, sampling_bytes):
        monkeypatch.setattr(module, "SETTINGS", ((100, (4, 3)),))
    out = tmp_path / "found.json"
    common = f"--ranks 1 --repeats 1 --window 1 --no-peer --out {out}"
    monkeypatch.setattr(sys, "argv", ["program", *common.split(), *arguments.split()])
    program.main()
    figures = json.loads(out.read_text())["figures"]
    assert len(figures) == cases and all(figure["ours"] > 0 for figure in figures)
    for figure in figures:
        if figure["case"].startswith("host, "):
            assert set(figure["more"]["gb_per_second"]) == {
                "ours", gather_gpu.UNSHIFTED, gather_gpu.IN_ORDER, gather_gpu.SHIFTED,
            }  # fmt: skip


@pytest.mark.parametrize(
    ("program", "arguments", "cases"),
    [
        (gather_gpu, "--parts skewed cached unexpected --batch 50 --row-bytes 64", 5),
        (sampling_bytes, "--idtypes int32", 2 * len(sampling_gpu.SETTINGS)),
    ],
)
def test_two_ranks_tell_each_other_what_they_found(
    program, arguments: str, cases: int, tmp_path, monkeypatch
) -> None:
    out = tmp_path / "found.json"
    common = f"--ranks 2 --nodes 20000 --edges 200000 --repeats 1 --window 1 --no-peer --out {out}"
    monkeypatch.setattr(sys, "argv", ["program", *common.split(), *arguments.split()])
    program.main()
    figures = json.loads(out.read_text())["figures"]
    assert len(figures) == cases and all(figure["ours"] > 0 for figure in figures)


def test_the_peers_fastest_way_is_compared_with(tmp_path, monkeypatch) -> None:
    """Its cache has the same share of the rows as our memory for them, and has been filled."""
    embeddings = []

    class Cached(fake_wholegraph.Embedding):
        def __init__(self, *given, **options) -> None:
            super().__init__(*given, **options)
            embeddings.append(self)

    peer = fake_peer(monkeypatch)
    peer._wholegraph.create_embedding = Cached
    monkeypatch.setattr(gather_gpu, "connect", lambda ranks, wanted: peer)
    monkeypatch.setattr(
        gather_gpu, "measure", lambda ways, *_: ({w: [float(len(w))] for w in ways}, {})
    )
    out = tmp_path / "found.json"
    words = "--parts cached --nodes 2000 --edges 20000 --batch 50 --row-bytes 64 --window 1"
    monkeypatch.setattr(sys, "argv", ["program", "--ranks", "1", *words.split(), "--out", str(out)])
    gather_gpu.main()
    ways = {f"peer, local_device cache, {way}" for way in ("adjusted", "as it is")}
    for figure in json.loads(out.read_text())["figures"]:
        rates = figure["more"]["gb_per_second"]
        assert set(rates) == {"ours", "peer", *ways}
        # The shortest name took the least time.
        assert figure["more"]["peers_way"] == "peer" and figure["peer"] == rates["peer"]
        assert figure["more"]["shares"]["device"] > gather_gpu.CACHED  # the hottest rows
    assert len(embeddings) == 2
    for each in embeddings:
        assert each.policy == ("local_device", "continuous", "cpu", "readonly", gather_gpu.CACHED)
        # Four turns of three batches, and a check of either gather.
        assert each.gathers == {True: 4 * 3 + 1, False: 1}


def test_sectors_are_counted_where_the_rows_are() -> None:
    """Against every byte that is read, one after another."""
    indptr, indices = PowerLaw(300, 9000).csc(torch.device("cpu"), torch.int32)
    seeds, parts, mine = torch.arange(0, 300, 7, dtype=torch.int32), 3, 1
    blocks = blocks_of(indptr, indices, seeds, (8, 4))
    degrees = indptr.diff().tolist()
    # Where the entries of a row begin among those of its part, and how many sectors these are.
    first = [sum(degrees[row % parts : row : parts]) for row in range(300)]
    expected = Sectors()
    for block in blocks:
        for i, row in enumerate(block.src_nodes[: block.num_dst].tolist()):
            if row % parts == mine:
                continue
            own = slice(int(block.indptr[i]), int(block.indptr[i + 1]))
            places = [first[row] + int(e) - int(indptr[row]) for e in block.eids[own]]
            bounds = {byte // 32 for byte in range(16 * (row // parts), 16 * (row // parts) + 24)}
            every = range(first[row], first[row] + degrees[row])
            expected += Sectors(
                len(bounds), len({4 * place // 32 for place in places}),
                len({4 * place // 32 for place in every}), len(places), degrees[row],
            )  # fmt: skip
    assert sectors_of(Layout(indptr, 4, parts, mine), blocks) == expected
    assert expected.sampled_megabytes < expected.whole_megabytes
    # One GPU alone counts all of its reads.
    assert sectors_of(Layout(indptr, 4, 1, 0), blocks).edges > expected.edges


def test_what_links_received_is_read_from_the_drivers_listing() -> None:
    listing = """\
GPU 0: NVIDIA H200 (UUID: GPU-0a1b2c3d-0000-1111-2222-333344445555)
\t Link 0: Data Tx: 7 KiB
\t Link 0: Data Rx: 100 KiB
\t Link 1: Data Tx: 7 KiB
\t Link 1: Data Rx: 20 KiB
GPU 1: NVIDIA H200 (UUID: GPU-0a1b2c3d-0000-1111-2222-333344446666)
\t Link 0: Data Rx: 3 KiB
GPU 2: NVIDIA H200 (UUID: GPU-0a1b2c3d-0000-1111-2222-333344447777)
\t Link 0: Data Rx: N/A
"""
    gpus = [f"0a1b2c3d-0000-1111-2222-33334444{end}" for end in ("5555", "6666", "7777")]
    assert received_bytes(listing, gpus[:2]) == 123 * 1024
    with pytest.raises(ValueError, match=r"no counters .*7777"):
        received_bytes(listing, gpus)
    with pytest.raises(ValueError, match="no counters"):
        received_bytes("No devices were found\n", gpus)


def test_links_carry_what_launches_move_in_their_time() -> None:
    machine = object.__new__(links.Machine)
    machine.count, machine.vectors = 1_000_000, 32  # rows of 512 bytes
    assert machine.rate([[1e-3, 3e-3], [4e-3, 4e-3]]) == pytest.approx((256 + 128) / 2)


def test_a_policy_that_is_not_possible_says_why(tmp_path, monkeypatch) -> None:
    out = tmp_path / "found.json"
    few = "--nodes 2000 --edges 20000 --batch 50 --repeats 1 --window 1"
    words = f"--links dgx1-4gc --ranks 4 {few} --out {out}"
    monkeypatch.setattr(sys, "argv", ["program", *words.split()])
    placement_gpu.main()
    figures = {each["case"]: each for each in json.loads(out.read_text())["figures"]}
    missing = figures.pop("dgx1-4gc, auto against partitioned")
    assert missing["peer"] is None and missing["reached"] is None
    assert "is linked only to" in missing["more"]["not_possible"]
    # XGNN's, cliques with and without copies of the hottest rows, a cache, the host.
    assert len(figures) == 5 and all(each["peer"] > 0 for each in figures.values())
    targets = {case: each["times_peer"] for case, each in figures.items()}
    assert targets["dgx1-4gc, auto against clique"] == 1.5
    assert targets["dgx1-4gc, auto against host"] == 1.0


@pytest.mark.parametrize(("held", "where"), [(1.1, "cuda"), (0.5, "cpu")])
def test_the_peers_rows_are_on_gpus_that_have_room(held, where, tmp_path, monkeypatch) -> None:
    peer, out = fake_peer(monkeypatch), tmp_path / "found.json"
    monkeypatch.setattr(placement_gpu, "connect", lambda ranks, wanted: peer)
    few = "--nodes 2000 --edges 20000 --batch 50 --repeats 1 --window 1"
    words = f"--links dgx1-4gf --ranks 1 --held {held} {few} --out {out}"
    monkeypatch.setattr(sys, "argv", ["program", *words.split()])
    placement_gpu.main()
    figures = json.loads(out.read_text())["figures"]
    assert figures[-1]["case"] == "dgx1-4gf, auto against pylibwholegraph"
    assert figures[-1]["ratio_to_peer"] == figures[-1]["peer"] / figures[-1]["ours"]
    assert figures[0]["more"]["peers_memory"] == where
    impossible = [each["case"] for each in figures if each["peer"] is None]
    assert impossible == ([] if held > 1 else ["dgx1-4gf, auto against partitioned"])


def test_a_pattern_of_links_is_for_its_number_of_gpus(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--links", "dgx1-6g", "--ranks", "4"])
    with pytest.raises(SystemExit):
        placement_gpu.main()
    assert "--ranks 6" in capsys.readouterr().err
