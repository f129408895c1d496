"""What DGL's C++ library of sparse matrices does, for the torch versions that it is not built for.

`dgl.sparse` is Python of DGL's own on top of a C++ class `SparseMatrix` and of functions that it
finds in ``torch.ops.dgl_sparse``.  This module has the same names with the same arguments, and
stands there in the library's place (`dgl_mgpu.dgl`): every function of `dgl.sparse` and
``DGLGraph.adj`` then work on every device of torch, and their documentation is DGL's.

A matrix is a `SparsityPattern`, where its non-zeros are, and a tensor of values, so that autograd
sees values as ordinary tensors.  Matrices that differ in values alone share the pattern, and with
it every format that was made of it.
"""

from dgl_mgpu.graph.sparse.compaction import compact
from dgl_mgpu.graph.sparse.creation import from_coo, from_csc, from_csr, from_diag, val_like
from dgl_mgpu.graph.sparse.elementwise import spsp_add, spsp_div, spsp_mul
from dgl_mgpu.graph.sparse.matmul import spmm
from dgl_mgpu.graph.sparse.matrix import SparseMatrix
from dgl_mgpu.graph.sparse.reduction import reduce, smax, smean, smin, sprod, sum
from dgl_mgpu.graph.sparse.sddmm import sddmm
from dgl_mgpu.graph.sparse.softmax import softmax
from dgl_mgpu.graph.sparse.spspmm import spspmm

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
