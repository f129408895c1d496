"""Products of rows with a matrix for each, on GPUs."""

from __future__ import annotations

from typing import Any

from dgl.backend.pytorch.sparse import _cast_if_autocast_enabled, _disable_autocast_if_enabled
from torch.overrides import handle_torch_function, has_torch_function

from dgl_mgpu.graph.originals import originals


def gather_mm(a: Any, b: Any, *, idx_b: Any) -> Any:
    """In place of ``dgl.ops.gather_mm``, which waits for the lengths of segments."""
    if has_torch_function((a, b, idx_b)):
        return handle_torch_function(gather_mm, (a, b, idx_b), a, b, idx_b=idx_b)
    if a.device.type == "cpu":
        return originals["dgl.ops.gather_mm:gather_mm"](a, b, idx_b=idx_b)
    from dgl_mgpu.graph.message_passing.segment import ProductsByType

    arguments = _cast_if_autocast_enabled(a, b, idx_b)
    with _disable_autocast_if_enabled():
        return ProductsByType.apply(*arguments)
