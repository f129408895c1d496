"""Tensors of all ranks on every rank; with GPUs, from one to the other."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from dgl_mgpu.comm import communicator as exchange_module
from dgl_mgpu.comm.communicator import Communicator, own_failure
from dgl_mgpu.errors import InvalidInputError, RankFailedError
from dgl_mgpu.train.launch.launch import launch
from dgl_mgpu.utils import timeouts
from tests.store.memory.gpu_runtimes import KINDS

pytestmark = pytest.mark.usefixtures("forked_ranks")

DTYPES = [torch.int64, torch.float32, torch.bfloat16, torch.uint8]


def of_rank(rank: int, case: int) -> list[torch.Tensor]:
    """Rows of several types; some ranks have none, and so have all in one case."""
    random = torch.Generator().manual_seed(97 * rank + case)
    count = 0 if case == 2 or (rank + case) % 3 == 0 else 3 + 5 * rank
    rows = [torch.randint(100, (count, 3), generator=random).to(dtype) for dtype in DTYPES]
    strided = torch.randint(100, (2, count + 1), generator=random).t()
    # Of different lengths, shapes without extent, and not contiguous.
    return [*rows, rows[0][:, 0], rows[1][:, :0], strided]


def _joins(kind: str) -> None:
    ranks = Communicator.of_all_machines()
    where = torch.device("cuda" if kind == "cuda" else "cpu")
    send, direct = exchange_module._send, []

    def seen(sent, gpu_group, group) -> None:
        direct.append(gpu_group is not None and sent.mine.is_cuda)
        send(sent, gpu_group, group)

    exchange_module._send = seen
    for case in range(4):
        mine = [tensor.to(where) for tensor in of_rank(ranks.rank, case)]
        found = ranks.all_gather_cat("join", mine)
        for place, tensor in enumerate(found):
            expected = torch.cat([of_rank(rank, case)[place] for rank in range(ranks.size)])
            assert tensor.device.type == where.type
            assert tensor.dtype == expected.dtype and torch.equal(tensor.cpu(), expected)
    # Through the host where there are no GPUs, or ranks share one.
    own_gpus = kind == "cuda" and torch.cuda.device_count() >= ranks.size
    assert ranks.size == 1 or set(direct) == {own_gpus}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_rank_has_all_ranks_rows_in_their_order(kind, num_ranks, monkeypatch):
    monkeypatch.setattr(exchange_module, "_send", exchange_module._send)  # one rank runs here
    launch(_joins, num_ranks, kind)


def _has_no_room() -> None:
    ranks = Communicator.of_all_machines()
    if ranks.rank == 1:
        exchange_module._Sent.__init__ = _no_room  # type: ignore[method-assign]
    with pytest.raises(
        torch.OutOfMemoryError if ranks.rank == 1 else RankFailedError, match="full"
    ):
        ranks.all_gather_cat("join", [torch.ones(5)])
    assert ranks.all_gather(ranks.rank) == [0, 1]  # they still talk to each other


def _no_room(*_: object) -> None:
    raise torch.OutOfMemoryError("the GPU is full")


def test_a_rank_without_room_is_told_on_all():
    launch(_has_no_room, 2)


def _one_does_not_come() -> None:
    timeouts.BUILD = 0.5
    if dist.get_rank() == 0:
        with pytest.raises(
            RankFailedError, match=r"connect to the other ranks: .* within 0\.5 s \(.*\)"
        ):
            Communicator.of_all_machines()
    dist.barrier()


def _one_does_not_answer() -> None:
    timeouts.BUILD = 0.5
    ranks = Communicator.of_all_machines()
    if ranks.rank == 0:
        waits = r"does not answer \(.*Timed out waiting 500ms"
        with pytest.raises(RankFailedError, match=waits) as raised:
            ranks.all_gather("here")
        # It may be torch's word of a killed worker. Its frames would keep connections open.
        cause = raised.value.__cause__
        assert isinstance(cause, RuntimeError) and cause.__traceback__ is None
    dist.barrier()


@pytest.mark.parametrize("work", [_one_does_not_come, _one_does_not_answer])
def test_the_wait_for_a_rank_has_a_limit(work):
    launch(work, 2)


def _one_fails_alone() -> None:
    ranks = Communicator.of_all_machines()
    reason = "rank 1 failed with MemoryError: there is no room"
    if ranks.rank == 1:
        with pytest.raises(MemoryError, match="there is no room"), ranks.told_of_errors():
            raise MemoryError("there is no room")
    else:
        with pytest.raises(RankFailedError, match=reason), ranks.told_of_errors():
            ranks.all_to_all(torch.arange(ranks.size))
    with pytest.raises(RankFailedError, match=reason):
        ranks.all_gather("here")
    # What all ranks raise, or have been told of, ends nothing.
    others = Communicator.of_this_machine()
    with pytest.raises(InvalidInputError), others.told_of_errors():
        raise InvalidInputError("join", "nothing", "pass something")
    assert others.all_gather(others.rank) == list(range(others.size))


def test_ranks_that_wait_are_told_why_another_fails():
    launch(_one_fails_alone, 3)


class _Memory:
    """What a step that fails has allocated."""


def _fails_beside_one_that(is_heard: bool) -> None:
    timeouts.BUILD = 0.5
    ranks = Communicator.of_all_machines()
    memory = _Memory()
    is_held = weakref.ref(memory)

    def step(of_step: _Memory = memory) -> None:
        raise OSError("there is no room")

    if ranks.rank == 0:
        with pytest.raises(OSError, match="there is no room"):
            ranks.run_all("build", step)
        del memory, step
        gc.collect()
        assert is_held() is None
    elif is_heard:
        with pytest.raises(ValueError), ranks.told_of_errors():
            raise ValueError
    dist.barrier()
    with pytest.raises(RankFailedError):  # for as long as the ranks are there
        ranks.all_gather("here")


@pytest.mark.parametrize("is_heard", [False, True])
def test_what_a_failed_step_held_is_free(is_heard):
    """Though another rank is gone, which this one finds when it tells of its error."""
    launch(_fails_beside_one_that, 2, is_heard)


def _fails_where_nobody_waits() -> None:
    Communicator.of_all_machines()
    with pytest.raises(MemoryError), Communicator().told_of_errors():
        raise MemoryError("there is no room")
    assert own_failure() is None


def test_a_rank_may_fail_where_nobody_waits():
    """A walk on a store of its own machine, say, of more nodes than it has memory for."""
    launch(_fails_where_nobody_waits, 2)


def _fails_in_a_job_before(folder: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = Communicator.of_all_machines()
    if rank == 1:
        with pytest.raises(MemoryError), ranks.told_of_errors():
            raise MemoryError("there is no room")
        assert own_failure() is not None
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{folder}/ranks", rank=rank, world_size=size)
    assert Communicator.of_all_machines().all_gather(rank) == list(range(size))
    assert own_failure() is None


def test_a_failure_is_that_of_its_job(tmp_path):
    launch(_fails_in_a_job_before, 2, str(tmp_path))
