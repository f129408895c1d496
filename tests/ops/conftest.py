"""Thread counts and fork safety, for tests of every operator."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def on_threads() -> Iterator[Callable[[int, Callable[[], Any]], Any]]:
    """Call a function with a given number of threads."""
    before = torch.get_num_threads()

    def call(number: int, function: Callable[[], Any]) -> Any:
        torch.set_num_threads(number)
        return function()

    yield call
    torch.set_num_threads(before)


class _Calls(torch.utils.data.Dataset):
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return self.function()


@pytest.fixture
def in_children() -> Callable[[Callable[[], Any]], list[Any]]:
    """Call a function in a forked child and in two forked DataLoader workers."""

    def call(function: Callable[[], Any]) -> list[Any]:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)

        def child() -> None:
            torch.set_num_threads(3)
            sender.send([part.numpy() for part in function()])

        process = context.Process(target=child, daemon=True)
        process.start()
        sender.close()
        answers = [tuple(torch.from_numpy(part) for part in receiver.recv())]
        process.join()
        loader = torch.utils.data.DataLoader(
            _Calls(function),
            batch_size=None,
            num_workers=2,
            multiprocessing_context=context,
        )
        return answers + [tuple(answer) for answer in loader]

    return call
