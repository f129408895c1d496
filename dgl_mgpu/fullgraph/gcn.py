"""A graph convolutional network with as few buffers as MG-GCN's, and exact gradients.

A *buffer* here is a tensor with a row for each of the rank's nodes.  Of ``L`` layers the forward
pass leaves ``L`` behind, the layers' outputs; ReLU, bias, normalisation and dropout are applied
to these in place, and a layer's product before its sum (or the other way round) lives no longer
than the layer.  The backward pass has two of its own, or while it multiplies three, and frees
outputs as it comes by them: what ReLU and dropout let through is what is positive, so that no
masks are kept.  With the two of the exchange that makes L + 3 (MG-GCN, section 4.2), the output
and its gradient among them; one more if the loss keeps the output.  Where that paper writes to a
buffer anew, here it is freed and torch's allocator gives it out again, in whatever width is needed
next.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from dgl import DGLGraph
from dgl._sparse_ops import _gspmm
from dgl.heterograph_index import HeteroGraphIndex
from dgl.nn import GraphConv
from torch import nn
from torch.autograd.function import once_differentiable

from dgl_mgpu.backend.errors import InvalidCallError
from dgl_mgpu.backend.spread import SpreadIndex
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.fullgraph.index import PartitionedIndex
from dgl_mgpu.ops.philox import SampleKey
from dgl_mgpu.store import Ranks

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Constants of MurmurHash3's 32-bit finaliser (Appleby, 2011), as signed numbers.
_FIRST, _SECOND = -2048144789, -1028477387
# Elements that dropout decides on at a time, so that its numbers are no buffer.
_DROPPED_AT_ONCE = 1 << 24


class GCN(nn.Module):
    """Layers of graph convolutions with ReLU and dropout between them, for the whole graph.

    The same numbers, but for rounding, as these modules one after the other::

        GraphConv(widths[0], widths[1], norm), ReLU, Dropout, GraphConv(widths[1], …), …

    Their parameters are in ``layers``, a ModuleList of ``dgl.nn.GraphConv``.  So a state
    dictionary fits every model that has its convolutions in a ``layers`` of its own, in both
    directions, and ``gcn.layers.load_state_dict(torch.nn.ModuleList(convolutions).state_dict())``
    takes those of any other.

    A layer sums first and multiplies then where its input is narrower than its output, else the
    other way round (MG-GCN, section 4.4), forward and backward.  The sum that only the input's
    gradient needs is left out where nobody asks for it.

    Parameters
    ----------
    widths : sequence of int, length layers + 1
        Of the input and of each layer's output.
    norm : {'both', 'right', 'left', 'none'}
        As of ``dgl.nn.GraphConv``.
    bias : bool
    dropout : float
        Chance of an element between layers to be dropped, while training.  Which are is a matter
        of torch's random state on the CPU, the layer, the node's id in the whole graph and the
        column: where the state is the same on all ranks, however many there are, so is the mask.
    keep_input_sums : bool
        Keep the sums of the input, one more buffer, for the backward pass and for as long as the
        same unchanged tensor is passed: then the first layer needs no sums any more.  An input
        that requires a gradient is not kept.  Otherwise a first layer that sums first does so
        again in the backward pass.
    keep_every : int
        Of so many hidden layers in a row, keep one output for the backward pass, which makes the
        others again: more work, fewer buffers.
    activation_dtype : torch.dtype, optional
        Of buffers and products, as under autocast; ``torch.bfloat16`` halves all buffers but the
        output.  Products and sums add up in float32.  Parameters stay as they are.  An input of
        another dtype is converted, which is one more buffer.  By default that of the input.
    allow_zero_in_degree : bool
        Else the first call on a graph with such nodes raises.

    Raises
    ------
    InvalidInputError
        If an argument is not as above.

    Notes
    -----
    On a `PartitionedGraph` a parameter's gradient is what this rank's rows add to it, as it is
    with ``dgl.nn``'s modules: add up all ranks', or wrap the model in
    ``torch.nn.parallel.DistributedDataParallel``.  States of the optimiser are dealt out over
    ranks by ``torch.distributed.optim.ZeroRedundancyOptimizer``.

    The backward pass frees what it has read, also with ``retain_graph=True``: it runs once.
    """

    def __init__(
        self,
        widths: Sequence[int],
        norm: str = "both",
        *,
        bias: bool = True,
        dropout: float = 0.0,
        keep_input_sums: bool = False,
        keep_every: int = 1,
        activation_dtype: torch.dtype | None = None,
        allow_zero_in_degree: bool = False,
    ) -> None:
        super().__init__()
        _check_options(widths, norm, dropout, keep_every, activation_dtype)
        self.widths = tuple(widths)
        self.norm = norm
        self.bias = bias
        self.dropout = dropout
        self.keep_input_sums = keep_input_sums
        self.keep_every = keep_every
        self.activation_dtype = activation_dtype
        self.allow_zero_in_degree = allow_zero_in_degree
        self.layers = nn.ModuleList(
            GraphConv(width, next_width, norm, bias=bias)
            for width, next_width in zip(self.widths[:-1], self.widths[1:], strict=True)
        )
        self._known = _Known()

    def extra_repr(self) -> str:
        return f"{self.widths}, norm={self.norm!r}, bias={self.bias}, dropout={self.dropout}"

    def forward(self, g: DGLGraph, x: torch.Tensor) -> torch.Tensor:
        """The last layer's output; collective where ``g`` is a `PartitionedGraph`.

        Parameters
        ----------
        g : DGLGraph
            Of one node type and one edge type.
        x : Tensor, shape (num_nodes, widths[0])

        Returns
        -------
        Tensor, dtype of parameters, shape (num_nodes, widths[-1])

        Raises
        ------
        InvalidInputError
            If ``x`` does not fit, or a node has no in-edges and that is not allowed.
        RankFailedError
            If that is so on another rank.
        """
        parameters: list[torch.Tensor] = [
            self.get_parameter(f"layers.{number}.{name}")
            for name in (("weight", "bias") if self.bias else ("weight",))
            for number in range(len(self.layers))
        ]
        dtype = self.activation_dtype or x.dtype
        self._check(g, x, parameters[0])
        left, right = self._known.scales(g, self.norm, dtype, self.allow_zero_in_degree)
        dropout = self.dropout if self.training and len(self.layers) > 1 else 0.0
        run = _Run(
            index=g._graph,
            dtype=dtype,
            left=left,
            right=right,
            sums_first=tuple(
                width < next_width
                for width, next_width in zip(self.widths[:-1], self.widths[1:], strict=True)
            ),
            dropout=dropout,
            key=int(torch.randint(1 << 62, ())) if dropout else 0,
            nodes=_global_ids(g) if dropout else None,
            keep_every=self.keep_every,
        )
        bias = parameters.pop() if self.bias else None
        with torch.autocast(x.device.type, enabled=False):
            # Of an inference tensor one cannot tell whether it was changed.
            if self.keep_input_sums and not x.requires_grad and not x.is_inference():
                run = self._known.with_input_sums(run, x)
            if torch.is_grad_enabled():
                out = _Layers.apply(run, x, *parameters)
            else:
                out = run.forward(x, parameters, None)
            return _finished(out, right, bias)

    def _check(self, g: DGLGraph, x: torch.Tensor, weight: torch.Tensor) -> None:
        asked = "run a GCN"
        if not g.is_homogeneous:
            raise InvalidCallError(
                asked,
                f"a graph with node types {g.ntypes} and edge types {g.etypes}",
                "pass one with one of each, e.g. dgl.to_homogeneous(g)",
            )
        if x.shape != (g.num_nodes(), self.widths[0]):
            raise InvalidCallError(
                asked,
                f"rows of shape {tuple(x.shape)}",
                f"pass shape {(g.num_nodes(), self.widths[0])}, a row for each node of the graph",
            )
        if x.dtype not in _DTYPES or (self.activation_dtype is None and x.dtype != weight.dtype):
            raise InvalidCallError(
                asked,
                f"rows of dtype {x.dtype} and parameters of dtype {weight.dtype}",
                "convert one of them, or make the model with activation_dtype=",
            )


def _check_options(
    widths: Sequence[int],
    norm: str,
    dropout: float,
    keep_every: int,
    activation_dtype: torch.dtype | None,
) -> None:
    asked = "make a GCN"
    if len(widths) < 2 or any(not isinstance(width, int) or width < 1 for width in widths):
        raise InvalidInputError(
            asked, f"widths {list(widths)}", "pass the input's and each layer's, 1 or more each"
        )
    if norm not in ("both", "right", "left", "none"):
        raise InvalidInputError(asked, f"norm={norm!r}", "use one of both, right, left, none")
    if not 0.0 <= dropout < 1.0:
        raise InvalidInputError(asked, f"dropout={dropout}", "pass a chance in [0, 1)")
    if not isinstance(keep_every, int) or keep_every < 1:
        raise InvalidInputError(asked, f"keep_every={keep_every!r}", "pass a positive integer")
    if activation_dtype is not None and activation_dtype not in _DTYPES:
        raise InvalidInputError(
            asked,
            f"activation_dtype={activation_dtype}",
            f"use one of {', '.join(map(str, _DTYPES))}",
        )


def _nothing() -> None:
    """A reference to what is not there."""


def _finished(
    rows: torch.Tensor, right: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """The output, from the last layer's sums.

    Left to autograd, which has freed the output's gradient when it comes to that of ``rows``.
    """
    if bias is None:
        return rows if right is None else rows * right
    return rows + bias if right is None else torch.addcmul(bias, rows, right)


class _Known:
    """What a model has found out about the graph and the input that it was called with last."""

    def __init__(self) -> None:
        self._of_graph: tuple[Any, ...] = (_nothing,)
        self._scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self._of_input: tuple[Any, ...] = (_nothing,)
        self._sums: torch.Tensor | None = None

    def __reduce__(self) -> tuple[type[_Known], tuple[()]]:
        return type(self), ()  # a copy of the model finds out by itself

    def scales(
        self, g: DGLGraph, norm: str, dtype: torch.dtype, allow_zero_in_degree: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What sources' and what destinations' rows are multiplied with, shape (num_nodes, 1)."""
        asked = norm, dtype, allow_zero_in_degree
        known, *about = self._of_graph
        if known() is not g._graph or tuple(about) != asked:
            if not allow_zero_in_degree:
                _require_in_edges(g)
            precise = torch.promote_types(dtype, torch.float32)
            power = -0.5 if norm == "both" else -1.0
            left, right = (
                degrees().to(precise).clamp(min=1).pow(power).unsqueeze(1) if is_asked else None
                for degrees, is_asked in (
                    (g.out_degrees, norm in ("both", "left")),
                    (g.in_degrees, norm in ("both", "right")),
                )
            )
            self._of_graph, self._scales = (weakref.ref(g._graph), *asked), (left, right)
            self._of_input, self._sums = (_nothing,), None
        return self._scales

    def with_input_sums(self, run: _Run, x: torch.Tensor) -> _Run:
        """The run, with the sums of its input; the graph is the one that scales were asked of."""
        known, *version = self._of_input
        if known() is not x or version != [x._version]:
            self._of_input, self._sums = (_nothing,), None
            with torch.no_grad():
                self._sums = run.normalised_sums(0, x.to(run.dtype))
            self._of_input = weakref.ref(x), x._version
        return replace(run, input_sums=self._sums, sums_first=(True, *run.sums_first[1:]))


def _require_in_edges(g: DGLGraph) -> None:
    def check() -> None:
        if (g.in_degrees() == 0).any():
            raise InvalidCallError(
                "run a GCN",
                "nodes without in-edges, of which nothing but the bias would be left",
                "add self-loops (dgl.add_self_loop), or pass allow_zero_in_degree=True",
            )

    if isinstance(g._graph, SpreadIndex):
        Ranks.of_all_machines().together("run a GCN", check)
    else:
        check()


def _global_ids(g: DGLGraph) -> torch.Tensor:
    """The nodes' ids in the whole graph."""
    if isinstance(g._graph, PartitionedIndex):
        part = g._graph.parts[0].part
        return part.src.nodes(part.rank, g.device)
    return torch.arange(g.num_nodes(), device=g.device)


@dataclass(frozen=True)
class _Run:
    """One forward pass and its backward pass, up to the last layer's sums.

    Parameters are a weight a layer, then a bias a layer but the last, or none.  A layer's input is
    already multiplied with ``left`` where the layer sums first, but for the first layer's, which
    is not ours.

    Attributes
    ----------
    index : HeteroGraphIndex
    dtype : torch.dtype
        Of buffers.
    left, right : Tensor, shape (num_nodes, 1), or None
        What rows are multiplied with before and after sums over in-edges.
    sums_first : tuple of bool
        Of each layer.
    dropout : float
    key : int
        Which elements dropout takes.
    nodes : Tensor, int64, shape (num_nodes,), or None
        Ids in the whole graph, for dropout.
    keep_every : int
    input_sums : Tensor, shape (num_nodes, widths[0]), or None
        Normalised sums of the input, where they are kept.
    """

    index: HeteroGraphIndex
    dtype: torch.dtype
    left: torch.Tensor | None
    right: torch.Tensor | None
    sums_first: tuple[bool, ...]
    dropout: float
    key: int
    nodes: torch.Tensor | None
    keep_every: int
    input_sums: torch.Tensor | None = None

    # -- forward ----------------------------------------------------------------------------------

    def forward(
        self,
        x: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        hidden: dict[int, torch.Tensor] | None,
    ) -> torch.Tensor:
        """The last layer's sums; ``hidden`` gets inputs of layers, those that are kept."""
        rows = x if self.input_sums is not None else x.to(self.dtype)
        for number in range(len(self.sums_first)):
            rows = self._output(number, rows, parameters)
            following = number + 1
            is_hidden = following < len(self.sums_first)
            if hidden is not None and is_hidden and following % self.keep_every == 0:
                hidden[following] = rows
        return rows

    def _output(
        self, number: int, rows: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """A layer's output, from its input."""
        weight, bias = self._of_layer(number, parameters)
        if self.sums_first[number]:
            total = self.normalised_sums(number, rows)
            out = total.mm(weight) if bias is None else torch.addmm(bias, total, weight)
            del total
        else:
            out = _sums(self.index, _scale_(rows.mm(weight), self.left))
            _scale_(out, self._right(number))
            if bias is not None:
                out += bias
        if number + 1 < len(self.sums_first):
            out.relu_()
            if self.dropout:
                assert self.nodes is not None
                key = SampleKey(self.key, hop=number).fold()
                drop_(out, self.nodes, key, self.dropout)
            if self.sums_first[number + 1]:
                _scale_(out, self.left)
        return out

    def normalised_sums(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """Sums of a layer's input."""
        if number == 0:
            if self.input_sums is not None:
                return self.input_sums
            if self.left is not None:
                rows = _scaled(rows, self.left)
        return _scale_(_sums(self.index, rows), self._right(number))

    def _right(self, number: int) -> torch.Tensor | None:
        """What a layer's sums are multiplied with here."""
        return self.right if number + 1 < len(self.sums_first) else None

    def _of_layer(
        self, number: int, parameters: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A layer's weight, and its bias if there is one, in the dtype of buffers."""
        weight, bias = parameters[number].to(self.dtype), len(self.sums_first) + number
        return weight, parameters[bias].to(self.dtype) if bias < len(parameters) else None

    # -- backward ---------------------------------------------------------------------------------

    def backward(
        self,
        x: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        hidden: dict[int, torch.Tensor],
        gradient: torch.Tensor,
        of_input: bool,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """The input's gradient, or None, and the parameters'; ``hidden`` is emptied.

        Of the last layer's gradient, which is autograd's, nothing is changed: its sums are not
        multiplied here.
        """
        num_layers = len(self.sums_first)
        found: dict[int, torch.Tensor] = {}
        transposed = self.index.reverse()
        for number in reversed(range(num_layers)):
            weight, bias = self._of_layer(number, parameters)
            right = self._right(number)
            if bias is not None:
                found[num_layers + number] = gradient.sum(0, dtype=parameters[-1].dtype)
            goes_on = of_input or number > 0
            rows = self._input(number, x, parameters, hidden)
            if self._repeats_sums(number, weight, goes_on):
                total = self.normalised_sums(number, rows)
                found[number] = total.t().mm(gradient)
                del total
                if goes_on:
                    gradient = gradient.mm(weight.t())
                    gradient = _sums(transposed, _scale_(gradient, right))
                    _scale_(gradient, self.left)
            else:
                gradient = _sums(transposed, _scale_(gradient, right))
                has_left = self.sums_first[number] and number > 0
                if not has_left:
                    _scale_(gradient, self.left)
                found[number] = rows.t().mm(gradient)
                if has_left:
                    _scale_(gradient, self.left)
                if goes_on:
                    gradient = gradient.mm(weight.t())
            if number > 0:
                # What is positive came through ReLU and dropout.
                torch.ops.aten.threshold_backward.grad_input(gradient, rows, 0, grad_input=gradient)
                if self.dropout:
                    gradient *= 1 / (1 - self.dropout)
            del rows
        of_parameters = [
            found[number].to(parameter.dtype) for number, parameter in enumerate(parameters)
        ]
        return (gradient.to(x.dtype) if of_input else None), of_parameters

    def _repeats_sums(self, number: int, weight: torch.Tensor, goes_on: bool) -> bool:
        """Whether the weight's gradient is found from the sums of the layer's input.

        Then these are made anew, and the input's gradient takes other sums, both as wide as the
        input.  Else the sums of the output's gradient serve both.
        """
        if number == 0 and self.input_sums is not None:
            return True
        width, next_width = weight.shape
        return self.sums_first[number] and (not goes_on or 2 * width < next_width)

    def _input(
        self,
        number: int,
        x: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        hidden: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """A layer's input, made again from the closest that is kept, and no longer kept."""
        if number == 0:
            return x if self.input_sums is not None else x.to(self.dtype)
        start = max((kept for kept in hidden if kept <= number), default=0)
        rows = hidden[start] if start else self._input(0, x, parameters, hidden)
        for before in range(start, number):
            rows = hidden[before + 1] = self._output(before, rows, parameters)
        return hidden.pop(number)


class _Layers(torch.autograd.Function):
    """All layers at once."""

    @staticmethod
    def forward(ctx: Any, run: _Run, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(x, *parameters)
        ctx.hidden = {}
        return run.forward(x, parameters, ctx.hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, *parameters = ctx.saved_tensors
        hidden, ctx.hidden = ctx.hidden, None
        if hidden is None:
            raise RuntimeError(
                "Trying to backward through a GCN a second time: it frees what it has read, also"
                " with retain_graph=True; call the model again"
            )
        with torch.autocast(x.device.type, enabled=False):
            of_input, of_parameters = ctx.run.backward(
                x, parameters, hidden, gradient, ctx.needs_input_grad[1]
            )
        return None, of_input, *of_parameters


def _sums(index: HeteroGraphIndex, rows: torch.Tensor) -> torch.Tensor:
    """For each node the sum of its in-edges' sources."""
    rows = rows.contiguous()
    if isinstance(index, SpreadIndex):
        return index.gspmm("copy_lhs", "sum", rows, None)
    return _gspmm(index, "copy_lhs", "sum", rows, None)[0]


def _scale_(rows: torch.Tensor, by: torch.Tensor | None) -> torch.Tensor:
    """Rows multiplied in place."""
    return rows if by is None else rows.mul_(by)


def _scaled(rows: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Rows multiplied, in a buffer of their own and their own dtype."""
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    return torch.mul(rows, by, out=out)


def drop_(rows: torch.Tensor, nodes: torch.Tensor, key: int, rate: float) -> None:
    """Set elements to 0 with a chance of ``rate``, and raise the others so that means stay.

    Parameters
    ----------
    rows : Tensor, shape (num_nodes, width)
        Changed in place.
    nodes : Tensor, int64, shape (num_nodes,)
        Which elements are taken depends on these, on the column and on ``key`` alone.
    key : int
        Signed, 64 bits.
    rate : float
        In [0, 1).
    """
    width = rows.shape[1]
    low, high = _signed(key), _signed(key >> 32)
    columns = _mix_(torch.arange(width, dtype=torch.int32, device=rows.device).bitwise_xor_(high))
    highest = min(int(rate * (1 << 32)), (1 << 32) - 1) - (1 << 31)
    at_once = max(1, _DROPPED_AT_ONCE // width)
    for some, ids in zip(rows.split(at_once), nodes.split(at_once), strict=True):
        words = _mix_(ids.to(torch.int32).bitwise_xor_(low)).unsqueeze(1) + columns
        some.masked_fill_(_mix_(words) < highest, 0)
    rows *= 1 / (1 - rate)


def _signed(word: int) -> int:
    """The low 32 bits as a signed number."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


def _mix_(words: torch.Tensor) -> torch.Tensor:
    """Mix the bits of every int32, in place (MurmurHash3's finaliser)."""
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    words *= _FIRST
    words ^= (words >> 13).bitwise_and_(0x7FFFF)
    words *= _SECOND
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    return words
