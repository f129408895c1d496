"""An operation on two operands' rows for every edge, against plain torch and DGL's C++."""

from __future__ import annotations

from itertools import product

import dgl
import pytest
import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops import sddmm

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
OPERATIONS = ("add", "sub", "mul", "div", "dot", "copy_lhs", "copy_rhs")
TARGETS = ("u", "e", "v")
SOURCES, DESTINATIONS, EDGES = 23, 31, 200
ROWS = {"u": SOURCES, "e": EDGES, "v": DESTINATIONS}
#: Shapes of both operands, and whether a dot product takes them.
SHAPES = [
    ((), (), False),
    ((1,), (1,), True),
    ((4, 1), (4, 1), True),
    ((4, 8), (4, 8), True),
    ((5,), (1,), False),
    ((1,), (2, 3), False),
    ((3, 1, 2), (4, 2), True),
    ((4, 7), (1, 7), True),
    ((2, 1), (1, 3), False),
    ((6,), (), False),
    ((0,), (0,), True),
]


def edges(
    count: int = EDGES, dtype: torch.dtype = torch.int64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ones, some of them repeated."""
    torch.manual_seed(0)
    src, dst = torch.randint(SOURCES, (count,)), torch.randint(DESTINATIONS, (count,))
    half = count // 2
    src[count - half :], dst[count - half :] = src[:half], dst[:half]
    return src.to(dtype), dst.to(dtype)


def operand(target: str, shape: tuple[int, ...], dtype: torch.dtype, count: int = EDGES):
    rows = torch.randn((ROWS | {"e": count})[target], *shape)
    return torch.where(rows.abs() < 0.1, 1, rows).to(dtype)  # it may be divided by


def in_float64(src, dst, lhs, rhs, op, lhs_target, rhs_target) -> torch.Tensor:
    """An edge at a time."""
    results = []
    for edge, (u, v) in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
        row = {"u": u, "e": edge, "v": v}
        left, right = lhs[row[lhs_target]].double(), rhs[row[rhs_target]].double()
        if op == "dot":
            results.append((left * right).sum(-1, keepdim=True))
        elif op.startswith("copy"):
            results.append(left if op == "copy_lhs" else right)
        else:
            results.append(getattr(torch, op)(left, right))
    return torch.stack(results)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, torch.finfo(dtype).eps)
    return {"rtol": rounding, "atol": rounding}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPERATIONS)
def test_against_torch(op, dtype):
    for number, (lhs_target, rhs_target) in enumerate(product(TARGETS, repeat=2)):
        src, dst = edges(dtype=(torch.int32, torch.int64)[number % 2])
        for left, right, for_dot in SHAPES:
            if op == "dot" and not for_dot:
                continue
            lhs, rhs = operand(lhs_target, left, dtype), operand(rhs_target, right, dtype)
            arguments = (op, lhs_target, rhs_target)
            found = sddmm(src, dst, lhs, rhs, *arguments)
            assert found.dtype == dtype
            expected = in_float64(src, dst, lhs, rhs, *arguments)
            torch.testing.assert_close(found.double(), expected, **tolerance(dtype))


@pytest.mark.parametrize("op", ["add", "div", "dot", "copy_lhs", "copy_rhs"])
def test_against_dgl(op):
    src, dst = edges()
    torch.manual_seed(1)
    graph = dgl.heterograph(
        {("a", "to", "b"): (src, dst)}, num_nodes_dict={"a": SOURCES, "b": DESTINATIONS}
    )
    for lhs_target, rhs_target in (("u", "v"), ("v", "e"), ("e", "u")):
        lhs = operand(lhs_target, (4, 1, 5), torch.float32)
        rhs = operand(rhs_target, (3, 5), torch.float32)
        expected = dgl.ops.gsddmm(graph, op, lhs, rhs, lhs_target, rhs_target)
        found = sddmm(src, dst, lhs, rhs, op, lhs_target, rhs_target)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("op", OPERATIONS)
def test_no_edges(op):
    src, dst = edges(0)
    lhs, rhs = operand("u", (4, 2), torch.float32), operand("v", (2,), torch.float32)
    shape = {"dot": (0, 4, 1), "copy_rhs": (0, 2)}.get(op, (0, 4, 2))
    assert sddmm(src, dst, lhs, rhs, op).shape == shape


def test_what_is_not_read_may_be_absent():
    src, dst = edges()
    rows = operand("u", (3,), torch.float32)
    assert torch.equal(sddmm(src, dst, rows, None, "copy_lhs", "u", "v"), rows[src])
    assert torch.equal(sddmm(src, dst, None, rows, "copy_rhs", "v", "u"), rows[src])


def test_many_edges_and_operands_that_are_not_contiguous():
    src, dst = edges(150_001)
    lhs, rhs = torch.randn(3, SOURCES).T, torch.randn(3, DESTINATIONS).T
    assert torch.equal(sddmm(src, dst, lhs, rhs, "sub"), lhs[src] - rhs[dst])


LHS, RHS = torch.zeros(SOURCES, 4), torch.zeros(DESTINATIONS, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "pow"}, "no op='pow'"),
        ({"lhs_target": "w"}, "lhs_target is 'w'"),
        ({"src": torch.zeros(EDGES)}, "ids have dtype torch.float32"),
        ({"dst": torch.zeros(3, dtype=torch.int64)}, "200 sources"),
        ({"dst": torch.zeros(EDGES, dtype=torch.int32)}, "destinations of torch.int32"),
        ({"lhs": None}, "lhs is None"),
        ({"rhs": None}, "rhs is None"),
        ({"lhs": LHS.long()}, "dtype torch.int64"),
        ({"lhs": torch.tensor(1.0)}, r"lhs has shape \(\)"),
        ({"rhs": RHS.double()}, "lhs has dtype torch.float32 and rhs has dtype torch.float64"),
        ({"rhs": RHS[:, :3]}, r"\(4,\) and \(3,\)"),
        ({"rhs": RHS[:, :1], "op": "dot"}, r"\(4,\) and \(1,\)"),
        ({"lhs": LHS[:, 0], "rhs": RHS[:, 0], "op": "dot"}, r"\(\) and \(\)"),
        ({"lhs_target": "e"}, "lhs has 23 rows, but there are 200 edges"),
    ],
)
def test_what_does_not_fit(change, message):
    src, dst = edges()
    arguments = {"src": src, "dst": dst, "lhs": LHS, "rhs": RHS, "op": "add"} | change
    with pytest.raises(InvalidInputError, match=message):
        sddmm(**arguments)


def test_registration():
    src, dst = edges()
    for op in OPERATIONS:
        lhs, rhs = operand("u", (4, 3), torch.float32), operand("v", (3,), torch.float32)
        torch.library.opcheck(torch.ops.dgl_mgpu.sddmm.default, (src, dst, lhs, rhs, op, "u", "v"))
