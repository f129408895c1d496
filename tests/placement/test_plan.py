"""A plan checks itself and survives JSON; what does not check is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest

from dgl_mgpu.errors import DataFormatError, PlanDoesNotFitError, UnreachableError
from dgl_mgpu.machine import preset
from dgl_mgpu.placement import HOST, Plan, TableSpec, solve

TOPOLOGY = preset("dgx1-4gc")


@pytest.fixture(scope="module")
def plan():
    table = TableSpec.features("feat", 10_000, 400, 1 / np.arange(1, 10_001), 1000.0)
    return solve(TOPOLOGY, [table], gpu_budget_bytes=600_000)


@pytest.fixture
def data(plan):
    return copy.deepcopy(plan.to_dict())


def test_json_round_trip(plan):
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again.to_dict() == plan.to_dict()
    assert again.tables["feat"] == plan.tables["feat"]
    assert again.describe() and again.describe()[0]["table"] == "feat"
    again.validate(TOPOLOGY)


def test_described_rows_add_up(plan):
    rows = plan.describe()
    assert sum(row["rows"] for row in rows) == 10_000
    assert sum(row["accesses"] for row in rows) == pytest.approx(1.0)
    assert sum(row["bytes"] for row in rows) == pytest.approx(4_000_000)
    assert sum(plan.hit_rates["feat"].values()) == pytest.approx(1.0)


def gpu_tier(data):
    return next(tier for tier in data["tables"]["feat"] if tier["memory"] == "gpu")


@pytest.mark.parametrize("field", ["topology", "tables", "gpu_budget", "seconds", "format"])
def test_a_missing_field_is_refused(data, field):
    del data[field]
    with pytest.raises(DataFormatError, match=field):
        Plan.from_dict(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.update(format=2),
        lambda data: data.update(num_gpus=3),
        lambda data: data.update(gpu_budget=[1.5, 2, 3, 4]),
        lambda data: data.update(gpu_budget=[0, 0, 0, 0]),
        lambda data: data.update(tables=[1, 2]),
        lambda data: data["tables"]["feat"][0].update(start=1),
        lambda data: data["tables"]["feat"][0].update(stop=0),
        lambda data: data["tables"]["feat"].pop(0),
        lambda data: gpu_tier(data).update(memory="tape"),
        lambda data: gpu_tier(data).update(parts=7),
        lambda data: gpu_tier(data).update(copies=[[9]] * gpu_tier(data)["parts"]),
        lambda data: gpu_tier(data).update(copies=[[]] * gpu_tier(data)["parts"]),
        lambda data: gpu_tier(data)["source"].pop(),
        lambda data: gpu_tier(data)["source"][0].__setitem__(0, 17),
        lambda data: gpu_tier(data)["source"][0].__setitem__(0, "0"),
    ],
)
def test_a_damaged_plan_is_refused(data, damage):
    damage(data)
    with pytest.raises(DataFormatError, match=r"read a plan|check the plan"):
        Plan.from_dict(data)


def test_reads_need_links(plan):
    reader, holder = next(
        (gpu, holder)
        for tier in plan.tables["feat"].tiers
        for gpu, reads in enumerate(tier.source)
        for holder in reads
        if tier.memory == "gpu" and holder not in (gpu, HOST)
    )
    with pytest.raises(UnreachableError, match="not linked"):
        plan.validate(TOPOLOGY.without_links((reader, holder)))


def test_another_number_of_gpus_is_refused(plan):
    with pytest.raises(DataFormatError, match="4 GPUs"):
        plan.validate(preset("dgx1"))


def test_budgets_are_checked(plan):
    with pytest.raises(PlanDoesNotFitError, match="host memory") as caught:
        replace(plan, host_budget=plan.host_bytes - 1).validate()
    assert caught.value.needed - caught.value.available == 1
