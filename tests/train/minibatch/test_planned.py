"""Plans for data and machines that need not be there are those that a store would have."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

from dgl_mgpu.config.schema import Config, DataConfig, ModelConfig, StoreConfig
from dgl_mgpu.config.store_options import StoreOptions
from dgl_mgpu.errors import ConfigError, InvalidInputError
from dgl_mgpu.models.homogeneous import INV_SQRT_DEGREES
from dgl_mgpu.train.compose import compose
from dgl_mgpu.train.minibatch.planned import plan_for
from dgl_mgpu.train.minibatch.run import make_trainer

NODES = 20_000


def plan(topology: str = "dgx1", **store):
    config = Config(
        data=DataConfig(name="generated", options={"num_nodes": NODES}),
        store=StoreConfig(**{"gpu_memory": "1MiB", **store}),
        topology=topology,
    )
    return plan_for(config).plan


def test_what_gpus_hold_beside_tables_counts(tmp_path):
    in_shared_memory, on_gpus, with_disk = (
        plan(device=device, disk_path=folder, staging_memory="256KiB")
        for device, folder in (("cpu", None), ("cuda", None), ("cuda", str(tmp_path)))
    )
    assert set(in_shared_memory.gpu_budget) == {1 << 20}
    # Positions are int32.
    assert set(on_gpus.gpu_budget) == {(1 << 20) - 4 * NODES}
    assert set(with_disk.gpu_budget) == {(1 << 20) - 4 * NODES - (256 << 10)}
    assert plan(device="auto").gpu_budget == on_gpus.gpu_budget


def test_narrow_features_take_less_room():
    def nbytes(**store) -> int:
        found = plan("single", gpu_memory="1GiB", **store)
        return sum(found.gpu_bytes) + found.host_bytes

    whole, named = nbytes(), {"feat": "bfloat16"}
    assert whole - nbytes(feature_dtypes=named) == NODES * 2 * 64


@pytest.mark.parametrize(
    ("model", "named", "found"),
    [
        ({}, "fear", "no such feature; did you mean 'feat'"),
        ({}, "label", "dtype torch.int64"),
        ({"inputs": "learned"}, "feat", "no such feature; choose from label"),
        ({}, INV_SQRT_DEGREES, "no such feature"),
        ({"name": "gcn"}, INV_SQRT_DEGREES, None),
    ],
)
def test_a_plan_refuses_the_narrow_features_that_a_run_does(model, named, found):
    config = Config(
        data=DataConfig(name="generated", options={"num_nodes": 500, "num_edges": 900}),
        store=StoreConfig(feature_dtypes={named: "float16"}),
        model=ModelConfig(**model),
        topology="dgx1",
    )
    if found is None:
        plan_for(config)
    else:
        with pytest.raises(InvalidInputError, match=found):
            plan_for(config)


def test_topology_of_a_store_on_gpus_is_not_planned_on_disk(tmp_path):
    store = {"gpu_memory": "400KiB", "host_memory": "1MiB", "disk_path": str(tmp_path)}
    for device, kinds in (("cpu", {"disk"}), ("cuda", set())):
        found = plan("single", device=device, staging_memory="4KiB", **store)
        memories = {tier.memory for tier in found.tables["topology/_N:_E:_N"].tiers}
        assert memories & {"disk"} == kinds
        assert "disk" in {tier.memory for tier in found.tables["node/_N/feat"].tiers}


def test_a_share_of_a_job_is_not_planned_without_its_machines():
    with pytest.raises(ConfigError, match=r"depends on the job's machines; name several"):
        plan(span="job")


@pytest.mark.parametrize("machines", [2, 64])
def test_a_plan_of_several_machines_is_a_share_of_the_data(machines):
    whole, share = plan("quad-v100"), plan(f"{machines}x-quad-v100", span="job", replica_ratio=0.1)
    assert whole.share is None and share.share.num_machines == machines
    assert 0.09 < share.share.replica_ratio <= 0.1
    held = share.share.replicated_bytes + share.share.own_bytes
    total = sum(row["bytes"] for row in whole.rows)
    assert held == pytest.approx((0.1 + 0.9 / machines) * total, rel=0.1)
    # What the plan places is what the machine has, and bounds of rows of edges.
    placed = sum(row["bytes"] for row in share.rows)
    assert held <= placed <= held + 8 * share.tables["topology/_N:_E:_N"].num_rows + 10
    # Of the nodes that are on one machine alone the others have their share.
    remote = share.share.remote_reads["node/_N/feat"]
    assert 0.5 * (1 - 1 / machines) < remote < 0.95 * (1 - 1 / machines)
    (network,) = {load.seconds for load in share.loads if load.kind == "network"}
    assert share.step_seconds > network > 0


def test_several_machines_have_the_data_in_the_way_that_takes_less_time():
    def chosen(**store):
        config = Config(
            data=DataConfig(name="generated", options={"num_nodes": NODES}),
            store=StoreConfig(gpu_memory="1MiB", span="auto", **store),
            topology="2x-quad-v100",
        )
        planned = plan_for(config)
        assert planned.num_machines == 2 and planned.span.startswith("store.span=auto: ")
        return planned.plan.share, planned.span

    share, reason = chosen()
    assert share is None and "a copy on each machine takes" in reason
    share, reason = chosen(host_memory="500KiB")
    assert share is not None and "does not fit" in reason


@pytest.mark.parametrize("hotness", ["presample", "file"])
def test_counts_are_refused_for_a_graph_that_is_not_generated(hotness, tmp_path):
    if hotness == "file":
        hotness = str(tmp_path / "accesses.npz")
        (tmp_path / "accesses.npz").touch()
    with pytest.raises(ConfigError, match=r"none is generated for a plan; use store\.hotness"):
        plan(hotness=hotness)


@pytest.fixture
def _no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("something is downloaded")

    monkeypatch.setattr("urllib.request.urlopen", refuse)


@pytest.mark.usefixtures("_no_network")
@pytest.mark.parametrize(
    ("name", "model", "nodes"),
    [
        ("cora", "gcn", {"node/_N/feat": 2708 * 1433 * 4, "node/_N/inv_sqrt_degrees": 2708 * 8}),
        ("ogbn-arxiv", "graphsage", {"node/_N/feat": 169_343 * 512, "node/_N/year": 169_343 * 8}),
        ("ogbn-proteins", "graphsage", {"node/_N/label": 132_534 * 112}),
        ("ogbn-mag", "rgcn", {"node/paper/feat": 736_389 * 512}),
    ],
)
def test_a_plan_of_data_that_are_not_here_has_their_published_size(tmp_path, name, model, nodes):
    words = [f"data={name}", f"model={model}", "topology=dgx1", f"data.root={tmp_path}"]
    found, origin, *_ = plan_for(compose(words))
    for table, nbytes in nodes.items():
        rows = [row for row in found.rows if row["table"] == table]
        assert sum(row["bytes"] for row in rows) == nbytes
    assert f"{name} is not in {tmp_path}" in origin
    assert "published" in origin and "modelled" in origin and "not counted" in origin
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("_no_network")
def test_a_plan_of_data_that_are_here_counts_them(tmp_path):
    nodes, random = 50, np.random.default_rng(0)
    folder = tmp_path / "reddit"
    folder.mkdir()
    graph = sparse.random(nodes, nodes, 0.2, "coo", random_state=1)
    sparse.save_npz(folder / "reddit_graph.npz", graph)
    np.savez(
        folder / "reddit_data.npz",
        feature=random.standard_normal((nodes, 5)),
        label=random.integers(0, 41, nodes),
        node_types=random.integers(1, 4, nodes),
    )
    words = ["data=reddit", "topology=dgx1", f"data.root={tmp_path}", "store.hotness=presample"]
    found, origin, *_ = plan_for(compose(words))
    (table,) = (table for name, table in found.tables.items() if name.startswith("topology"))
    assert table.num_rows == nodes
    assert f"counted in the files in {folder}" in origin
    with pytest.raises(ConfigError, match="this one is not here"):
        plan_for(compose([*words, f"data.root={tmp_path / 'other'}"]))


@pytest.mark.parametrize("model", ["graphsage", "gcn"])
def test_a_plan_of_a_graph_to_be_generated_has_the_tables_of_its_store(tmp_path, model):
    options = {"num_nodes": 900, "num_edges": 9000}
    words = [f"data.options={options}".replace("'", ""), f"model={model}", f"data.root={tmp_path}"]
    config = compose([*words, "store.device=cpu", "model.self_loops=false"])
    planned, origin, *_ = plan_for(config)
    store = make_trainer(config).store
    try:
        assert planned.tables.keys() == store.plan.tables.keys()
        for table in planned.tables:
            sizes = [
                sum(row["bytes"] for row in plan.rows if row["table"] == table)
                for plan in (planned, store.plan)
            ]
            assert sizes[0] == sizes[1]
    finally:
        store.close()
    assert "modelled" in origin


def test_a_configuration_and_a_store_have_the_same_options_and_defaults():
    assert Config().store_options() == StoreOptions(batch_size=1024, fanouts=[10, 10])
    of_batch = {"batch_size", "fanouts"}  # which the trainer and the sampler configure
    assert vars(StoreConfig()).keys() == StoreOptions.__dataclass_fields__.keys() - of_batch
