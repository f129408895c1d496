"""Attention written with sparse matrices in one pass, against the same on DGL's dense tensors.

On CPUs products and softmax are computed at once, and on GPUs when somebody reads their values:
here on CPUs too.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import dgl
import dgl.sparse as dglsp
import pytest
import torch
from torch import Tensor, nn

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.sparse import attention
from tests.graph.sparse.matrices import DEVICES

ROWS, COLUMNS, WIDTH, HEADS = 12, 9, 5, 3
Run = Callable[..., Tensor]


@pytest.fixture
def passes() -> Iterator[mock.Mock]:
    """Attention in one pass, which counts its calls; values are left to be computed."""
    with (
        tensor_backed_graphs(),
        mock.patch.object(attention, "attention", wraps=attention.attention) as counted,
    ):
        yield counted


def indices(device: str = "cpu") -> Tensor:
    """Some places twice; the last row and the last column are empty."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(ROWS - 1, (40,), generator=generator)
    col = torch.randint(COLUMNS - 1, (40,), generator=generator)
    assert len(torch.stack([row, col]).unique(dim=1).T) < 40
    return torch.stack([row, col]).to(device)


def matrix(device: str = "cpu", value: Tensor | None = None) -> dglsp.SparseMatrix:
    return dglsp.spmatrix(indices(device), value, shape=(ROWS, COLUMNS))


def operands(heads: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(1)
    sizes = (ROWS, COLUMNS, COLUMNS)
    made = (torch.randn(size, WIDTH, *heads, dtype=torch.float64) for size in sizes)
    return [it.to(device, dtype).requires_grad_() for it in made]


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0) -> Tensor:
    """Attention by a dense softmax, where a place has as many entries as it has non-zeros."""
    counts = torch.zeros(ROWS, COLUMNS, dtype=q.dtype, device=q.device)
    row, col = indices(q.device.type)
    counts.index_put_((row, col), torch.ones_like(row, dtype=q.dtype), accumulate=True)
    single = q.dim() == 2
    q, k, v = (it.unsqueeze(2) if single else it for it in (q, k, v))
    scores = scale * torch.einsum("rdh,cdh->rch", q, k)
    weights = counts[:, :, None] * (scores - scores.amax(1, keepdim=True)).exp()
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-30)
    out = torch.einsum("rch,cdh->rdh", weights, v)
    return out.squeeze(2) if single else out


def same(found: Tensor, expected: Tensor, leaves: list[Tensor], **tolerances: float) -> None:
    """Both are equal, and so are their gradients."""
    torch.testing.assert_close(found, expected, **tolerances)
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(expected)
    for one, other in zip(
        torch.autograd.grad(found, leaves, gradient),
        torch.autograd.grad(expected, leaves, gradient),
        strict=True,
    ):
        torch.testing.assert_close(one, other, **tolerances)


FORMS: dict[str, tuple[Run, tuple[int, ...], float]] = {
    "heads": (
        lambda a, q, k, v: dglsp.bspmm(dglsp.bsddmm(a, q, k.transpose(1, 0)).softmax(), v),
        (HEADS,),
        1.0,
    ),
    "one head": (
        lambda a, q, k, v: dglsp.bspmm(dglsp.bsddmm(a, q, k.transpose(1, 0)).softmax(), v),
        (1,),
        1.0,
    ),
    "no heads": (lambda a, q, k, v: dglsp.spmm(dglsp.sddmm(a, q, k.T).softmax(), v), (), 1.0),
    "@": (lambda a, q, k, v: dglsp.sddmm(a, q, k.T).softmax(dim=1) @ v, (), 1.0),
    "function": (lambda a, q, k, v: dglsp.softmax(dglsp.sddmm(a, q, k.T)) @ v, (), 1.0),
    "a matrix times a number": (
        lambda a, q, k, v: dglsp.bsddmm(a * 0.5, q, k.transpose(1, 0)).softmax() @ v,
        (HEADS,),
        0.5,
    ),
    "scores times a number": (
        lambda a, q, k, v: (dglsp.bsddmm(a, q, k.transpose(1, 0)) * 0.5).softmax() @ v,
        (HEADS,),
        0.5,
    ),
    "a number times scores": (
        lambda a, q, k, v: (2 * (0.5 * dglsp.bsddmm(a, q, k.transpose(1, 0)))).softmax() @ v,
        (HEADS,),
        1.0,
    ),
    "scores divided by a number": (
        lambda a, q, k, v: (dglsp.bsddmm(a, q, k.transpose(1, 0)) / WIDTH**0.5).softmax() @ v,
        (HEADS,),
        WIDTH**-0.5,
    ),
    "a product by a function": (
        lambda a, q, k, v: dglsp.mul(dglsp.sddmm(a, q, k.T), -1).softmax() @ v,
        (),
        -1.0,
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMS)
def test_attention_takes_one_pass(name, device, passes):
    run, heads, scale = FORMS[name]
    leaves = operands(heads, torch.float64, device)
    out = run(matrix(device), *leaves)
    assert passes.call_count == 1
    assert out.is_contiguous()
    same(out, dense(*leaves, scale), leaves)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", ["csr", "csc", "diag"])
def test_other_formats(form, idtype, passes):
    leaves, run = operands((HEADS,), torch.float64), FORMS["heads"][0]
    value = torch.full((9,), 0.5, dtype=torch.float64)
    if form == "diag":
        a = dglsp.diag(value, (ROWS, COLUMNS))
    else:
        degrees = torch.tensor([3, 0, 4, 0, 2] + [0] * ((ROWS if form == "csr" else COLUMNS) - 5))
        indptr = torch.cat([torch.zeros(1, dtype=idtype), degrees.cumsum(0).to(idtype)])
        create = dglsp.from_csr if form == "csr" else dglsp.from_csc
        others = torch.tensor([0, 3, 8, 1, 2, 3, 4, 8, 0], dtype=idtype)
        a = create(indptr, others, value, (ROWS, COLUMNS))
    found = run(a, *leaves)
    assert passes.call_count == 1
    same(found, composed(run, a, leaves), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype, passes):
    leaves = operands((HEADS,), dtype)
    out = FORMS["heads"][0](matrix(), *leaves)
    assert passes.call_count == 1
    assert out.dtype == dtype
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    exact = [it.detach().double().requires_grad_() for it in leaves]
    expected = dense(*exact)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    for one, other in zip(
        torch.autograd.grad(out.sum(), leaves),
        torch.autograd.grad(expected.sum(), exact),
        strict=True,
    ):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


def test_autocast(passes):
    """Nodes' products are bfloat16, and a matrix's values are float32."""
    linear = nn.Linear(WIDTH, WIDTH * HEADS)
    q = torch.randn(ROWS, WIDTH)
    expected = None
    for context in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            rows = [linear(it).view(-1, WIDTH, HEADS) for it in (q, q[:COLUMNS], q[:COLUMNS])]
            out = FORMS["heads"][0](matrix(), *rows)
        if expected is None:
            expected = out
    assert passes.call_count == 2
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=5e-2, atol=5e-2)
    out.float().sum().backward()
    assert linear.weight.grad is not None


def composed(run: Run, a: dglsp.SparseMatrix, leaves: list[Tensor]) -> Tensor:
    """The same where values are computed at once, on the CPU."""
    with tensor_backed_graphs(on=False):
        return run(a, *leaves)


def drop_half(a: dglsp.SparseMatrix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = dglsp.bsddmm(a, q, k.transpose(1, 0)).softmax()
    kept = (torch.arange(scores.nnz) % 2)[:, None]
    return dglsp.bspmm(dglsp.val_like(scores, 2 * kept * scores.val), v)


def by_columns(a: dglsp.SparseMatrix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dglsp.bspmm(dglsp.bsddmm(a, q, k.transpose(1, 0)).softmax(dim=0), v)


def read_scores(a: dglsp.SparseMatrix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = dglsp.bsddmm(a, q, k.transpose(1, 0))
    return scores.val.square().sum() + dglsp.bspmm(scores.softmax(), v)


def sums(a: dglsp.SparseMatrix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = dglsp.bsddmm(a, q, k.transpose(1, 0))
    return scores.sum(1) + scores.softmax().sum(1) + (scores.softmax().T @ q).sum() + v.sum()


def times_a_matrix(a: dglsp.SparseMatrix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = dglsp.sddmm(a, q[..., 0], k[..., 0].T).coalesce()
    return (scores * scores.softmax()).softmax() @ v[..., 0]


def values_of_another_width(a: dglsp.SparseMatrix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = dglsp.bsddmm(a, q, k.transpose(1, 0))
    return dglsp.bspmm(scores.softmax(), v[:, :2])


def times_a_tensor(a: dglsp.SparseMatrix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = dglsp.bsddmm(a, q, k.transpose(1, 0)) * v[0, 0, 0]
    return dglsp.bspmm(scores.softmax(), v)


def outer(a: dglsp.SparseMatrix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dglsp.sddmm(a, q[:, 0, 0], k[:, 0, 0]).softmax() @ v[:, 0, 0]


@pytest.mark.parametrize(
    "run",
    [
        drop_half,
        by_columns,
        read_scores,
        sums,
        times_a_matrix,
        values_of_another_width,
        times_a_tensor,
        outer,
    ],
)
def test_values_that_are_read_are_those_that_are_computed_at_once(run, passes):
    leaves = operands((HEADS,), torch.float64)
    found = run(matrix(), *leaves)
    assert passes.call_count == 0
    same(found, composed(run, matrix(), leaves), leaves)


def read_after(a: dglsp.SparseMatrix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Reads a softmax, of which it has made the product, twice; and the scores, too."""
    scores = dglsp.bsddmm(a, q, k.transpose(1, 0))
    weights = scores.softmax()
    out = dglsp.bspmm(weights, v)
    assert weights.dtype == q.dtype and weights.shape == (ROWS, COLUMNS)
    return out + weights.val.square().sum() + scores.val.mean() + dglsp.bspmm(weights, v)


def test_values_may_be_read_after_one_pass(passes):
    leaves = operands((HEADS,), torch.float64)
    found = read_after(matrix(), *leaves)
    assert passes.call_count == 1
    same(found, composed(read_after, matrix(), leaves), leaves)


def test_operands_may_be_written_to(passes):
    """What is computed later is of what they were."""

    def run(a: dglsp.SparseMatrix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = 1 * q, 1 * k
        first = dglsp.bsddmm(a, q, k.transpose(1, 0))
        second = dglsp.bsddmm(a, q, k.transpose(1, 0)).softmax()
        q.mul_(3)
        k.zero_()
        return dglsp.bspmm(second, v) + first.val.sum()

    leaves = operands((HEADS,), torch.float64)
    found = run(matrix(), *leaves)
    assert passes.call_count == 1
    leaves_of_dense = [*leaves]
    expected = composed(read_at_once, matrix(), leaves_of_dense)
    same(found, expected, leaves)


def read_at_once(a: dglsp.SparseMatrix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = dglsp.bsddmm(a, q, k.transpose(1, 0))
    return dglsp.bspmm(scores.softmax(), v) + scores.val.sum()


@pytest.mark.parametrize(
    "value",
    [
        lambda: torch.rand(40, dtype=torch.float64),
        lambda: torch.ones(40, dtype=torch.float64).requires_grad_(),
        lambda: torch.ones(40, dtype=torch.float64).index_fill(0, torch.tensor([7]), torch.nan),
        lambda: torch.rand(40, HEADS, dtype=torch.float64),
    ],
    ids=["that differ", "with gradients", "of which one is NaN", "of heads"],
)
def test_values_of_the_matrix_are_composed(value, passes):
    leaves = operands((HEADS,), torch.float64)
    a = matrix(value=value())
    found = FORMS["heads"][0](a, *leaves)
    assert passes.call_count == 0
    same(found, composed(FORMS["heads"][0], a, leaves), leaves, equal_nan=True)


def test_a_matrix_whose_values_were_written_to(passes):
    leaves = operands((HEADS,), torch.float64)
    a, run = matrix(), FORMS["heads"][0]
    run(a, *leaves)
    a.val.mul_(2)
    same(run(a, *leaves), dense(*leaves, 2.0), leaves)
    assert passes.call_count == 2
    a.val[3] = 0.5
    same(run(a, *leaves), composed(run, a, leaves), leaves)
    assert passes.call_count == 2


@pytest.mark.parametrize("place", ["product", "softmax", "sum"])
def test_gradients_flow_where_they_are_recorded(place, passes):
    def run(a: dglsp.SparseMatrix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def at(name: str) -> Any:
            return torch.no_grad() if name == place else nullcontext()

        with at("product"):
            scores = dglsp.bsddmm(a, q, k.transpose(1, 0))
        with at("softmax"):
            weights = scores.softmax()
        with at("sum"):
            out = dglsp.bspmm(weights, v)
        return out + weights.val.sum() + scores.val.sum()

    leaves = operands((HEADS,), torch.float64)
    found, expected = run(matrix(), *leaves), composed(run, matrix(), leaves)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found.sum(), leaves, allow_unused=True),
        torch.autograd.grad(expected.sum(), leaves, allow_unused=True),
        strict=True,
    ):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_inference_mode(passes):
    leaves = operands((HEADS,), torch.float64)
    a = matrix()
    with torch.inference_mode():
        out = FORMS["heads"][0](a, *leaves)
        scores = dglsp.bsddmm(a, *leaves[:1], leaves[1].transpose(1, 0))
    assert passes.call_count == 1
    torch.testing.assert_close(out, dense(*leaves).detach())
    assert not scores.val.requires_grad


def test_no_non_zeros(passes):
    q, k, v = operands((HEADS,), torch.float64)
    a = dglsp.spmatrix(torch.empty(2, 0, dtype=torch.long), shape=(ROWS, COLUMNS))
    assert not FORMS["heads"][0](a, q, k, v).any()


def test_what_does_not_fit_is_refused(passes):
    q, k, v = operands((HEADS,), torch.float64)
    weights = dglsp.bsddmm(matrix(), q, k.transpose(1, 0)).softmax()
    for wrong in (v[:-1], v[..., 0], v[..., :2], v.float()):
        with pytest.raises(InvalidInputError):
            dglsp.bspmm(weights, wrong)
    with pytest.raises(InvalidInputError):
        dglsp.bsddmm(matrix(), q, k)
    assert passes.call_count == 0


@pytest.mark.parametrize("name", ["heads", "no heads", "scores times a number"])
def test_second_derivatives(name, passes):
    run, heads, _ = FORMS[name]
    leaves = operands(heads, torch.float64)
    assert torch.autograd.gradgradcheck(lambda *leaves: run(matrix(), *leaves), leaves)
    assert passes.call_count > 0


def test_a_second_derivative_where_an_operand_has_none(passes):
    q, k, v = operands((HEADS,), torch.float64)
    run, leaves = FORMS["heads"][0], [q, v]

    def penalty(out: Tensor) -> Tensor:
        gradients = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return sum(it.square().sum() for it in gradients)

    found = penalty(run(matrix(), q, k.detach(), v))
    expected = penalty(dense(q, k.detach(), v))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves)
    )


def test_outputs_may_be_written_to(passes):
    leaves = operands((), torch.float64)
    same(FORMS["no heads"][0](matrix(), *leaves).relu_(), dense(*leaves).relu(), leaves)
    assert passes.call_count == 1


def test_matrices_of_values_that_nobody_has_read_are_pickled(passes):
    q, k, _ = (it.detach() for it in operands((HEADS,), torch.float64))
    weights = dglsp.bsddmm(matrix(), q, k.transpose(1, 0)).softmax()
    copied = pickle.loads(pickle.dumps(weights))
    assert torch.equal(copied.val, weights.val)


class SparseMHA(nn.Module):
    """Attention as DGL's graph transformer has it, examples/sparse/graph_transformer.py."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, a: dglsp.SparseMatrix, h: Tensor) -> Tensor:
        q, k, v = (it(h).reshape(len(h), 2, 3) for it in self.projections[:3])
        q *= 2**-0.5
        attn = dglsp.bsddmm(a, q, k.transpose(1, 0)).softmax()
        return self.projections[3](dglsp.bspmm(attn, v).reshape(len(h), -1))


def test_a_graph_transformer(passes):
    """Two layers with one matrix, which is the graph's or its transpose."""
    torch.manual_seed(0)
    g = dgl.rand_graph(20, 80)
    layers = nn.ModuleList([SparseMHA(), SparseMHA()]).double()
    h = torch.randn(20, 6, dtype=torch.float64, requires_grad=True)

    def run(a: dglsp.SparseMatrix, *leaves: Tensor) -> Tensor:
        return layers[1](a.T, layers[0](a, h).relu_())

    leaves = [h, *layers.parameters()]
    found = run(g.adj())
    assert passes.call_count == 2
    same(found, composed(run, g.adj(), []), leaves)


@pytest.mark.parametrize(
    "derive", [lambda s: s.softmax(), lambda s: s * 2, lambda s: (s * 2).softmax()]
)
def test_values_that_are_written_to_later_are_not_those_computed_of(derive, passes):
    q, k, _ = (it.detach() for it in operands((), torch.float64))
    expected = derive(dglsp.sddmm(matrix(), q, k.t())).val.clone()
    scores = dglsp.sddmm(matrix(), q, k.t())
    derived = derive(scores)
    scores.val.zero_()
    assert torch.equal(derived.val, expected)
    assert expected.any() and not passes.called
