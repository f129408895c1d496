"""Random sparse matrices, and the same as dense tensors of torch: what tests here compare with."""

from __future__ import annotations

from dataclasses import dataclass

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import dgl.sparse as dglsp
import pytest
import torch

FORMATS = ["coo", "csr", "csc", "diag"]
SHAPES = [(5, 5), (4, 7), (7, 4)]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    ),
]


@dataclass
class Case:
    """A sparse matrix and the values it was made of, in the order of its non-zeros."""

    sparse: dglsp.SparseMatrix
    value: torch.Tensor

    @property
    def dense(self) -> torch.Tensor:
        return to_dense(self.sparse, self.value)


def to_dense(sparse: dglsp.SparseMatrix, value: torch.Tensor | None = None) -> torch.Tensor:
    """The matrix as a dense tensor, differentiable in `value`; duplicates are added up."""
    value = sparse.val if value is None else value
    zeros = value.new_zeros(*sparse.shape, *value.shape[1:])
    return zeros.index_put((sparse.row.long(), sparse.col.long()), value, accumulate=True)


def make(
    form: str,
    shape: tuple[int, int],
    nnz: int = 9,
    width: int | None = None,
    *,
    duplicates: bool = False,
    dtype: torch.dtype = torch.float64,
    idtype: torch.dtype = torch.int64,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """A random matrix given in one format; its values lie between 1 and 9."""
    generator = torch.Generator().manual_seed(seed)
    nnz = min(shape) if form == "diag" else nnz
    value = torch.rand(nnz, *([width] if width else []), generator=generator, dtype=torch.float64)
    value = (value * 8 + 1).to(device, dtype)
    value.requires_grad_(dtype.is_floating_point)
    if form == "diag":
        return Case(dglsp.diag(value, shape), value)
    size = shape[0] * shape[1]
    places = (
        torch.randint(size, (nnz,), generator=generator)
        if duplicates
        else torch.randperm(size, generator=generator)[:nnz]
    )
    row, col = (places // shape[1]).to(device), (places % shape[1]).to(device)
    if form == "coo":
        indices = torch.stack([row, col]).to(idtype)
        return Case(dglsp.spmatrix(indices, value, shape), value)
    major, minor, count = (row, col, shape[0]) if form == "csr" else (col, row, shape[1])
    degrees = torch.bincount(major, minlength=count)
    indptr = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)]).to(idtype)
    create = dglsp.from_csr if form == "csr" else dglsp.from_csc
    indices = minor[major.argsort(stable=True)].to(idtype)
    return Case(create(indptr, indices, value, shape), value)


def same_gradients(
    out: torch.Tensor, expected: torch.Tensor, *inputs: torch.Tensor, **tolerances: float
) -> None:
    """Both are equal, and so are their gradients for `inputs`, for a random gradient of theirs."""
    torch.testing.assert_close(out, expected, **tolerances)
    weight = torch.rand(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    for a, b in zip(
        torch.autograd.grad(out, inputs, weight, allow_unused=True),
        torch.autograd.grad(expected, inputs, weight, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, **tolerances)
