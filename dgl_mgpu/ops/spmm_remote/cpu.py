"""Sums of rows that lie in several memories of this process, on the CPU."""

from __future__ import annotations

import ctypes

import torch

from dgl_mgpu.ops.spmm import add_spmm, spmm
from dgl_mgpu.ops.spmm_remote import op as contract
from dgl_mgpu.ops.spmm_remote.op import LocalEntries, RemoteEntries, spmm_remote_op


@spmm_remote_op.cpu
def _spmm_remote_cpu(
    local: LocalEntries,
    remote: RemoteEntries,
    rows: torch.Tensor,
    bases: torch.Tensor,
    starts: torch.Tensor,
    pairs: torch.Tensor,
    num_pairs: int,
    ps: int,
    dist: int,
    wpb: int,
    alignment: int,
) -> torch.Tensor:
    local_indptr, local_columns, local_weights = local
    remote_indptr, remote_columns, remote_weights = remote
    out = contract.output(local_indptr, rows)
    if out.numel() == 0:
        return out
    number = torch.float64 if rows.dtype == torch.float64 else torch.float32
    num_weights = 1 if local_weights is None else local_weights.shape[1]
    shape = (num_weights, rows.shape[1] // num_weights)

    def operands(
        of_entries: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, str]:
        of_entries = of_entries.to(number).view(-1, *shape)
        if weights is None:
            return of_entries, None, "copy_lhs"
        return of_entries, weights.to(number).unsqueeze(2), "mul"

    total = spmm(
        local_indptr, local_columns, None, *operands(rows.contiguous(), local_weights), "sum"
    )[0]
    found = _fetched(remote_columns.long(), rows, bases, starts)
    entries = torch.arange(len(found), dtype=remote_indptr.dtype)
    add_spmm(total, remote_indptr, entries, None, *operands(found, remote_weights))
    return out.copy_(total.view(out.shape))


def _fetched(
    columns: torch.Tensor, rows: torch.Tensor, bases: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """A row for each column."""
    owners = torch.searchsorted(starts, columns, right=True) - 1
    places = columns - starts[owners]
    found = rows.new_empty(len(columns), rows.shape[1])
    for rank, base in enumerate(bases.tolist()):
        asked = (owners == rank).nonzero().squeeze(1)
        if len(asked):
            count = int(places[asked].max()) + 1
            found[asked] = _matrix_at(base, count, rows)[places[asked]]
    return found


def _matrix_at(address: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """The rows at an address of this process, of the type and width of others."""
    num_bytes = count * like.shape[1] * like.element_size()
    memory = (ctypes.c_char * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).view(count, like.shape[1])
