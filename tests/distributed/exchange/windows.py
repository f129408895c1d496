"""What stands in for memory that GPUs lend each other: files that all ranks have mapped."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from dgl_mgpu.distributed.exchange.window import Window, reaches_all

_BYTES = 1 << 20


def window_of(group: dist.ProcessGroup, device: torch.device) -> Window | None:
    """What ranks lend each other: a stand-in on the CPU; None of GPUs that are not linked."""
    if device.type == "cpu":
        return MappedWindow(group)  # type: ignore[return-value]
    return Window(group, device) if reaches_all(group, device) else None


class MappedWindow:
    """Windows in files; what was in a half is gone when it is this one's turn again."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.turns = 0
        self.most = 0  # bytes that were asked for at a time
        self.rank, size = 0, 1
        if group is not None:
            self.rank, size = dist.get_rank(group), dist.get_world_size(group)
        folder = [tempfile.mkdtemp(prefix="window-") if self.rank == 0 else ""]
        if group is not None:
            dist.broadcast_object_list(folder, dist.get_global_rank(group, 0), group)
        paths = [Path(folder[0]) / str(other) for other in range(size)]
        paths[self.rank].write_bytes(bytes(2 * _BYTES))
        self.wait_for_all()
        self._all = [
            torch.from_file(str(path), shared=True, size=2 * _BYTES, dtype=torch.uint8)
            for path in paths
        ]
        self.wait_for_all()
        if self.rank == 0:  # mappings stay
            shutil.rmtree(folder[0])

    def turn(self, nbytes: int) -> list[torch.Tensor]:
        assert nbytes <= _BYTES
        self.turns += 1
        self.most = max(self.most, nbytes)
        memory = [each.view(2, _BYTES)[self.turns % 2][:nbytes] for each in self._all]
        memory[self.rank].fill_(0xFF)  # NaN in every type
        return memory

    def wait_for_all(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def done(self, *used: torch.Tensor) -> Callable[[], None]:
        return lambda: None
