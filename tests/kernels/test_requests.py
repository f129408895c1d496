"""Messages to the owners of ids, as a CUDA kernel writes them and as the CPU's operator does."""

from __future__ import annotations

import pytest
import torch

from dgl_mgpu.ops import requests
from dgl_mgpu.ops.requests import Owners, RequestMessages, RequestOptions, head_words

ROWS = 3000
NOTES = (0, 2**40, -1, 3, -(2**62), 5)


def messages(machines: int, calls: int, room: int, dtype, where) -> RequestMessages:
    words = head_words(machines, calls)
    width = words * 8 // dtype.itemsize + room
    return RequestMessages(
        torch.zeros(machines, width, dtype=dtype, device=where),
        words,
    )


def positions(machine: int, bounds: torch.Tensor, dtype) -> torch.Tensor:
    """A machine's own rows and a tenth of the others are there."""
    is_here = torch.rand(ROWS, generator=torch.Generator().manual_seed(machine)) < 0.1
    is_here[bounds[machine] : bounds[machine + 1]] = True
    position = torch.full((ROWS,), -1, dtype=dtype)
    count = int(is_here.sum())
    position[is_here] = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(dtype)
    return position


def asked(to: RequestMessages, number: int, places, ids) -> list[list[int]]:
    """The ids of each message, by the places of their answers."""
    machines, room = to.ids.shape
    found = []
    for machine in range(machines):
        mine = (places >= machine * room) & (places < (machine + 1) * room)
        at = places[mine] - machine * room
        assert torch.equal(to.ids[machine, at].long(), ids[mine].long())
        found.append(sorted(ids[mine].tolist()))
    return found


@pytest.mark.parametrize("lists_own", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("machines", [1, 3])
def test_each_id_goes_to_its_owner(where, machines, dtype, lists_own):
    draw = torch.Generator().manual_seed(0)
    inner = [1000, 1000][: machines - 1]  # the second machine owns nothing
    owners = Owners(torch.tensor([0, *inner, ROWS]), machines - 1)
    position = positions(machines - 1, owners.bounds, dtype)
    kinds = [torch.randint(ROWS, (count,), generator=draw).to(dtype) for count in (2500, 0, 1400)]
    expected = messages(machines, len(kinds), 4000, torch.int32, "cpu")
    found = messages(machines, len(kinds), 4000, torch.int32, where)
    before = [0] * machines
    for number, ids in enumerate(kinds):
        options = RequestOptions(NOTES, number)
        own, own_there = None, None
        if lists_own:
            own, own_there = (
                torch.full((len(ids),), -1, dtype=torch.int32, device=on) for on in ("cpu", where)
            )
        places = requests.write_requests(expected, ids, position, ROWS, owners, options, own)
        others = requests._write_requests_cuda(
            *found, ids.to(where), position.to(where), ROWS, owners.bounds.to(where),
            owners.machine, *options, own_there,
        ).cpu()  # fmt: skip
        by_machine = asked(expected, number, places, ids)
        there = RequestMessages(found.messages.cpu(), found.head_words)
        assert by_machine == asked(there, number, others, ids)
        # Against the definition: who owns an id, and that no id of a row here goes anywhere else.
        is_here = position[ids.long()] >= 0
        for machine, part in enumerate(by_machine):
            first, end = owners.bounds[machine : machine + 2].tolist()
            of_machine = (ids >= first) & (ids < end) & ~is_here
            assert part == sorted(ids[of_machine].tolist())
            before[machine] += len(part)
        here = ids[is_here]
        for found_at, listed in (places, own), (others, own_there):
            of_here = found_at[is_here] - machines * 4000
            if listed is None:
                assert torch.equal(of_here, position[here.long()].long())
            else:
                assert torch.equal(of_here.sort().values, torch.arange(len(here)))
                assert torch.equal(listed.cpu()[of_here].long(), here.long())
        before[owners.machine] += len(here) * lists_own
        first = requests.NOTES + number * (machines + 1)
        assert expected.heads[0, first : first + machines + 1].tolist() == [*before, -1]
    assert expected.heads[:, : requests.NOTES].tolist() == [list(NOTES)] * machines
    assert torch.equal(there.heads, expected.heads)


def test_what_finds_no_room_is_counted(where):
    ids, position = torch.arange(ROWS), torch.full((ROWS,), -1)
    for write, device in (requests.write_requests, "cpu"), (requests._write_requests_cuda, where):
        to = messages(3, 1, 64, torch.int64, device)
        arguments = (ids.to(device), position.to(device), ROWS)
        there = Owners(torch.tensor([0, 1000, ROWS, ROWS], device=device), 2)
        if write is requests.write_requests:
            places = write(to, *arguments, there, RequestOptions(NOTES, 0))
        else:
            places = write(*to, *arguments, *there, *RequestOptions(NOTES, 0), None).cpu()
        assert to.heads[:, requests.NOTES :].tolist() == [[1000, 2000, 0, -1]] * 3
        assert places[:1000].unique().tolist() == list(range(-1, 64))
        assert places[1000:].unique().tolist() == [-1, *range(64, 128)]
        for machine in 0, 1:
            kept = places // 64 == machine
            assert torch.equal(to.ids[machine, places[kept] % 64].cpu(), ids[kept])


@pytest.mark.parametrize("bad", [-1, ROWS])
def test_the_first_bad_id_is_named(where, bad):
    ids, position = torch.arange(2000), torch.empty(0, dtype=torch.int64)
    ids[[1700, 31, 900]] = bad
    for write, device in (requests.write_requests, "cpu"), (requests._write_requests_cuda, where):
        to = messages(2, 1, 64, torch.int64, device)
        there = Owners(torch.tensor([0, 1000, ROWS], device=device), 0)
        arguments = ids.to(device), position.to(device), ROWS
        options = RequestOptions(NOTES, 0)
        if write is requests.write_requests:
            write(to, *arguments, there, options)
        else:
            write(*to, *arguments, *there, *options, None)
        assert to.heads[:, requests.NOTES :].tolist() == [[0, 0, 31]] * 2
