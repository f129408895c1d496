"""CUDA graphs of a model's forward and backward pass over padded mini-batches."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from dgl import DGLError
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from dgl_mgpu.capture.call import (
    Call,
    NotCapturable,
    ObservedSizes,
    Template,
    recording,
    split_tensors,
)
from dgl_mgpu.capture.cuda_graph import captured, host_waits_refused, new_pool
from dgl_mgpu.capture.guards import ModelState
from dgl_mgpu.capture.static_buffers import RowBuffer, StaticBuffers
from dgl_mgpu.errors import InvalidInputError


class ModelGraphs:
    """CUDA graphs of a model's forward and backward pass, and the static buffers they read.

    Parameters
    ----------
    model : nn.Module
    call : Call
        The first one, which is loaded.
    observed : ObservedSizes
        Of calls so far.
    """

    def __init__(self, model: nn.Module, call: Call, observed: ObservedSizes) -> None:
        self.state = ModelState(model)
        self._device, self._dst_types = call.device, call.dst_types
        capacity = observed.largest.capacity(observed.smallest, self._dst_types)
        if not capacity.hold_padded(call.sizes, self._dst_types):
            raise NotCapturable("its mini-batches differ too much in their numbers of edges")
        self._template = call.template()
        self._buffers = StaticBuffers(call.blocks, capacity, call.pair_graphs)
        self._limits = capacity.padded_limits(self._dst_types)
        #: By tensor: of which of the sizes it has as many rows, if of any.
        self._axes = observed.axes
        self._first = call.sizes
        self._tensors = [
            RowBuffer(tensor, len(tensor) if axis is None else capacity.flat[axis])
            for tensor, axis in zip(map(_with_rows, call.tensors), self._axes, strict=True)
        ]
        self._is_scalar = [not tensor.dim() for tensor in call.tensors]
        self._with_grad = torch.is_grad_enabled()
        self._needs_grad = [self._with_grad and tensor.requires_grad for tensor in call.tensors]
        #: Parameters that require gradients, by name.
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if self._with_grad and parameter.requires_grad
        }
        self._autocast = _recorded_autocast(call.device.type)
        #: What the backward pass starts from: the last forward pass's outputs and inputs.
        self._last: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        #: Whether a module that raises for nodes without in-edges would have done so.
        self._lacks_in_edges = torch.zeros((), dtype=torch.bool, device=call.device)
        self._lacks_in_edges_on_host = torch.zeros(
            (), dtype=torch.bool, pin_memory=call.device.type == "cuda"
        )
        self.num_replays = 0
        #: By output: which of the sizes its number of rows has been in all comparisons; none of
        #: them if it is constant.
        self._fitting_axes: list[list[int]] = []
        #: Which forward pass the graphs' memory is of, and what lives while its backward pass may
        #: come.
        self._generation = 0
        self._pending: Callable[[], object] = _nothing
        self._record(model)

    # -- recording ------------------------------------------------------------------------

    def _record(self, model: nn.Module) -> None:
        pool = new_pool(self._device)
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            outputs = self._forward(model)  # allocates buffers of the features that it reads
            self._buffers.forget()
            #: Gradients of the outputs that have some, for the backward pass to start from.
            grad_outputs = [*map(torch.zeros_like, self._last[0])]
            self._grad_outputs = [*map(_with_rows, grad_outputs)]
            #: How many rows of each are no zeros.
            self._grad_rows = [0] * len(self._grad_outputs)
            self._padded_shapes = [output.shape for output in outputs]
            self._check_gradients(self._backward())
            versions = self._input_versions()
            with host_waits_refused():
                self._forward(model)
                self._backward()
            if self._input_versions() != versions:
                raise NotCapturable("its forward pass changes an argument in place")
            self._replay_forward = captured(partial(self._forward, model), self._device, pool)
            self._replay_backward = (
                captured(self._backward, self._device, pool) if self._grad_outputs else list
            )

    def _check_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        names = [*self._parameters, *("an argument" for _ in gradients[len(self._parameters) :])]
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise NotCapturable(f"the gradient of {name} is sparse")

    def _input_versions(self) -> list[int]:
        """How often each buffer of features and of tensors was written."""
        buffers = [*self._tensors, *self._buffers.columns()]
        return [it.data._version for it in buffers if not it.data.is_inference()]

    def _forward(self, model: nn.Module) -> list[torch.Tensor]:
        """The model's outputs for what is in the buffers, padding included."""
        # Share the parameters' memory but no autograd history, which autograd would wait for.
        leaves = {
            name: parameter.detach().requires_grad_()
            for name, parameter in self._parameters.items()
        }
        tensors = [
            (buffer.data[0] if is_scalar else buffer.data).detach().requires_grad_(needs_grad)
            for buffer, is_scalar, needs_grad in zip(
                self._tensors, self._is_scalar, self._needs_grad, strict=True
            )
        ]
        args, kwargs = self._template.filled(
            self._buffers.blocks(), self._buffers.pair_graphs(), tensors
        )
        with recording() as flags, self._autocast(), torch.set_grad_enabled(self._with_grad):
            result = functional_call(model, leaves, args, kwargs)
        if flags:
            self._lacks_in_edges.logical_or_(torch.stack(flags).any())
            self._lacks_in_edges_on_host.copy_(self._lacks_in_edges, non_blocking=True)
        outputs, self._result = split_tensors(result)
        self._outputs_need_grad = [output.requires_grad for output in outputs]
        self._last = (
            [output for output in outputs if output.requires_grad],
            [*leaves.values(), *(tensor for tensor in tensors if tensor.requires_grad)],
        )
        return [output.detach() for output in outputs]

    def _backward(self) -> list[torch.Tensor | None]:
        """Gradients of the last forward pass's inputs, from those of its outputs."""
        outputs, inputs = self._last
        if not outputs:
            return []
        with torch.autocast(self._device.type, enabled=False):
            # What is saved for it is not freed: a script may run the backward pass twice.
            starts = [
                gradient if output.dim() else gradient[0]
                for gradient, output in zip(self._grad_outputs, outputs, strict=True)
            ]
            gradients = torch.autograd.grad(
                outputs, inputs, starts, allow_unused=True, retain_graph=True
            )
        return [*gradients]

    # -- calls ----------------------------------------------------------------------------

    def takes(self, call: Call) -> bool:
        """Whether a call fits the buffers."""
        flat = call.sizes.flat
        return (
            self._limits.hold(flat)
            and all(
                tensor.shape[0] == (buffer.data.shape[0] if axis is None else flat[axis])
                for tensor, axis, buffer in zip(
                    map(_with_rows, call.tensors), self._axes, self._tensors, strict=True
                )
            )
            # Sizes that were the same in all comparisons may differ here.
            and all(len({flat[axis] for axis in axes}) <= 1 for axes in self._fitting_axes)
            and self._buffers.takes(call.blocks, call.pair_graphs)
        )

    def has_rare_sizes(self, call: Call) -> bool:
        """Whether a call has nothing or one of something that the first call had more of.

        Models may do something else then: skip an edge type without edges, or squeeze a row.
        """
        return any(
            count < 2 and count != first
            for count, first in zip(call.sizes.flat, self._first.flat, strict=True)
        )

    def is_free(self) -> bool:
        """Whether no backward pass of an earlier call is outstanding."""
        return self._pending() is None

    def replay(self, call: Call) -> Any:
        """The model's result for a call that the graphs take.

        Raises
        ------
        DGLError
            If a module that raises for nodes without in-edges got one in an earlier call.
        """
        if self._lacks_in_edges_on_host:
            raise DGLError(
                "There are 0-in-degree nodes in the graph of an earlier mini-batch, whose output "
                "is invalid. Add self-loops with dgl.add_self_loop(g), or make the module with "
                "allow_zero_in_degree=True. (The model is captured as a CUDA graph, which notices "
                "this after the call: --capture=off raises in the call itself.)"
            )
        self.load(call)
        self.num_replays += 1
        if self._grad_outputs:
            outputs = _Replay.apply(self, call.sizes.flat, *self.differentiated(call))
        else:
            outputs = self.replay_forward(call.sizes.flat)
        return self._result.filled((), (), outputs)

    def load(self, call: Call) -> None:
        """Copy a call's graphs and tensors into the buffers."""
        # First: what fails may have overwritten some of the buffers.
        self._generation += 1
        tensors = [_with_rows(tensor.detach()) for tensor in call.tensors]
        try:
            self._buffers.load(
                call.blocks, call.pair_graphs, [*zip(self._tensors, tensors, strict=True)]
            )
        except InvalidInputError as error:
            raise NotCapturable(error.found) from error

    def differentiated(self, call: Call) -> list[torch.Tensor]:
        """What gradients of a call are of: parameters, then tensors."""
        return [*self._parameters.values(), *itertools.compress(call.tensors, self._needs_grad)]

    def replay_forward(self, flat: Sequence[int]) -> list[torch.Tensor]:
        """The outputs for what was loaded, without padding."""
        return self._cut(self._replay_forward(), flat)

    def _cut(self, outputs: Sequence[torch.Tensor], flat: Sequence[int]) -> list[torch.Tensor]:
        return [
            output.clone() if axis is None else output.narrow_copy(0, 0, flat[axis])
            for output, axis in zip(outputs, self._output_axes, strict=True)
        ]

    def replay_backward(
        self,
        generation: int,
        versions: Sequence[int],
        flat: Sequence[int],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs, from those of the outputs that have some.

        Raises
        ------
        InvalidInputError
            If another forward pass has been replayed since, or a parameter has other values.
        """
        if generation != self._generation:
            raise InvalidInputError(
                "run the backward pass of a model's call again",
                "the model is captured as a CUDA graph, and its memory holds another call by now",
                "run all backward passes of a call before the next call, or use --capture=off",
            )
        if versions != self.versions():
            raise InvalidInputError(
                "run the backward pass of a model's call",
                "a parameter was changed in place after the forward pass",
                "run the backward pass before the optimizer's step, or use --capture=off",
            )
        self._load_gradients(flat, gradients)
        return self._inputs_gradients(self._replay_backward(), flat)

    def versions(self) -> list[int]:
        """How often each parameter was changed in place."""
        return [parameter._version for parameter in self._parameters.values()]

    def _load_gradients(
        self, flat: Sequence[int], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Copy the outputs' gradients to where the backward pass reads them; padding gets zeros."""
        for number, (axis, gradient) in enumerate(zip(self._grad_axes, gradients, strict=True)):
            buffer, loaded = self._grad_outputs[number], self._grad_rows[number]
            all_rows = buffer.shape[0]
            rows = 0 if gradient is None else all_rows if axis is None else flat[axis]
            if gradient is not None:
                (buffer if rows == all_rows else buffer[:rows]).copy_(_with_rows(gradient))
            if rows < loaded:
                buffer[rows:loaded].zero_()
            self._grad_rows[number] = rows

    def _inputs_gradients(
        self, gradients: Sequence[torch.Tensor | None], flat: Sequence[int]
    ) -> list[torch.Tensor | None]:
        """Copies of gradients, whose memory the next replay overwrites."""
        of_tensors = len(gradients) - len(self._parameters)
        cut = [*gradients]
        axes = itertools.compress(self._axes, self._needs_grad)
        for number, axis in zip(range(len(cut) - of_tensors, len(cut)), axes, strict=True):
            gradient = cut[number]
            if gradient is not None and axis is not None:
                cut[number] = gradient[: flat[axis]]
        present = [gradient for gradient in cut if gradient is not None]
        copies = iter(torch._foreach_mul(present, 1) if present else ())
        return [None if it is None else next(copies) for it in cut]

    # -- for comparisons ------------------------------------------------------------------

    def match_outputs(self, call: Call, outputs: Sequence[torch.Tensor], result: Template) -> None:
        """Find out which rows of the padded outputs are those that a model gave for a call.

        Raises
        ------
        NotCapturable
            If that cannot be told from their shapes.
        """
        if result != self._result:
            raise NotCapturable("its result differs from call to call")
        capacity, flat = self._buffers.sizes.flat, call.sizes.flat
        all_axes = self._fitting_axes or [[*range(len(flat))] for _ in outputs]
        self._fitting_axes = []
        for output, shape, axes in zip(outputs, self._padded_shapes, all_axes, strict=True):
            if output.shape == shape:
                self._fitting_axes.append([])
                continue
            fitting = [
                axis
                for axis in axes
                if (flat[axis], capacity[axis]) == output.shape[:1] + shape[:1]
            ]
            if not fitting or output.shape[1:] != shape[1:]:
                raise NotCapturable("an output does not have a row for each node or edge")
            self._fitting_axes.append(fitting)
        self._output_axes = [min(axes, default=None) for axes in self._fitting_axes]
        self._grad_axes = [*itertools.compress(self._output_axes, self._outputs_need_grad)]

    def eager(
        self, model: nn.Module, flat: Sequence[int], gradients: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Outputs and gradients of what was loaded, padding included, computed without a replay."""
        outputs = self._cut(self._forward(model), flat)
        self._load_gradients(flat, gradients)
        return outputs, self._inputs_gradients(self._backward(), flat)

    def replayed(
        self, flat: Sequence[int], gradients: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Outputs and gradients of what was loaded, by a replay."""
        outputs = self.replay_forward(flat)
        self._load_gradients(flat, gradients)
        return outputs, self._inputs_gradients(self._replay_backward(), flat)


class _Token:
    """Lives as long as a backward pass may come."""


class _Replay(torch.autograd.Function):
    """A forward pass and, later, its backward pass by replays."""

    @staticmethod
    def forward(
        ctx: Any, graphs: ModelGraphs, flat: Sequence[int], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs = graphs.replay_forward(flat)
        ctx.graphs, ctx.flat, ctx.generation = graphs, flat, graphs._generation
        ctx.versions = graphs.versions()
        ctx.token = _Token()
        graphs._pending = weakref.ref(ctx.token)
        ctx.needs_grad = graphs._outputs_need_grad
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(out for out, needs in zip(outputs, ctx.needs_grad, strict=True) if not needs)
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        wanted = [*itertools.compress(gradients, ctx.needs_grad)]
        found = ctx.graphs.replay_backward(ctx.generation, ctx.versions, ctx.flat, wanted)
        ctx.token = None
        return None, None, *found


def _nothing() -> None:
    return None


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() else tensor[None]


def _recorded_autocast(kind: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """The autocast that is on now; without its cache, which would outlive the recorded work."""
    if not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext
    return partial(torch.autocast, kind, torch.get_autocast_dtype(kind), cache_enabled=False)
