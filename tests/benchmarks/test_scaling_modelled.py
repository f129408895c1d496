"""The modelled scaling goes by results that are kept, and adds up."""

from __future__ import annotations

import json

import pytest

from benchmarks import scaling_modelled
from benchmarks.scaling_modelled import KEPT, LATENCY, MEASURED, gradient_bytes, measured
from dgl_mgpu.machine import preset


@pytest.mark.parametrize("name", MEASURED)
def test_steps_are_of_results_that_are_kept(name: str) -> None:
    file, of, key = MEASURED[name]
    figures = json.loads((KEPT / file).read_text())["figures"]
    found = [each[key] for each in figures if all(each[part] == of[part] for part in of)]
    assert measured(name) == found[0] / 1e3 and len(found) == 1


def test_gradients_are_those_of_the_model() -> None:
    import torch

    layers = [torch.nn.Linear(128, 256), torch.nn.Linear(256, 172)]
    layers += [torch.nn.Linear(128, 256, bias=False), torch.nn.Linear(256, 172, bias=False)]
    assert gradient_bytes() == sum(x.nbytes for layer in layers for x in layer.parameters())


def test_a_machine_and_a_graph_are_smaller_by_the_same_factor() -> None:
    machine = preset("hgx-h200")
    smaller = scaling_modelled._smaller(machine, 100.0)
    assert smaller.host_bandwidth.tolist() == (machine.host_bandwidth / 100).tolist()
    assert smaller.host_groups[0].bandwidth == machine.host_groups[0].bandwidth / 100
    assert smaller.gpu_memory.tolist() == (machine.gpu_memory // 100).tolist()


def test_epochs_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling_modelled, "MACHINES", (1, 2, 4))
    monkeypatch.setattr(scaling_modelled, "_PLANNED", 0.001)
    monkeypatch.setattr(scaling_modelled, "BATCH", 60_000)
    one, two, four = scaling_modelled.epochs(scaling_modelled.Graph(20), 20, 40.0, 1e-4, 2e-4)
    assert one["fits"] is False and two["span"] == four["span"] == "job"
    step = measured("step_of_two")
    for row in (two, four):
        reads = (row["local_ms"] + row["network_ms"]) / 1e3
        gradients = 2 * gradient_bytes() * (1 - 1 / row["machines"]) / (8 * 40e9)
        gradients += LATENCY * (row["machines"] // 2)
        assert row["gradients_ms"] == pytest.approx(1e3 * gradients)
        assert row["overlapped_s"] == pytest.approx(row["steps"] * (max(step, reads) + gradients))
        turn = step + reads - 2e-4 + gradients
        assert row["in_turn_s"] == pytest.approx(row["steps"] * turn)
    assert two["steps"] == pytest.approx(2 * four["steps"], abs=1)
    assert two["overlapped_times_first"] == 1.0
    expected = two["overlapped_s"] / four["overlapped_s"]
    assert four["overlapped_times_first"] == pytest.approx(expected)
    assert four["overlapped_of_linear"] == pytest.approx(expected / 2)


def test_the_kept_result_says_what_it_assumes() -> None:
    kept = json.loads((KEPT / "scaling_modelled.json").read_text())
    assert kept["assumptions"] == scaling_modelled.ASSUMPTIONS and kept["modelled"] is True
    assert {row["machines"] for row in kept["figures"]} == set(scaling_modelled.MACHINES)
    counted = [each for each in kept["checks"] if each["check"].startswith("bytes")]
    assert len(counted) == 8 and all(0.85 < each["quotient"] < 1.2 for each in counted)
