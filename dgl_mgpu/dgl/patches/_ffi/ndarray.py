"""DGL's arrays on GPUs and in pinned memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from dgl._ffi.runtime_ctypes import DGLContext

from dgl_mgpu.graph.dispatch import as_tensor
from dgl_mgpu.graph.originals import originals

if TYPE_CHECKING:
    from dgl.ndarray import NDArray


_CPU = DGLContext(1, 0)


def asnumpy(self: Any) -> np.ndarray:
    """In place of ``NDArray.asnumpy``: an array on a GPU is one that shares a tensor's memory."""
    if self.ctx.device_type == _CPU.device_type:
        return originals["dgl._ffi.ndarray:NDArrayBase.asnumpy"](self)
    from dgl_mgpu.dgl.patches.backend.pytorch.tensor import zerocopy_from_dgl_ndarray

    return zerocopy_from_dgl_ndarray(self).cpu().numpy()


def pin_memory_(self: NDArray) -> None:
    """Pin an array's memory, until it is unpinned or the array is given up."""
    from dgl_mgpu.graph.pinning import pinning

    vars(self)["_pinned"] = pinning.pin_memory_inplace(as_tensor(self))


def unpin_memory_(self: NDArray) -> None:
    """Unpin an array's memory; an error if it is pinned, but not by the array."""
    from dgl_mgpu.graph.pinning import pinning

    pinned = vars(self).pop("_pinned", None)
    tensor = as_tensor(self)
    if pinned is not None:
        pinned.unpin_memory_()
    elif tensor.is_pinned():
        raise pinning.PinningError(
            "unpin an array", "it has not pinned its memory", "leave it to what pinned it"
        )
