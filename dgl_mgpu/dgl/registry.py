"""Everything that is changed in DGL and in ogb, on one screen.

Three kinds of entries, each with its reason and the versions it applies to:

* `Replacement`: after a module has been executed, one of its names is bound to another object.
* `Surrounding`: a module is executed inside a context manager.
* `Unavailable`: a module whose C++ library is missing imports, and raises a typed error when
  something in it is used.

An entry names its implementation as ``"module:object"`` inside `patches`, which is imported
only when the target is: the table itself imports neither torch nor DGL.
"""

from __future__ import annotations

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
    *(
        Replacement(
            f"dgl.backend.pytorch.tensor:{name}",
            f"padding:{name}",
            (DGL,),
            "adds to one place twice where graphs in a batch have no rows: wrong places on GPUs",
        )
        for name in ("pad_packed_tensor", "pack_padded_tensor")
    ),
    Replacement(
        "dgl.sparse.sparse_matrix:torch",
        "sparse_operators:torch_for_sparse_matrix",
        (DGL,),
        "SparseMatrix.sample() without ids asks torch.range for all of them, which counts one too "
        "many, warns and is to be removed",
    ),
    Replacement(
        "dgl.sparse.sparse_matrix:SparseMatrix.to",
        "sparse_operators:to",
        (DGL,),
        "SparseMatrix.cpu() of a matrix on the CPU makes another one, which is not known to be "
        "diagonal and cannot be inverted",
    ),
    Replacement(
        "dgl.cuda.gpu_cache:GPUCache",
        "gpu:GPUCache",
        (DGL,),
        "its C++, HugeCTR's cache for one version of CUDA, is not in the wheel",
    ),
    Replacement(
        "dgl.partition:NDArrayPartition",
        "gpu:NDArrayPartition",
        (DGL,),
        "its C++ is for GPUs alone: the wheel knows the sizes of parts and nothing else of them",
    ),
    Replacement(
        "dgl.dataloading.dataloader:is_tensor_adaptor_enabled",
        "gpu:is_tensor_adaptor_enabled",
        (DGL,),
        "prefetches on a stream of its own only with DGL's C++ for torch's allocator, which is not "
        "built for any torch after 2.2",
    ),
    Replacement(
        "dgl.dataloading.dataloader:_prefetch_update_feats",
        "batches:_prefetch_update_feats",
        (DGL,),
        "gpu_cache fails for features of other than one dimension, makes float32 of all, and asks "
        "whether a tensor of ids is true",
    ),
    Replacement(
        "dgl.storages.pytorch_tensor:_fetch_cuda",
        "gpu:_fetch_cuda",
        (DGL,),
        "torch.index_select takes a block of threads for each row, and longer than the gather of "
        "this package",
    ),
    *(
        Replacement(
            f"dgl.dataloading.dataloader:{name}",
            f"batches:{name}",
            (DGL,),
            "asks again and again what each part of a mini-batch is: a GPU waits for the host",
        )
        for name in (
            "recursive_apply",
            "recursive_apply_pair",
            "remove_parent_storage_columns",
            "restore_parent_storage_columns",
        )
    ),
    Replacement(
        "dgl.dataloading.dataloader:_PrefetchingIter.__next__",
        "batches:next_batch",
        (DGL,),
        "goes over every mini-batch five times to fetch and to move: a GPU waits for the host",
    ),
    Replacement(
        "dgl.dataloading.dataloader:WorkerInitWrapper.__call__",
        "dataloading:begin_worker",
        (DGL,),
        "a worker that collects the garbage of its parent is aborted where CUDA events are in it",
    ),
    Replacement(
        "dgl.dataloading.dataloader:DataLoader.__init__",
        "uva:init_loader",
        (DGL,),
        "use_uva=True pins the graph and its features in every process; ranks can share a store",
    ),
    Replacement(
        "dgl.dataloading.dataloader:DDPTensorizedDataset.__init__",
        "shares:init_shares",
        (DGL,),
        "with fewer seeds than fill the ranks' shares it raises on some ranks alone, or gives them "
        "memory that nobody wrote for seeds",
    ),
    *(
        Replacement(
            f"dgl.heterograph_index:_CAPI_DGLHetero{function}",
            f"pin_memory:{by}",
            (DGL,),
            "the wheel cannot pin graphs, and says of none that it is",
        )
        for function, by in (
            ("PinMemory_", "pin_index"),
            ("PinMemory", "pin_copy"),
            ("UnpinMemory_", "unpin_index"),
            ("IsPinned", "is_index_pinned"),
        )
    ),
    *(
        Replacement(
            f"dgl.heterograph_index:{name}",
            f"pin_memory:{by}",
            (DGL,),
            "graphs stay pinned when they are pickled, and the wheel's C++ knows of none that is",
        )
        for name, by in (
            ("_CAPI_DGLHeteroPickle", "pickle_states"),
            ("_CAPI_DGLHeteroForkingPickle", "forking_pickle_states"),
            ("HeteroGraphIndex.__setstate__", "set_index_state"),
            ("_forking_rebuild", "forking_rebuild"),
        )
    ),
    Replacement(
        "dgl.random:seed",
        "seed:seed",
        (DGL,),
        "what this package draws on GPUs in DGL's place is to be repeatable, too",
    ),
    *(
        Replacement(
            f"dgl.utils.pin_memory:{name}",
            f"pin_memory:{name}",
            (DGL,),
            "the wheel cannot pin memory; and as NDArrays, tensors would lose whose memory they "
            "are part of, and whether their elements are bool",
        )
        for name in (
            "pin_memory_inplace",
            "gather_pinned_tensor_rows",
            "scatter_pinned_tensor_rows",
        )
    ),
    *(
        Replacement(
            f"dgl._ffi.ndarray:NDArrayBase.{name}",
            f"pin_memory:{by}",
            (DGL,),
            "the wheel cannot pin arrays, and unpins those that others have pinned without a word",
        )
        for name, by in (("pin_memory_", "pin_array"), ("unpin_memory_", "unpin_array"))
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
    *(
        Replacement(
            f"dgl.utils.data:{name}",
            f"networkx_calls:{name}",
            (DGL, NUMPY_SCALARS),
            "calls int() on edge ids that are arrays of one element, which NumPy refuses",
        )
        for name in ("networkx2tensor", "networkxbipartite2tensors")
    ),
    Replacement(
        "dgl.dataloading.cluster_gcn:np",
        "numpy_calls:numpy_for_cluster_gcn",
        (DGL, NUMPY_2),
        "ClusterGCNSampler calls numpy.cumsum on a tensor, which NumPy is about to refuse",
    ),
    Replacement(
        "dgl.data.ppi:json_graph",
        "networkx_calls:json_graph_of_links",
        (DGL, NETWORKX_EDGES),
        "reads the edges of PPI's graphs from a key that networkx no longer looks for: KeyError",
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
        "dgl.backend.pytorch.tensor:zerocopy_from_numpy",
        "arrays:zerocopy_from_numpy",
        (DGL,),
        "with torch.set_default_device('cuda') it copies what DGL's C++ reads to the GPU",
    ),
    Replacement(
        "dgl._ffi.ndarray:NDArrayBase.asnumpy",
        "arrays:asnumpy",
        (DGL,),
        "an NDArray can share the memory of a tensor on a GPU, which the wheel cannot read",
    ),
    Replacement(
        "dgl._ffi.streams:_dgl_get_stream",
        "streams:_dgl_get_stream",
        (DGL,),
        "the wheel knows no GPU, so of no stream that is current on one",
    ),
    Replacement(
        "dgl.heterograph:DGLGraph.in_degrees",
        "degrees:in_degrees",
        (DGL,),
        "looks each node up: on a GPU four kernels where one does it, in every mean",
    ),
    Replacement(
        "dgl.heterograph:DGLGraph.out_degrees",
        "degrees:out_degrees",
        (DGL,),
        "asks twice of all nodes whether they exist: on a GPU the host waits, in every GraphConv, "
        "and a step cannot be captured in a CUDA graph",
    ),
    Replacement(
        "dgl.heterograph:DGLGraph.update_all",
        "message_passing:update_all",
        (DGL,),
        "makes a graph of the relation first, also where there is one, views of all features, and "
        "checks what it has made: more than half of its time",
    ),
    Replacement(
        "dgl.heterograph:DGLGraph.apply_edges",
        "message_passing:apply_edges",
        (DGL,),
        "makes views of all features, and checks what it has made: half of its time",
    ),
    *(
        Replacement(
            target,
            f"frames:{by}",
            (DGL,),
            "asks each time what is known of a graph on a GPU: a third of the host's time of a "
            "layer of a mini-batch",
        )
        for target, by in (
            ("dgl.frame:Column.clone", "clone_column"),
            ("dgl.frame:Frame.clone", "clone_frame"),
            ("dgl.heterograph:DGLGraph._set_n_repr", "set_node_features"),
            ("dgl.heterograph:DGLGraph._set_e_repr", "set_edge_features"),
        )
    ),
    Replacement(
        "dgl.ops.spmm:gspmm",
        "message_passing:gspmm",
        (DGL,),
        "makes a mean of eight operators on a GPU, and a mini-batch waits for the host meanwhile",
    ),
    Replacement(
        "dgl.ops.sddmm:gsddmm",
        "message_passing:gsddmm",
        (DGL,),
        "the sources of a partitioned graph's edges may be on other ranks",
    ),
    Replacement(
        "dgl.optim.pytorch.sparse_optim:SparseAdam.update",
        "sparse_adam:update",
        (DGL,),
        "reads what a GPU sends to the CPU before it is there: wrong embeddings, now and then",
    ),
    Replacement(
        "dgl.core:invoke_edge_udf",
        "message_passing:invoke_edge_udf",
        (DGL,),
        "the sources of a partitioned graph's edges may be on other ranks",
    ),
    Replacement(
        "dgl.core:invoke_udf_reduce",
        "message_passing:invoke_udf_reduce",
        (DGL,),
        "calls no function where there are no edges: a rank of a partitioned graph then has no "
        "results, and does not take part in the others' exchange of gradients",
    ),
    *(
        Replacement(
            f"dgl.readout:{name}",
            f"readout:{name}",
            (DGL,),
            "a rank of a partitioned graph would read out its own nodes and edges alone",
        )
        for name in (
            "readout_nodes",
            "readout_edges",
            "softmax_nodes",
            "softmax_edges",
            "broadcast_nodes",
            "broadcast_edges",
            "_topk_on",
        )
    ),
    *(
        Replacement(
            f"dgl.heterograph:DGLGraph.{name}",
            f"readout:{name}",
            (DGL,),
            "counts of a rank's own nodes and edges are not those of the partitioned graph",
        )
        for name in ("batch_size", "batch_num_nodes", "batch_num_edges")
    ),
    Replacement(
        "dgl.nn.pytorch.conv.gatedgraphconv:GatedGraphConv.forward",
        "gated_graph_conv:forward",
        (DGL,),
        "looks for edges of each type: where a rank of a partitioned graph has none, others wait",
    ),
    *(
        Replacement(
            f"dgl.nn.pytorch.conv.{name}.forward",
            f"attention_residuals:{ours}",
            (DGL,),
            "views residuals of no rows as so many heads: a rank may have no nodes",
        )
        for name, ours in (
            ("gatconv:GATConv", "gat"),
            ("gatv2conv:GATv2Conv", "gatv2"),
            ("edgegatconv:EdgeGATConv", "edge_gat"),
        )
    ),
    *(
        Replacement(
            f"dgl.nn.pytorch.conv.{name}.forward",
            f"batch_norm:{ours}",
            (DGL,),
            "normalises by a process's own rows: a rank has some of a partitioned graph's",
        )
        for name, ours in (
            ("edgeconv:EdgeConv", "edge_conv"),
            ("gatedgcnconv:GatedGCNConv", "gated_gcn"),
        )
    ),
    Replacement(
        "dgl._sparse_ops:_gspmm",
        "message_passing:_gspmm",
        (DGL,),
        "message passing on graphs on a GPU: without the detour through C functions and arrays",
    ),
    Replacement(
        "dgl._sparse_ops:_gsddmm",
        "message_passing:_gsddmm",
        (DGL,),
        "messages to edges on a GPU: the same without the detour",
    ),
    *(
        Replacement(
            f"dgl.backend.pytorch.sparse:{name}",
            f"message_passing:backend_{name}",
            (DGL,),
            "makes an autograd function of each product of a backward pass, too, where nothing is "
            "recorded",
        )
        for name in ("gspmm", "gsddmm")
    ),
    Replacement(
        "dgl.backend.pytorch.sparse:edge_softmax",
        "message_passing:edge_softmax",
        (DGL,),
        "on a GPU DGL makes it of four operators; here it is one",
    ),
    Replacement(
        "dgl.backend.pytorch.sparse:edge_softmax_hetero",
        "message_passing:edge_softmax_hetero",
        (DGL,),
        "a softmax over several relations of a partitioned graph is a matter of all ranks, too",
    ),
    Replacement(
        "dgl.transforms.to_block:to_block",
        "to_block:to_block",
        (DGL,),
        "asks arrays for their context, which tensors do not have, and takes long to make a block",
    ),
    *(
        Replacement(
            f"dgl.sampling.{module}:F",
            "samplers:backend_for_samplers",
            (DGL,),
            "some samplers refuse a graph, or walks, on a GPU, where the wheel has none",
        )
        for module in ("neighbor", "randomwalks")
    ),
    Replacement(
        "dgl.sampling.neighbor:select_topk",
        "samplers:select_topk",
        (DGL,),
        "numbers all nodes on the CPU, and then refuses them for a graph on a GPU",
    ),
    Replacement(
        "dgl.sampling.neighbor:sample_neighbors",
        "samplers:sample_neighbors",
        (DGL,),
        "asks a graph for its C++ object, which a store's graph does not have",
    ),
    Replacement(
        "dgl.sampling.neighbor:_sample_neighbors",
        "samplers:_sample_neighbors",
        (DGL,),
        "keeps nodes' numbers as int64 for its C++, which for int32 ids reads and writes int32: "
        "from the second call on NeighborSampler's blocks have edges that the graph has not",
    ),
    Replacement(
        "dgl.sampling.labor:sample_labors",
        "samplers:sample_labors",
        (DGL,),
        "excludes edges on a GPU after sampling, but keeps the weights of all: blocks go without",
    ),
    Replacement(
        "dgl.sampling.randomwalks:random_walk",
        "samplers:random_walk",
        (DGL,),
        "asks a graph for its C++ object, which a store's graph does not have",
    ),
    Replacement(
        "dgl.sampling.node2vec_randomwalk:node2vec_random_walk",
        "samplers:node2vec_random_walk",
        (DGL,),
        "refuses graphs on a GPU, and asks nodes for what NDArrays have and tensors lack",
    ),
    Replacement(
        "dgl.ndarray:array",
        "arrays:array",
        (DGL,),
        "DGL's samplers make empty arrays on the graph's device: on a GPU they are tensors",
    ),
    Replacement(
        "dgl.ndarray:create_shared_mem_array",
        "shared_memory:create_shared_mem_array",
        (DGL,),
        "its memory stays in /dev/shm if a tensor of it is alive when the process ends",
    ),
    Replacement(
        "dgl.utils.internal:alias_func",
        "transforms:alias_func",
        (DGL,),
        "DGLGraph's methods that are functions too would call those as they were before they were "
        "replaced",
    ),
    *(
        Replacement(
            f"dgl.transforms.functional:{name}",
            f"transforms:{name}",
            (DGL,),
            "refuses a graph on a GPU, or copies it to the CPU",
        )
        for name in ("line_graph", "to_simple")
    ),
    *(
        Replacement(
            f"dgl.transforms.functional:{name}",
            f"transforms:{name}",
            (DGL,),
            "a part of a graph has no edges that have numbers at both ends, but loops it has",
        )
        for name in ("remove_self_loop", "add_self_loop", "add_edges")
    ),
    Replacement(
        "dgl.transforms.functional:reverse",
        "transforms:reverse",
        (DGL,),
        "makes a DGLGraph of a part of a graph, which then does not know whose nodes are where",
    ),
    *(
        Replacement(
            f"dgl.data.{module}:F",
            "files:backend_for_files",
            (DGL,),
            "writes DGL's arrays to files, which tensors on a GPU are not",
        )
        for module in ("heterograph_serialize", "tensor_serialize")
    ),
    Replacement(
        "dgl.data.graph_serialize:save_graphs",
        "files:save_graphs",
        (DGL,),
        "says of a part of a graph that it is no graph",
    ),
    Replacement(
        "dgl.partition:partition_graph_with_halo",
        "partition:partition_graph_with_halo",
        (DGL,),
        "marks a part's edges in a tensor on the CPU, wherever the graph is",
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
        "dgl._ffi.base",
        "signals:abort_ends_the_process",
        (DGL,),
        "a process that aborts may wait for ever: libxsmm finalises itself within the signal",
    ),
    Surrounding(
        "dgl.dataloading",
        "dataloading:samplers_of_all_hops",
        (DGL,),
        "samples hop by hop, each through a graph over all nodes: most of a GPU's time is waiting",
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
