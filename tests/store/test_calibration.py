"""The calibration of multiprocessors on a GPU that is not there: its times are a model's."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import dgl
import numpy as np
import pytest
import torch

import dgl_mgpu
from dgl_mgpu.comm import cuda_runtime
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.cuda_runtime import Runtime
from dgl_mgpu.errors import ConfigError, DeviceMemoryError, RankFailedError
from dgl_mgpu.ops import gather_rows
from dgl_mgpu.ops.view import HOST_SMS, LISTED_ROWS
from dgl_mgpu.placement import order_by_hotness
from dgl_mgpu.store import calibration
from dgl_mgpu.store.calibration import FOUND, calibrate
from dgl_mgpu.store.memory import Blueprint, FeatureSource, TopologySource, build
from dgl_mgpu.store.planning import StoreOptions
from dgl_mgpu.train.launch.launch import launch
from tests.store.memory.fake_gpu import FakeRuntime
from tests.store.memory.layouts import partitioned, plan_of, replicated, single
from tests.store.memory.test_tables import random_csc

SMS = 132
ROWS, WIDTH = 9000, 8
#: Tiers: replicated, dealt out, in host memory; and how often each is read.
CUTS, ACCESSES = (0, 1000, 5000, ROWS), (0.7, 0.1, 0.2)
OPTIONS = StoreOptions(batch_size=50, fanouts=(3, 2))

Times = dict[str, Callable[[int], float]]

#: Seconds by the number of multiprocessors: a link that 16 fill, a host that 4 read best, and a
#: sampler that 49 serve as well as all of them.
TIMES: Times = {
    "sms": lambda sms: 1 / min(25 * sms, 400),
    "host_sms": lambda sms: 1 / (11 * sms if sms < 4 else 46 - 0.1 * sms),
    "sample": lambda sms: 1 + 3 / sms,
}


class Model:
    """A clock that calls once and tells what a model says of the operator that it saw called.

    Attributes
    ----------
    calls : list of tuple
        Kind of operator, multiprocessors, and what the operator was given.
    """

    num_sms = SMS

    def __init__(self, times: Times = TIMES, machine: str = "fake") -> None:
        self.machine = machine
        self.times = times
        self.calls: list[tuple] = []
        gather, sample = dgl_mgpu.ops.gather_rows, dgl_mgpu.ops.sample_blocks

        def gather_rows(view, ids, out):
            kind = "sms" if view.host_start < 0 else "host_sms"
            self.calls.append((kind, getattr(view, kind), view, ids))
            return gather(view, ids, out)

        def sample_blocks(view, seeds, fanouts, key, *, sms):
            self.calls.append(("sample", sms, view, seeds))
            assert len(seeds) == OPTIONS.batch_size and list(fanouts) == list(OPTIONS.fanouts)
            return sample(view, seeds, fanouts, key, sms=sms)

        calibration.gather_rows, calibration.sample_blocks = gather_rows, sample_blocks

    def seconds(self, call):
        call()
        kind, sms, *_ = self.calls[-1]
        return self.times[kind](sms)

    def counts(self) -> dict[str, set[int]]:
        """What was tried for each kind."""
        return {kind: {sms for k, sms, *_ in self.calls if k == kind} for kind in TIMES}


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Tables of these tests are large enough, and what is found is kept in a folder of their own;
    what a test puts in a module's place goes when it ends."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("gather_rows", "sample_blocks"):
        monkeypatch.setattr(calibration, name, getattr(calibration, name))
    monkeypatch.setattr(cuda_runtime, "find_runtime", cuda_runtime.find_runtime)
    shrink(monkeypatch.setattr)


def shrink(set_value=setattr) -> None:
    """Take small tables for large ones."""
    set_value(calibration, "MIN_BYTES", 4000)
    set_value(calibration, "_BATCH_BYTES", 20_000 * 4 * WIDTH)


def build_store(ranks: Communicator, tables=("rows", "graph"), cuts=CUTS, gpu=True):
    """A store whose tables are in tiers of the GPUs and the host's, and the feature rows."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    indptr, indices = random_csc(rng, ROWS, 60_000)
    sources = {
        "rows": FeatureSource(rows, "node"),
        "graph": TopologySource(indptr, indices, None, ROWS, torch.int64, "node"),
    }
    makers = (replicated, partitioned, lambda *args: single(*args[:2], "host", args[2]))
    tiers = [
        make(start, stop, ranks.size)
        for make, start, stop in zip(makers, cuts[:-1], cuts[1:], strict=True)
        if start < stop
    ]
    plan = plan_of(ranks.size, {name: tiers for name in tables})
    often = [share for share, a, b in zip(ACCESSES, cuts[:-1], cuts[1:], strict=True) if a < b]
    plan = dataclasses.replace(
        plan,
        rows=tuple({"table": name, "accesses": a} for name in tables for a in often),
        hit_rates={name: {"local": 0.8, "host": 0.2} for name in tables},
    )
    order = order_by_hotness(np.bincount(indices, minlength=ROWS)).order
    blueprint = Blueprint({name: sources[name] for name in tables}, {"node": order}, plan)
    runtime = FakeRuntime(ranks.rank, ranks.size) if gpu else None
    return build(blueprint if ranks.rank == 0 else None, ranks, runtime), rows


def used(store) -> list[int]:
    """Multiprocessors for rows in GPUs, in host memory, and for sampling."""
    rows = store.tables["rows"].view
    return [rows.sms, rows.host_sms, *(t.view.sms for n, t in store.tables.items() if n != "rows")]


def test_as_few_as_fill_the_link() -> None:
    store, rows = build_store(Communicator())
    calibrate(store, OPTIONS, Communicator(), Model())
    assert used(store) == [16, 4, 49]
    ids = torch.arange(ROWS)
    assert torch.equal(gather_rows(store.tables["rows"].view, ids), torch.from_numpy(rows))


@pytest.mark.parametrize(
    ("gather", "expected"),
    [
        (lambda sms: 1 / sms, 0),  # rows of its own memory: all of the GPU
        (lambda sms: 1 / min(sms, 65.0), 66),  # within 97 %
        (lambda sms: 1 / (132 if sms == SMS else 127), 0),  # not within
        (lambda sms: 1.0, 1),  # as fast with any
    ],
)
def test_how_few_are_enough(gather, expected) -> None:
    store, _ = build_store(Communicator())
    calibrate(store, OPTIONS, Communicator(), Model({**TIMES, "sms": gather}))
    assert used(store)[0] == expected


@pytest.mark.parametrize(("held_up", "by"), [(16, 1.2), (99, 5.0)])
def test_a_measurement_that_was_held_up_counts_for_nothing(held_up, by) -> None:
    model, seen = Model(), set()

    def sometimes(sms: int) -> float:
        late = by if sms == held_up and sms not in seen else 1.0
        seen.add(sms)
        return late * TIMES["sms"](sms)

    model.times = {**TIMES, "sms": sometimes}
    store, _ = build_store(Communicator())
    calibrate(store, OPTIONS, Communicator(), model)
    assert used(store)[0] == 16


def test_what_is_measured_is_what_training_reads() -> None:
    store, rows = build_store(Communicator())
    model = Model()
    before = torch.get_rng_state()
    calibrate(store, OPTIONS, Communicator(), model)
    assert torch.equal(torch.get_rng_state(), before)
    gathers = [call for call in model.calls if call[0] != "sample"]
    for kind, _, view, ids in gathers:
        first, last = (CUTS[2], ROWS) if kind == "host_sms" else (0, CUTS[2])
        assert len(ids) >= LISTED_ROWS and first <= int(ids.min()) and int(ids.max()) < last
        # Sorted by address, as a gather does, where the host's link is what is measured.
        assert view.host_start == (CUTS[2] if kind == "host_sms" else -1)
        assert kind != "host_sms" or view.host_share == 1.0  # though the plan expects fewer
    # The replicated tier has a fifth of the rows that GPUs hold, and seven reads of eight.
    on_gpus, on_host = (
        torch.cat([ids for kind, *_, ids in gathers if kind == which])
        for which in ("sms", "host_sms")
    )
    assert float((on_gpus < CUTS[1]).double().mean()) == pytest.approx(0.7 / 0.8, abs=0.01)
    assert len(on_host.unique()) > 0.9 * (ROWS - CUTS[2])
    view = gathers[0][2]
    order = store.tables["rows"].view.position.argsort()
    places = torch.tensor([0, 999, 1000, 4999])
    assert torch.equal(gather_rows(view, places), torch.from_numpy(rows)[order[places]])
    # Batches take turns.
    assert len({id(ids) for kind, *_, ids in gathers if kind == "sms"}) > 1


def test_nothing_is_measured_on_small_tables(monkeypatch) -> None:
    monkeypatch.setattr(calibration, "MIN_BYTES", 1 << 20)
    store, _ = build_store(Communicator())
    model = Model()
    calibrate(store, OPTIONS, Communicator(), model)
    assert model.calls == [] and used(store) == [0, HOST_SMS, 0]
    assert not FOUND.path.exists()
    # 160 kB in GPUs and 128 kB in host memory.
    monkeypatch.setattr(calibration, "MIN_BYTES", 140_000)
    calibrate(store, OPTIONS, Communicator(), model)
    assert model.counts()["host_sms"] == set() and used(store) == [16, HOST_SMS, 49]


def test_all_neighbours_are_not_sampled_for_it() -> None:
    store, _ = build_store(Communicator())
    model = Model()
    calibrate(store, StoreOptions(batch_size=50, fanouts=(-1, 2)), Communicator(), model)
    assert model.counts()["sample"] == set() and used(store) == [16, 4, 0]


def test_a_table_all_in_host_memory() -> None:
    store, _ = build_store(Communicator(), ["rows"], (0, 0, 0, ROWS))
    model = Model()
    calibrate(store, OPTIONS, Communicator(), model)
    assert model.counts()["sms"] == set() and used(store) == [0, 4]


def test_what_was_found_is_used_again() -> None:
    store, _ = build_store(Communicator())
    calibrate(store, OPTIONS, Communicator(), Model())
    again, _ = build_store(Communicator())
    model = Model()
    calibrate(again, OPTIONS, Communicator(), model)
    assert model.calls == [] and used(again) == used(store)
    calibrate(again, OPTIONS, Communicator(), model, cached=False)
    assert model.calls


@pytest.mark.parametrize("what", ["machine", "links", "batch_size", "shares"])
def test_another_machine_or_another_use_is_measured_anew(what) -> None:
    store, _ = build_store(Communicator())
    calibrate(store, OPTIONS, Communicator(), Model())
    text = FOUND.path.read_text()
    options, slow = OPTIONS, {kind: lambda sms: 1 / sms for kind in TIMES}
    model = Model(slow, "other" if what == "machine" else "fake")
    if what == "links":
        options = dataclasses.replace(OPTIONS, links=[[0, 1]])
    if what == "shares":
        rows = tuple({**row, "accesses": 1 / 3} for row in store.plan.rows)
        # Twice as many reads of the tier in host memory, for the sampler.
        layout = dataclasses.replace(store.layout, plan=dataclasses.replace(store.plan, rows=rows))
        store = dataclasses.replace(store, layout=layout)
    if what == "batch_size":
        options = dataclasses.replace(OPTIONS, fanouts=[2, 3])
        calibration.sample_blocks = lambda *args, sms: model.calls.append(("sample", sms))
    calibrate(store, options, Communicator(), model)
    measured = {kind for kind, tried in model.counts().items() if tried}
    assert measured == {"batch_size": {"sample"}, "shares": {"sample"}}.get(what, set(TIMES))
    assert used(store)[2] == 0
    kept, before = json.loads(FOUND.path.read_text())["found"], json.loads(text)["found"]
    assert before.items() < kept.items()  # beside what was there


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: "",
        lambda kept: "[1, 2",
        lambda kept: "\N{SNOWMAN}" * 3,
        lambda kept: "7",
        lambda kept: json.dumps({**kept, "format": 0}),
        lambda kept: json.dumps({"found": kept["found"]}),
        lambda kept: json.dumps({**kept, "found": [1]}),
        lambda kept: json.dumps({**kept, "found": dict.fromkeys(kept["found"], "16")}),
        lambda kept: json.dumps({**kept, "found": dict.fromkeys(kept["found"], SMS + 1)}),
        lambda kept: json.dumps({**kept, "found": dict.fromkeys(kept["found"], -2)}),
    ],
)
def test_a_damaged_or_older_file_is_made_anew(damage) -> None:
    store, _ = build_store(Communicator())
    calibrate(store, OPTIONS, Communicator(), Model())
    text = FOUND.path.read_text()
    FOUND.path.write_text(damage(json.loads(text)))
    model = Model()
    calibrate(store, OPTIONS, Communicator(), model)
    assert model.calls and used(store) == [16, 4, 49]
    assert FOUND.path.read_text() == text
    assert [path.name for path in FOUND.path.parent.iterdir()] == [FOUND.path.name]


def test_a_folder_that_takes_no_file_is_told(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    store, _ = build_store(Communicator())
    with pytest.warns(UserWarning, match="not kept for the next time"):
        calibrate(store, OPTIONS, Communicator(), Model())
    assert used(store) == [16, 4, 49]


def test_the_file_is_in_the_users_cache(monkeypatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/her")
    assert Path("/home/her/.cache/dgl_mgpu") in FOUND.path.parents


@pytest.mark.parametrize(
    ("sms", "expected"), [(0, [0, HOST_SMS, 0]), (40, [40, HOST_SMS, 40]), (2, [2, 2, 2])]
)
def test_a_number_is_taken_as_it_is(sms, expected) -> None:
    store, _ = build_store(Communicator())
    model = Model()
    calibrate(store, dataclasses.replace(OPTIONS, sms=sms), Communicator(), model)
    assert used(store) == expected and model.calls == []
    calibrate(store, OPTIONS, Communicator(), model)
    assert used(store) == [16, 4, 49]


@pytest.mark.parametrize("sms", ["all", -1, 1.5, True, None])
def test_numbers_that_are_none(sms) -> None:
    with pytest.raises(ConfigError, match=r"store\.sms"):
        StoreOptions(sms=sms)


def test_shared_memory_is_left_as_it_is() -> None:
    store, _ = build_store(Communicator(), gpu=False)
    model = Model()
    for sms in ("auto", 16):
        calibrate(store, dataclasses.replace(OPTIONS, sms=sms), Communicator(), model)
    assert used(store) == [0, HOST_SMS, 0] and model.calls == []


def test_too_little_memory_is_told() -> None:
    store, _ = build_store(Communicator())

    def no_room(*args):
        raise torch.cuda.OutOfMemoryError("1 GiB is not there")

    calibration.gather_rows = no_room
    with pytest.raises(DeviceMemoryError, match=r"1 GiB.*store\.gpu_memory"):
        calibrate(store, OPTIONS, Communicator(), type("M", (), {"machine": "", "num_sms": SMS})())


def _agrees(folder: str) -> None:
    shrink()
    ranks = Communicator.of_this_machine()
    store, _ = build_store(ranks)
    times = dict(TIMES)
    if ranks.rank == 1:  # which has a slower way to its peer, and a faster one to the host
        times |= {"sms": lambda sms: 1 / min(9 * sms, 300), "host_sms": lambda sms: 1e-3}
    other = dataclasses.replace(OPTIONS, sms=7)  # the first rank's count
    calibrate(store, OPTIONS if ranks.rank == 0 else other, ranks, Model(times))
    assert used(store) == [33, 4, 49]
    assert ranks.all_gather(used(store)) == [used(store)] * ranks.size
    kept = FOUND.path.read_text()
    assert "2 x fake" in kept

    class Breaks(Model):
        def seconds(self, call):
            if ranks.rank == 1:
                raise RuntimeError("it has fallen off the bus")
            return super().seconds(call)

    with pytest.raises(RankFailedError if ranks.rank == 0 else RuntimeError, match="off the bus"):
        calibrate(store, OPTIONS, ranks, Breaks(machine="broken"))
    assert FOUND.path.read_text() == kept
    ranks.run_all("go on", lambda: None)
    store.close()


def test_the_slowest_rank_decides_for_all(tmp_path) -> None:
    launch(_agrees, 2, str(tmp_path))


def test_a_global_store_is_calibrated_when_it_is_built(monkeypatch) -> None:
    runtime = FakeRuntime(0, 1)
    monkeypatch.setattr(cuda_runtime, "find_runtime", lambda: runtime)
    g = dgl.rand_graph(ROWS, 60_000)
    g.ndata["feat"] = torch.randn(ROWS, WIDTH)
    model = Model()
    monkeypatch.setattr(calibration, "CudaMeter", lambda device: model)
    store = dgl_mgpu.GlobalStore.from_dgl(g, batch_size=50, fanouts=(3, 2))
    found = {type(t.view).__name__: t.view.sms for t in store._store.tables.values()}
    assert found == {"RowView": 16, "GraphView": 49}
    store.close()

    def breaks(call):
        raise RuntimeError("it has fallen off the bus")

    monkeypatch.setattr(model, "seconds", breaks)
    monkeypatch.setattr(model, "machine", "broken")
    with pytest.raises(RuntimeError, match="off the bus"):
        dgl_mgpu.GlobalStore.from_dgl(g, batch_size=50, fanouts=(3, 2))
    assert runtime.is_empty


@pytest.mark.alone
@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
    reason="no GPU, or no CuPy",
)
def test_on_a_gpu(monkeypatch, tmp_path) -> None:
    monkeypatch.undo()  # tables are large, and the clock is the GPU's
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    num_rows = 1 << 20
    rows = np.broadcast_to(np.arange(num_rows, dtype=np.int64)[:, None], (num_rows, 64))
    tiers = [replicated(0, num_rows // 2, 1), single(num_rows // 2, num_rows, "host", 1)]
    order = np.random.default_rng(0).permutation(num_rows)
    blueprint = Blueprint(
        {"rows": FeatureSource(rows, "node")}, {"node": order}, plan_of(1, {"rows": tiers})
    )
    store = build(blueprint, Communicator(), Runtime())
    calibrate(store, OPTIONS, Communicator())
    view = store.tables["rows"].view
    num_sms = torch.cuda.get_device_properties(store.device).multi_processor_count
    # 0 says all of them: which is best, is the machine's answer.
    assert 0 <= view.sms < num_sms and 0 <= view.host_sms < num_sms
    found = json.loads(FOUND.path.read_text())["found"]
    assert list(found.values()) == [view.sms, view.host_sms]
    assert all(torch.cuda.get_device_name() in key for key in found)
    ids = torch.randint(num_rows, (100_000,), device=store.device)
    assert torch.equal(gather_rows(view, ids), ids[:, None].expand(-1, 64))
    store.close()
