"""Names of GraphBolt's later versions, on what this version has.

They say where rows are kept and when they are fetched.  Here a store decides that, or the operating
system, which keeps the pages of files that are read often.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from dgl.graphbolt.feature_store import Feature
from dgl.graphbolt.impl.gpu_cached_feature import GPUCachedFeature
from dgl.graphbolt.impl.torch_based_feature_store import TorchBasedFeature
from dgl.graphbolt.itemset import ItemSetDict
from dgl.graphbolt.minibatch_transformer import MiniBatchTransformer
from dgl.graphbolt.utils import exclude_seed_edges
from torch import Tensor
from torch.utils.data import functional_datapipe

from dgl_mgpu.errors import InvalidInputError

Features = TypeVar("Features", bound=Feature | Mapping[Any, Feature])


class DiskBasedFeature(TorchBasedFeature):
    """A feature in a file of NumPy's, of which rows are read when they are asked for.

    Parameters
    ----------
    path : str or Path
        Of a file ``.npy``, of two dimensions or more.
    metadata : dict, optional
    num_threads : int, optional
        Is not used: rows are read through the operating system's mapping of the file.
    """

    def __init__(
        self, path: Any, metadata: dict[str, Any] | None = None, num_threads: int | None = None
    ) -> None:
        # GraphBolt looks at it when the object goes, also if there is no such file.
        self._is_inplace_pinned: set[Tensor] = set()
        # A copy is made of what is written to; torch warns of arrays that cannot be.
        super().__init__(torch.from_numpy(np.load(path, mmap_mode="c")), metadata)

    def read(self, ids: Tensor | None = None) -> Tensor:
        """Rows on the device of their ids; all of them on the CPU."""
        if ids is None or ids.device.type == "cpu":
            return super().read(ids)
        from dgl_mgpu.graph.stored_tensors import stored_on

        if stored_on(ids.device, self._tensor) is not None:
            return super().read(ids)
        return super().read(ids.cpu()).to(ids.device)

    def pin_memory_(self) -> DiskBasedFeature:
        """Leave it where it is."""
        return self


def gpu_cached_feature(fallback_features: Features, max_cache_size_in_bytes: int) -> Any:
    """Features behind a cache in the current GPU's memory.

    Parameters
    ----------
    fallback_features : Feature or dict of Feature
    max_cache_size_in_bytes : int
        Of one cache, or of the caches of all features of a dict together.

    Returns
    -------
    GPUCachedFeature or dict of GPUCachedFeature

    Raises
    ------
    InvalidInputError
        If there is no room for a row.
    """
    features = fallback_features
    several = features if isinstance(features, Mapping) else {None: features}
    row_bytes = sum(_row_bytes(feature) for feature in several.values())
    count = max_cache_size_in_bytes // max(row_bytes, 1)
    if count < 1:
        raise InvalidInputError(
            "cache features on a GPU",
            f"a row of each takes {row_bytes} bytes, and the cache {max_cache_size_in_bytes}",
            "pass a larger max_cache_size_in_bytes",
        )
    cached = {key: GPUCachedFeature(feature, count) for key, feature in several.items()}
    return cached if isinstance(features, Mapping) else cached[None]


def _row_bytes(feature: Any) -> int:
    return int(feature.read(torch.tensor([0])).nbytes)


def cpu_cached_feature(
    fallback_features: Features,
    max_cache_size_in_bytes: int,
    policy: str | None = None,
    pin_memory: bool = False,
) -> Features:
    """The features themselves: the operating system caches what is read of files."""
    return fallback_features


@functional_datapipe("exclude_seed_edges")
class SeedEdgesExcluder(MiniBatchTransformer):  # type: ignore[misc]
    """Leaves the edges between seeds out of what was sampled for them.

    Parameters
    ----------
    datapipe : DataPipe
    include_reverse_edges : bool
    reverse_etypes_mapping : dict of str to str, optional
        As of ``dgl.graphbolt.exclude_seed_edges``.
    asynchronous : bool
        Is not used.
    """

    def __init__(
        self,
        datapipe: Any,
        include_reverse_edges: bool = False,
        reverse_etypes_mapping: dict[str, str] | None = None,
        asynchronous: bool = False,
    ) -> None:
        super().__init__(datapipe, self._exclude)
        self._reversed = include_reverse_edges, reverse_etypes_mapping

    def _exclude(self, minibatch: Any) -> Any:
        return exclude_seed_edges(minibatch, *self._reversed)


#: By the names that ``dgl.graphbolt`` gets where it has not got them.
LATER_NAMES: dict[str, Any] = {
    "CPUCachedFeature": cpu_cached_feature,
    "DiskBasedFeature": DiskBasedFeature,
    "HeteroItemSet": ItemSetDict,
    "SeedEdgesExcluder": SeedEdgesExcluder,
    "cpu_cached_feature": cpu_cached_feature,
    "gpu_cached_feature": gpu_cached_feature,
}

_there = vars(sys.modules["dgl.graphbolt"])
for _name, _value in LATER_NAMES.items():
    # A module may have the name: what GraphBolt imports of all modules are these, too.
    if isinstance(_there.get(_name), ModuleType | None):
        _there[_name] = _value
