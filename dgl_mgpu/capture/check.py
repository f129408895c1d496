"""Compares replays of a model with its eager passes over the same mini-batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from dgl_mgpu.capture.call import Call, NotCapturable, cause_of, inside, split_tensors
from dgl_mgpu.capture.graphs import ModelGraphs

#: How far results may be apart, as a share of the largest one: kernels add up in another order.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
#: As :data:`_TOLERANCE`, where matrix products of single precision round their factors.
_TF32_TOLERANCE = 1e-2
#: How far gradients of single precision may be apart as vectors, as a share of their length: an
#: activation that is rounded to the other side of a kink, as ReLU's, makes some elements jump.
_KINKS = 2e-3
#: Roundings by which gradients of outputs are changed, to see how far apart rounding may bring sums
#: of what cancels, such as gradients of attention; and how many times as far they may be.
_ROUNDINGS, _TIMES_AS_FAR = 4, 20.0

_DROPOUTS = frozenset(
    {
        torch.dropout,
        torch.dropout_,
        torch.feature_dropout,
        torch.alpha_dropout,
        torch.feature_alpha_dropout,
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
    }
)

Results = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None]]


class NoDropout(TorchFunctionMode):
    """Within, dropout keeps everything: padded mini-batches would draw other numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


def checked_result(model: nn.Module, call: Call, graphs: ModelGraphs) -> tuple[Any, str | None]:
    """The eager result of a call, and how a replay differs from it, if it does.

    Where dropout draws random numbers, two comparisons are made in place of one: of the padded
    mini-batch with the mini-batch, both without dropout; and of a replay with the eager passes over
    the padded mini-batch, which draw the same numbers.
    """
    generator = _generator(call.device)
    before = generator.get_state()
    with inside():
        result = model._wrapped_call_impl(*call.args, **call.kwargs)
    after = generator.get_state()
    try:
        tensors, template = split_tensors(result)
        graphs.match_outputs(call, tensors, template)
        if _has_other_leaves(tensors, graphs.differentiated(call)):
            return result, "gradients go to tensors that are neither its parameters nor arguments"
        gradients = _random_gradients(tensors)
        flat = call.sizes.flat
        graphs.load(call)
        if torch.equal(before, after):
            eager = _Eager(graphs, call, tensors, gradients)
            eager.compare(graphs.replayed(flat, gradients), "a replay")
            return result, None
        with NoDropout(), inside():
            tensors, _ = split_tensors(model._wrapped_call_impl(*call.args, **call.kwargs))
            if not torch.equal(after, generator.get_state()):
                return result, "it draws random numbers for other things than dropout"
            eager = _Eager(graphs, call, tensors, gradients)
            padded = graphs.eager(model, flat, gradients)
        eager.compare(padded, "a padded mini-batch")
        generator.set_state(before)
        padded = graphs.eager(model, flat, gradients)
        generator.set_state(before)
        _compare(graphs.replayed(flat, gradients), padded, "a replay")
    except NotCapturable as error:
        return result, str(error)
    except Exception as error:
        # Of the comparison, not of the call, which goes on.
        return result, f"it cannot be compared with the eager passes: {cause_of(error)}"
    finally:
        generator.set_state(after)
    return result, None


def _has_other_leaves(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    """Whether outputs have gradients for leaves other than these inputs and what they are of."""
    known = {id(it) for it in inputs}
    seen = {it.grad_fn for it in inputs if it.grad_fn is not None}
    left = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            return True
        left += [following for following, _ in node.next_functions if following is not None]
    return False


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


def _random_gradients(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of the outputs that have some, from a generator of their own."""
    wanted = [output for output in outputs if output.requires_grad]
    if not wanted:
        return []
    generator = torch.Generator(wanted[0].device).manual_seed(0)
    return [
        torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)
        for output in wanted
    ]


class _Eager:
    """The results of a call's eager passes, given its outputs and the gradients of these."""

    def __init__(
        self,
        graphs: ModelGraphs,
        call: Call,
        outputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        self._outputs, self._kind = outputs, call.device.type
        self._differentiated = graphs.differentiated(call)
        self._starts = gradients
        self._gradients = self._gradients_from(gradients)

    def _gradients_from(self, starts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        if not starts:
            return []
        outputs = [output for output in self._outputs if output.requires_grad]
        with torch.autocast(self._kind, enabled=False):
            return torch.autograd.grad(
                outputs, self._differentiated, starts, allow_unused=True, retain_graph=True
            )

    @functools.cached_property
    def _rounded_gradients(self) -> Sequence[torch.Tensor | None]:
        """As the gradients, from those of the outputs that have been changed by few roundings."""
        generator = torch.Generator(self._starts[0].device).manual_seed(1)
        return self._gradients_from(
            [
                start + start * noise.mul_(_ROUNDINGS * torch.finfo(start.dtype).eps)
                for start in self._starts
                for noise in [torch.empty_like(start).normal_(generator=generator)]
            ]
        )

    def compare(self, found: Results, what: str) -> None:
        """Raise NotCapturable if other passes over the mini-batch gave other results."""
        _compare(found, (self._outputs, self._gradients), what, self._is_rounding)

    def _is_rounding(self, number: int, found: torch.Tensor) -> bool:
        """Whether a gradient is no further from the eager one than rounding explains."""
        eager, rounded = self._gradients[number], self._rounded_gradients[number]
        if eager is None or rounded is None or found.shape != eager.shape:
            return False
        limit = _TIMES_AS_FAR * torch.linalg.vector_norm((rounded - eager).double())
        difference = torch.linalg.vector_norm((found - eager).double())
        return bool(limit.isfinite() and difference <= limit)


def _compare(
    found: Results,
    expected: Results,
    what: str,
    is_rounding: Callable[[int, torch.Tensor], bool] = lambda number, found: False,
) -> None:
    if not all(map(_is_close, found[0], expected[0])):
        raise NotCapturable(f"{what} gave other outputs than the eager passes")
    for number, (one, other) in enumerate(zip(found[1], expected[1], strict=True)):
        if one is None and other is None:
            continue
        is_same = one is not None and other is not None and _is_close_as_vector(one, other)
        if not is_same and (one is None or not is_rounding(number, one)):
            raise NotCapturable(f"{what} gave other gradients than the eager passes")


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    if not one.numel():
        return True
    tolerance = _tolerance(one)
    one, other = one.detach().double(), other.detach().double()
    largest = other.abs().nan_to_num(0, posinf=0).max()
    return torch.allclose(
        one, other, rtol=0, atol=float(tolerance * largest) + 1e-12, equal_nan=True
    )


def _is_close_as_vector(one: torch.Tensor, other: torch.Tensor) -> bool:
    if _is_close(one, other):
        return True
    if one.shape != other.shape or one.dtype != other.dtype or not one.is_floating_point():
        return False
    tolerance = _tolerance(one)
    share = max(2 * tolerance, min(20 * tolerance, _KINKS))
    difference = torch.linalg.vector_norm((one - other).double())
    limit = share * torch.linalg.vector_norm(other.double())
    return bool(limit.isfinite() and difference <= limit)


def _tolerance(tensor: torch.Tensor) -> float:
    tolerance = _TOLERANCE[tensor.dtype]
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind):
        return max(tolerance, _TOLERANCE[torch.get_autocast_dtype(kind)])
    if tensor.dtype == torch.float32 and tensor.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        return _TF32_TOLERANCE
    return tolerance
