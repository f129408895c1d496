"""Plans for data and machines that need not be there are those that a store would have."""

from __future__ import annotations

import pytest

from dgl_mgpu.errors import ConfigError, InvalidInputError
from dgl_mgpu.minibatch.planned import plan_for
from dgl_mgpu.training.config import Config, DataConfig, ModelConfig, StoreConfig
from dgl_mgpu.training.models import INV_SQRT_DEGREES

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
        ({}, "label", "rows of torch.int64"),
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


@pytest.mark.parametrize("hotness", ["presample", "file"])
def test_counts_are_refused_for_a_graph_that_is_not_generated(hotness, tmp_path):
    if hotness == "file":
        hotness = str(tmp_path / "accesses.npz")
        (tmp_path / "accesses.npz").touch()
    with pytest.raises(ConfigError, match=r"none is generated for a plan; use store\.hotness=degree"):
        plan(hotness=hotness)
