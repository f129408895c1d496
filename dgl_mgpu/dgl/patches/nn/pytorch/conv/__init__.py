"""Shared by several of DGL's convolutions: residuals without nodes, batch normalisation."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn.functional import batch_norm
from torch.overrides import TorchFunctionMode

from dgl_mgpu.graph.originals import originals


def forward_with_residual(name: str, module: Any, graph: Any, feat: Any, *others: Any) -> Any:
    """The original ``forward``, also where there is no node: on a rank, or of a type in a block."""
    original = originals[f"dgl.nn.pytorch.conv.{name}.forward"]
    residual = module.res_fc
    if residual is None or graph.num_dst_nodes():
        return original(module, graph, feat, *others)
    # DGL views residuals as rows of so many heads, a number that no rows do not determine.
    without = copy.copy(module)
    without._modules = {**module._modules, "res_fc": None}
    result = original(without, graph, feat, *others)
    # Gives its parameters a gradient of zeros, since on other ranks they have one.
    zero = 0 * residual((feat[1] if isinstance(feat, tuple) else feat)[:0]).sum()
    return (result[0] + zero, *result[1:]) if isinstance(result, tuple) else result + zero


def forward_over_all_rows(name: str, module: Any, graph: Any, *features: Any) -> Any:
    """The original ``forward``, with batch normalisation over the rows of all processes."""
    from dgl_mgpu.graph.distributed import DistributedGraphIndex

    original = originals[f"dgl.nn.pytorch.conv.{name}.forward"]
    index = graph._graph
    if not (module.batch_norm and module.training and isinstance(index, DistributedGraphIndex)):
        return original(module, graph, *features)
    with _OverAllRows(index):
        return original(module, graph, *features)


class _OverAllRows(TorchFunctionMode):
    """Batch normalisation while training, with the mean and the variance of all processes' rows."""

    def __init__(self, index: Any) -> None:
        super().__init__()
        self._index = index

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._normalised if func is batch_norm else func)(*args, **(kwargs or {}))

    def _normalised(
        self, rows: torch.Tensor, running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None, weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None, training: bool = False, momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:  # fmt: skip
        """As ``torch.nn.functional.batch_norm`` of rows of shape (n, channels)."""
        if not training:
            return batch_norm(rows, running_mean, running_var, weight, bias, False, momentum, eps)
        size = torch.tensor(len(rows), dtype=torch.float64, device=rows.device)
        count = float(self._index.all_gather(size).sum())
        if count < 2:  # torch's own words, which a rank without rows would not have
            raise ValueError(f"Expected more than 1 value per channel when training, got {count:g}")
        mean = self._index.readout(rows, "mean")
        centred = rows - mean
        variance = self._index.readout(centred.square(), "mean")
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean[0].to(running_mean.dtype), momentum)
                unbiased = variance[0] * (count / (count - 1))
                running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        result = centred * torch.rsqrt(variance + eps)
        if weight is not None:
            result = result * weight
        return result if bias is None else result + bias
