"""What DGL's ``_ffi`` is where its binary, libdgl, is not used: no C, and tensors as arrays.

Modules here have the names of DGL's, and stand in for them when DGL is imported
(`dgl_mgpu.dgl.importer`).  Functions of the C API are this package's, by the same names
(`dgl_mgpu.dgl.capi.without_library`).
"""

#: Modules of DGL that those of this folder stand in for.
STAND_INS = frozenset(f"dgl._ffi.{name}" for name in ("base", "function", "ndarray", "object"))
