"""The store on GPUs that are not there (fake_gpu.py), for one rank and for several."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing as mp
import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dgl
import numpy as np
import pytest
import torch

import dgl_mgpu
from dgl_mgpu.comm import cuda_runtime
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.errors import (
    ConfigError,
    DeviceMemoryError,
    PeerAccessError,
    RankFailedError,
    StoreClosedError,
    UnavailableError,
)
from dgl_mgpu.machine import preset
from dgl_mgpu.machine.links import FOUND, as_measured, is_measured
from dgl_mgpu.ops import RowView, gather_rows
from dgl_mgpu.store.memory import Blueprint, FeatureSource, build
from dgl_mgpu.store.memory import device as device_module
from dgl_mgpu.store.memory import links as measuring
from dgl_mgpu.store.memory.links import measure_links
from dgl_mgpu.store.memory.machine import (
    machine,
    prove_access,
    restrict_links,
    topology_of_ranks,
    with_access,
)
from dgl_mgpu.store.memory.segment import Segment
from dgl_mgpu.train.launch.launch import launch
from tests.store.memory.fake_gpu import FakeRuntime
from tests.store.memory.layouts import partitioned, plan_of, replicated, single
from tests.store.memory.test_tables import ROWS, assert_equal_to_sources, make_blueprint


@pytest.fixture(autouse=True)
def _restored(monkeypatch) -> None:
    """A single rank's work runs in this process; what it replaces is put back."""
    monkeypatch.setattr(cuda_runtime, "find_runtime", cuda_runtime.find_runtime)
    monkeypatch.setattr(device_module, "_PART_BYTES", device_module._PART_BYTES)
    monkeypatch.setattr(
        device_module.UploadChannel, "window_bytes", device_module.UploadChannel.window_bytes
    )


def three_tiers(num_ranks: int):
    a, b = ROWS // 7, ROWS // 2
    return [
        replicated(0, a, num_ranks),
        partitioned(a, b, num_ranks),
        single(b, ROWS, "host", num_ranks),
    ]


def build_here(ranks: Communicator, runtime: FakeRuntime, idtype=torch.int64):
    torch.manual_seed(0)  # every rank makes the same data to compare with
    blueprint = make_blueprint(ranks.size, three_tiers(ranks.size), Path("/none"), idtype)
    return build(blueprint if ranks.rank == 0 else None, ranks, runtime), blueprint


def _reads_everything(part_bytes: int) -> None:
    device_module._PART_BYTES = part_bytes
    device_module.UploadChannel.window_bytes = 3 * part_bytes
    ranks = Communicator.of_this_machine()
    runtime = FakeRuntime(ranks.rank, ranks.size)
    for idtype in (torch.int32, torch.int64):
        store, blueprint = build_here(ranks, runtime, idtype)
        assert_equal_to_sources(store, blueprint)
        # Nothing but the tables is on the GPU, and the window is no longer registered.
        mine = sum(
            -(-segment.nbytes // 128) * 128
            for table in store.tables.values()
            for memory, segment in zip(table.memories, table._segments, strict=True)
            if memory == "device"
        )
        assert runtime.used == mine
        assert len(runtime.registered) == len(store.tables)
        store.close()
        assert runtime.is_empty


@pytest.mark.parametrize(("num_ranks", "part_bytes"), [(1, 1000), (2, 1 << 20), (4, 1000)])
def test_every_rank_reads_the_sources_rows_and_closing_frees_all(num_ranks, part_bytes):
    launch(_reads_everything, num_ranks, part_bytes)


@pytest.mark.parametrize(
    ("rates", "share"),
    [
        ({}, 1.0),
        ({"host": 0.2, "local": 0.8}, 0.2),
        ({"host": 0.0}, 1.0),
        ({"host": 0.0, "local": 1.0}, 0.0),
        ({"local": 1.0}, 0.0),
    ],
)
def test_tables_know_how_many_of_their_reads_go_to_the_host(rates, share):
    for tiers, of_graphs in ((three_tiers(1), share), ([replicated(0, ROWS, 1)], 0.0)):
        blueprint = make_blueprint(1, tiers, Path("/none"), torch.int64)
        plan = dataclasses.replace(
            blueprint.plan, hit_rates={name: rates for name in blueprint.plan.tables}
        )
        store = build(dataclasses.replace(blueprint, plan=plan), Communicator(), FakeRuntime(0, 1))
        graphs, rows = [], []
        for table in store.tables.values():
            (rows if isinstance(table.view, RowView) else graphs).append(table.view.host_share)
        assert set(rows) == {share} and set(graphs) == {of_graphs}
        store.close()


def _leaves_without_closing() -> None:
    ranks = Communicator.of_this_machine()
    runtime = FakeRuntime(ranks.rank, ranks.size)
    store, _ = build_here(ranks, runtime)
    if ranks.rank == 0:
        del store
        gc.collect()
        # Mapped by the other, its memory is not to be freed yet.
        assert runtime.used and not runtime.opened and not runtime.registered
    ranks.run_all("wait", lambda: None)
    if ranks.rank == 1:
        del store
        gc.collect()
        assert runtime.is_empty
    ranks.run_all("wait", lambda: None)
    store, blueprint = build_here(ranks, runtime)  # frees what was left
    assert_equal_to_sources(store, blueprint)
    assert len(runtime.blocks) == 1
    store.close()
    assert runtime.is_empty


def test_what_nothing_refers_to_is_freed_once_no_rank_maps_it():
    launch(_leaves_without_closing, 2)


def _fails_while_filling(where: str) -> None:
    ranks = Communicator.of_this_machine()
    runtime = FakeRuntime(ranks.rank, ranks.size)
    runtime.fail_upload = where == "upload" and ranks.rank == 1
    before = {os.readlink(f"/proc/self/fd/{fd}") for fd in _open_files()}
    rows = np.ones((50_000, 16), np.float32)
    blueprint = Blueprint(
        {"a": FeatureSource(rows), "b": FeatureSource(_Fragile(rows))},
        {},
        plan_of(ranks.size, {name: [partitioned(0, 50_000, ranks.size)] for name in "ab"}),
    )
    if where == "upload":
        blueprint.sources.pop("b")
    reasons = {"upload": "the bus is on fire", "source": "the disk is gone"}
    try:
        build(blueprint if ranks.rank == 0 else None, ranks, runtime)
    except (RankFailedError, RuntimeError, OSError) as error:
        assert reasons[where] in str(error)
    else:
        raise AssertionError("it was built")
    gc.collect()
    assert runtime.is_empty
    after = {os.readlink(f"/proc/self/fd/{fd}") for fd in _open_files()}
    assert not {name for name in after - before if "/dev/shm" in name}
    ranks.run_all("go on", lambda: None)  # the ranks still talk to each other


class _Fragile:
    """Rows that cannot be read to the end."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows
        self.ndim, self.shape, self.dtype = rows.ndim, rows.shape, rows.dtype

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        if ids.max() % 2:
            raise OSError("the disk is gone")
        return self._rows[ids]


def _open_files() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]


@pytest.mark.parametrize("where", ["upload", "source"])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_failure_half_way_leaves_nothing(where, num_ranks):
    if (where, num_ranks) != ("upload", 1):  # a single rank has no other to fail
        launch(_fails_while_filling, num_ranks, where)


def _runs_out_of_memory(share: bool) -> None:
    ranks = Communicator.of_this_machine()
    gpu = 0 if share else ranks.rank
    # Enough for each alone where they share one GPU; too little on rank 1 where they do not.
    memory = 40_000 if share or ranks.rank == 1 else 1 << 20
    runtime = FakeRuntime(ranks.rank, ranks.size, gpu, memory)
    rows = np.zeros((1000 if share else 2000, 16), np.float32)
    blueprint = Blueprint(
        {"f": FeatureSource(rows)}, {}, plan_of(2, {"f": [partitioned(0, len(rows), 2)]})
    )
    with pytest.raises(DeviceMemoryError, match=rf"fake-{0 if share else 1}: 40,000") as caught:
        build(blueprint if ranks.rank == 0 else None, ranks, runtime)
    assert caught.value.needed == 64_000 and caught.value.available == 40_000
    assert runtime.most_bytes == 0  # nobody had allocated anything


@pytest.mark.parametrize("share", [False, True])
def test_too_little_gpu_memory_is_told_on_all_ranks_before_anything_is_made(share):
    launch(_runs_out_of_memory, 2, share)


def test_no_other_process_reads_it():
    store, _ = build_here(Communicator(), FakeRuntime(0, 1))
    table = store.tables["label"]
    with pytest.raises(StoreClosedError, match="num_workers=0"):
        pickle.dumps(table)
    answers = mp.get_context("fork").Queue()

    def read() -> None:
        try:
            gather_rows(table.view, torch.arange(3))
        except StoreClosedError as error:
            answers.put(str(error))

    process = mp.get_context("fork").Process(target=read)
    process.start()
    assert "num_workers=0" in answers.get()
    process.join()
    assert gather_rows(table.view, torch.arange(3)).shape == (3,)  # the fork has freed nothing
    store.close()
    with pytest.raises(StoreClosedError, match="closed"):
        table.view  # noqa: B018


def _one_is_killed(folder: Path) -> None:
    ranks = Communicator.of_this_machine()
    ranks.all_gather(0)  # all have found each other: else some would not get as far as here
    if ranks.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RankFailedError, match="gone"):
            ranks.all_gather(0)
    (folder / f"{ranks.rank}").touch()


def test_a_killed_rank_is_told_to_all(tmp_path):
    # Four, so that one of the others is no neighbour of the rank that is gone.
    with pytest.raises(RankFailedError, match="SIGKILL"):
        launch(_one_is_killed, 4, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "3"]


def _proves(refused, garbled, unshared) -> None:
    ranks = Communicator.of_this_machine()
    runtime = FakeRuntime(
        ranks.rank, ranks.size, refused=refused, garbled=garbled, unshared=unshared
    )
    access = prove_access(runtime, ranks)
    expected = np.ones((ranks.size, ranks.size), bool)
    for pair in (*refused, *garbled):
        expected[pair] = False
    for rank in unshared:
        expected[:, rank] = np.arange(ranks.size) == rank
    assert np.array_equal(access, expected)
    assert runtime.is_empty


def test_access_is_proved_by_reading():
    launch(_proves, 3, [(0, 2)], [(1, 0), (2, 1)], [])


def test_memory_without_a_handle_is_not_read_by_others():
    launch(_proves, 3, [(0, 2)], [], [1])


def _with_small_copies(folder) -> None:
    os.environ["XDG_CACHE_HOME"] = str(folder)
    measuring._OWN_BYTES = measuring._LINK_BYTES = 1 << 16


def _measures(folder) -> None:
    _with_small_copies(folder)
    ranks = Communicator.of_this_machine()
    runtime = FakeRuntime(ranks.rank, ranks.size, refused=[(0, 2)])
    runtime.is_measured = is_measured
    infos = ranks.all_gather(runtime.device_info())
    access = prove_access(runtime, ranks)
    measure_links(runtime, ranks, access, infos)
    assert runtime.is_empty
    here = with_access(machine("auto", ranks.size, runtime, infos), access)
    here = as_measured(here, [info.gpu for info in infos])
    assert here.link_bandwidth.tolist() == [
        [1000.0, 101.0, 0.0],  # the last was refused
        [100.0, 1000.0, 102.0],
        [100.0, 101.0, 1000.0],
    ]
    assert here.host_bandwidth.tolist() == [50.0] * 3
    assert [group.bandwidth for group in here.host_groups] == [75.0]
    assert here.port_bandwidth.tolist() == [101.0, 101.0, 100.5]  # all at once half of each
    runtime.rates = None  # once is enough
    measure_links(runtime, ranks, access, infos)


def test_links_are_measured_once(tmp_path):
    launch(_measures, 3, tmp_path)


def _lacks_memory(folder) -> None:
    _with_small_copies(folder)
    ranks = Communicator.of_this_machine()
    runtime = FakeRuntime(ranks.rank, ranks.size, memory=1 << (16 if ranks.rank else 20))
    runtime.is_measured = is_measured
    infos = ranks.all_gather(runtime.device_info())
    measure_links(runtime, ranks, np.ones((2, 2), bool), infos)
    assert runtime.is_empty and not FOUND.read()


def test_links_are_not_measured_where_memory_lacks(tmp_path):
    launch(_lacks_memory, 2, tmp_path)


class _Refusing:
    """CUDA's runtime where memory cannot be shared."""

    class CUDARuntimeError(RuntimeError):
        pass

    def getDevice(self) -> int:
        return 0

    def setDevice(self, index: int) -> None:
        pass

    def ipcGetMemHandle(self, address: int) -> bytes:
        raise self.CUDARuntimeError("cudaErrorNotSupported: operation not supported")


def test_memory_that_cuda_does_not_share_is_a_typed_error():
    runtime = object.__new__(cuda_runtime.Runtime)
    runtime._runtime, runtime._index, runtime.device = _Refusing(), 0, torch.device("cuda", 0)
    with pytest.raises(PeerAccessError, match=r"cuda:0.*NotSupported.*store\.links"):
        runtime.share(4096)


def _reads_what_has_no_handle() -> None:
    ranks = Communicator.of_this_machine()
    runtime = FakeRuntime(ranks.rank, ranks.size, unshared=[1])
    rows = np.ones((100, 4), np.float32)
    blueprint = Blueprint(
        {"f": FeatureSource(rows)}, {}, plan_of(2, {"f": [partitioned(0, 100, 2)]})
    )
    with pytest.raises(PeerAccessError if ranks.rank == 1 else RankFailedError, match="do not"):
        build(blueprint if ranks.rank == 0 else None, ranks, runtime)
    assert runtime.is_empty
    # Where others need not read it, there is no handle to be had.
    blueprint = Blueprint(
        {"f": FeatureSource(rows)}, {}, plan_of(2, {"f": [replicated(0, 100, 2)]})
    )
    build(blueprint if ranks.rank == 0 else None, ranks, runtime).close()
    assert runtime.is_empty


def test_a_plan_that_needs_a_handle_that_is_refused():
    launch(_reads_what_has_no_handle, 2)


def _one_gpu_is_not_there(fails: str) -> None:
    ranks = Communicator.of_this_machine()
    runtime = FakeRuntime(ranks.rank, ranks.size)

    def broken():
        raise RuntimeError("the GPU has fallen off the bus")

    if ranks.rank == 1:
        setattr(runtime if fails == "device_info" else cuda_runtime, fails, broken)
    if fails == "device_info":
        cuda_runtime.find_runtime = lambda: runtime
    g = power_law_graph(20, 30)
    with pytest.raises(RuntimeError, match="fallen off the bus"):
        dgl_mgpu.GlobalStore.from_dgl(g if ranks.rank == 0 else None)
    with pytest.raises(RuntimeError, match="fallen off the bus"):
        if fails == "find_runtime":
            cuda_runtime.choose_runtime("auto", ranks)
        else:
            build_here(ranks, runtime)
    ranks.run_all("go on", lambda: None)  # the ranks still talk to each other


@pytest.mark.parametrize("fails", ["find_runtime", "device_info"])
def test_a_gpu_that_fails_before_anything_is_made_is_told_to_all(fails):
    launch(_one_gpu_is_not_there, 2, fails)


def test_positions_count_before_anything_is_made():
    runtime = FakeRuntime(0, 1, memory=400)
    rows, order = np.zeros((100, 1), np.float32), np.arange(100)
    tiers = [partitioned(0, 10, 1), single(10, 100, "host", 1)]
    blueprint = Blueprint({"f": FeatureSource(rows, "n")}, {"n": order}, plan_of(1, {"f": tiers}))
    with pytest.raises(DeviceMemoryError) as caught:
        build(blueprint, Communicator(), runtime)
    assert caught.value.needed == 128 + 4 * 100 and runtime.most_bytes == 0


def _holds_rows_of_no_bytes() -> None:
    ranks = Communicator.of_this_machine()
    runtime = FakeRuntime(ranks.rank, ranks.size)
    sources = {"f": FeatureSource(np.empty((10, 0), np.float32))}
    blueprint = Blueprint(sources, {}, plan_of(2, {"f": [partitioned(0, 10, 2)]}))
    store = build(blueprint if ranks.rank == 0 else None, ranks, runtime)
    assert gather_rows(store.tables["f"].view, torch.arange(10)).shape == (10, 0)
    store.close()


def test_a_store_of_no_bytes():
    launch(_holds_rows_of_no_bytes, 2)


def power_law_graph(num_nodes: int = 600, num_edges: int = 6000) -> dgl.DGLGraph:
    rng = np.random.default_rng(5)
    sources = (num_nodes * rng.random(num_edges) ** 3).astype(np.int64)
    g = dgl.graph((sources, rng.integers(0, num_nodes, num_edges)), num_nodes=num_nodes)
    g.ndata["feat"] = torch.from_numpy(rng.standard_normal((num_nodes, 64)).astype(np.float32))
    g.ndata["half"] = g.ndata["feat"][:, :3].to(torch.bfloat16)
    return g


def _builds_from_dgl(options: dict, fake: dict, hidden: list) -> None:
    ranks = Communicator.of_this_machine()
    settings = {name: value for name, value in fake.items() if name != "gpus"}
    gpus = fake.get("gpus", list(range(ranks.size)))
    runtime = FakeRuntime(ranks.rank, max(gpus) + 1, gpus[ranks.rank], **settings)
    cuda_runtime.find_runtime = lambda: runtime
    g = power_law_graph()
    store = dgl_mgpu.GlobalStore.from_dgl(g if ranks.rank == 0 else None, **options)
    every = torch.arange(g.num_nodes())
    for name, rows in g.ndata.items():
        assert torch.equal(store.gather(name, every), rows)
    _, _, blocks = store.graph.sample_blocks(every[:100], [-1, -1])
    frontier = dgl.in_subgraph(g, every[:100])
    assert blocks[-1].num_edges() == frontier.num_edges()
    for table in store.plan.tables.values():
        for tier in table.tiers:
            for reader, owner in hidden:
                assert owner not in tier.source[reader]
    if "gpu_memory" in options:
        held = runtime.used + 4 * g.num_nodes()  # with the positions
        assert held <= int(options["gpu_memory"]) + 128 * 40
    assert any(t.memory == "gpu" for table in store.plan.tables.values() for t in table.tiers)
    store.close()
    assert runtime.is_empty
    with pytest.raises(StoreClosedError):
        store.gather("feat", every)


@pytest.mark.parametrize(
    ("num_ranks", "options", "fake", "hidden"),
    [
        (1, {"gpu_memory": 60_000}, {}, []),
        (2, {"gpu_memory": 90_000}, {"gpus": [0, 0]}, []),
        (3, {"gpu_memory": 60_000}, {"gpus": [2, 0, 1]}, []),
        (4, {"gpu_memory": 60_000, "links": "dgx1-4gc"}, {}, [(0, 3), (1, 2), (3, 0), (2, 1)]),
        (2, {"gpu_memory": 90_000}, {"refused": [(1, 0)]}, [(1, 0)]),
        (2, {"gpu_memory": 90_000}, {"unshared": [0]}, [(1, 0)]),
        (1, {"gpu_memory": 60_000}, {"unshared": [0]}, []),
        (4, {"links": [[0, 1], [2, 3]]}, {}, [(0, 2), (0, 3), (1, 2), (1, 3)]),
    ],
)
def test_the_plan_is_for_the_links_there_are(num_ranks, options, fake, hidden):
    launch(_builds_from_dgl, num_ranks, options, fake, hidden)


def test_links_that_are_none():
    machine = preset("hgx-h200", 4)
    for links in ([[0, 4]], [[1, 1]], [[0, 1, 2]], 7, [[0, "1"]], "dgx-1000", [0, 1]):
        with pytest.raises(ConfigError):
            restrict_links(machine, links)
    with pytest.raises(ConfigError, match="it has 4"):
        restrict_links(preset("hgx-h200", 6), "quad-v100")
    only = restrict_links(machine, [[0, 1]]).link_bandwidth
    assert (only > 0).sum() == 4 + 2 and only[0, 1] == machine.link_bandwidth[0, 1]
    dgx1 = restrict_links(preset("hgx-h200"), "dgx1").link_bandwidth > 0
    assert np.array_equal(dgx1, preset("dgx1").link_bandwidth > 0)


def test_topology_on_disk_is_refused_on_gpus(tmp_path):
    blueprint = make_blueprint(1, [single(0, ROWS, "disk", 1)], tmp_path)
    with pytest.raises(ConfigError, match=r"host_memory.*store\.device=cpu"):
        build(blueprint, Communicator(), FakeRuntime(0, 1))


def test_which_device(monkeypatch):
    g = power_law_graph(20, 30)
    runtime = FakeRuntime(0, 1)
    monkeypatch.setattr(cuda_runtime, "find_runtime", lambda: runtime)
    dgl_mgpu.GlobalStore.from_dgl(g, device="cpu")
    assert runtime.most_bytes == 0
    dgl_mgpu.GlobalStore.from_dgl(g, device="cuda").close()
    assert runtime.most_bytes > 0 and runtime.is_empty
    with pytest.raises(ConfigError, match="auto, cpu, cuda"):
        dgl_mgpu.GlobalStore.from_dgl(g, device="gpu")

    def no_cupy():
        raise UnavailableError("run a CUDA kernel", "CuPy cannot be imported", "pip install it")

    monkeypatch.setattr(cuda_runtime, "find_runtime", no_cupy)
    with pytest.raises(UnavailableError, match=r"rank 0 cannot use one .*pip install it"):
        dgl_mgpu.GlobalStore.from_dgl(g, device="cuda")
    with pytest.warns(UserWarning, match="stays in shared memory"):
        dgl_mgpu.GlobalStore.from_dgl(g)
    monkeypatch.setattr(cuda_runtime, "find_runtime", lambda: None)
    with pytest.raises(UnavailableError, match="no GPU"):
        dgl_mgpu.GlobalStore.from_dgl(g, device="cuda")


def test_training_keeps_its_share_of_a_gpu():
    gib = 1 << 30
    device_infos = [
        cuda_runtime.DeviceInfo(f"{i}", free, 100 * gib)
        for i, free in enumerate((90 * gib, 20 * gib))
    ]
    seen = ["0", "1"]
    found = topology_of_ranks(
        preset("hgx-h200", 2), seen, [device_infos[1], device_infos[0], device_infos[0]]
    )
    assert found.gpu_memory.tolist() == [0, 65 * gib // 2, 65 * gib // 2]
    local, link = (preset("hgx-h200").link_bandwidth[0, gpu] for gpu in (0, 1))
    assert found.link_bandwidth.tolist() == [
        [local, link, link], [link, local, local], [link, local, local]
    ]  # fmt: skip
    small = [cuda_runtime.DeviceInfo("0", 8 * gib, 8 * gib)]
    assert topology_of_ranks(preset("single"), ["0"], small).gpu_memory.tolist() == [4 * gib]
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        topology_of_ranks(preset("single"), ["0"], device_infos[1:])


def test_a_process_that_ended_has_nothing_mapped():
    go_on = mp.get_context("fork").Event()
    process = mp.get_context("fork").Process(target=go_on.wait)
    process.start()
    mark = device_module._process_stamp(process.pid)
    assert device_module._is_alive(mark)
    # Another process with this number is not this process.
    assert not device_module._is_alive(mark - (1 << device_module._PID_BITS))
    go_on.set()
    while Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    assert not device_module._is_alive(mark)  # though it is still listed
    process.join()
    assert not device_module._is_alive(mark)
    assert device_module._is_alive(device_module._process_stamp(os.getpid()))
    assert not device_module._is_alive(0)


class _CountedMemory:
    """A store's memory on a GPU that is not there, of two ranks of which this is the first."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.segment = Segment.create(16)
        self.marks = self.segment.array(np.int64, (2,))
        self.memory = device_module.DeviceMemory(runtime, self.segment, 0)
        self.memory.allocate(1000)


def test_a_killed_ranks_number_taken_by_another_process_keeps_no_block():
    runtime = FakeRuntime(0, 2)
    counted = _CountedMemory(runtime)
    # As a rank would have left it that was started before this process, which has its number now.
    counted.marks[1] = device_module._process_stamp(os.getpid()) - (1 << device_module._PID_BITS)
    counted.memory.close()
    assert runtime.is_empty


def test_a_failing_gpu_does_not_keep_others_waiting(monkeypatch):
    runtime = FakeRuntime(0, 2)
    counted = _CountedMemory(runtime)

    def fails() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(runtime, "synchronize", fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        counted.memory.close()
    assert not counted.marks.any()


def test_a_finalizer_that_runs_while_blocks_are_freed(monkeypatch):
    runtime = FakeRuntime(0, 2)
    counted_memories = [_CountedMemory(runtime) for _ in range(3)]
    for counted in counted_memories:
        # Another rank has all of them mapped for now.
        counted.marks[1] = device_module._process_stamp(os.getpid())
        counted.memory._finalizer()
    assert len(runtime.blocks) == 3
    garbage = [_CountedMemory(runtime)]
    is_alive = device_module._is_alive

    def collects(mark: int) -> bool:
        garbage.clear()  # which sweeps, as the garbage collector may at any time
        return is_alive(mark)

    for counted in counted_memories:
        counted.marks[1] = 0
    monkeypatch.setattr(device_module, "_is_alive", collects)
    device_module.sweep()
    assert runtime.is_empty


def test_threads_that_sweep_free_each_block_once():
    runtime = FakeRuntime(0, 2)
    counted_memories = [_CountedMemory(runtime) for _ in range(50)]
    for counted in counted_memories:
        counted.marks[1] = device_module._process_stamp(os.getpid())
        counted.memory._finalizer()
        counted.marks[1] = 0
    with ThreadPoolExecutor(8) as pool:
        for sweep in [pool.submit(device_module.sweep) for _ in range(8)]:
            sweep.result()  # raises what the thread raises
    assert runtime.is_empty


def test_a_fork_that_closes_a_store_does_nothing(monkeypatch):
    monkeypatch.setattr(device_module, "_WAIT_SECONDS", 100.0)
    runtime = FakeRuntime(0, 1)
    store, blueprint = build_here(Communicator(), runtime)

    def close() -> None:
        def fails() -> None:
            raise RuntimeError("cannot initialise CUDA in a fork")

        runtime.synchronize = runtime.trim = fails
        store.close()

    process = mp.get_context("fork").Process(target=close)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert_equal_to_sources(store, blueprint)
    store.close()
    assert runtime.is_empty
