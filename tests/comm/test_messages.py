"""Messages of lengths that only their senders know."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.comm.messages import Messages
from tests.ranks import RankProcesses


def _word(sender: int, receiver: int, turn: int, place: int) -> int:
    return ((sender * 10 + receiver) * 100 + turn) * 10_000 + place


def _exchange(
    messages: Messages, like: object, words: Sequence[Sequence[int]], note: int = 0
) -> tuple[list[int], list[list[int]]]:
    """The notes of all ranks, and the words that they sent here."""
    rank, lengths = dist.get_rank(), [len(part) for part in words]

    def write(room: int) -> torch.Tensor:
        sent = torch.zeros(len(words), 1 + len(words) + room, dtype=torch.int64)
        sent[:, 0], sent[:, 1 : 1 + len(words)] = note, torch.tensor(lengths)
        for part, into in zip(words, sent[:, 1 + len(words) :], strict=True):
            into[: len(part)] = torch.tensor(part[:room], dtype=torch.int64)
        return sent

    in_flight = messages.start(like, write, lambda heads: max(max(head[1:]) for head in heads))
    received = in_flight.result()
    rows = received.messages[:, 1 + len(words) :].tolist()
    assert all(len(row) == received.room for row in rows)
    return (
        [head[0] for head in received.heads],
        [row[: head[1 + rank]] for row, head in zip(rows, received.heads, strict=True)],
    )


def _exchanged() -> None:
    rank, size = dist.get_rank(), 3
    messages = Messages(Communicator.of_all_machines(), 1 + size)
    draw = random.Random(0)  # of the same numbers on all ranks
    for turn in range(40):
        # None at times, of a length as before at others, and far more at some.
        scale = draw.choice([0, 3, 50, 50, 50, 900])
        lengths = [[draw.randint(scale // 2, scale) for _ in range(size)] for _ in range(size)]

        def words(sender: int, receiver: int) -> list[int]:
            count = lengths[sender][receiver]  # noqa: B023  (called in this turn)
            return [_word(sender, receiver, turn, place) for place in range(count)]  # noqa: B023

        sent = [words(rank, receiver) for receiver in range(size)]
        notes, received = _exchange(messages, turn % 2, sent, 10 * turn + rank)
        assert notes == [10 * turn + sender for sender in range(size)]
        assert received == [words(sender, rank) for sender in range(size)]


def test_messages_arrive_whatever_was_foreseen(ranks: RankProcesses) -> None:
    ranks.run(_exchanged)


def _collectives() -> list[int]:
    counts: list[int] = []
    group = Communicator.of_all_machines()
    send, messages = group.all_to_all, Messages(group, 4)

    def counted(*args: object) -> torch.Tensor:
        counts[-1] += 1
        return send(*args)  # type: ignore[arg-type]

    group.all_to_all = counted  # type: ignore[assignment, method-assign]
    try:
        for length in (100, 100, 110, 90, 50, 900, 900, 0, 900):
            # One rank's alone are longer: all ranks take part in the second collective.
            counts.append(0)
            _exchange(messages, "", [[0] * (length if dist.get_rank() == 1 else 10)] * 3)
    finally:
        del group.all_to_all  # type: ignore[method-assign]
    return counts


def test_what_is_as_long_as_before_takes_one_collective(ranks: RankProcesses) -> None:
    assert ranks.run(_collectives) == [[2, 1, 1, 1, 1, 2, 1, 1, 1]] * 3
