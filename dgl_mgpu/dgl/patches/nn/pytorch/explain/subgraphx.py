"""SubgraphX with NumPy from version 1.25 on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dgl_mgpu.utils.modules import module_with


def where_once(condition: NDArray[np.bool_]) -> tuple[NDArray[np.intp], ...]:
    """`numpy.where` for a condition that holds once: 0-dimensional indices, fit for ``int()``.

    Raises ValueError if it does not hold exactly once.
    """
    return tuple(index.reshape(()) for index in np.where(condition))


numpy_for_subgraphx = module_with(np, where=where_once)
