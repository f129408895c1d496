"""The forward and the backward pass of a GCN, and the buffers that they take.

A *buffer* here is a tensor with a row for each of the rank's nodes.  Of ``L`` layers the forward
pass leaves ``L`` behind, the layers' outputs; ReLU, bias, normalisation and dropout are applied
to these in place, and a layer's product before its sum (or the other way round) lives no longer
than the layer.  The backward pass has two of its own, or while it multiplies three, and frees
outputs as it comes by them: what ReLU and dropout let through is what is positive, so that no
masks are kept.  So there are ``L + 1`` while rows are exchanged, the output and its gradient among
them, and one more if the loss keeps the output.  The exchange has others' rows in flight, on
however many ranks: by broadcast that makes L + 3 (MG-GCN, section 4.2), by messages with the halo
L + 2.5, and between GPUs that read each other's memory L + 3, of which their windows are one
(``tests/distributed/test_memory.py`` counts the bytes on five ranks).  Where MG-GCN writes to a
buffer anew, here it is freed and torch's allocator gives it out again, in whatever width is needed
next.  Sums of layers' inputs stay for their weights' gradients where all takes no more than that
(`has_room_for_sums`): narrow layers leave room for them.

Of an input in the host's memory (`HostRows`) some columns are there at a time, and so of its sums:
either is multiplied as it comes, in the forward pass and for the weight's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from dgl import DGLGraph
from dgl._sparse_ops import _gspmm
from dgl.heterograph_index import HeteroGraphIndex

from dgl_mgpu.distributed.host_features import HostRows
from dgl_mgpu.distributed.index import PartitionedIndex
from dgl_mgpu.graph.distributed import DistributedGraphIndex
from dgl_mgpu.ops.autograd import differentiable_once
from dgl_mgpu.ops.philox import SampleKey

Input = torch.Tensor | HostRows

# Constants of MurmurHash3's 32-bit finaliser (Appleby, 2011), as signed numbers.
_FIRST, _SECOND = -2048144789, -1028477387
# Elements that are decided on at a time, so that their numbers are no buffer.
_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Passes:
    """One forward pass and its backward pass, up to the last layer's sums.

    Parameters are a weight a layer, then a bias a layer but the last, or none.  A layer's input is
    already multiplied with ``left`` where the layer sums first, but for the first layer's, which
    is not ours.
    """

    index: HeteroGraphIndex
    dtype: torch.dtype  # Of buffers
    # Shape (num_nodes, 1), or None: what rows are multiplied with before and after sums over
    # in-edges
    left: torch.Tensor | None
    right: torch.Tensor | None
    sums_first: tuple[bool, ...]  # Of each layer
    dropout: float
    key: int  # Which elements dropout takes
    # int64, shape (num_nodes,), or None: ids in the whole graph, for dropout
    nodes: torch.Tensor | None
    keep_every: int
    keeps_sums: bool = False  # Whether hidden layers that sum first leave their sums behind
    # Tensor or HostRows, shape (num_nodes, widths[0]), or None: normalised sums of the input, where
    # they are kept: they take its place
    input_sums: Input | None = None

    def with_input_sums(self, sums: Input) -> Passes:
        """The same, but that the first layer has its sums already."""
        return replace(self, input_sums=sums, sums_first=(True, *self.sums_first[1:]))

    # -- forward ----------------------------------------------------------------------------------

    def forward(
        self,
        x: Input,
        parameters: Sequence[torch.Tensor],
        hidden: dict[int, torch.Tensor] | None,
        sums: dict[int, Input] | None,
    ) -> torch.Tensor:
        """The last layer's sums; ``hidden`` and ``sums`` get inputs of layers and their sums, those
        that are kept."""
        rows = self._output(0, self._first_input(x), parameters)
        for number in range(1, len(self.sums_first)):
            if hidden is not None and number % self.keep_every == 0:
                hidden[number] = rows
            rows = self._output(number, rows, parameters, sums if self.keeps_sums else None)
        return rows

    def _output(
        self,
        number: int,
        rows: Input,
        parameters: Sequence[torch.Tensor],
        sums: dict[int, Input] | None = None,
    ) -> torch.Tensor:
        """A layer's output, from its input."""
        weight, bias = self._layer_parameters(number, parameters)
        if self.sums_first[number]:
            total = self.normalised_sums(number, rows)
            out = _product(total, weight, bias)
            if sums is not None:
                sums[number] = total
            del total
        else:
            out = _sums(self.index, _scale_(_product(rows, weight), self.left))
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

    def normalised_sums(self, number: int, rows: Input) -> Input:
        """Sums of a layer's input; of one in the host's memory, made of slabs when they come."""
        if number == 0 and self.input_sums is not None:
            return self.input_sums
        if isinstance(rows, HostRows):
            return rows.changed(self._sums_of_slab)
        if number == 0 and self.left is not None:
            rows = _scaled(rows, self.left)
        return _scale_(_sums(self.index, rows), self._right(number))

    def _sums_of_slab(self, slab: torch.Tensor, _columns: slice) -> torch.Tensor:
        scaled = _scale_(slab.to(self.dtype), self.left)
        return _scale_(_sums(self.index, scaled), self._right(0))

    def _first_input(self, x: Input) -> Input:
        """The input, converted unless its sums, which are, take its place."""
        return x if self.input_sums is not None else self.convert(x)

    def convert(self, x: Input) -> Input:
        """The input in the dtype of buffers; in the host's memory it stays as it is."""
        return x if isinstance(x, HostRows) else x.to(self.dtype)

    def _right(self, number: int) -> torch.Tensor | None:
        """What a layer's sums are multiplied with here."""
        return self.right if number + 1 < len(self.sums_first) else None

    def _layer_parameters(
        self, number: int, parameters: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A layer's weight, and its bias if there is one, in the dtype of buffers."""
        weight, bias = parameters[number].to(self.dtype), len(self.sums_first) + number
        return weight, parameters[bias].to(self.dtype) if bias < len(parameters) else None

    # -- backward ---------------------------------------------------------------------------------

    def backward(
        self,
        x: Input,
        parameters: Sequence[torch.Tensor],
        hidden: dict[int, torch.Tensor],
        sums: dict[int, Input],
        gradient: torch.Tensor,
        of_input: bool,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """The input's gradient, or None, and the parameters'; ``hidden`` and ``sums`` are emptied.

        Of the last layer's gradient, which is autograd's, nothing is changed: its sums are not
        multiplied here.
        """
        num_layers = len(self.sums_first)
        gradients: dict[int, torch.Tensor] = {}
        transposed = self.index.reverse()
        for number in reversed(range(num_layers)):
            weight, bias = self._layer_parameters(number, parameters)
            right = self._right(number)
            if bias is not None:
                gradients[num_layers + number] = gradient.sum(0, dtype=parameters[-1].dtype)
            goes_on = of_input or number > 0
            rows = self._input(number, x, parameters, hidden)
            total = sums.pop(number, None)
            if total is None and self._repeats_sums(number, weight, goes_on):
                total = self.normalised_sums(number, rows)
            if total is not None:
                gradients[number] = _transposed_product(total, gradient)
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
                gradients[number] = _transposed_product(rows, gradient)
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
            gradients[number].to(parameter.dtype) for number, parameter in enumerate(parameters)
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
        x: Input,
        parameters: Sequence[torch.Tensor],
        hidden: dict[int, torch.Tensor],
    ) -> Input:
        """A layer's input, made again from the closest that is kept, and no longer kept."""
        if number == 0:
            return self._first_input(x)
        start = max((layer for layer in hidden if layer <= number), default=0)
        rows = hidden[start] if start else self._first_input(x)
        for before in range(start, number):
            rows = hidden[before + 1] = self._output(before, rows, parameters)
        return hidden.pop(number)


def has_room_for_sums(widths: Sequence[int], layers: Sequence[int]) -> bool:
    """Whether sums of these layers' inputs may stay until the backward pass.

    With them all must be in L + 2 buffers as wide as the widest, the exchange's not among them.
    There are most of them at the last layer: with what the forward pass leaves behind the loss has
    the output, its logarithms and their gradient, the backward pass the gradient, its sums and what
    becomes of these.
    """
    *before, last = widths
    multiplied = before[-1] if len(before) > 1 else 0
    columns = sum(before[1:]) + sum(widths[layer] for layer in layers)
    return columns + 2 * last + max(last, multiplied) <= (len(before) + 2) * max(widths)


class Layers(torch.autograd.Function):
    """All layers at once."""

    @staticmethod
    def forward(ctx: Any, passes: Passes, x: Input, *parameters: torch.Tensor) -> torch.Tensor:
        # A tensor that is saved may not be changed in the meantime. Sums take the input's place.
        ctx.x = x if isinstance(x, HostRows) else passes.input_sums
        ctx.save_for_backward(*parameters, *([x] if ctx.x is None else []))
        ctx.passes, ctx.hidden, ctx.sums = passes, {}, {}
        return passes.forward(x, parameters, ctx.hidden, ctx.sums)

    @staticmethod
    @differentiable_once("a GCN", "use its layers one by one, which are dgl.nn.GraphConv")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        parameters = list(ctx.saved_tensors)
        passes, hidden, sums, x = ctx.passes, ctx.hidden, ctx.sums, ctx.x
        ctx.passes = ctx.hidden = ctx.sums = ctx.x = None
        if hidden is None:
            raise RuntimeError(
                "Trying to backward through a GCN a second time: it frees what it has read, also"
                " with retain_graph=True; call the model again"
            )
        if x is None:
            x = parameters.pop()
        with torch.autocast(x.device.type, enabled=False):
            of_input, of_parameters = passes.backward(
                x, parameters, hidden, sums, gradient, ctx.needs_input_grad[1]
            )
        return None, of_input, *of_parameters


def _sums(index: HeteroGraphIndex, rows: torch.Tensor) -> torch.Tensor:
    """For each node the sum of its in-edges' sources."""
    rows = rows.contiguous()
    if isinstance(index, DistributedGraphIndex):
        return index.gspmm("copy_lhs", "sum", rows, None)
    return _gspmm(index, "copy_lhs", "sum", rows, None)[0]


def _product(rows: Input, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if isinstance(rows, HostRows):
        return rows.times(weight, bias)
    return rows.mm(weight) if bias is None else torch.addmm(bias, rows, weight)


def _transposed_product(rows: Input, gradient: torch.Tensor) -> torch.Tensor:
    if isinstance(rows, HostRows):
        return rows.transposed_times(gradient)
    return rows.t().mm(gradient)


def _scale_(rows: torch.Tensor, by: torch.Tensor | None) -> torch.Tensor:
    """Rows multiplied in place."""
    return rows if by is None else rows.mul_(by)


def _scaled(rows: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Rows multiplied, in a buffer of their own and their own dtype."""
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    return torch.mul(rows, by, out=out)


# -- dropout by counter: an element's fate follows from where it is, so that no mask is kept -------


def drop_(
    rows: torch.Tensor, nodes: torch.Tensor, key: int, rate: float, first_column: int = 0
) -> None:
    """Set elements to 0 with a chance of ``rate``, and raise the others so that means stay.

    Rows, of shape (num_nodes, width), are changed in place.  Which elements are taken depends on
    ``nodes``, int64 of shape (num_nodes,), on the column, of which ``first_column`` is the number
    of the first, and on ``key``, signed with 64 bits.  ``rate`` is in [0, 1).
    """
    width = rows.shape[1]
    low, high = _signed(key), _signed(key >> 32)
    columns = torch.arange(
        first_column, first_column + width, dtype=torch.int32, device=rows.device
    )
    columns = _mix_(columns.bitwise_xor_(high))
    highest = min(int(rate * (1 << 32)), (1 << 32) - 1) - (1 << 31)
    at_once = max(1, _AT_ONCE // width)
    for part, ids in zip(rows.split(at_once), nodes.split(at_once), strict=True):
        words = _mix_(ids.to(torch.int32).bitwise_xor_(low)).unsqueeze(1) + columns
        part.masked_fill_(_mix_(words) < highest, 0)
    rows *= 1 / (1 - rate)


def dropped(g: DGLGraph, rows: HostRows, rate: float) -> HostRows:
    """A graph's nodes' rows with elements dropped out: the same ones whenever they are read."""
    nodes, key = global_ids(g), int(torch.randint(1 << 62, ()))

    def change(slab: torch.Tensor, columns: slice) -> torch.Tensor:
        drop_(slab, nodes, key, rate, columns.start)
        return slab

    return rows.changed(change)


def global_ids(g: DGLGraph) -> torch.Tensor:
    """The nodes' ids in the whole graph."""
    if isinstance(g._graph, PartitionedIndex):
        part = g._graph.parts[0].part
        return part.src.nodes(part.rank, g.device)
    return torch.arange(g.num_nodes(), device=g.device)


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
