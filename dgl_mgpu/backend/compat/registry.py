"""Everything that is changed in DGL and in ogb, on one screen.

Three kinds of entries, each with its reason and the versions it applies to:

* `Replacement`: after a module has been executed, one of its names is bound to another object.
* `Surrounding`: a module is executed inside a context manager.
* `Unavailable`: a module whose C++ library is missing imports, and raises a typed error when
  something in it is used.

An entry names its implementation as ``"module:object"`` inside `overrides`, which is imported
only when the target is: the table itself imports neither torch nor DGL.
"""

from __future__ import annotations

from dataclasses import dataclass

from .environment import VersionRange, installed_version

DGL = VersionRange("dgl", "2.1", "2.2")
TORCH = VersionRange("torch", "2.4", "3")
# Since when only 0-dimensional arrays convert to Python scalars in silence.
NUMPY_SCALARS = VersionRange("numpy", "1.25", "3")
NUMPY_2 = VersionRange("numpy", "2.0", "3")
OGB = VersionRange("ogb", "1.3", "2")


@dataclass(frozen=True)
class Replacement:
    """One name of one module, bound to another object once the module has been executed.

    Parameters
    ----------
    target : str
        ``"module:name"``.
    by : str
        ``"module:name"`` inside `overrides`.
    versions : tuple of VersionRange
        Applies only where all hold.
    reason : str
        What fails without it.
    """

    target: str
    by: str
    versions: tuple[VersionRange, ...]
    reason: str

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]


@dataclass(frozen=True)
class Surrounding:
    """A module that is executed inside the context manager ``by()``."""

    module: str
    by: str
    versions: tuple[VersionRange, ...]
    reason: str


@dataclass(frozen=True)
class Unavailable:
    """A part of DGL that needs a C++ library built for one exact torch version.

    Parameters
    ----------
    module : str
        The dotted name under which it is imported.
    library : str
        Path of its library inside DGL's folder, with ``{torch}`` for torch's version.
    needs : str
        A Python module without which it does not import either; empty if none.
    instead : str
        What to use in its place.
    """

    module: str
    library: str
    needs: str
    instead: str


REPLACEMENTS: tuple[Replacement, ...] = (
    Replacement(
        "dgl.backend:get_preferred_backend",
        "backend_choice:get_preferred_backend",
        (DGL,),
        "asked at every import of a DGL module, and at run time; without a choice on disk it "
        "prints and writes ~/.dgl/config.json, which ranks that start together corrupt",
    ),
    Replacement(
        "dgl.backend.pytorch.sparse:_cast_if_autocast_enabled",
        "autocast:_cast_if_autocast_enabled",
        (DGL, TORCH),
        "torch.cuda.amp.autocast_mode._cast and torch.get_autocast_gpu_dtype are deprecated",
    ),
    Replacement(
        "dgl.backend.pytorch.sparse:_disable_autocast_if_enabled",
        "autocast:_disable_autocast_if_enabled",
        (DGL, TORCH),
        "torch.cuda.amp.autocast is deprecated: a FutureWarning at every message-passing call",
    ),
    Replacement(
        "dgl.backend.pytorch.tensor:sparse_matrix",
        "sparse_matrix:sparse_matrix",
        (DGL, TORCH),
        "DGLGraph.adj_external() warns that invariant checks are disabled implicitly",
    ),
    Replacement(
        "dgl.sparse.sparse_matrix:torch",
        "sparse_operators:torch_for_sparse_matrix",
        (DGL,),
        "SparseMatrix.sample() without ids asks torch.range for all of them, which counts one too "
        "many, warns and is to be removed",
    ),
    Replacement(
        "dgl.distributed.dist_graph:gb",
        "distributed:graphbolt_types",
        (DGL,),
        "asks of every partition whether it is a graphbolt graph, also where graphbolt is absent",
    ),
    Replacement(
        "dgl.nn.pytorch.conv.grouprevres:InvertibleCheckpoint",
        "grouprevres:InvertibleCheckpoint",
        (DGL, TORCH),
        "GroupRevRes resizes typed storages, which warn that they are to be removed",
    ),
    Replacement(
        "dgl.nn.pytorch.explain.subgraphx:np",
        "numpy_calls:numpy_for_subgraphx",
        (DGL, NUMPY_SCALARS),
        "SubgraphX calls int() on an array of one element, which NumPy warns of and then refuses",
    ),
    Replacement(
        "dgl.dataloading.cluster_gcn:np",
        "numpy_calls:numpy_for_cluster_gcn",
        (DGL, NUMPY_2),
        "ClusterGCNSampler calls numpy.cumsum on a tensor, which NumPy is about to refuse",
    ),
    Replacement(
        "dgl._ffi.function:get_global_func",
        "functions:get_global_func",
        (DGL,),
        "the wheel's C functions know CPUs alone: calls with graphs or arrays on a GPU come here",
    ),
    *(
        Replacement(
            f"dgl.backend.pytorch.tensor:{name}",
            f"arrays:{name}",
            (DGL,),
            "the wheel's NDArray knows CPUs alone: a tensor on a GPU stays a tensor",
        )
        for name in (
            "zerocopy_to_dgl_ndarray",
            "zerocopy_to_dgl_ndarray_for_write",
            "zerocopy_from_dgl_ndarray",
        )
    ),
    Replacement(
        "dgl.ndarray:array",
        "arrays:array",
        (DGL,),
        "DGL's samplers make empty arrays on the graph's device: on a GPU they are tensors",
    ),
    *(
        Replacement(
            f"ogb.{module}:torch",
            "ogb_load:torch_for_ogb",
            (OGB, TORCH),
            "reads pickled NumPy arrays with torch.load, which refuses them by default, and makes "
            "tensors of pandas' arrays, which are read-only since pandas 3",
        )
        for module in (
            "nodeproppred.dataset",
            "nodeproppred.dataset_dgl",
            "nodeproppred.dataset_pyg",
            "linkproppred.dataset",
            "linkproppred.dataset_dgl",
            "linkproppred.dataset_pyg",
            "graphproppred.dataset",
            "graphproppred.dataset_dgl",
            "graphproppred.dataset_pyg",
            "lsc.mag240m",
            "lsc.wikikg90m",
            "lsc.wikikg90mv2",
            "lsc.pcqm4m",
            "lsc.pcqm4m_dgl",
            "lsc.pcqm4m_pyg",
            "lsc.pcqm4mv2",
            "lsc.pcqm4mv2_dgl",
            "lsc.pcqm4mv2_pyg",
        )
    ),
)

SURROUNDINGS: tuple[Surrounding, ...] = (
    Surrounding(
        "dgl.backend",
        "backend_choice:pytorch_by_default",
        (DGL,),
        "chooses the backend while it is executed, before its function can be replaced",
    ),
    Surrounding(
        "dgl.backend.backend",
        "backend_choice:without_syntax_warnings",
        (DGL, VersionRange("python", "3.12", "4")),
        "a docstring's invalid escape prints a SyntaxWarning wherever no bytecode is cached",
    ),
    Surrounding(
        "dgl.sparse",
        "sparse_operators:operators_without_library",
        (DGL,),
        "raises FileNotFoundError: its C++ library is built for torch 2.0 to 2.2.1, each version "
        "its own",
    ),
    Surrounding(
        "ogb",
        "ogb_load:without_version_check",
        (OGB,),
        "asks PyPI for its newest version on a thread: offline, the process cannot end before "
        "the connection times out",
    ),
)

#: The library that `dgl.sparse` loads: a path in DGL's folder, as `Unavailable.library`.
SPARSE_LIBRARY = "dgl_sparse/libdgl_sparse_pytorch_{torch}.so"

UNAVAILABLE: tuple[Unavailable, ...] = (
    Unavailable(
        "dgl.graphbolt",
        library="graphbolt/libgraphbolt_pytorch_{torch}.so",
        needs="torchdata.datapipes",
        instead="use dgl.dataloading (NeighborSampler, DataLoader) and dgl.graph, which work",
    ),
)


def applies(entry: Replacement | Surrounding) -> bool:
    """Whether all packages an entry names are installed in the versions it is for."""
    versions = ((wanted, installed_version(wanted.package)) for wanted in entry.versions)
    return all(version is not None and wanted.holds(version) for wanted, version in versions)
