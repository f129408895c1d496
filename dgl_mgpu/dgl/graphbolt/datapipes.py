"""The names of torchdata's datapipes that GraphBolt imports, where torchdata has them no longer."""

from __future__ import annotations

import importlib.util
import operator
import sys
import threading
from collections import deque
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch.utils.data.datapipes.iter as torchs
from torch.utils.data import IterDataPipe, functional_datapipe
from torch.utils.data.graph import DataPipeGraph, traverse_dps

#: How long a prefetcher's thread waits before it looks whether it is still wanted.
_LOOK_SECONDS = 0.1


class Prefetcher(IterDataPipe):
    """Elements of a datapipe, which a thread makes before they are asked for.

    Parameters
    ----------
    source_datapipe : IterDataPipe
    buffer_size : int
        Elements that may be ready, at most.
    """

    def __init__(self, source_datapipe: Any, buffer_size: int = 10) -> None:
        if buffer_size <= 0:
            raise ValueError("'buffer_size' is required to be a positive integer.")
        self.source_datapipe, self.buffer_size = source_datapipe, buffer_size

    def __iter__(self) -> Iterator[Any]:
        ready: deque[Any] = deque()
        changed = threading.Condition()
        ended, stopped, errors = threading.Event(), threading.Event(), list[BaseException]()

        def make() -> None:
            try:
                for element in self.source_datapipe:
                    with changed:
                        ready.append(element)
                        changed.notify()
                        while len(ready) >= self.buffer_size and not stopped.is_set():
                            changed.wait(_LOOK_SECONDS)
                    if stopped.is_set():
                        return
            except BaseException as error:  # raised where the element is due
                errors.append(error)
            finally:
                with changed:
                    ended.set()
                    changed.notify()

        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        try:
            while True:
                with changed:
                    while not ready and not ended.is_set():
                        changed.wait(_LOOK_SECONDS)
                    if not ready:
                        break
                    element = ready.popleft()
                    changed.notify()
                yield element
            if errors:
                raise errors[0]
        finally:
            with changed:
                stopped.set()
                changed.notify()
            thread.join()


class Enumerator(IterDataPipe):
    """Elements of a datapipe with their numbers."""

    def __init__(self, source_datapipe: Any, starting_index: int = 0) -> None:
        self.source_datapipe, self.starting_index = source_datapipe, starting_index

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        yield from enumerate(self.source_datapipe, self.starting_index)


#: By the names of the methods by which they are chained.
_OWN = {"prefetch": Prefetcher, "enumerate": Enumerator}


def find_dps(graph: DataPipeGraph, dp_type: type) -> list[Any]:
    """The datapipes of a type in a graph, each once."""
    found: dict[int, Any] = {}

    def look(part: DataPipeGraph) -> None:
        for number, (pipe, inner) in part.items():
            if type(pipe) is dp_type:
                found.setdefault(number, pipe)
            look(inner)

    look(graph)
    return [*found.values()]


def replace_dp(graph: DataPipeGraph, old_datapipe: Any, new_datapipe: Any) -> DataPipeGraph:
    """Put a datapipe in the place of another one, for all that read from it but the new one."""
    assert len(graph) == 1
    ((_, (last, _)),) = graph.items()
    if last is old_datapipe:
        return traverse_dps(new_datapipe)
    seen: set[int] = {id(new_datapipe)}

    def replaced(value: Any) -> Any:
        if value is old_datapipe:
            return new_datapipe
        if type(value) in (list, tuple):
            parts = [*map(replaced, value)]
            is_same = all(map(operator.is_, parts, value))
            return value if is_same else type(value)(parts)
        if type(value) is dict:
            for key, part in value.items():
                value[key] = replaced(part)
        return value

    def look(part: DataPipeGraph) -> None:
        for number, (pipe, inner) in part.items():
            if number in seen:
                continue
            seen.add(number)
            for name, value in vars(pipe).items():
                setattr(pipe, name, replaced(value))
            look(inner)

    look(graph)
    return traverse_dps(last)


def install() -> None:
    """Let ``torchdata.datapipes`` and ``torchdata.dataloader2.graph`` be imported."""
    if _has("torchdata.datapipes") and _has("torchdata.dataloader2"):
        return
    names = {name: getattr(torchs, name) for name in torchs.__all__}
    names["IterDataPipe"] = IterDataPipe
    for name, pipe in _OWN.items():
        if name not in IterDataPipe.functions:
            functional_datapipe(name)(pipe)
        names[pipe.__name__] = pipe
    pipes = _module("torchdata.datapipes.iter", names)
    whole = _module("torchdata.datapipes", {"iter": pipes})
    functions = {"find_dps": find_dps, "replace_dp": replace_dp, "traverse_dps": traverse_dps}
    graph = _module("torchdata.dataloader2.graph", functions)
    loader = _module("torchdata.dataloader2", {"graph": graph})
    if importlib.util.find_spec("torchdata") is None:
        _module("torchdata", {})
    parent = importlib.import_module("torchdata")
    parent.datapipes, parent.dataloader2 = whole, loader  # type: ignore[attr-defined]


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _module(name: str, contents: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, __doc__)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(contents)
    sys.modules[name] = module
    return module
