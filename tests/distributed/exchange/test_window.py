from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from dgl_mgpu.distributed.exchange.window import Window, reaches_all
from dgl_mgpu.errors import DGLMGPUError

_UNLINKED = "x"


class _Cuda:
    """What torch.cuda tells a process that sees some GPUs and has chosen one."""

    def __init__(self, sees: str, chosen: int) -> None:
        self.sees, self.chosen = sees, chosen

    def current_device(self) -> int:
        return self.chosen

    def device_count(self) -> int:
        return len(self.sees)

    def get_device_properties(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=self.sees[gpu])

    def can_device_access_peer(self, gpu: int, other: int) -> bool:
        # As CUDA does, which says no of a GPU and itself.
        return gpu != other and _UNLINKED not in (self.sees[gpu], self.sees[other])


def _reaches(cudas: list[_Cuda], devices: list[str]) -> bool:
    rank = dist.get_rank()
    with patch.multiple(
        torch.cuda,
        **{
            name: getattr(cudas[rank], name)
            for name in (
                "current_device",
                "device_count",
                "get_device_properties",
                "can_device_access_peer",
            )
        },
    ):
        return reaches_all(dist.group.WORLD, torch.device(devices[rank]))


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1", "cuda:2"], ["cuda"] * 3])
def test_gpus_that_all_see_reach_each_other(ranks, devices):
    cudas = [_Cuda("abc", rank) for rank in range(3)]
    assert ranks.run(_reaches, cudas, devices) == [True] * 3


@pytest.mark.parametrize(
    ("sees", "chosen"),
    [
        (["abc", "abc", "abc"], [0, 1, 1]),  # two ranks on a GPU
        (["a", "b", "c"], [0, 0, 0]),  # each sees its own
        (["abc", "bca", "cab"], [0, 0, 0]),  # torch lends no memory between equal numbers
        (["abc", "abc", "cab"], [0, 1, 2]),  # other numbers, but one GPU
        (["ab", "ab", "ddc"], [0, 1, 2]),  # one sees no other
        (["abx", "abx", "abx"], [0, 1, 2]),  # one is not linked
    ],
)
def test_others_do_not(ranks, sees, chosen):
    cudas = [_Cuda(*each) for each in zip(sees, chosen, strict=True)]
    assert ranks.run(_reaches, cudas, ["cuda"] * 3) == [False] * 3


def test_ranks_without_a_gpu_do_not(ranks):
    cudas = [_Cuda("abc", rank) for rank in range(3)]
    assert ranks.run(_reaches, cudas, ["cuda", "cpu", "cuda"]) == [False] * 3


class _Symmetric:
    """Symmetric memory in which all ranks' is this one's."""

    def __init__(self) -> None:
        self.rooms: list[weakref.ref[torch.Tensor]] = []

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert all(room() is None for room in self.rooms), "the old memory is not free yet"
        room = torch.zeros(size, dtype=dtype)
        self.rooms.append(weakref.ref(room))
        return room

    def rendezvous(self, room: torch.Tensor, group: dist.ProcessGroup) -> SimpleNamespace:
        storage = room.untyped_storage()  # which does not keep its tensor

        def get_buffer(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(0, dtype=dtype).set_(storage, 0, shape, (1,))  # type: ignore[call-overload]

        return SimpleNamespace(get_buffer=get_buffer)


def _turns() -> None:
    fake = _Symmetric()
    stream = SimpleNamespace(device=torch.device("cuda", 0))
    with (
        patch.multiple(
            torch.cuda, Stream=lambda device, priority: stream, synchronize=lambda device: None
        ),
        patch.multiple(symmetric, empty=fake.empty, rendezvous=fake.rendezvous),
    ):
        window = Window(dist.group.WORLD, torch.device("cuda"))
        for nbytes in (0, 10, 3 << 20, 1 << 20, (3 << 20) + 1):
            first, second, third = ([*window.turn(nbytes)] for _ in range(3))
            assert len(first) == len(second) == dist.get_world_size()
            assert all(memory.dtype == torch.uint8 for memory in first)
            assert all(len(memory) >= nbytes for memory in first + second)
            first[0].fill_(1)
            second[0].fill_(2)
            assert (first[0] == 1).all()
            assert third[0].data_ptr() == first[0].data_ptr()
    assert len(fake.rooms) == 3
    assert fake.rooms[-1]() is not None


def test_a_window_has_two_halves_and_grows(ranks):
    """It keeps what it lends, and gives it up before it asks for more."""
    ranks.run(_turns)


def _no_room(message: str) -> str:
    fake, rank = _Symmetric(), dist.get_rank()

    def empty(size: int, **options: Any) -> torch.Tensor:
        if rank == 1:
            raise RuntimeError(message)
        return fake.empty(size, **options)

    stream = SimpleNamespace(device=torch.device("cuda", 0))
    with (
        patch.multiple(
            torch.cuda,
            Stream=lambda device, priority: stream,
            synchronize=lambda device: None,
            mem_get_info=lambda device: (1000, 2000),
        ),
        patch.multiple(symmetric, empty=empty, rendezvous=fake.rendezvous),
        pytest.raises((DGLMGPUError, RuntimeError)) as caught,
    ):
        Window(dist.group.WORLD, torch.device("cuda")).turn(5 << 20)
    return f"{caught.type.__name__}: {caught.value}"


def test_without_room_for_a_window_all_ranks_raise(ranks):
    others, own, _ = ranks.run(_no_room, "CUDA driver error: out of memory")
    assert own.startswith("DeviceMemoryError") and "10,485,760 bytes" in own and "broadcast" in own
    assert others.startswith("RankFailedError") and "10,485,760 bytes" in others


def test_other_errors_of_a_window_stay_what_they_are(ranks):
    others, own, _ = ranks.run(_no_room, "CUDA driver error: invalid device")
    assert own == "RuntimeError: CUDA driver error: invalid device"
    assert others.startswith("RankFailedError") and "invalid device" in others
