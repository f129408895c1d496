"""Messages of lengths that only their senders know."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.messages import Messages
from tests.ranks import RankProcesses


def _word(sender: int, receiver: int, turn: int, place: int) -> int:
    return ((sender * 10 + receiver) * 100 + turn) * 10_000 + place


def _exchanged() -> None:
    messages, rank, size = Messages(Communicator.of_all_machines()), dist.get_rank(), 3
    draw = random.Random(0)  # of the same numbers on all ranks
    for turn in range(40):
        # None at times, of a length as before at others, and far more at some.
        scale = draw.choice([0, 3, 50, 50, 50, 900])
        lengths = [[draw.randint(scale // 2, scale) for _ in range(size)] for _ in range(size)]
        words = [
            [_word(rank, receiver, turn, place) for place in range(lengths[rank][receiver])]
            for receiver in range(size)
        ]
        sent = torch.tensor([word for part in words for word in part], dtype=torch.int64)
        received = messages.exchange(turn % 2, (turn, rank), sent, lengths[rank])
        assert received.notes == [[turn, sender] for sender in range(size)]
        assert received.lengths == [of[rank] for of in lengths]
        assert received.data.tolist() == [
            _word(sender, rank, turn, place)
            for sender in range(size)
            for place in range(lengths[sender][rank])
        ]


def test_messages_arrive_whatever_was_foreseen(ranks: RankProcesses) -> None:
    ranks.run(_exchanged)


def _collectives() -> list[int]:
    group, counts = Communicator.of_all_machines(), []
    send, messages = group.all_to_all, Messages(group)

    def counted(*args: object) -> torch.Tensor:
        counts[-1] += 1
        return send(*args)  # type: ignore[arg-type]

    group.all_to_all = counted  # type: ignore[method-assign]
    try:
        for length in (100, 100, 110, 90, 50, 900, 900, 0, 900):
            # One rank's alone are longer: all ranks take part in the second collective.
            lengths = [length if dist.get_rank() == 1 else 10] * 3
            counts.append(0)
            messages.exchange("", (), torch.zeros(sum(lengths), dtype=torch.int64), lengths)
    finally:
        del group.all_to_all  # type: ignore[method-assign]
    return counts


def test_what_is_as_long_as_before_takes_one_collective(ranks: RankProcesses) -> None:
    assert ranks.run(_collectives) == [[2, 1, 1, 1, 1, 2, 1, 1, 1]] * 3
