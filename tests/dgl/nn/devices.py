"""Where graphs made of tensors are in tests, and how close their results come to DGL's C++."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.message_passing import attention

#: Of an element and of the largest element: sums are added up in another order than in DGL's C++.
TOLERANCES = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (2e-4, 2e-5),
    torch.bfloat16: (5e-2, 2e-2),
}
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_GPU)]


def on_tensors(device: str) -> AbstractContextManager[None]:
    """Where graphs that are made on `device` are made of tensors."""
    return tensor_backed_graphs() if device == "cpu" else nullcontext()


@contextmanager
def floats(dtype: torch.dtype) -> Iterator[None]:
    """Where new tensors and modules are of a dtype, and float32 has all its bits on GPUs."""
    before = torch.get_default_dtype()
    precision = torch.get_float32_matmul_precision()
    tf32 = torch.backends.cudnn.allow_tf32
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32


class SameDraws(TorchFunctionMode):
    """Devices choose alike.

    Random tensors, and the first of equal numbers, are those of the CPU, whatever device asks for
    them; nothing is dropped.
    """

    DRAWN = (torch.rand, torch.randn, torch.randint, torch.randperm)

    def __enter__(self) -> SameDraws:
        self._keeping = mock.patch.object(attention, "dropped", lambda dropout: 0.0)
        self._keeping.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._keeping.stop()

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if function is torch.nn.functional.dropout:
            return arguments[0]
        if function is torch.nn.functional.multi_head_attention_forward:
            keywords["training"] = False  # which is to say, no dropout
        if function in self.DRAWN and "device" in keywords:
            device = keywords.pop("device")
            return function(*arguments, **keywords).to(device)
        if function is torch.topk and arguments[0].is_cuda:
            found = function(arguments[0].cpu(), *arguments[1:], **keywords)
            return type(found)(part.to(arguments[0].device) for part in found)
        return function(*arguments, **keywords)


def close(
    found: torch.Tensor,
    expected: torch.Tensor,
    what: str,
    dtype: torch.dtype,
    spread: float = 1.0,
) -> None:
    """Assert that a result is near the expected one, within `spread` times the tolerance."""
    rtol, atol = (spread * each for each in TOLERANCES[dtype])
    if expected.numel():
        atol *= max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(
        found.cpu(), expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}"
    )
