"""Rows of several tables in one message to each machine."""

from __future__ import annotations

import pytest
import torch

from dgl_mgpu.ops import RowView, gather_rows
from dgl_mgpu.store.remote_rows import ReceivedRows, by_machine, num_bytes
from dgl_mgpu.store.rounds import Spans

MACHINES, ROOM = 3, 50
#: Element types, and shapes of rows, of which some have bytes that no wide load begins at.
TABLES = [(torch.uint8, (3,)), (torch.float32, (8,)), (torch.int64, ()), (torch.float16, (2, 5))]


def drawn(count: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 200, (count, *shape)).to(dtype)


def table_of(rows: torch.Tensor) -> RowView:
    return RowView(
        tiers=torch.tensor([[0, len(rows), 1, 0]]),
        pointers=torch.tensor([rows.data_ptr()]),
        num_rows=len(rows),
        row_shape=rows.shape[1:],
        dtype=rows.dtype,
        owner=rows,
    )


@pytest.mark.parametrize("most", [0, 1, 11])
@pytest.mark.parametrize("number", [1, len(TABLES)])
def test_rows_of_all_tables_are_found_where_they_were_asked_for(number, most):
    torch.manual_seed(0)
    tables, known = TABLES[:number], ReceivedRows()
    for _ in range(3):
        # Of each machine for each other one, by table.
        counts = torch.randint(0, most + 1, (MACHINES, number, MACHINES))
        counts[range(MACHINES), :, range(MACHINES)] = 0
        sent_to: list[list[torch.Tensor]] = []
        rows_of = []
        for of_machine in counts.tolist():
            rows = [
                drawn(sum(of_table), *table)
                for of_table, table in zip(of_machine, tables, strict=True)
            ]
            rows_of.append([each.split(of) for each, of in zip(rows, of_machine, strict=True)])
            views = [table_of(drawn(1, *table)) for table in tables]
            nbytes = num_bytes(of_machine, views)
            sent_to.append([*by_machine(rows, of_machine).split(nbytes)])
        for machine in range(MACHINES):
            received = torch.cat([of_sender[machine] for of_sender in sent_to])
            receiving = counts[:, :, machine].T.tolist()
            begins = (counts[:, :, machine].cumsum(1) - counts[:, :, machine]).T.tolist()
            spans = [
                Spans(first, [a + b for a, b in zip(first, of, strict=True)])
                for first, of in zip(begins, receiving, strict=True)
            ]
            here = [drawn(7, *table) for table in tables]
            views = [table_of(rows) for rows in here]
            both = known.views([*tables], views, received, spans, receiving, ROOM)
            for of, (view, own, first) in enumerate(zip(both, here, begins, strict=True)):
                places, expected = [], []
                for sender, (begin, count) in enumerate(zip(first, receiving[of], strict=True)):
                    places += range(sender * ROOM + begin, sender * ROOM + begin + count)
                    expected.append(rows_of[sender][of][machine])
                    address = int(view.pointers[sender]) + begin * view.row_bytes
                    assert not count or (address - received.data_ptr()) % 16 == 0
                places += range(MACHINES * ROOM, MACHINES * ROOM + len(own))
                found = gather_rows(view, torch.tensor(places))
                assert torch.equal(found, torch.cat([*expected, own]))
