"""The CUDA kernel of the transposed sparse-dense product, against plain torch."""

from __future__ import annotations

import pytest
import torch

from dgl_mgpu.errors import UnavailableError
from dgl_mgpu.ops import spmm_transposed
from dgl_mgpu.ops.spmm_transposed import OPS, _spmm_transposed_cuda
from tests.kernels.test_spmm import skewed
from tests.ops.test_spmm import GRAPHS, SHAPES, SOURCES, graph
from tests.ops.test_spmm_transposed import assert_product, rows_for


@pytest.fixture
def product(where, monkeypatch):
    """The operator on a device, with what it takes and gives on the CPU."""
    if where.type == "cpu":
        monkeypatch.setattr(torch.ops.dgl_mgpu.spmm_transposed, "default", _spmm_transposed_cuda)

    def call(*arguments):
        *tensors, op = arguments
        moved = [None if each is None else each.to(where) for each in tensors]
        return spmm_transposed(*moved, SOURCES, op).cpu()

    return call


@pytest.fixture
def check(product):
    """Compares the operator on a device with what is expected."""
    return lambda *arguments: assert_product(product(*arguments), *arguments)


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(check, name):
    indptr, indices, eids = graph(GRAPHS[name], torch.int32)
    check(indptr, indices, eids, *rows_for(indptr, (20,), (1,), torch.float32), "mul")
    indptr, indices, eids = graph(GRAPHS[name], permuted=False)
    check(indptr, indices, eids, *rows_for(indptr, (20,), (1,), torch.float32), "copy_lhs")


@pytest.mark.parametrize("width", [1, 3, 6, 8, 48, 300])
@pytest.mark.parametrize("op", OPS)
def test_widths(check, width, op):
    indptr, indices, eids = skewed()
    check(indptr, indices, eids, *rows_for(indptr, (width,), (width,), torch.float32), op)


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float64, 10), (torch.float16, 100), (torch.bfloat16, 24)]
)
def test_dtypes(check, dtype, width):
    indptr, indices, eids = skewed(torch.int32)
    check(indptr, indices, eids, *rows_for(indptr, (width,), (1,), dtype), "mul")
    check(indptr, indices, None, *rows_for(indptr, (width,), (1,), dtype), "copy_lhs")


@pytest.mark.parametrize(("v_shape", "e_shape"), SHAPES)
def test_shapes(check, v_shape, e_shape):
    indptr, indices, eids = graph(GRAPHS["rows without entries"])
    check(indptr, indices, eids, *rows_for(indptr, v_shape, e_shape, torch.float32), "mul")


def test_out_of_any_alignment(product, where):
    indptr, indices, eids = skewed()
    v, e = rows_for(indptr, (16,), (16,), torch.float32)
    for offset in (1, 2):
        moved = torch.zeros(v.numel() + offset, device=where)[offset:].view(v.shape).copy_(v)
        out = product(indptr, indices, eids, moved, e, "mul")
        assert_product(out, indptr, indices, eids, v, e, "mul")


def test_room_for_more_entries_than_there_are(product):
    indptr, indices, _ = skewed()
    v, e = rows_for(indptr, (16,), (1,), torch.float32)
    more = torch.cat([indices, torch.full((5000,), 1 << 40)])
    out = product(indptr, more, None, v, None, "copy_lhs")
    assert_product(out, indptr, indices, None, v, e, "copy_lhs")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_deterministic_algorithms_are_refused():
    indptr, indices, eids = (tensor.cuda() for tensor in skewed())
    v = torch.ones(len(indptr) - 1, 4, device="cuda")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(UnavailableError, match="any order"):
            spmm_transposed(indptr, indices, eids, v, None, SOURCES, "copy_lhs")
    finally:
        torch.use_deterministic_algorithms(before)
