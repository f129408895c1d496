"""Everything that is changed in DGL and in ogb, on one screen.

Three kinds of entries, each with its reason and the versions it applies to:

* `Replacement`: after a module has been executed, one of its names is bound to another object.
* `Surrounding`: a module is executed inside a context manager.
* `Unavailable`: a module whose C++ library is missing imports, and raises a typed error when
  something in it is used.

`patches` mirrors the tree of DGL: an override stands in the file that has its target's name. An
entry names it as ``"module:object"`` inside `patches`. It is imported only when its target is: the
table itself imports neither torch nor DGL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dgl_mgpu.dgl.environment import VersionRange, installed_version

DGL = VersionRange("dgl", "2.1", "2.2")
TORCH = VersionRange("torch", "2.4", "3")
# Since when only 0-dimensional arrays convert to Python scalars in silence.
NUMPY_SCALARS = VersionRange("numpy", "1.25", "3")
NUMPY_2 = VersionRange("numpy", "2.0", "3")
# Since when JSON's edges can be named; the default changed from "links" to "edges" in 3.6.
NETWORKX_EDGES = VersionRange("networkx", "3.4", "4")
OGB = VersionRange("ogb", "1.3", "2")


@dataclass(frozen=True)
class Replacement:
    """One name of one module, bound to another object once the module has been executed.

    Parameters
    ----------
    target : str
        ``"module:name"``, or ``"module:class.method"``.
    by : str
        ``"module:name"`` inside `patches`.
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


def _replace(
    reason: str, *changes: str, versions: tuple[VersionRange, ...] = (DGL,)
) -> Iterator[Replacement]:
    """The replacements that have one reason.

    A change is a target, whose implementation has its last name and stands in the file of
    `patches` that mirrors its module; or ``"target = name"`` for another name in this file; or
    ``"target = module:name"`` for one that several modules share.
    """
    for change in changes:
        target, _, by = change.partition(" = ")
        module, _, name = target.partition(":")
        by = by or name.rpartition(".")[2]
        if ":" not in by:
            by = f"{module.removeprefix('dgl.')}:{by}"
        yield Replacement(target, by, versions, reason)


REPLACEMENTS: tuple[Replacement, ...] = (
    *_replace(
        "asked at every import of a DGL module, and at run time; without a choice on disk "
        "it prints and writes ~/.dgl/config.json, which ranks that start together corrupt",
        "dgl.backend:get_preferred_backend",
    ),
    *_replace(
        "torch.cuda.amp.autocast_mode._cast and torch.get_autocast_gpu_dtype are deprecated",
        "dgl.backend.pytorch.sparse:_cast_if_autocast_enabled",
        versions=(DGL, TORCH),
    ),
    *_replace(
        "torch.cuda.amp.autocast is deprecated: a FutureWarning at every message-passing call",
        "dgl.backend.pytorch.sparse:_disable_autocast_if_enabled",
        versions=(DGL, TORCH),
    ),
    *_replace(
        "DGLGraph.adj_external() warns that invariant checks are disabled implicitly",
        "dgl.backend.pytorch.tensor:sparse_matrix",
        versions=(DGL, TORCH),
    ),
    *_replace(
        "adds to one place twice where graphs in a batch have no rows: wrong places on GPUs",
        "dgl.backend.pytorch.tensor:pad_packed_tensor",
        "dgl.backend.pytorch.tensor:pack_padded_tensor",
    ),
    *_replace(
        "SparseMatrix.sample() without ids asks torch.range for all of them, which counts "
        "one too many, warns and is to be removed",
        "dgl.sparse.sparse_matrix:torch = torch_for_sparse_matrix",
    ),
    *_replace(
        "SparseMatrix.cpu() of a matrix on the CPU makes another one, which is not known to"
        " be diagonal and cannot be inverted",
        "dgl.sparse.sparse_matrix:SparseMatrix.to",
    ),
    *_replace(
        "its C++, HugeCTR's cache for one version of CUDA, is not in the wheel",
        "dgl.cuda.gpu_cache:GPUCache",
    ),
    *_replace(
        "its C++ is for GPUs alone: the wheel knows the sizes of parts and nothing else of them",
        "dgl.partition:NDArrayPartition",
    ),
    *_replace(
        "prefetches on a stream of its own only with DGL's C++ for torch's allocator, which"
        " is not built for any torch after 2.2",
        "dgl.dataloading.dataloader:is_tensor_adaptor_enabled",
    ),
    *_replace(
        "gpu_cache fails for features of other than one dimension, makes float32 of all, "
        "and asks whether a tensor of ids is true",
        "dgl.dataloading.dataloader:_prefetch_update_feats",
    ),
    *_replace(
        "torch.index_select takes a block of threads for each row, and longer than the "
        "gather of this package",
        "dgl.storages.pytorch_tensor:_fetch_cuda",
    ),
    *_replace(
        "asks again and again what each part of a mini-batch is: a GPU waits for the host",
        "dgl.dataloading.dataloader:recursive_apply",
        "dgl.dataloading.dataloader:recursive_apply_pair",
        "dgl.dataloading.dataloader:remove_parent_storage_columns",
        "dgl.dataloading.dataloader:restore_parent_storage_columns",
    ),
    *_replace(
        "goes over every mini-batch five times to fetch and to move: a GPU waits for the host",
        "dgl.dataloading.dataloader:_PrefetchingIter.__next__ = next_batch",
    ),
    *_replace(
        "samples hop by hop, each through a graph over all nodes, tells no graph that an epoch "
        "begins, and makes views of blocks for nothing: most of a GPU's time is waiting",
        "dgl.dataloading:DataLoader.__iter__ = iterate",
        "dgl.dataloading:NeighborSampler.sample_blocks",
        "dgl.dataloading:BlockSampler.assign_lazy_features",
    ),
    *_replace(
        "a worker that collects the garbage of its parent is aborted where CUDA events are in it",
        "dgl.dataloading.dataloader:WorkerInitWrapper.__call__ = begin_worker",
    ),
    *_replace(
        "use_uva=True pins the graph and its features in every process; ranks can share a store",
        "dgl.dataloading.dataloader:DataLoader.__init__ = init_loader",
    ),
    *_replace(
        "with fewer seeds than fill the ranks' shares it raises on some ranks alone, or "
        "gives them memory that nobody wrote for seeds",
        "dgl.dataloading.dataloader:DDPTensorizedDataset.__init__ = init_shares",
    ),
    *_replace(
        "the wheel cannot pin graphs, and says of none that it is",
        "dgl.heterograph_index:_CAPI_DGLHeteroPinMemory_ = pin_index",
        "dgl.heterograph_index:_CAPI_DGLHeteroPinMemory = pin_copy",
        "dgl.heterograph_index:_CAPI_DGLHeteroUnpinMemory_ = unpin_index",
        "dgl.heterograph_index:_CAPI_DGLHeteroIsPinned = is_index_pinned",
    ),
    *_replace(
        "graphs stay pinned when they are pickled, and the wheel's C++ knows of none that is",
        "dgl.heterograph_index:_CAPI_DGLHeteroPickle = pickle_states",
        "dgl.heterograph_index:_CAPI_DGLHeteroForkingPickle = forking_pickle_states",
        "dgl.heterograph_index:HeteroGraphIndex.__setstate__ = set_index_state",
        "dgl.heterograph_index:_forking_rebuild",
    ),
    *_replace(
        "what this package draws on GPUs in DGL's place is to be repeatable, too",
        "dgl.random:seed",
    ),
    *_replace(
        "the wheel cannot pin memory; and as NDArrays, tensors would lose whose memory they"
        " are part of, and whether their elements are bool",
        "dgl.utils.pin_memory:pin_memory_inplace",
        "dgl.utils.pin_memory:gather_pinned_tensor_rows",
        "dgl.utils.pin_memory:scatter_pinned_tensor_rows",
    ),
    *_replace(
        "the wheel cannot pin arrays, and unpins those that others have pinned without a word",
        "dgl._ffi.ndarray:NDArrayBase.pin_memory_",
        "dgl._ffi.ndarray:NDArrayBase.unpin_memory_",
    ),
    *_replace(
        "asks of every partition whether it is a graphbolt graph, also where graphbolt is absent",
        "dgl.distributed.dist_graph:gb",
    ),
    *_replace(
        "GroupRevRes resizes typed storages, which warn that they are to be removed",
        "dgl.nn.pytorch.conv.grouprevres:InvertibleCheckpoint",
        versions=(DGL, TORCH),
    ),
    *_replace(
        "SubgraphX calls int() on an array of one element, which NumPy warns of and then refuses",
        "dgl.nn.pytorch.explain.subgraphx:np = numpy_for_subgraphx",
        versions=(DGL, NUMPY_SCALARS),
    ),
    *_replace(
        "calls int() on edge ids that are arrays of one element, which NumPy refuses",
        "dgl.utils.data:networkx2tensor",
        "dgl.utils.data:networkxbipartite2tensors",
        versions=(DGL, NUMPY_SCALARS),
    ),
    *_replace(
        "ClusterGCNSampler calls numpy.cumsum on a tensor, which NumPy is about to refuse",
        "dgl.dataloading.cluster_gcn:np = numpy_for_cluster_gcn",
        versions=(DGL, NUMPY_2),
    ),
    *_replace(
        "reads the edges of PPI's graphs from a key that networkx no longer looks for: KeyError",
        "dgl.data.ppi:json_graph = json_graph_of_links",
        versions=(DGL, NETWORKX_EDGES),
    ),
    *_replace(
        "the wheel's C functions know CPUs alone: calls with graphs or arrays on a GPU come here",
        "dgl._ffi.function:get_global_func",
    ),
    *_replace(
        "the wheel's NDArray knows CPUs alone: a tensor on a GPU stays a tensor",
        "dgl.backend.pytorch.tensor:zerocopy_to_dgl_ndarray",
        "dgl.backend.pytorch.tensor:zerocopy_to_dgl_ndarray_for_write",
        "dgl.backend.pytorch.tensor:zerocopy_from_dgl_ndarray",
    ),
    *_replace(
        "with torch.set_default_device('cuda') it copies what DGL's C++ reads to the GPU",
        "dgl.backend.pytorch.tensor:zerocopy_from_numpy",
    ),
    *_replace(
        "an NDArray can share the memory of a tensor on a GPU, which the wheel cannot read",
        "dgl._ffi.ndarray:NDArrayBase.asnumpy",
    ),
    *_replace(
        "the wheel knows no GPU, so of no stream that is current on one",
        "dgl._ffi.streams:_dgl_get_stream",
    ),
    *_replace(
        "looks each node up: on a GPU four kernels where one does it, in every mean",
        "dgl.heterograph:DGLGraph.in_degrees",
    ),
    *_replace(
        "asks twice of all nodes whether they exist: on a GPU the host waits, in every "
        "GraphConv, and a step cannot be captured in a CUDA graph",
        "dgl.heterograph:DGLGraph.out_degrees",
    ),
    *_replace(
        "makes a graph of the relation first, also where there is one, views of all "
        "features, and checks what it has made: more than half of its time",
        "dgl.heterograph:DGLGraph.update_all",
    ),
    *_replace(
        "makes views of all features, and checks what it has made: half of its time",
        "dgl.heterograph:DGLGraph.apply_edges",
    ),
    *_replace(
        "asks each time what is known of a graph on a GPU: a third of the host's time of a "
        "layer of a mini-batch",
        "dgl.frame:Column.clone = clone_column",
        "dgl.frame:Frame.clone = clone_frame",
        "dgl.heterograph:DGLGraph._set_n_repr",
        "dgl.heterograph:DGLGraph._set_e_repr",
    ),
    *_replace(
        "makes a mean of eight operators on a GPU, and a mini-batch waits for the host meanwhile",
        "dgl.ops.spmm:gspmm",
    ),
    *_replace(
        "the sources of a partitioned graph's edges may be on other ranks",
        "dgl.ops.sddmm:gsddmm",
        "dgl.core:invoke_edge_udf",
    ),
    *_replace(
        "reads what a GPU sends to the CPU before it is there: wrong embeddings, now and then",
        "dgl.optim.pytorch.sparse_optim:SparseAdam.update",
    ),
    *_replace(
        "calls no function where there are no edges: a rank of a partitioned graph then has"
        " no results, and does not take part in the others' exchange of gradients",
        "dgl.core:invoke_udf_reduce",
    ),
    *_replace(
        "a rank of a partitioned graph would read out its own nodes and edges alone",
        "dgl.readout:readout_nodes",
        "dgl.readout:readout_edges",
        "dgl.readout:softmax_nodes",
        "dgl.readout:softmax_edges",
        "dgl.readout:broadcast_nodes",
        "dgl.readout:broadcast_edges",
        "dgl.readout:_topk_on",
    ),
    *_replace(
        "counts of a rank's own nodes and edges are not those of the partitioned graph",
        "dgl.heterograph:DGLGraph.batch_size",
        "dgl.heterograph:DGLGraph.batch_num_nodes",
        "dgl.heterograph:DGLGraph.batch_num_edges",
    ),
    *_replace(
        "looks for edges of each type: where a rank of a partitioned graph has none, others wait",
        "dgl.nn.pytorch.conv.gatedgraphconv:GatedGraphConv.forward",
    ),
    *_replace(
        "views residuals of no rows as so many heads: a rank may have no nodes",
        "dgl.nn.pytorch.conv.gatconv:GATConv.forward",
        "dgl.nn.pytorch.conv.gatv2conv:GATv2Conv.forward",
        "dgl.nn.pytorch.conv.edgegatconv:EdgeGATConv.forward",
    ),
    *_replace(
        "normalises by a process's own rows: a rank has some of a partitioned graph's",
        "dgl.nn.pytorch.conv.edgeconv:EdgeConv.forward",
        "dgl.nn.pytorch.conv.gatedgcnconv:GatedGCNConv.forward",
    ),
    *_replace(
        "message passing on graphs on a GPU: without the detour through C functions and arrays",
        "dgl._sparse_ops:_gspmm",
    ),
    *_replace(
        "messages to edges on a GPU: the same without the detour",
        "dgl._sparse_ops:_gsddmm",
    ),
    *_replace(
        "makes an autograd function of each product of a backward pass, too, where nothing "
        "is recorded",
        "dgl.backend.pytorch.sparse:gspmm",
        "dgl.backend.pytorch.sparse:gsddmm",
    ),
    *_replace(
        "on a GPU DGL makes it of four operators; here it is one",
        "dgl.backend.pytorch.sparse:edge_softmax",
    ),
    *_replace(
        "a softmax over several relations of a partitioned graph is a matter of all ranks, too",
        "dgl.backend.pytorch.sparse:edge_softmax_hetero",
    ),
    *_replace(
        "asks arrays for their context, which tensors do not have, and takes long to make a block",
        "dgl.transforms.to_block:to_block",
    ),
    *_replace(
        "some samplers refuse a graph, or walks, on a GPU, where the wheel has none",
        "dgl.sampling.neighbor:F = sampling:backend_for_samplers",
        "dgl.sampling.randomwalks:F = sampling:backend_for_samplers",
    ),
    *_replace(
        "numbers all nodes on the CPU, and then refuses them for a graph on a GPU",
        "dgl.sampling.neighbor:select_topk",
    ),
    *_replace(
        "asks a graph for its C++ object, which a store's graph does not have",
        "dgl.sampling.neighbor:sample_neighbors",
        "dgl.sampling.randomwalks:random_walk",
    ),
    *_replace(
        "keeps nodes' numbers as int64 for its C++, which for int32 ids reads and writes "
        "int32: from the second call on NeighborSampler's blocks have edges that the graph "
        "has not",
        "dgl.sampling.neighbor:_sample_neighbors",
    ),
    *_replace(
        "excludes edges on a GPU after sampling, but keeps the weights of all: blocks go without",
        "dgl.sampling.labor:sample_labors",
    ),
    *_replace(
        "refuses graphs on a GPU, and asks nodes for what NDArrays have and tensors lack",
        "dgl.sampling.node2vec_randomwalk:node2vec_random_walk",
    ),
    *_replace(
        "DGL's samplers make empty arrays on the graph's device: on a GPU they are tensors",
        "dgl.ndarray:array",
    ),
    *_replace(
        "its memory stays in /dev/shm if a tensor of it is alive when the process ends",
        "dgl.ndarray:create_shared_mem_array",
    ),
    *_replace(
        "DGLGraph's methods that are functions too would call those as they were before "
        "they were replaced",
        "dgl.utils.internal:alias_func",
    ),
    *_replace(
        "refuses a graph on a GPU, or copies it to the CPU",
        "dgl.transforms.functional:line_graph",
        "dgl.transforms.functional:to_simple",
    ),
    *_replace(
        "a part of a graph has no edges that have numbers at both ends, but loops it has",
        "dgl.transforms.functional:remove_self_loop",
        "dgl.transforms.functional:add_self_loop",
        "dgl.transforms.functional:add_edges",
    ),
    *_replace(
        "makes a DGLGraph of a part of a graph, which then does not know whose nodes are where",
        "dgl.transforms.functional:reverse",
    ),
    *_replace(
        "writes DGL's arrays to files, which tensors on a GPU are not",
        "dgl.data.heterograph_serialize:F = data:backend_for_files",
        "dgl.data.tensor_serialize:F = data:backend_for_files",
    ),
    *_replace(
        "says of a part of a graph that it is no graph",
        "dgl.data.graph_serialize:save_graphs",
    ),
    *_replace(
        "marks a part's edges in a tensor on the CPU, wherever the graph is",
        "dgl.partition:partition_graph_with_halo",
    ),
    *_replace(
        "reads pickled NumPy arrays with torch.load, which refuses them by default, and "
        "makes tensors of pandas' arrays, which are read-only since pandas 3",
        *(
            f"ogb.{module}:torch = ogb:torch_for_ogb"
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
        versions=(OGB, TORCH),
    ),
)

SURROUNDINGS: tuple[Surrounding, ...] = (
    Surrounding(
        "dgl.backend",
        "backend:pytorch_by_default",
        (DGL,),
        "chooses the backend while it is executed, before its function can be replaced",
    ),
    Surrounding(
        "dgl.backend.backend",
        "backend.backend:without_syntax_warnings",
        (DGL, VersionRange("python", "3.12", "4")),
        "a docstring's invalid escape prints a SyntaxWarning wherever no bytecode is cached",
    ),
    Surrounding(
        "dgl._ffi.base",
        "_ffi.base:abort_ends_the_process",
        (DGL,),
        "a process that aborts may wait for ever: libxsmm finalises itself within the signal",
    ),
    Surrounding(
        "dgl.sparse",
        "sparse:operators_without_library",
        (DGL,),
        "raises FileNotFoundError: its C++ library is built for torch 2.0 to 2.2.1, each version "
        "its own",
    ),
    Surrounding(
        "ogb",
        "ogb:without_version_check",
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
