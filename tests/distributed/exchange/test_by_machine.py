"""The halo over several machines: ranks of this one go by names of their machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from dgl.nn import SAGEConv

from dgl_mgpu.distributed.exchange.by_machine import HaloByMachine, Machines
from dgl_mgpu.distributed.exchange.tuner import Auto
from tests.distributed.both import Both
from tests.distributed.exchange.test_exchange import (
    _CASES,
    _adjoint,
    _input_changes,
    _sum_gradients,
    _sums,
    _weights_of_columns,
    _Whole,
)
from tests.distributed.graphs import homogeneous
from tests.ranks import RankProcesses, on_machines


@pytest.fixture(scope="module")
def six_ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(6)
    yield processes
    processes.close()


#: Machines of six ranks on the CPU, and of four on GPUs.
_ON_GPUS = {"aaabbb": "aabb", "aabbcc": "aabb", "abcabc": "abab"}


@pytest.fixture(scope="module")
def _four_gpus() -> Iterator[RankProcesses]:
    gpus = torch.cuda.device_count()
    if gpus < 4:
        pytest.skip(f"two machines of two ranks need four GPUs, and there are {gpus}")
    processes = RankProcesses(4, "cuda")
    yield processes
    processes.close()


@pytest.fixture(params=["cpu", "cuda"])
def run_on(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Runs a check on machines by these names, a letter for each of six ranks."""
    if request.param == "cpu":
        return partial(request.getfixturevalue("six_ranks").run, on_machines)
    ranks = request.getfixturevalue("_four_gpus")
    return lambda machines, *check: ranks.run(on_machines, _ON_GPUS[machines], *check)


@pytest.mark.parametrize("machines", [*_ON_GPUS])
@pytest.mark.parametrize(("kind", "strategy"), [*_CASES[:2], ("skewed", "one rank has all")])
def test_sums_on_several_machines(run_on, machines, kind, strategy):
    run_on(machines, _sums, kind, strategy, torch.int64)


def test_gradients_on_several_machines(run_on):
    for check in (_adjoint, _sum_gradients, _weights_of_columns, _input_changes):
        run_on("aabbcc", check)


def _rows_between_machines() -> None:
    """A row goes to a machine once, and both ways take as many."""
    whole = _Whole("skewed", "shuffled")
    machines = Machines.of_job()
    assert machines is not None and whole.group is not None
    rounds = HaloByMachine(whole.part, whole.group, machines)
    sent = []

    def counted(out, rows, comes, goes, group, async_op):
        if group is machines.across.process_group(rows.device):
            sent.append(goes)
        return exchange(out, rows, comes, goes, group=group, async_op=async_op)

    exchange = dist.all_to_all_single
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        rounds.sums(whole.own_src(whole.rows(whole.of_src.num_nodes, 3)))
        there = [sum(goes) for goes in zip(*sent, strict=True)]
        sent.clear()
        rounds.transposed_sums(whole.own_dst(whole.rows(whole.of_dst.num_nodes, 3)))
        back = sum(map(sum, sent))
    readers = [torch.cat([whole.parts[rank].halo for rank in ranks]) for ranks in machines.ranks]
    low, high = whole.of_src.bounds[whole.rank], whole.of_src.bounds[whole.rank + 1]
    wanted = [len(halo[(halo >= low) & (halo < high)].unique()) for halo in readers]
    wanted[machines.number] = 0
    assert there == wanted
    mine = torch.tensor([sum(there), back])
    dist.all_reduce(mine)
    assert (
        mine[0]
        == mine[1]
        < sum(
            sum(
                part.wanted[rank]
                for ranks in machines.ranks
                if reader not in ranks
                for rank in ranks
            )
            for reader, part in enumerate(whole.parts)
        )
    )


def _trains_on_machines(exchange: str) -> None:
    both = Both(homogeneous(), exchange=exchange)
    rounds = both.pg._graph.parts[0].rounds
    assert isinstance(rounds, HaloByMachine if exchange == "halo by machine" else Auto)
    model = SAGEConv(4, 3, "mean").double()
    x = torch.rand(both.g.num_nodes(), 4, dtype=torch.float64)
    for _ in range(30):  # of which the first ones try all strategies
        both.compare(lambda g, nodes: model(g, nodes["x"]), {"x": x}, model=model)
    if isinstance(rounds, Auto):
        assert "halo by machine" in rounds._strategies.by_name
        assert rounds.found


@pytest.mark.parametrize("exchange", ["halo by machine", "auto"])
def test_layers_on_several_machines(run_on, exchange):
    run_on("aabbcc", _trains_on_machines, exchange)


def test_a_row_goes_to_a_machine_once(run_on):
    run_on("aaabbb", _rows_between_machines)


@pytest.mark.parametrize("machines", ["aaaaaa", "abcdef", "aabbbb"])
def test_machines_without_as_many_ranks_have_no_levels(six_ranks, machines):
    six_ranks.run(on_machines, machines, _has_no_levels)


def _has_no_levels() -> None:
    assert Machines.of_job() is None
