"""Rows of batches that ranks have taken in turn, on any machines, come together on all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from dgl_mgpu.comm import communicator as exchange
from dgl_mgpu.errors import RankFailedError
from dgl_mgpu.layerwise_inference.group import InferenceGroup

MACHINES = ["aaa", "aab", "aba", "abc"]


def _on(machines: str, check) -> None:
    """With ranks on machines by these names, a letter each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_groups", None)
        patch.setattr(exchange, "_machine_id", lambda: machines[dist.get_rank()])
        check(InferenceGroup.of_job())


def _batches(expected: torch.Tensor, step: int, rank: int, size: int) -> Iterator[torch.Tensor]:
    return iter(list(expected.split(step))[rank::size])


def _are_together(group: InferenceGroup) -> None:
    rank, size = group.everyone.rank, group.size
    # In whole rounds, in rounds that leave ranks without a batch, and with batches for one alone.
    for length, step in ((12, 2), (13, 2), (7, 3), (2, 5)):
        expected = torch.arange(3.0 * length).view(length, 3)
        found = group.collected(_batches(expected, step, rank, size), length, step)
        assert found.dtype == torch.float32 and torch.equal(found, expected)
        found += rank  # of which others see nothing
        group.everyone.all_gather(0)
        assert torch.equal(found, expected + rank)


@pytest.mark.parametrize("machines", MACHINES)
def test_all_ranks_get_all_rows(ranks, machines):
    ranks.run(_on, machines[: ranks.size], _are_together)


def test_one_rank_gets_its_own():
    expected = torch.rand(7, 2)
    assert torch.equal(InferenceGroup().collected(_batches(expected, 3, 0, 1), 7, 3), expected)


def _fails(group: InferenceGroup, at: int) -> None:
    expected = torch.rand(12, 2)
    rank, size = group.everyone.rank, group.size

    def batches() -> Iterator[torch.Tensor]:
        for number, batch in enumerate(_batches(expected, 2, rank, size)):
            if rank == 1 and number == at:
                raise ValueError("no batch for me")
            yield batch

    with pytest.raises(ValueError if rank == 1 else RankFailedError, match="no batch for me"):
        group.collected(batches(), 12, 2)


def _the_first_fails(group: InferenceGroup) -> None:
    _fails(group, 0)


def _a_later_one_fails(group: InferenceGroup) -> None:
    _fails(group, 1)


@pytest.mark.parametrize("check", [_the_first_fails, _a_later_one_fails])
def test_all_hear_of_a_batch_that_fails(ranks, check):
    ranks.run(_on, "aab", check)
