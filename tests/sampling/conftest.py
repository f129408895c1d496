"""Where samplers are tested: on tensors on the CPU, and on a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import dgl  # noqa: F401  (first: its import needs what the next line imports)
import pytest
import torch

from dgl_mgpu.graph.dispatch import tensor_backed_graphs


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other longer than these small tensors take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["tensors", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A device on which this package samples; graphs that a test makes there are of tensors."""
    if request.param == "tensors":
        with tensor_backed_graphs():
            yield torch.device("cpu")
        return
    if not torch.cuda.is_available() or importlib.util.find_spec("cupy") is None:
        pytest.skip("needs a GPU, and CuPy")
    yield torch.device("cuda", torch.cuda.current_device())
