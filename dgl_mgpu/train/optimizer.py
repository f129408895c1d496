"""The optimizer of a run and the mean of its ranks' gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.config.schema import TrainerConfig


def make_optimizer(
    config: TrainerConfig, parameters: Iterable[nn.Parameter], device: torch.device | str
) -> torch.optim.Optimizer:
    """Adam as configured, of which several ranks may each hold a part; then collective."""
    options: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "fused": torch.device(device).type == "cuda",  # one kernel in place of a dozen
    }
    if not config.shard_optimizer or Communicator.of_all_machines().size == 1:
        return torch.optim.Adam(parameters, **options)
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes long to import

    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, **options)


def full_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer, gathered on the first rank if it is sharded; collective.

    The other ranks of a sharded optimizer get an empty one.
    """
    if not hasattr(optimizer, "consolidate_state_dict"):
        return optimizer.state_dict()
    # Not by `consolidate_state_dict`, which unpickles what it receives.
    everyone, own = Communicator.of_all_machines(), optimizer.optim.state_dict()  # type: ignore[attr-defined]
    states = [_broadcast_state(source, own, everyone) for source in range(everyone.size)]
    if everyone.rank > 0:
        return {}
    optimizer._all_state_dicts = states  # type: ignore[attr-defined]
    whole = optimizer.state_dict()
    optimizer._all_state_dicts = []  # type: ignore[attr-defined]
    return whole


def _broadcast_state(source: int, own: dict[str, Any], everyone: Communicator) -> dict[str, Any]:
    """One rank's state on all ranks, in the host's memory; collective."""
    state: dict[int, dict[str, Any]] = {}
    buffers: dict[tuple[int, str], torch.Tensor] = {}
    message: Any = None
    if everyone.rank == source:
        for number, parts in own["state"].items():
            state[number] = {k: v for k, v in parts.items() if not isinstance(v, torch.Tensor)}
            for name in parts.keys() - state[number].keys():
                buffers[number, name] = parts[name].cpu().contiguous()
        shapes = [(*key, buffer.shape, buffer.dtype) for key, buffer in buffers.items()]
        message = state, own["param_groups"], shapes
    state, groups, shapes = everyone.all_gather(message)[source]
    for number, name, shape, dtype in shapes:
        buffer = buffers.get((number, name))
        buffer = torch.empty(shape, dtype=dtype) if buffer is None else buffer
        everyone.send(source, buffer)
        state[number][name] = buffer
    return {"state": state, "param_groups": groups}


def load_full_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load the whole state of another optimizer, which may have been fused or sharded.

    Its options, such as the learning rate, stay as configured.
    """
    groups = [
        {**own, "params": group["params"]}
        for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True)
    ]
    _check_state(optimizer, groups, saved["state"])
    # A sharded optimizer removes other ranks' parts of the state.
    optimizer.load_state_dict({"state": dict(saved["state"]), "param_groups": groups})
    own = getattr(optimizer, "optim", None)
    if own is not None:
        optimizer.state.clear()  # an unused second reference to this rank's part
        for parameter, state in own.state.items():
            # torch moves steps to the CPU, where a fused kernel cannot count them.
            if own.param_groups[0].get("fused"):
                state["step"] = state["step"].to(parameter.device)


def _check_state(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: dict[int, Any]
) -> None:
    """Check that a state is that of these parameters: torch takes any, and fails later."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    if numbers != list(range(len(parameters))):
        raise ValueError(f"the optimizer's state is of parameters {numbers}")
    is_adam = isinstance(getattr(optimizer, "optim", optimizer), torch.optim.Adam)
    wanted = {"step", "exp_avg", "exp_avg_sq"} if is_adam else None
    for number, parts in state.items():
        if number not in numbers or wanted not in (None, parts.keys()):
            raise ValueError(f"the optimizer has {[*parts]} of parameter {number}")
        own = parameters[number]
        for name, value in parts.items():
            value = torch.as_tensor(value)
            if name == "step":
                if value.ndim or not (value >= 0 and value.isfinite()):
                    raise ValueError(f"the optimizer took {value} steps of parameter {number}")
            elif (value.shape, value.dtype) != (own.shape, own.dtype):
                raise ValueError(
                    f"{name} of parameter {number} has shape {tuple(value.shape)} and "
                    f"{value.dtype}, not {tuple(own.shape)} and {own.dtype}"
                )


def broadcast_from_first(tensors: Iterable[torch.Tensor]) -> None:
    """Copy the first rank's parameters or buffers to all; collective."""
    if dist.is_initialized():
        for tensor in tensors:
            dist.broadcast(tensor.detach(), 0)


def flattened_gradients(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """One after another, also of those that have none: other ranks' mini-batches may differ."""
    gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
    return torch.cat([gradient.flatten() for gradient in gradients])


def average_gradients(parameters: Sequence[torch.Tensor], flat: torch.Tensor | None = None) -> None:
    """Average gradients over ranks, zeros where no rank has any; collective.

    The same gradients give the same bits, whatever was computed before: they are exchanged in one
    message, in the order of the parameters, which are the same on all ranks.  Torch's
    DistributedDataParallel builds its buckets anew after its first step; where a number lies in a
    bucket decides in which order ranks' numbers are added up, so a run that was resumed on three
    ranks differed in last digits from one that had not stopped.

    ``flat``, overwritten, is :func:`flattened_gradients` where that is there already.
    """
    if dist.is_initialized():
        flat = flattened_gradients(parameters) if flat is None else flat
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        _set_gradients(parameters, flat)


def sum_gradients(parameters: Sequence[torch.Tensor], *metrics: torch.Tensor) -> list[torch.Tensor]:
    """Sum gradients over ranks, and return the sums of metrics, in one message.

    Collective.  Metrics have shape ().
    """
    if not dist.is_initialized():
        return list(metrics)
    flat = torch.cat([flattened_gradients(parameters), torch.stack(metrics)])
    dist.all_reduce(flat)
    _set_gradients(parameters, flat[: -len(metrics)])
    return list(flat[-len(metrics) :])


def _set_gradients(parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    parts = flat.split_with_sizes([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)
