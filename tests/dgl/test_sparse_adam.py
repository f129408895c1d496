"""Adam for node embeddings on the CPU, against DGL's own."""

from __future__ import annotations

import pytest
import torch

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip

from dgl_mgpu.graph.originals import originals

NODES, WIDTH, STEPS = 50, 8, 4


@pytest.fixture(params=["cpu", "gpu"])
def device(request):
    if request.param == "gpu" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return "cuda" if request.param == "gpu" else "cpu"


def trained(name, device, state_dtype, use_uva, update=None):
    """Weights after some steps on the same random nodes, some of them twice."""
    embedding = dgl.nn.NodeEmbedding(NODES, WIDTH, name, init_func=torch.nn.init.ones_)
    optimizer = dgl.optim.SparseAdam([embedding], lr=0.1, dtype=state_dtype, use_uva=use_uva)
    draw = torch.Generator().manual_seed(4)
    for _ in range(STEPS):
        nodes = torch.randint(NODES, (30,), generator=draw)
        gradient = torch.randn(30, WIDTH, generator=draw)
        if update is None:
            optimizer.update(nodes.to(device), gradient.to(device), embedding)
        else:
            update(optimizer, nodes, gradient, embedding)
    if device == "cuda":
        torch.cuda.synchronize()
    return embedding.weight.clone()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("use_uva", [False, None])
def test_as_dgl_does_it_on_the_cpu(device, state_dtype, use_uva):
    name = f"adam-{device}-{state_dtype}-{use_uva}"
    original = originals["dgl.optim.pytorch.sparse_optim:SparseAdam.update"]
    expected = trained(f"{name}-dgl", "cpu", state_dtype, use_uva, original)
    found = trained(name, device, state_dtype, use_uva)
    assert not torch.equal(found, torch.ones(NODES, WIDTH))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
