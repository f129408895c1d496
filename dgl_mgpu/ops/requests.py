"""Ids into messages to the machines that own them; see ``kernels/requests.cu``.

There is a message to each machine: a head of int64 words, and then ids, for as many of which there
is room.  Several calls may write to the same messages, one of each type of edges, whose ids follow
those of the calls before.  All heads are equal::

    notes | of each call: ids for each machine, of it and those before; a bad id's place, or -1

A machine knows from them how much room all messages would need, also where an id found none.  What
is here is not sent, but listed or known by its position: the message to this machine is its head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.device import Kernel, Launch, c_type, position_pointer, position_type
from dgl_mgpu.ops.library import Operator, Size, Written, call
from dgl_mgpu.ops.workspace import NodePrefix, Workspace, workspace

#: Words at the beginning of every head.
NOTES = 6


class Owners(NamedTuple):
    """Which machine owns a node: ``bounds``, int64, has the first node of each and then the end."""

    bounds: Tensor
    machine: int  # this one


class RequestOptions(NamedTuple):
    """How ids are written to messages."""

    notes: Sequence[int]
    number: int  # of calls before


class RequestMessages(NamedTuple):
    """Messages that requests are written to."""

    messages: Written  # int32 or int64, (machines, 8 * head_words bytes and room for ids)
    head_words: int

    @property
    def heads(self) -> Tensor:
        """int64, shape (machines, head_words)."""
        return self.messages[:, : self.head_elements].view(torch.int64)

    @property
    def ids(self) -> Tensor:
        """Where ids go, shape (machines, room)."""
        return self.messages[:, self.head_elements :]

    @property
    def head_elements(self) -> int:
        """Elements of a message that its head takes."""
        return self.head_words * torch.int64.itemsize // self.messages.element_size()


def head_words(machines: int, calls: int) -> int:
    """Words of a head of messages to which so many calls write."""
    return first_word(calls, machines)


def first_word(number: int, machines: int) -> int:
    """Which word of a head is the first of those that a call writes, by its number."""
    return NOTES + number * (machines + 1)


@Operator
def write_requests_op(
    to: RequestMessages,
    ids: Tensor,
    position: Tensor,
    num_rows: Size,
    owners: Owners,
    options: RequestOptions,
    own: Written | None = None,
) -> Tensor:
    return torch.empty_like(ids, dtype=torch.int64)


def write_requests(
    to: RequestMessages,
    ids: Tensor,
    position: Tensor,
    num_rows: int,
    owners: Owners,
    options: RequestOptions,
    own: Tensor | None = None,
) -> Tensor:
    """Write the ids that this machine does not have to the messages to their owners.

    Parameters
    ----------
    to : RequestMessages
    ids : Tensor, int32 or int64, shape (n,)
    position : Tensor, int32 or int64, shape (num_rows,) or (0,)
        Of rows here, -1 of others; empty where all are here, and ids are positions.
    num_rows : int
        Of all machines together.
    owners : Owners
    options : RequestOptions
    own : Tensor, the messages' dtype, shape (n,) or longer, optional
        Gets the ids of rows that this machine has.

    Returns
    -------
    Tensor, int64, shape (n,)
        Where each id's answer will be: ``machine * room + place`` for the ``place``-th id in the
        message to a machine, -1 if there was no room; of a row that this machine has,
        ``machines * room`` and its place in ``own``, or its position where that is None.  The
        order of the ids of a message, and of those in ``own``, is left open.
    """
    others = to.head_words, ids, position, num_rows, *owners, *options, own
    return call("write_requests", (to.messages,), *others)


@write_requests_op.cpu
def _write_requests_cpu(
    to: RequestMessages,
    ids: Tensor,
    position: Tensor,
    num_rows: int,
    owners: Owners,
    options: RequestOptions,
    own: Tensor | None,
) -> Tensor:
    notes, number = options
    machines, room = to.ids.shape
    last = first_word(number - 1, machines)
    before = to.heads[0, last : last + machines] if number else torch.zeros(machines).long()
    is_bad = (ids < 0) | (ids >= num_rows)
    bad = is_bad.nonzero()[:1, 0].tolist()
    ids = torch.where(is_bad, 0, ids) if bad else ids
    at = position[ids].long() if position.numel() else ids.long()
    owner = torch.searchsorted(owners.bounds[1:-1], ids.long(), right=True)
    owner[at >= 0] = owners.machine
    order = owner.argsort(stable=True)
    counts = owner.bincount(minlength=machines)
    begins = before.clone()
    begins[owners.machine] = 0
    within = begins.repeat_interleave(counts)
    within += torch.arange(len(ids)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    places = torch.empty_like(within)
    places[order] = torch.where(within < room, owner[order] * room + within, -1)
    parts = ids[order].split(counts.tolist())
    for machine, part in enumerate(parts):
        if machine != owners.machine:
            into = to.ids[machine, begins[machine] :]
            into[: len(part)] = part[: len(into)]
    if own is None:
        places = torch.where(at >= 0, machines * room + at, places)
        counts[owners.machine] = 0
    else:
        mine = parts[owners.machine]
        own[: len(mine)] = mine
        places[at >= 0] = machines * room + torch.arange(len(mine))
    first = first_word(number, machines)
    to.heads[:, first : first + machines] = before + counts
    to.heads[:, :NOTES] = torch.tensor(notes)
    to.heads[:, first + machines] = bad[0] if bad else -1
    return places


_THREADS, _AT_ONCE, _MOST_MACHINES = 256, 4, 1024


@functools.cache
def _kernel(ids: torch.dtype, position: str, sent: torch.dtype) -> Kernel:
    types = f"{c_type(ids)}, {position}, {c_type(sent)}"
    return Kernel("requests.cu", f"dgl_mgpu::write_requests<{types}>")


@write_requests_op.cuda
def _write_requests_cuda(
    to: RequestMessages,
    ids: Tensor,
    position: Tensor,
    num_rows: int,
    owners: Owners,
    options: RequestOptions,
    own: Tensor | None,
) -> Tensor:
    places = torch.empty(len(ids), dtype=torch.int64, device=ids.device)
    space, prefix = workspace(ids.device), NodePrefix(ids, len(ids))
    with space.lock:
        requests_launch(space, to, prefix, position, num_rows, owners, options, own, places)()
    return places


#: Place of the ids among the words of a launch.
REQUESTED = 0


def requests_launch(
    space: Workspace,
    to: RequestMessages,
    ids: NodePrefix,
    position: Tensor,
    num_rows: int,
    owners: Owners,
    options: RequestOptions,
    own: Tensor | None,
    places: Tensor,
) -> Launch:
    """The launch of :func:`write_requests`, of ids that the host need not know the number of.

    It is for the workspace's present buffers.
    """
    messages, device = to.messages, ids.nodes.device
    machines, width = messages.shape
    if machines > _MOST_MACHINES:
        raise InvalidInputError(
            "ask other machines on a GPU",
            f"there are {machines} machines, and its kernel has room for {_MOST_MACHINES}",
            "have fewer machines share one copy of the data",
        )
    kernel = _kernel(ids.nodes.dtype, position_type(position), messages.dtype)
    wanted = -(-ids.most // (_THREADS * _AT_ONCE))
    requests = gpu.struct(
        *ids, position_pointer(position), num_rows, owners.bounds, machines, owners.machine, own,
        *message_words(messages, to.head_words), width - to.head_elements, options.number,
        space.counters(machines + 2), places, *options.notes,
    )  # fmt: skip
    blocks = gpu.blocks_within(kernel, _THREADS, wanted, device)
    return Launch(kernel, blocks, _THREADS, requests, device=device)


def message_words(messages: Tensor, head_words: int) -> tuple[Tensor, int, int]:
    """Messages with heads of so many words, the kernels' ``Messages``."""
    return messages, messages.stride(0) * messages.element_size(), head_words
