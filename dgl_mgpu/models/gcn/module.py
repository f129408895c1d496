"""The GCN as a module of torch's."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from dgl import DGLGraph
from dgl.nn import GraphConv
from torch import nn

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.host_features import HostRows
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.distributed import DistributedGraphIndex
from dgl_mgpu.graph.errors import InvalidCallError
from dgl_mgpu.models.gcn.passes import Layers, Passes, global_ids, has_room_for_sums

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class FullGraphGCN(nn.Module):
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
        that requires a gradient is not kept.  Sums of one in the host's memory are kept there,
        too.  Otherwise they stay from the forward to the backward pass where that is within the
        buffers of MG-GCN (section 4.2) and saves sums, and so do those of other layers that sum
        first; else such layers may do so again in the backward pass.
    keep_every : int
        Of so many hidden layers in a row, keep one output for the backward pass, which makes the
        others again: more work, fewer buffers.
    activation_dtype : torch.dtype, optional
        Of buffers and products, as under autocast; ``torch.bfloat16`` halves all buffers but the
        output.  Products, and sums over a round of an exchange, add up in float32 and are rounded
        once a round.  Parameters stay as they are.  An input of
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

    The backward pass frees what it has read, also with ``retain_graph=True``: it runs once.  There
    are no second derivatives; what asks for one raises an `InvalidInputError`.
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
            GraphConv(*ends, norm, bias=bias, allow_zero_in_degree=allow_zero_in_degree)
            for ends in pairwise(self.widths)
        )
        self._known = Known()

    def extra_repr(self) -> str:
        return f"{self.widths}, norm={self.norm!r}, bias={self.bias}, dropout={self.dropout}"

    def forward(self, g: DGLGraph, x: torch.Tensor | HostRows) -> torch.Tensor:
        """The last layer's output; collective where ``g`` is a `PartitionedGraph`.

        Parameters
        ----------
        g : DGLGraph
            Of one node type and one edge type.
        x : Tensor or HostRows, shape (num_nodes, widths[0])
            `HostRows` stay in the host's memory and are multiplied, or summed first, some columns
            at a time.

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
        sums_first = tuple(width < next_width for width, next_width in pairwise(self.widths))
        spares_sums = self._spares_sums(x)
        # Of hidden layers, where there is room beside those of the input.
        sparing = [0] * spares_sums + [
            layer for layer, sums in enumerate(sums_first) if layer and sums
        ]
        passes = Passes(
            index=g._graph,
            dtype=dtype,
            left=left,
            right=right,
            sums_first=sums_first,
            dropout=dropout,
            key=int(torch.randint(1 << 62, ())) if dropout else 0,
            nodes=global_ids(g) if dropout else None,
            keep_every=self.keep_every,
            keeps_sums=self.keep_every == 1 and has_room_for_sums(self.widths, sparing),
        )
        bias = parameters.pop() if self.bias else None
        with torch.autocast(x.device.type, enabled=False):
            if self.keep_input_sums and _stays_the_same(x):
                passes = self._known.with_input_sums(passes, x)
            elif spares_sums:
                with torch.no_grad():
                    sums = passes.normalised_sums(0, passes.convert(x))
                passes = passes.with_input_sums(sums)
            if torch.is_grad_enabled():
                out = Layers.apply(passes, x, *parameters)
            else:
                out = passes.forward(x, parameters, None, None)
            return _finish(out, right, bias)

    def _spares_sums(self, x: torch.Tensor | HostRows) -> bool:
        """Whether sums of the input that stay until the backward pass are fewer than without.

        Else there would be sums as wide as the output in both passes, or the input's twice.
        """
        width, next_width = self.widths[:2]
        return (
            torch.is_grad_enabled()
            and isinstance(x, torch.Tensor)
            and not x.requires_grad
            and self.keep_every == 1
            and width < 2 * next_width
            and has_room_for_sums(self.widths, [0])
        )

    def _check(self, g: DGLGraph, x: torch.Tensor | HostRows, weight: torch.Tensor) -> None:
        action = "run a GCN"
        if not g.is_homogeneous:
            raise InvalidCallError(
                action,
                f"the graph has the node types {g.ntypes} and the edge types {g.etypes}",
                "pass one with one of each, e.g. dgl.to_homogeneous(g)",
            )
        if x.shape != (g.num_nodes(), self.widths[0]):
            raise InvalidCallError(
                action,
                f"the rows have shape {tuple(x.shape)}",
                f"pass shape {(g.num_nodes(), self.widths[0])}, a row for each node of the graph",
            )
        if x.device != g.device:
            raise InvalidCallError(
                action,
                f"the rows are on '{x.device}', but the graph is on '{g.device}'",
                "move them there, or pass "
                "dgl_mgpu.distributed.host_features.HostRows.of_nodes(g, rows)",
            )
        if x.dtype not in _DTYPES or (self.activation_dtype is None and x.dtype != weight.dtype):
            raise InvalidCallError(
                action,
                f"the rows have dtype {x.dtype}, but the parameters have dtype {weight.dtype}",
                "convert one of them, or make the model with activation_dtype=",
            )


def _check_options(
    widths: Sequence[int],
    norm: str,
    dropout: float,
    keep_every: int,
    activation_dtype: torch.dtype | None,
) -> None:
    action = "make a GCN"
    if len(widths) < 2 or any(not isinstance(width, int) or width < 1 for width in widths):
        raise InvalidInputError(
            action,
            f"the widths are {list(widths)}",
            "pass the width of the input and of each layer, 1 or more each",
        )
    if norm not in ("both", "right", "left", "none"):
        raise InvalidInputError(
            action, f"there is no norm={norm!r}", "use one of both, right, left, none"
        )
    if not 0.0 <= dropout < 1.0:
        raise InvalidInputError(action, f"dropout is {dropout}", "pass a probability in [0, 1)")
    if not isinstance(keep_every, int) or keep_every < 1:
        raise InvalidInputError(action, f"keep_every is {keep_every!r}", "pass a positive integer")
    if activation_dtype is not None and activation_dtype not in _DTYPES:
        raise InvalidInputError(
            action,
            f"there is no activation_dtype={activation_dtype}",
            f"use one of {', '.join(map(str, _DTYPES))}",
        )


def _finish(
    rows: torch.Tensor, right: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """The output, from the last layer's sums.

    Left to autograd, which has freed the output's gradient when it comes to that of ``rows``.
    """
    if bias is None:
        return rows if right is None else rows * right
    return rows + bias if right is None else torch.addcmul(bias, rows, right)


def _stays_the_same(x: torch.Tensor | HostRows) -> bool:
    """Whether sums of the input may be kept."""
    if isinstance(x, HostRows):
        return True
    # Of an inference tensor one cannot tell whether it was changed.
    return not x.requires_grad and not x.is_inference()


class Known:
    """What a model has found out about the graph and the input that it was called with last."""

    def __init__(self) -> None:
        self._of_graph: tuple[Any, ...] = (_nothing,)
        self._scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self._of_input: tuple[Any, ...] = (_nothing,)
        self._sums: torch.Tensor | HostRows | None = None

    def __reduce__(self) -> tuple[type[Known], tuple[()]]:
        return type(self), ()  # a copy of the model finds out by itself

    def scales(
        self, g: DGLGraph, norm: str, dtype: torch.dtype, allow_zero_in_degree: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What sources' and what destinations' rows are multiplied with, shape (num_nodes, 1)."""
        key = norm, dtype, allow_zero_in_degree
        known, *about = self._of_graph
        if known() is not g._graph or tuple(about) != key:
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
            self._of_graph, self._scales = (weakref.ref(g._graph), *key), (left, right)
            self._of_input, self._sums = (_nothing,), None
        return self._scales

    def with_input_sums(self, passes: Passes, x: torch.Tensor | HostRows) -> Passes:
        """The passes, with sums of the input; the graph is the one that scales were asked of.

        They are kept where the input is.
        """
        version = 0 if isinstance(x, HostRows) else x._version
        known, *known_version = self._of_input
        if known() is not x or known_version != [version]:
            self._of_input, self._sums = (_nothing,), None
            with torch.no_grad():
                sums = passes.normalised_sums(0, passes.convert(x))
                self._sums = sums.kept() if isinstance(sums, HostRows) else sums
            self._of_input = weakref.ref(x), version
        assert self._sums is not None
        return passes.with_input_sums(self._sums)


def _nothing() -> None:
    """A reference to what is not there."""


def _require_in_edges(g: DGLGraph) -> None:
    def check() -> None:
        if (g.in_degrees() == 0).any():
            raise InvalidCallError(
                "run a GCN",
                "some nodes have no in-edges, and nothing but the bias would be left of them",
                "add self-loops (dgl.add_self_loop), or pass allow_zero_in_degree=True",
            )

    if isinstance(g._graph, DistributedGraphIndex):
        Communicator.of_all_machines().run_all("run a GCN", check)
    else:
        check()
