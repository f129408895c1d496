"""Checks of a checkpoint's fields: contents may be invalid although checksums match.

Each field is checked by itself and against the others; the model and the optimizer check their
states when they load them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dgl_mgpu.config.schema import config_of_run
from dgl_mgpu.errors import ConfigError, DataFormatError, InvalidInputError
from dgl_mgpu.placement import Plan
from dgl_mgpu.report import EpochReport

#: The key of the number of an archive's member, in place of a part of a state in a file.
MEMBER = "member"
#: Errors of torch, and of readers of plain values, for states of another model.
STATE_ERRORS = (
    RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
)  # fmt: skip


def invalid_field(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first field of a checkpoint that does not hold what it should, and what is wrong."""
    for name, check in _CHECKS.items():
        try:
            problem = check(values[name])
        except (ConfigError, DataFormatError, InvalidInputError) as error:
            problem = f"does not do: {error.asked}: {error.found}"
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            problem = f"cannot be read ({type(error).__name__}: {error})"
        except RecursionError:
            problem = "is nested too deeply"
        if problem is not None:
            return name, problem
    epoch, numbers = values["epoch"], [report["epoch"] for report in values["reports"]]
    if numbers != list(range(1, epoch + 1)):
        return "reports", f"are of {len(numbers)} epochs, and {epoch} are done"
    if bool(values["parts"]) != bool(values["batches"]):
        return "parts", f"has {len(values['parts'])} entries for {values['batches']} batches"
    return None


def require_dtypes(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise TypeError for tensors of other dtypes than the model's, to which torch would cast."""
    for name, own in (*model.named_parameters(), *model.named_buffers()):
        saved = state.get(name)
        if isinstance(saved, torch.Tensor) and saved.dtype != own.dtype:
            raise TypeError(f"{name} is {saved.dtype}, and {own.dtype} in this model")


def _count(value: Any) -> str | None:
    is_count = type(value) is int and 0 <= value < 2**63
    return None if is_count else f"is {value!r:.100}, not a number from 0 on"


def _mapping(value: Any) -> str | None:
    return None if isinstance(value, Mapping) else f"is a {type(value).__name__}, not a dictionary"


def _list_of(check_entry: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        if not isinstance(value, list):
            return f"is a {type(value).__name__}, not a list"
        return next(
            (f"has an entry that {w}" for w in map(check_entry, value) if w is not None), None
        )

    return check


def _generator(value: Any) -> str | None:
    is_state = isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.ndim == 1
    return None if is_state else "is no tensor of bytes"


def _report(value: Any) -> str | None:
    EpochReport.from_dict(value)
    return _count(value["epoch"])


def _plan(value: Any) -> str | None:
    if value:
        Plan.from_dict(value)
    return _mapping(value)


def _model(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return _mapping(value)
    for name, part in value.items():
        is_file = isinstance(part, Mapping) and type(part.get(MEMBER)) is int
        if not isinstance(name, str) or not (isinstance(part, torch.Tensor) or is_file):
            return f"has {name!r:.100}, a {type(part).__name__}, which is no tensor"
    return None


def _optimizer(value: Any) -> str | None:
    for state in value["state"].values():
        for name, part in state.items():
            if not isinstance(part, torch.Tensor | int | float) or isinstance(part, bool):
                return f"has {name!r:.100}, a {type(part).__name__}, which is no tensor"
    for group in value["param_groups"]:
        if not all(type(number) is int for number in group["params"]):
            return "has a parameter without a number"
    return None


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "epoch": _count,
    "batches": _count,
    "config": lambda value: None if config_of_run(value) else "is empty",
    "reports": _list_of(_report),
    "parts": _list_of(_mapping),
    "captured": _list_of(_mapping),
    "random": _list_of(_generator),
    "plan": _plan,
    "model": _model,
    "best_model": _model,
    "optimizer": _optimizer,
}
