"""Features kept in narrower types in stores on GPUs, against rows that torch has rounded."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import dgl_mgpu
from dgl_mgpu.train.launch.launch import launch
from tests.store.narrow_features import NARROW, assert_right, graph

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None,
    reason="no GPU, or no CuPy",
)


def _gives_rounded_rows(dtype: torch.dtype, given: torch.dtype, memory: dict[str, str]) -> None:
    g = graph(given)
    with dgl_mgpu.GlobalStore.from_dgl(
        g, feature_dtypes={"feat": dtype}, device="cuda", **memory
    ) as store:
        assert_right(store, g, dtype)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "memory", [{}, {"policy": "host"}, {"gpu_memory": "88KiB"}], ids=["gpu", "host", "both"]
)
def test_rows_of_every_memory_are_rounded_once(dtype, given, memory):
    _gives_rounded_rows(dtype, given, memory)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_rows_of_other_ranks_are_those(dtype):
    """On one GPU, which ranks share."""
    launch(_gives_rounded_rows, 2, dtype, torch.float32, {"gpu_memory": "46KiB"})
