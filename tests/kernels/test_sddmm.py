"""The CUDA kernels of an operation on two operands' rows for every edge, against the CPU's."""

from __future__ import annotations

import pytest
import torch

from dgl_mgpu.ops import sddmm
from dgl_mgpu.ops.sddmm import _plan, _sddmm_cuda
from tests.ops.test_sddmm import DTYPES, OPERATIONS, ROWS, edges, operand, tolerance


def check(where, count, left, right, op, targets, dtype, id_dtype=torch.int32) -> None:
    src, dst = edges(count, id_dtype)
    lhs = None if left is None else operand(targets[0], left, dtype, count)
    rhs = None if right is None else operand(targets[1], right, dtype, count)
    expected = sddmm(src, dst, lhs, rhs, op, *targets)
    there = [None if each is None else each.to(where) for each in (src, dst, lhs, rhs)]
    found = _sddmm_cuda(*there, op, *targets).cpu()
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, **tolerance(dtype))


@pytest.mark.parametrize("targets", ["uv", "eu", "ve"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_operations(where, op, targets):
    for count, shape in ((1500, (4, 1)), (1500, (8, 4)), (40, (300, 4)), (7, (1200, 4))):
        check(where, count, shape, shape, op, targets, torch.float32)


@pytest.mark.parametrize("op", ["sub", "dot"])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((4, 1, 6), (3, 6)),
        ((2, 1), (1,)),
        ((5, 2), (1, 2)),
        ((1, 4), (7, 1, 4)),
        ((1, 24), (4, 24)),
        ((3, 1, 260), (3, 2, 260)),
        ((20,), (5, 8, 20)),
    ],
)
def test_shapes_that_broadcast(where, op, left, right):
    check(where, 700, left, right, op, "uv", torch.float32)


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_rows_that_heads_share_are_read_once(where, heads):
    plan = _plan("dot", torch.float32, torch.int32, (1, 24), (heads, 24), 16, torch.device(where))
    assert plan.kernel.expression.endswith(f", {heads}>")
    check(where, 300, (1, 24), (heads, 24), "dot", "uv", torch.float32)


@pytest.mark.parametrize("width", [1, 2, 4, 7, 16, 64, 100, 257, 1024])
def test_dot_products_of_any_width(where, width):
    for heads in (1, 3):
        check(where, 300, (heads, width), (heads, width), "dot", "uv", torch.float32)


@pytest.mark.parametrize("width", [4, 24])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_dtypes(where, dtype, width):
    for op in ("mul", "dot"):
        check(where, 300, (width,), (width,), op, "uv", dtype, torch.int64)


def test_operands_whose_addresses_are_odd(where):
    src, dst = (each.to(where) for each in edges())
    lhs, rhs = (torch.randn(1 + 4 * ROWS[end], device=where)[1:].view(-1, 4) for end in "uv")
    expected = lhs[src.long()] + rhs[dst.long()]
    assert torch.equal(_sddmm_cuda(src, dst, lhs, rhs, "add", "u", "v"), expected)


def test_what_is_absent_or_empty(where):
    check(where, 100, (3,), None, "copy_lhs", "ue", torch.float32)
    check(where, 100, None, (3,), "copy_rhs", "ev", torch.float32)
    check(where, 0, (3,), (3,), "add", "uv", torch.float32)
    check(where, 100, (3, 0), (3, 0), "add", "uv", torch.float32)
    check(where, 100, (3, 0), (3, 0), "dot", "uv", torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operators_find_their_kernels(dtype):
    src, dst = edges()
    lhs, rhs = operand("u", (4, 64), dtype), operand("v", (4, 64), dtype)
    for op in OPERATIONS:
        found = sddmm(src.cuda(), dst.cuda(), lhs.cuda(), rhs.cuda(), op)
        torch.testing.assert_close(found.cpu(), sddmm(src, dst, lhs, rhs, op), **tolerance(dtype))
