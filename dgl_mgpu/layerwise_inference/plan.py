"""How a model is computed layer by layer: what each layer's modules are and read.

A small graph shows it, on which the modules' calls are intercepted.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import dgl
import torch
from dgl import DGLGraph
from torch import nn

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.layerwise_inference.blocks import Blocks
from dgl_mgpu.layerwise_inference.rows import ASKED, Column, Graph, Outline, Tree, leaves, map_tree
from dgl_mgpu.store.feature_storage import TableStorage
from dgl_mgpu.utils.types import CanonicalEtype


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Have all modules in eval mode, and then in the mode that each had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class CallEnded(BaseException):
    """Ends a call of the model from within; not for a model's own handlers."""


#: What stands in for a module's call: gets the block, all arguments, and the call itself.
CallHandler = Callable[[DGLGraph, Tree, Callable[[], Any]], Any]


@contextmanager
def intercept_calls(handle: CallHandler) -> Iterator[None]:
    """Have ``handle`` stand in for the outermost calls of modules with a graph, on this thread.

    Of all modules, since a model may have some that it does not name as its own.
    """
    call, thread, inside = nn.Module.__call__, threading.get_ident(), False

    def stand_in(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or threading.get_ident() != thread:
            return call(module, *args, **kwargs)
        graphs = [value for value in (*args, *kwargs.values()) if isinstance(value, DGLGraph)]
        if not graphs:
            return call(module, *args, **kwargs)
        inside = True
        try:
            return handle(graphs[0], (args, kwargs), partial(call, module, *args, **kwargs))
        finally:
            inside = False

    nn.Module.__call__ = stand_in  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]


ASKED_LAYERS = "infer all nodes layer by layer"
AT_ONCE = "pass layerwise=False, which runs the model on the whole graph at once"

#: How many blocks a model is offered while its layers are counted.
_MANY_LAYERS = 33


class _OneGraphError(InvalidInputError, AttributeError):
    """A model takes one graph, where it is called with blocks."""


class TracedBlocks(list):
    """The blocks that a model is called with; ``touched`` once the model has looked at them."""

    touched = False

    def __getitem__(self, place: Any) -> Any:
        self.touched = True
        try:
            return super().__getitem__(place)
        except IndexError as error:
            raise InvalidInputError(
                ASKED,
                f"the model reads blocks[{place}], but was given {super().__len__()}",
                "pass num_layers, the number of blocks that the model takes",
            ) from error

    def __iter__(self) -> Iterator[Any]:
        self.touched = True
        return super().__iter__()

    def __len__(self) -> int:
        self.touched = True
        return super().__len__()

    def __getattr__(self, name: str) -> NoReturn:
        if hasattr(DGLGraph, name) and not name.startswith("__"):
            raise _OneGraphError(
                ASKED,
                f"the model reads '{name}' as if it were called with one graph, but it is called "
                "with a list of blocks",
                "have its forward take (blocks, x), a block for each layer; or call it yourself, "
                "model(g, x), which does all nodes at once",
            )
        raise AttributeError(f"'list' object has no attribute '{name}'")


@dataclass(frozen=True)
class ProbeGraph:
    """A small graph with the types of another one, on which a model shows what it does.

    Every node has in-edges of every type that there is.  Features are rows of the other graph's.
    """

    graph: DGLGraph  # on the device that computes
    columns: Tree  # of Column: the model's input
    blocks: Blocks  # of `graph`

    @classmethod
    def of(cls, g: Graph, columns: Tree, device: torch.device) -> ProbeGraph:
        # Different numbers of nodes tell the types apart; no more than the graph has, since a model
        # may look up what belongs to a node's id.
        counts = {
            ntype: max(1, min(5 + place, g.num_nodes(ntype)))
            for place, ntype in enumerate(g.ntypes)
        }
        draw = torch.Generator().manual_seed(0)
        edges = {}
        for src, etype, dst in g.canonical_etypes:
            ends = torch.arange(counts[dst]).repeat(3)
            starts = torch.randint(counts[src], (len(ends),), generator=draw)
            edges[src, etype, dst] = (starts, ends)
        graph = dgl.heterograph(edges, counts, idtype=g.idtype).to(device)
        for ntype in g.ntypes:
            for name, rows in g.nodes[ntype].data.items():
                graph.nodes[ntype].data[name] = sample_rows(rows, counts[ntype], device)
        for etype in g.canonical_etypes:
            for name, rows in g.edges[etype].data.items():
                graph.edges[etype].data[name] = sample_rows(rows, graph.num_edges(etype), device)
        few = map_tree(
            lambda column: Column(
                column.ntype, sample_rows(column.rows, counts[column.ntype], device)
            ),
            columns,
        )
        return cls(graph, few, Blocks(graph, device))

    def layers(self, num_layers: int) -> TracedBlocks:
        """The whole graph as a block of each layer."""
        whole = self.blocks.whole()
        return TracedBlocks(self.blocks.for_layer(whole, layer) for layer in range(num_layers))

    def inputs(self) -> Tree:
        return map_tree(lambda column: column.rows.clone(), self.columns)

    def outline(self, tree: Tree, ntype: str | None, what: str) -> Tree:
        """The types and shapes of rows that a model or module returned.

        They are rows of ``ntype``, unless keys of dicts or numbers of rows say it.
        """
        if isinstance(tree, Mapping):
            known = self.graph.ntypes
            return {
                key: self.outline(item, key if key in known else ntype, what)
                for key, item in tree.items()
            }
        if isinstance(tree, list | tuple):
            return type(tree)([self.outline(item, ntype, what) for item in tree])
        if not isinstance(tree, torch.Tensor):
            return tree
        fitting = [
            known
            for known in self.graph.ntypes
            if ntype in (None, known) and tree.dim() and len(tree) == self.graph.num_nodes(known)
        ]
        if len(fitting) != 1:
            raise InvalidInputError(
                ASKED_LAYERS,
                f"{what} returns a tensor of shape {tuple(tree.shape)}, which is not one row for "
                "each destination node of its block",
                AT_ONCE,
            )
        return Outline(fitting[0], tree.shape[1:], tree.dtype)


def sample_rows(
    rows: torch.Tensor | TableStorage, count: int, device: torch.device
) -> torch.Tensor:
    """Rows from all over a column."""
    if not len(rows):
        return torch.zeros(count, *rows.shape[1:], dtype=rows.dtype, device=device)
    return Column("", rows).take(torch.linspace(0, len(rows) - 1, count).long()).to(device)


@dataclass
class Record:
    """One call of a module with a graph."""

    graph: DGLGraph
    arguments: Tree
    given: Tree = None

    @property
    def layer(self) -> int | None:
        return getattr(self.graph, "layer", None)


def record_calls(
    model: nn.Module, pattern: ProbeGraph, num_layers: int
) -> tuple[list[Record], Tree]:
    """What a model's modules and the model itself do on the probe graph."""
    records: list[Record] = []

    def handle(graph: DGLGraph, arguments: Tree, run: Callable[[], Any]) -> Any:
        records.append(Record(graph, clone_tree(arguments)))
        given = run()
        records[-1].given = clone_tree(given)
        return given

    with intercept_calls(handle):
        result = model(pattern.layers(num_layers), pattern.inputs())
    return records, result


def clone_tree(tree: Tree) -> Tree:
    return map_tree(torch.clone, tree)


def widest_row_bytes(model: nn.Module, pattern: ProbeGraph, num_layers: int) -> int:
    """Bytes of the widest rows that the model takes or one of its modules returns."""
    records, output = record_calls(model, pattern, num_layers)
    trees = pattern.inputs(), *(record.given for record in records), output
    return max(sum(torch.atleast_1d(rows)[:1].nbytes for rows in leaves(tree)) for tree in trees)


def count_layers(model: nn.Module, pattern: ProbeGraph) -> int:
    """The number of blocks that a model uses of more than it needs; raises for all, or none.

    What the model raises comes out as it is, with a note where the number of blocks may be the
    reason.
    """
    action, fix = "count the layers of a model", "pass num_layers"
    used: set[int | None] = set()
    running = False

    def handle(graph: DGLGraph, arguments: Tree, run: Callable[[], Any]) -> Any:
        nonlocal running
        running = True
        given = run()
        used.add(getattr(graph, "layer", None))
        running = False
        return given

    blocks = pattern.layers(_MANY_LAYERS)
    try:
        with intercept_calls(handle):
            model(blocks, pattern.inputs())
    except Exception as error:
        missing = isinstance(error, KeyError) and not used  # a feature
        # More nodes than a model has learned rows for are so with any number of layers.
        if missing or not blocks.touched or isinstance(error, IdOutOfRangeError | _OneGraphError):
            raise
        # A model that takes as many of its layers as there are blocks has run out of them.
        if running or not used or not isinstance(error, IndexError):
            if used or not running:
                error.add_note(
                    f"Raised while dgl_mgpu.inference called the model with {_MANY_LAYERS} blocks, "
                    f"to count its layers, of which {len(used)} were done. If it fails for having "
                    "too many blocks, pass num_layers."
                )
            raise
    count = len(used - {None})
    if None in used or not 0 < count < _MANY_LAYERS:
        found = f"the model's modules used {count} of {_MANY_LAYERS} blocks"
        raise InvalidInputError(action, found, fix)
    return count


@dataclass
class Call:
    """A module's call in a model's forward pass."""

    layer: int
    outline: Tree  # of Outline
    given: Tree  # of tensors: its result on the probe graph


@dataclass
class InferencePlan:
    """How a model is computed layer by layer."""

    num_layers: int
    calls: list[Call]  # in the order of a forward pass, which is also that of the layers
    output: Tree  # of Outline: the model's result
    expected: Tree  # of tensors: the model's result on the probe graph
    #: For each tensor of the input, the layers that read it other than through a module.
    readers: list[set[int]] = field(default_factory=list)
    #: The same for the result of each call.
    call_readers: list[set[int]] = field(default_factory=list)
    #: Degrees of the whole graph that the model asks blocks for.
    degrees: set[tuple[str, CanonicalEtype]] = field(default_factory=set)

    @classmethod
    def of(cls, model: nn.Module, pattern: ProbeGraph, num_layers: int) -> InferencePlan:
        records, result = record_calls(model, pattern, num_layers)
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
        plan = cls(num_layers, calls, pattern.outline(result, None, "the model"), result)
        plan._find_readers(model, pattern)
        return plan

    def last_call(self, layer: int) -> int:
        return max(place for place, call in enumerate(self.calls) if call.layer == layer)

    def peak_bytes(self, counts: Mapping[str, int]) -> int:
        """The most bytes of results kept at the same time, given the numbers of nodes by type."""

        def nbytes(tree: Tree) -> int:
            return sum(outline.row_bytes * counts[outline.ntype] for outline in leaves(tree))

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
        before = self._observe(model, pattern, inputs, given)

        def readers(rows: list[torch.Tensor], changes: list[tuple[Tree, list[Tree]]]) -> set[int]:
            if not all(row.is_floating_point() for row in rows):
                return every  # what may stand in place of other numbers is not known
            layers: set[int] = set()
            for change in changes:
                try:
                    after = self._observe(model, pattern, *change)
                except Exception:  # whatever a model makes of such numbers, it has read them
                    return every
                layers |= {layer for layer in before if not _equal(before[layer], after[layer])}
            return layers

        for place, rows in enumerate(leaves(inputs)):
            changed = [(tree, given) for tree in _changed(inputs, place)]
            self.readers.append(readers([rows], changed))
        for number, call in enumerate(self.calls):
            others = given[:number], given[number + 1 :]
            changed = [(inputs, [*others[0], tree, *others[1]]) for tree in _changed(call.given)]
            later = set(range(call.layer + 1, self.num_layers))
            self.call_readers.append(readers(leaves(call.given), changed) & later)

    def _observe(
        self, model: nn.Module, pattern: ProbeGraph, inputs: Tree, given: list[Tree]
    ) -> dict[int, list[torch.Tensor]]:
        """What each layer's modules, and for the last the model, get and give if modules gave
        ``given``.
        """
        seen: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(self.num_layers)}
        number = 0

        def handle(graph: DGLGraph, arguments: Tree, run: Callable[[], Any]) -> Any:
            nonlocal number
            seen[self.calls[number].layer] += leaves(clone_tree(arguments))
            number += 1
            return clone_tree(given[number - 1])

        with intercept_calls(handle):
            result = model(pattern.layers(self.num_layers), clone_tree(inputs))
        seen[self.num_layers - 1] += leaves(result)
        return seen


def _changed(tree: Tree, place: int | None = None) -> list[Tree]:
    """A tree with other floats, NaN or random ones, in all of its tensors or in one."""
    draw = torch.Generator().manual_seed(1)

    def with_other(numbers: Callable[[torch.Tensor], torch.Tensor]) -> Tree:
        places = itertools.count()

        def change(rows: torch.Tensor) -> torch.Tensor:
            meant = next(places) == place or place is None
            return numbers(rows) if meant and rows.is_floating_point() else rows

        return map_tree(change, tree)

    return [
        with_other(lambda rows: torch.full_like(rows, math.nan)),
        with_other(lambda rows: torch.randn(rows.shape, generator=draw).to(rows)),
    ]


def _equal(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    """Whether all numbers are the same; NaN is NaN."""
    return len(before) == len(after) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(before, after, strict=True)
    )
