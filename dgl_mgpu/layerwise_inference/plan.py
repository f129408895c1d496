"""How a model is done layer by layer: which modules each layer has, and what they read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from dgl import DGLGraph
from torch import nn

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.layerwise_inference.modules import meeting
from dgl_mgpu.layerwise_inference.probe_graph import (
    ASKED_LAYERS,
    AT_ONCE,
    ProbeGraph,
    cloned,
    recorded,
)
from dgl_mgpu.layerwise_inference.rows import Tree, leaves, mapped


@dataclass
class Call:
    """A module's call in a model's forward.

    Attributes
    ----------
    layer : int
    outline : tree of Outline
        What it gives.
    given : tree of Tensor
        What it gave on the pattern.
    """

    layer: int
    outline: Tree
    given: Tree


@dataclass
class InferencePlan:
    """How a model is done layer by layer.

    Attributes
    ----------
    num_layers : int
    calls : list of Call
        In the order in which a forward makes them, which is also that of the layers.
    output : tree of Outline
        What the model gives.
    expected : tree of Tensor
        What it gave on the pattern.
    readers : list of set of int
        For each tensor of the input, the layers that read it other than through a module.
    call_readers : list of set of int
        The same for what each call gives.
    """

    num_layers: int
    calls: list[Call]
    output: Tree
    expected: Tree
    readers: list[set[int]] = field(default_factory=list)
    call_readers: list[set[int]] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, pattern: ProbeGraph, num_layers: int) -> InferencePlan:
        records, found = recorded(model, pattern, num_layers)
        layers = [record.layer for record in records]
        in_order = None not in layers and layers == sorted(layers)  # type: ignore[type-var]
        if not in_order or set(layers) != set(range(num_layers)):
            raise InvalidInputError(
                ASKED_LAYERS,
                f"the model's modules are called with the blocks {layers} of {num_layers} in this "
                "order, where None is a graph that the model made itself",
                f"use one module for each block, one after the other, or {AT_ONCE}",
            )
        calls = []
        for record in records:
            ends = record.graph.dsttypes
            what = f"a module of layer {record.layer}"
            outline = pattern.outline(record.given, ends[0] if len(ends) == 1 else None, what)
            calls.append(Call(record.layer, outline, record.given))  # type: ignore[arg-type]
        plan = cls(num_layers, calls, pattern.outline(found, None, "the model"), found)
        plan._find_readers(model, pattern)
        return plan

    def last_call(self, layer: int) -> int:
        return max(place for place, call in enumerate(self.calls) if call.layer == layer)

    def peak_bytes(self, counts: Mapping[str, int]) -> int:
        """Of all results that are kept at the same time, at most.

        Parameters
        ----------
        counts : mapping of str to int
            Nodes by type.
        """

        def nbytes(tree: Tree) -> int:
            return sum(each.row_bytes * counts[each.ntype] for each in leaves(tree))

        def during(layer: int) -> int:
            kept = [
                call.outline
                for call, readers in zip(self.calls, self.call_readers, strict=True)
                if call.layer <= layer and any(reader >= layer for reader in readers)
            ]
            return nbytes([*kept, self.output] if layer == self.num_layers - 1 else kept)

        return max(map(during, range(self.num_layers)))

    def _find_readers(self, model: nn.Module, pattern: ProbeGraph) -> None:
        """Find out which layers read what, by changing it and looking what else has changed."""
        inputs, given = pattern.inputs(), [call.given for call in self.calls]
        every = set(range(self.num_layers))
        before = self._seen(model, pattern, inputs, given)

        def readers(rows: list[torch.Tensor], changes: list[tuple[Tree, list[Tree]]]) -> set[int]:
            if not all(each.is_floating_point() for each in rows):
                return every  # what may stand in place of other numbers is not known
            found: set[int] = set()
            for change in changes:
                try:
                    after = self._seen(model, pattern, *change)
                except Exception:  # whatever a model makes of such numbers, it has read them
                    return every
                found |= {layer for layer in before if not _equal(before[layer], after[layer])}
            return found

        for place, rows in enumerate(leaves(inputs)):
            changed = [(each, given) for each in _changed(inputs, place)]
            self.readers.append(readers([rows], changed))
        for number, call in enumerate(self.calls):
            others = given[:number], given[number + 1 :]
            changed = [(inputs, [*others[0], each, *others[1]]) for each in _changed(call.given)]
            later = set(range(call.layer + 1, self.num_layers))
            self.call_readers.append(readers(leaves(call.given), changed) & later)

    def _seen(
        self, model: nn.Module, pattern: ProbeGraph, inputs: Tree, given: list[Tree]
    ) -> dict[int, list[torch.Tensor]]:
        """What each layer's modules get, and the last one's model gives, if modules gave this."""
        seen: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(self.num_layers)}
        number = 0

        def meet(graph: DGLGraph, arguments: Tree, run: Callable[[], Any]) -> Any:
            nonlocal number
            seen[self.calls[number].layer] += leaves(cloned(arguments))
            number += 1
            return cloned(given[number - 1])

        with meeting(meet):
            found = model(pattern.layers(self.num_layers), cloned(inputs))
        seen[self.num_layers - 1] += leaves(found)
        return seen


def _changed(tree: Tree, place: int | None = None) -> list[Tree]:
    """A tree with other floats, NaN or random ones, in all of its tensors or in one."""
    draw = torch.Generator().manual_seed(1)

    def with_other(numbers: Callable[[torch.Tensor], torch.Tensor]) -> Tree:
        places = itertools.count()

        def change(rows: torch.Tensor) -> torch.Tensor:
            meant = next(places) == place or place is None
            return numbers(rows) if meant and rows.is_floating_point() else rows

        return mapped(change, tree)

    return [
        with_other(lambda rows: torch.full_like(rows, math.nan)),
        with_other(lambda rows: torch.randn(rows.shape, generator=draw).to(rows)),
    ]


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether all numbers are the same; NaN is NaN."""
    return len(some) == len(others) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(some, others, strict=True)
    )
