"""DGL's C++ library of sparse matrices, for the torch versions that it is not built for.

`dgl.sparse` is Python on top of a C++ class `SparseMatrix` and of functions in
``torch.ops.dgl_sparse``.  This package has the same names with the same arguments and takes the
library's place (`dgl_mgpu.dgl`), on every device of torch.  DGL documents the functions; wrong
arguments raise `InvalidInputError`, indices out of range `IdOutOfRangeError`.

A matrix is a `SparsityPattern` and a tensor of values, so that autograd sees values as ordinary
tensors.  Matrices that differ in values alone share the pattern, and every format made of it.
"""

from dgl_mgpu.graph.sparse.matrix import (
    SparseMatrix,
    compact,
    from_coo,
    from_csc,
    from_csr,
    from_diag,
    val_like,
)
from dgl_mgpu.graph.sparse.products import sddmm, spmm, spspmm
from dgl_mgpu.graph.sparse.reduction import (
    reduce,
    smax,
    smean,
    smin,
    softmax,
    sprod,
    spsp_add,
    spsp_div,
    spsp_mul,
    sum,
)

__all__ = [
    "SparseMatrix",
    "compact",
    "from_coo",
    "from_csc",
    "from_csr",
    "from_diag",
    "reduce",
    "sddmm",
    "smax",
    "smean",
    "smin",
    "softmax",
    "spmm",
    "sprod",
    "spsp_add",
    "spsp_div",
    "spsp_mul",
    "spspmm",
    "sum",
    "val_like",
]
