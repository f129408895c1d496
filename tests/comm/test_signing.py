"""What ranks take for a message of another one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dgl_mgpu.comm import signing
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.serialization import NotPlainError
from dgl_mgpu.comm.signing import SignedGroup
from dgl_mgpu.errors import RankFailedError
from dgl_mgpu.train.launch.launch import launch

pytestmark = pytest.mark.usefixtures("forked_ranks")

# Below, at and above what a frame holds.
SIZES = (0, 1, 900, 951, 952, 953, 5000, 100_000)


def _talk() -> None:
    ranks = Communicator.of_all_machines()
    for number, size in enumerate(SIZES):
        # Of all sizes at once, another rank's each time.
        sizes = [SIZES[(number + rank) % len(SIZES)] for rank in range(ranks.size)]
        found = ranks.all_gather((ranks.rank, bytes(sizes[ranks.rank])))
        assert found == [(rank, bytes(each)) for rank, each in enumerate(sizes)]
        sent = torch.arange(size)
        assert torch.equal(
            ranks.broadcast_from_rank0("send", lambda sent=sent: sent + ranks.rank), sent
        )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_messages_of_any_size_arrive(num_ranks):
    launch(_talk, num_ranks)


def _send_what_is_not_right(change: str) -> None:
    group = SignedGroup(dist.group.WORLD)
    group.agree()
    group.all_gather("before")
    if dist.get_rank() == 1:
        CHANGES[change](group)
    told = "is not what was signed" if change == "altered" else "is not signed by this rank's"
    with pytest.raises(RankFailedError, match=rf"message of rank \d {told}"):
        group.all_gather("x" * 10)


def _other_key(group: SignedGroup) -> None:
    group._key = bytes(32)


def _alter(group: SignedGroup) -> None:
    right = group._frame

    def altered(data: bytes) -> torch.Tensor:
        frame = right(data)
        frame[signing._HEAD.size] ^= 1
        return frame

    group._frame = altered  # type: ignore[method-assign]


def _repeat(group: SignedGroup) -> None:
    group._count -= 1


def _pretend(group: SignedGroup) -> None:
    group._rank = 0


CHANGES = {"secret": _other_key, "altered": _alter, "repeated": _repeat, "sender": _pretend}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_a_ranks_own_next_message_is_refused(change):
    launch(_send_what_is_not_right, 2, change)


def _one_sends_what_is_no_plain_data() -> None:
    ranks = Communicator.of_all_machines()
    if ranks.rank == 1:
        signing.dumps = lambda value: b"no plain data"
    with pytest.raises(RankFailedError, match="message of rank 1 cannot be read") as raised:
        ranks.all_gather(0)
    assert isinstance(raised.value.__cause__, NotPlainError)
    with pytest.raises(RankFailedError, match="is gone, or does not answer") as later:
        ranks.all_gather(0)
    told_of = later.value.__cause__
    assert str(told_of) == str(raised.value) and told_of.__traceback__ is None
    assert isinstance(told_of.__cause__, NotPlainError)


def test_the_cause_of_a_refusal_is_kept():
    launch(_one_sends_what_is_no_plain_data, 2)


def _have_other_secrets() -> None:
    signing.set_job_secret(f"of rank {dist.get_rank()}".encode())
    with pytest.raises(RankFailedError, match=f"not signed .*{signing.SECRET}"):
        Communicator.of_all_machines()


def test_ranks_with_other_secrets_do_not_talk():
    launch(_have_other_secrets, 2)


def test_the_launchers_secret_comes_before_the_environments(monkeypatch):
    monkeypatch.setattr(signing, "_secret", b"")
    assert signing.job_secret() == b""
    monkeypatch.setenv(signing.SECRET, "ours")
    assert signing.job_secret() == b"ours"
    signing.set_job_secret(b"launcher's")
    assert signing.job_secret() == b"launcher's"
