"""The optimizer of a run, whose states ranks may share, and its states in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dgl_mgpu.store import Ranks
from dgl_mgpu.training.config import TrainerConfig


def make_optimizer(
    config: TrainerConfig, parameters: Iterable[nn.Parameter], device: torch.device | str
) -> torch.optim.Optimizer:
    """Adam as configured, of which several ranks may each hold a part; then collective."""
    options: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "fused": torch.device(device).type == "cuda",  # one kernel in place of a dozen
    }
    if not config.shard_optimizer or Ranks.of_all_machines().size == 1:
        return torch.optim.Adam(parameters, **options)
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes long to import

    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, **options)


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer, as one that holds all would have it; collective.

    Where ranks share it, that of the first rank: the others have an empty one.
    """
    if hasattr(optimizer, "consolidate_state_dict"):
        optimizer.consolidate_state_dict(to=0)
        if Ranks.of_all_machines().rank > 0:
            return {}
    return optimizer.state_dict()


def take_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Give an optimizer the whole state that another had, and let it go on in its own way.

    The other may have been fused, as on a GPU, or shared by ranks, where this one is not.
    """
    groups = [
        {**group, "fused": own["fused"]} if "fused" in own else group
        for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True)
    ]
    # A shared one takes out of the state what is not this rank's.
    optimizer.load_state_dict({"state": dict(saved["state"]), "param_groups": groups})
    own = getattr(optimizer, "optim", None)
    if own is not None:
        optimizer.state.clear()  # a second reference to this rank's part, which nobody looks at
        for parameter, state in own.state.items():
            # torch takes steps to the CPU on the way, where a fused kernel cannot count them.
            if own.param_groups[0].get("fused"):
                state["step"] = state["step"].to(parameter.device)
