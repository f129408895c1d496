"""The arguments of a model's call: graphs, tensors with a row for each node or edge, constants."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from dgl.frame import Frame
from dgl.heterograph import DGLBlock, DGLGraph

from dgl_mgpu.capture.sizes import Sizes
from dgl_mgpu.errors import DGLMGPUError
from dgl_mgpu.graph.block_frames import BlockFrame
from dgl_mgpu.graph.index import TensorIndex

_Constants = bool | int | float | complex | str | bytes | torch.dtype | torch.device | None
_IDENTITIES = (FunctionType, BuiltinFunctionType, type)


class _Thread(threading.local):
    """What this thread is doing."""

    #: Whether a model's call is under way, whose submodules are not captured apart.
    is_inside = False
    #: Where a forward pass that is recorded notes whether there are nodes without in-edges.
    flags: list[torch.Tensor] | None = None


thread = _Thread()


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """Within, calls of modules are not captured apart."""
    before, thread.is_inside = thread.is_inside, True
    try:
        yield
    finally:
        thread.is_inside = before


@contextlib.contextmanager
def recording() -> Iterator[list[torch.Tensor]]:
    """Within, modules that raise for nodes without in-edges note on the device whether they would.

    They ask the GPU otherwise, and the host would wait.
    """
    flags: list[torch.Tensor] = []
    thread.flags = flags
    try:
        with inside():
            yield flags
    finally:
        thread.flags = None


#: The structure of nested containers: a container's type, its keys, and the structures in it.
Structure = tuple[Any, ...] | None


class NotCapturable(Exception):
    """Why a model's call cannot be captured, as a phrase that follows a colon."""


def cause_of(error: Exception) -> str:
    """An error that a model raised as such a phrase."""
    cause = error.found if isinstance(error, DGLMGPUError) else str(error)
    return (cause.splitlines() or [type(error).__name__])[0]


def flatten(value: Any, leaves: list[Any]) -> Structure:
    """Add what is in nested lists, tuples and dicts to ``leaves``; return their structure."""
    kind = type(value)
    if kind is dict:
        return kind, tuple(value), *(flatten(part, leaves) for part in value.values())
    if kind is list or kind is tuple:
        return kind, None, *(flatten(part, leaves) for part in value)
    leaves.append(value)
    return None


def unflatten(structure: Structure, leaves: Iterator[Any]) -> Any:
    """The inverse of :func:`flatten`."""
    if structure is None:
        return next(leaves)
    kind, keys, *inner = structure
    parts = [unflatten(part, leaves) for part in inner]
    return dict(zip(keys, parts, strict=True)) if kind is dict else kind(parts)


def first_block(arguments: Iterable[Any]) -> DGLBlock | None:
    """A block among arguments, or the first element of one of them; None if there is none."""
    for value in arguments:
        if isinstance(value, DGLBlock):
            return value
        if type(value) in (list, tuple) and value and isinstance(value[0], DGLBlock):
            return value[0]
    return None


@dataclass(eq=False)
class Call:
    """One call of a model.

    Attributes
    ----------
    key : hashable
        What two calls must have in common to share a CUDA graph, apart from sizes.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: Hashable = field(init=False)
    blocks: list[DGLBlock] = field(init=False)
    pair_graphs: list[DGLGraph] = field(init=False)
    tensors: list[torch.Tensor] = field(init=False)
    sizes: Sizes = field(init=False)

    def __post_init__(self) -> None:
        self._leaves: list[Any] = []
        self._structure = flatten((self.args, self.kwargs), self._leaves)
        self.blocks, self.pair_graphs, self.tensors = [], [], []
        parts = tuple(map(self._part, self._leaves))
        device = self.device = self.blocks[0]._graph.device
        for tensor in self.tensors:
            if tensor.device != device:
                raise NotCapturable(f"a tensor among its arguments is on {tensor.device}")
        try:
            self.sizes = Sizes.of(self.blocks, self.pair_graphs)
        except ValueError as error:
            raise NotCapturable(str(error)) from error
        self.key = self._structure, parts

    def _part(self, leaf: Any) -> Hashable:
        if isinstance(leaf, torch.Tensor):
            self.tensors.append(leaf)
            return leaf.dtype, leaf.shape[1:], leaf.dim(), leaf.requires_grad
        if isinstance(leaf, DGLGraph):
            if not isinstance(leaf._graph, TensorIndex):
                raise NotCapturable(f"a graph among its arguments is on {leaf.device}")
            (self.blocks if isinstance(leaf, DGLBlock) else self.pair_graphs).append(leaf)
            # A model may ask which features there are.
            frames = (*leaf._node_frames, *leaf._edge_frames)
            features = tuple(map(_column_names, frames))
            return type(leaf), tuple(leaf._canonical_etypes), leaf._graph.idtype, features
        if isinstance(leaf, _Constants):
            return type(leaf), leaf
        if isinstance(leaf, _IDENTITIES):
            return leaf
        raise NotCapturable(f"an argument is of type {type(leaf).__name__}")

    @property
    def dst_types(self) -> tuple[int, ...]:
        """The number of each edge type's destination type in a block."""
        block = self.blocks[0]
        num_sources = len(block.srctypes)
        return tuple(dst - num_sources for _, dst in block._graph.schema.ends)

    def template(self) -> Template:
        """The arguments without graphs and tensors."""
        return Template(self._structure, [*map(_blanked, self._leaves)])


def _column_names(frame: Frame) -> tuple[str, ...]:
    names = frame.unmade_names if type(frame) is BlockFrame else None
    return tuple(frame._columns) if names is None else names


class ObservedSizes:
    """The sizes of calls, and what their tensors have rows for.

    Attributes
    ----------
    largest, smallest : Sizes
        By element.
    """

    def __init__(self, call: Call) -> None:
        self.largest = self.smallest = call.sizes
        self._axes = [_axes_of(call, tensor) for tensor in call.tensors]

    def add(self, call: Call) -> None:
        """Take another call into account."""
        self.largest = self.largest.joined(call.sizes)
        self.smallest = self.smallest.common(call.sizes)
        for axes, tensor in zip(self._axes, call.tensors, strict=True):
            axes &= _axes_of(call, tensor)

    @property
    def axes(self) -> list[int | None]:
        """By tensor: which of `Sizes.flat` its number of rows has been in all calls, if any."""
        return [min(axes, default=None) for axes in self._axes]


def _axes_of(call: Call, tensor: torch.Tensor) -> set[int]:
    if not tensor.dim():
        return set()
    return {axis for axis, count in enumerate(call.sizes.flat) if count == len(tensor)}


class _Blank(Enum):
    """What an argument is left out of a template for."""

    TENSOR, BLOCK, PAIR_GRAPH = range(3)


def _blanked(leaf: Any) -> Any:
    """A blank in place of a graph or a tensor; anything else as it is."""
    if isinstance(leaf, torch.Tensor):
        return _Blank.TENSOR
    if isinstance(leaf, DGLGraph):
        return _Blank.BLOCK if isinstance(leaf, DGLBlock) else _Blank.PAIR_GRAPH
    return leaf


@dataclass
class Template:
    """Nested containers with blanks for graphs and tensors."""

    structure: Structure
    leaves: list[Any]

    def filled(
        self,
        blocks: Iterable[DGLBlock],
        pair_graphs: Iterable[DGLGraph],
        tensors: Iterable[torch.Tensor],
    ) -> Any:
        """The containers with these graphs and tensors in them, in their order."""
        parts = {
            _Blank.BLOCK: iter(blocks),
            _Blank.PAIR_GRAPH: iter(pair_graphs),
            _Blank.TENSOR: iter(tensors),
        }
        leaves = (next(parts[leaf]) if isinstance(leaf, _Blank) else leaf for leaf in self.leaves)
        return unflatten(self.structure, leaves)


def split_tensors(value: Any) -> tuple[list[torch.Tensor], Template]:
    """The tensors of a model's result, and what it is without them.

    Raises
    ------
    NotCapturable
        If there is anything else in it than tensors and constants.
    """
    leaves: list[Any] = []
    structure = flatten(value, leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor | _Constants):
            raise NotCapturable(f"its result has a part of type {type(leaf).__name__}")
    return tensors, Template(structure, [*map(_blanked, leaves)])


def numerical_modes(device: torch.device) -> Hashable:
    """What else decides which kernels a model's operations launch, and in which order they run."""
    kind = device.type
    is_autocast = torch.is_autocast_enabled(kind)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype(kind) if is_autocast else None,
        torch.get_default_dtype(),
        # As torch.backends.cuda.matmul.allow_tf32 and others, in less time.
        torch._C._get_cublas_allow_tf32(),
        torch._C._get_cudnn_allow_tf32(),
        torch._C._get_deterministic_algorithms(),
        threading.get_ident(),
        torch._C._cuda_getCurrentRawStream(device.index) if kind == "cuda" else None,
    )
