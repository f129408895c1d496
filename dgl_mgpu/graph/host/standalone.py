"""What ``dgl.distributed`` needs of DGL's binary in its standalone mode: one process, no server."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dgl_mgpu.graph.errors import UnknownIdError

_UNSET = {
    "rank": -1,
    "machine_id": -1,
    "num_machines": 0,
    "num_servers": 0,
    "num_servers_per_machine": 0,
    "num_clients": 0,
    "group_id": -1,
    "message": 0,
}
#: What this process knows of itself, of servers and of clients.
_settings = dict(_UNSET)


def reset() -> None:
    _settings.update(_UNSET)


def _setting(name: str) -> tuple[Callable[[], int], Callable[[int], None]]:
    return lambda: _settings[name], lambda value: _settings.update({name: value})


get_rank, set_rank = _setting("rank")
get_machine_id, set_machine_id = _setting("machine_id")
get_num_machines, set_num_machines = _setting("num_machines")
get_num_servers, set_num_servers = _setting("num_servers")
get_num_servers_per_machine, set_num_servers_per_machine = _setting("num_servers_per_machine")
get_num_clients, set_num_clients = _setting("num_clients")
get_group_id, set_group_id = _setting("group_id")
get_message, set_message = _setting("message")


def next_message() -> int:
    """The number of the next message."""
    number = get_message()
    set_message(number + 1)
    return number


def map_ids(
    ids: torch.Tensor,
    starts: torch.Tensor,
    last: torch.Tensor,
    counts: torch.Tensor,
    num_parts: int,
    num_types: int,
) -> torch.Tensor:
    """The types of ids of all types, followed by the ids within their types.

    A range of ids, from its start to its last, is that of a type in a part: part by part, and in
    it type by type.  ``counts`` says, type by type, how many of it there are up to each part's end.
    """
    ranges = torch.searchsorted(last, ids)
    if bool((ranges == len(last)).any()):
        raise UnknownIdError(
            "find the types of ids",
            f"id {int(ids.max())} of a graph with {int(last[-1]) + 1}",
            "pass ids that the graph has",
        )
    types, parts = ranges % num_types, ranges.div(num_types, rounding_mode="floor")
    ends = torch.cat([counts.new_zeros(num_types, 1), counts.view(num_types, num_parts)], dim=1)
    return torch.cat([types, ids - starts[ranges] + ends[types, parts]]).to(ids.dtype)
