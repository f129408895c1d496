"""A small graph on which a model shows what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import dgl
import torch
from dgl import DGLGraph
from torch import nn

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.layerwise_inference.blocks import Blocks
from dgl_mgpu.layerwise_inference.modules import meeting
from dgl_mgpu.layerwise_inference.rows import ASKED, Column, Graph, Outline, Tree, leaves, mapped
from dgl_mgpu.store.feature_storage import TableStorage

ASKED_LAYERS = "infer all nodes layer by layer"
AT_ONCE = "pass layerwise=False, which runs the model on the whole graph at once"

#: How many blocks a model is offered while its layers are counted.
_MANY_LAYERS = 33


class _OneGraphError(InvalidInputError, AttributeError):
    """A model takes one graph, where it is called with blocks."""


class TracedBlocks(list):
    """The blocks that a model is called with.

    Attributes
    ----------
    touched : bool
        Whether the model has looked at them.
    """

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

    Attributes
    ----------
    graph : DGLGraph
        On the device that computes.
    columns : tree of Column
        The model's input.
    blocks : Blocks
        Of ``graph``.
    """

    graph: DGLGraph
    columns: Tree
    blocks: Blocks

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
                graph.nodes[ntype].data[name] = some(rows, counts[ntype], device)
        for etype in g.canonical_etypes:
            for name, rows in g.edges[etype].data.items():
                graph.edges[etype].data[name] = some(rows, graph.num_edges(etype), device)
        few = mapped(
            lambda column: Column(column.ntype, some(column.rows, counts[column.ntype], device)),
            columns,
        )
        return cls(graph, few, Blocks(graph, device))

    def layers(self, num_layers: int) -> TracedBlocks:
        """The whole graph as a block of each layer."""
        whole = self.blocks.whole()
        return TracedBlocks(self.blocks.for_layer(whole, layer) for layer in range(num_layers))

    def inputs(self) -> Tree:
        return mapped(lambda column: column.rows.clone(), self.columns)

    def outline(self, tree: Tree, ntype: str | None, what: str) -> Tree:
        """The types and shapes of rows that a model or module gave.

        Parameters
        ----------
        ntype : str or None
            Whose rows they are, unless keys of dicts or numbers of rows say it.
        """
        if isinstance(tree, Mapping):
            known = self.graph.ntypes
            return {
                key: self.outline(each, key if key in known else ntype, what)
                for key, each in tree.items()
            }
        if isinstance(tree, list | tuple):
            return type(tree)([self.outline(each, ntype, what) for each in tree])
        if not isinstance(tree, torch.Tensor):
            return tree
        fitting = [
            each
            for each in self.graph.ntypes
            if ntype in (None, each) and tree.dim() and len(tree) == self.graph.num_nodes(each)
        ]
        if len(fitting) != 1:
            raise InvalidInputError(
                ASKED_LAYERS,
                f"{what} returns a tensor of shape {tuple(tree.shape)}, which is not one row for "
                "each destination node of its block",
                AT_ONCE,
            )
        return Outline(fitting[0], tree.shape[1:], tree.dtype)


def some(rows: torch.Tensor | TableStorage, count: int, device: torch.device) -> torch.Tensor:
    """Rows from all over a column."""
    if not len(rows):
        return torch.zeros(count, *rows.shape[1:], dtype=rows.dtype, device=device)
    return Column("", rows).take(torch.linspace(0, len(rows) - 1, count).long()).to(device)


@dataclass
class Record:
    """One call of a module with a graph: what it got and gave."""

    graph: DGLGraph
    arguments: Tree
    given: Tree = None

    @property
    def layer(self) -> int | None:
        return getattr(self.graph, "layer", None)


def recorded(model: nn.Module, pattern: ProbeGraph, num_layers: int) -> tuple[list[Record], Tree]:
    """What a model's modules and the model itself do on the pattern."""
    records: list[Record] = []

    def meet(graph: DGLGraph, arguments: Tree, run: Callable[[], Any]) -> Any:
        records.append(Record(graph, cloned(arguments)))
        given = run()
        records[-1].given = cloned(given)
        return given

    with meeting(meet):
        found = model(pattern.layers(num_layers), pattern.inputs())
    return records, found


def cloned(tree: Tree) -> Tree:
    return mapped(torch.clone, tree)


def widest(model: nn.Module, pattern: ProbeGraph, num_layers: int) -> int:
    """Bytes of the widest rows that the model takes or one of its modules gives."""
    records, found = recorded(model, pattern, num_layers)
    given = [record.given for record in records]
    tensors = [leaves(each) for each in (pattern.inputs(), *given, found)]
    return max(sum(torch.atleast_1d(rows)[:1].nbytes for rows in each) for each in tensors if each)


def count_layers(model: nn.Module, pattern: ProbeGraph) -> int:
    """How many blocks a model uses of more than it needs.

    Raises
    ------
    InvalidInputError
        If it uses them all, or none.  What the model raises comes out as it is, with a note where
        the number of blocks may be the reason.
    """
    asked, fix = "count the layers of a model", "pass num_layers"
    used: set[int | None] = set()
    running = False

    def meet(graph: DGLGraph, arguments: Tree, run: Callable[[], Any]) -> Any:
        nonlocal running
        running = True
        given = run()
        used.add(getattr(graph, "layer", None))
        running = False
        return given

    blocks = pattern.layers(_MANY_LAYERS)
    try:
        with meeting(meet):
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
        raise InvalidInputError(asked, found, fix)
    return count
