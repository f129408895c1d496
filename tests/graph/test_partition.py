"""Rows dealt out over parts, and DGL's exchange of them over NCCL, here over gloo."""

from __future__ import annotations

import dgl.cuda.nccl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from dgl import ndarray as nd
from dgl.partition import NDArrayPartition

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.train.launch.launch import launch

RANGES = {3: [0, 2, 2, 11], 4: [0, 5, 6, 8, 11], 1: [0, 11]}
CASES = [
    *((parts, "remainder") for parts in (1, 2, 3, 4, 11, 20)),
    *((parts, "range") for parts in RANGES),
]


def make(parts: int, mode: str) -> NDArrayPartition:
    ranges = torch.tensor(RANGES[parts]) if mode == "range" else None
    return NDArrayPartition(11, parts, mode, ranges)


def owner_of(row: int, parts: int, mode: str) -> int:
    if mode == "remainder":
        return row % parts
    return next(p for p in range(parts) if RANGES[parts][p] <= row < RANGES[parts][p + 1])


@pytest.mark.parametrize(("parts", "mode"), CASES)
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_every_row_is_one_of_one_parts(parts, mode, idtype):
    partition = make(parts, mode)
    assert (partition.num_parts(), partition.array_size()) == (parts, 11)
    rows = torch.arange(11, dtype=idtype)
    seen = []
    for part in range(parts):
        mine = [row for row in range(11) if owner_of(row, parts, mode) == part]
        assert partition.local_size(part) == len(mine)
        assert partition.get_local_indices(part, torch.device("cpu")).tolist() == mine
        local = partition.map_to_local(rows[torch.tensor(mine, dtype=torch.int64)])
        assert local.dtype == idtype and local.tolist() == list(range(len(mine)))
        back = partition.map_to_global(local, part)
        assert back.dtype == idtype and back.tolist() == mine
        seen += mine
    assert sorted(seen) == list(range(11))


@pytest.mark.parametrize(("parts", "mode"), CASES)
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 100])
def test_a_permutation_sorts_rows_by_part_and_keeps_their_order(parts, mode, idtype, count):
    torch.manual_seed(0)
    rows = torch.randint(0, 11, (count,)).to(idtype)
    order, counts = make(parts, mode).generate_permutation(rows)
    owners = np.array([owner_of(row, parts, mode) for row in rows.tolist()], dtype=np.int64)
    assert order.dtype == idtype
    assert order.tolist() == np.argsort(owners, kind="stable").tolist()
    assert counts.dtype == torch.int64
    assert counts.tolist() == np.bincount(owners, minlength=parts).tolist()


def test_ranges_may_be_an_array_of_dgl_or_a_list():
    for ranges in (nd.array(np.array(RANGES[3])), RANGES[3], torch.tensor(RANGES[3]).int()):
        partition = NDArrayPartition(11, 3, "range", ranges)
        assert [partition.local_size(part) for part in range(3)] == [2, 0, 9]


@pytest.mark.parametrize(
    "arguments",
    [
        (11, 0),
        (11, 2, "modulo"),
        (11, 2, "range"),
        (11, 2, "remainder", torch.tensor([0, 5, 11])),
        (11, 2, "range", torch.tensor([0, 11])),
        (11, 2, "range", torch.tensor([0, 12, 11])),
        (11, 2, "range", torch.tensor([1, 5, 11])),
        (11, 2, "range", torch.tensor([0, 5, 10])),
    ],
    ids=str,
)
def test_what_is_no_partition_is_refused(arguments):
    with pytest.raises(InvalidInputError):
        NDArrayPartition(*arguments)


@pytest.mark.parametrize("part", [-1, 3])
def test_parts_that_there_are_not_are_refused(part):
    partition = make(3, "range")
    for ask in (partition.local_size, lambda p: partition.map_to_global(torch.arange(2), p)):
        with pytest.raises(InvalidInputError, match="3 parts"):
            ask(part)


class _NoStream:
    def synchronize(self) -> None:
        pass


def exchange() -> None:
    """DGL asks for NCCL by name, and for a stream: gloo does the same for the CPU."""
    dist.get_backend = lambda group=None: "nccl"
    torch.cuda.current_stream = lambda device=None: _NoStream()
    pull_and_push(NDArrayPartition(40, dist.get_world_size()))
    pull_and_push(NDArrayPartition(40, 2, "range", torch.tensor([0, 13, 40])))


def pull_and_push(partition: NDArrayPartition) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    table = torch.arange(40.0)[:, None] * torch.ones(3)
    mine = partition.get_local_indices(rank, torch.device("cpu"))
    wanted = torch.randint(0, 40, (25,), generator=torch.Generator().manual_seed(rank))
    pulled = dgl.cuda.nccl.sparse_all_to_all_pull(wanted, table[mine], partition)
    assert torch.equal(pulled, table[wanted])
    rows, values = dgl.cuda.nccl.sparse_all_to_all_push(wanted, table[wanted], partition)
    assert torch.isin(rows, mine).all()
    assert torch.equal(values, table[rows])
    exchanged: list = [None] * size
    dist.all_gather_object(exchanged, (wanted, rows))
    asked, received = (torch.cat(each).sort().values for each in zip(*exchanged, strict=True))
    assert torch.equal(received, asked)


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_pull_and_push_rows_of_each_other():
    launch(exchange, 2)
