"""ClusterGCNSampler with NumPy 2."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dgl_mgpu.utils.modules import module_with


def cumsum_of_tensor(a: ArrayLike, axis: Any = None, dtype: Any = None, out: Any = None) -> NDArray:
    """`numpy.cumsum` of a tensor, which is made an array first."""
    return np.cumsum(np.asarray(a), axis, dtype, out)


numpy_for_cluster_gcn = module_with(np, cumsum=cumsum_of_tensor)
