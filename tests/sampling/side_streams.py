"""A side stream without a GPU, which works at once and notes what it was asked, and poison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from dgl_mgpu.sampling.side_stream import side_stream_of


@dataclass(frozen=True, eq=False)
class HostEvent:
    """An event by its number, on the side stream or on the script's stream."""

    number: int
    on_side_stream: bool
    log: list = field(repr=False)
    is_done: bool = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.log.append(("host waits", self))


class HostStream:
    """Attributes: ``log`` of (what, event), whether work ``is_inside`` now, and whether the GPU
    ``is_idle``, having done all that the script has queued."""

    script_stream = 0

    def __init__(self) -> None:
        self.log: list = []
        self.is_idle = False
        self.is_full = False
        self.is_inside = False
        self._num_events = 0

    @contextmanager
    def use(self) -> Iterator[None]:
        assert not self.is_inside
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False

    def record_event(self) -> HostEvent:
        self._num_events += 1
        event = HostEvent(self._num_events, self.is_inside, self.log, self.is_idle)
        self.log.append(("records", event))
        return event

    def wait_for_script(self) -> None:
        assert not self.is_inside
        self.log.append(("follows", None))

    def make_script_wait(self, event: HostEvent) -> None:
        assert not self.is_inside and event.on_side_stream
        self.log.append(("waits", event))


def poison(where: torch.device) -> None:
    """Have memory of a GPU that nobody has written to read as NaN, on all streams."""

    def fill_and_give_back() -> None:
        sizes = [2**power for power in range(9, 25)] * 2
        kept = [torch.full((size // 4,), torch.nan, device=where) for size in sizes]
        torch.cuda.synchronize(where)
        del kept

    side_stream = side_stream_of(where)
    assert side_stream is not None
    with side_stream.use():
        fill_and_give_back()
    fill_and_give_back()
