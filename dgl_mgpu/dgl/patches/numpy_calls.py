"""NumPy as modules of DGL call it that rely on what NumPy 2 has removed or deprecated."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dgl_mgpu.dgl.patches.modules import module_with


def where_once(condition: NDArray[np.bool_]) -> tuple[NDArray[np.intp], ...]:
    """`numpy.where` for a condition that holds once: 0-dimensional indices, fit for ``int()``.

    Raises
    ------
    ValueError
        If it does not hold exactly once.
    """
    return tuple(index.reshape(()) for index in np.where(condition))


def cumsum_of_tensor(a: ArrayLike, axis: Any = None, dtype: Any = None, out: Any = None) -> NDArray:
    """`numpy.cumsum` of a tensor, which is made an array first."""
    return np.cumsum(np.asarray(a), axis, dtype, out)


numpy_for_subgraphx = module_with(np, where=where_once)
numpy_for_cluster_gcn = module_with(np, cumsum=cumsum_of_tensor)
