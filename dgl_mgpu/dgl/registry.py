"""Everything that is changed in DGL, in ogb and in Hydra, on one screen.

Two kinds of entries, each with its reason and the versions it applies to:

* `Replacement`: after a module has been executed, one of its names is bound to another object.
* `Surrounding`: a module is executed inside a context manager.

`dgl.graphbolt` is DGL's own, and has its C++ library's functions from `dgl_mgpu.dgl.graphbolt`,
and from there also names of later versions.

`patches` mirrors the tree of DGL: an override stands in the file that has its target's name. It is
imported only when its target is: the table itself imports neither torch nor DGL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dgl_mgpu.dgl.environment import VersionRange, installed_version

DGL = VersionRange("dgl", "2.1", "2.5")
# GraphBolt's Python and the operators it calls differ from one minor version to the next.
GRAPHBOLT = VersionRange("dgl", "2.1", "2.2")
TORCH = VersionRange("torch", "2.4", "3")
# Since when only 0-dimensional arrays convert to Python scalars in silence.
NUMPY_SCALARS = VersionRange("numpy", "1.25", "3")
NUMPY_2 = VersionRange("numpy", "2.0", "3")
# Since when JSON's edges can be named; the default changed from "links" to "edges" in 3.6.
NETWORKX_EDGES = VersionRange("networkx", "3.4", "4")
# Since when the arrays of a table cannot be written to.
PANDAS_3 = VersionRange("pandas", "3", "4")
OGB = VersionRange("ogb", "1.3", "2")
HYDRA = VersionRange("hydra-core", "1.3", "1.4")
# Since when argparse checks the help of an option when it is added.
PYTHON_3_14 = VersionRange("python", "3.14", "4")


@dataclass(frozen=True)
class Replacement:
    """One name of one module, bound to another object once the module has been executed."""

    target: str  # "module:name", or "module:class.method"
    by: str  # "module:name" inside `patches`
    versions: tuple[VersionRange, ...]  # applies only where all hold
    reason: str  # what fails without it

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


# By versions: targets, and why they are replaced. A module is followed by names in it, the
# implementation of which has the last name and stands in the file of `patches` that mirrors the
# module; "=" gives another name in this file, or "module:name" of one that several modules share.
_TABLE: dict[tuple[VersionRange, ...], dict[str, str]] = {
    (DGL,): {
        "dgl.backend: get_preferred_backend":
            "asked at every import of a DGL module, and at run time; without a choice on disk it "
            "prints and writes ~/.dgl/config.json, which ranks that start together corrupt",
        "dgl.backend.pytorch.tensor: pad_packed_tensor pack_padded_tensor":
            "adds to one place twice where graphs in a batch have no rows: wrong places on GPUs",
        "dgl.sparse.sparse_matrix: torch=torch_for_sparse_matrix":
            "SparseMatrix.sample() without ids asks torch.range for all of them, which counts one "
            "too many, warns and is to be removed; values of one are made on the CPU and copied",
        "dgl.sparse.sparse_matrix: SparseMatrix.to":
            "SparseMatrix.cpu() of a matrix on the CPU makes another one, which is not known to "
            "be diagonal and cannot be inverted",
        """
            dgl.sparse.elementwise_op_sp: SparseMatrix.__mul__=multiply
            SparseMatrix.__rmul__=multiply SparseMatrix.__truediv__=divide
        """:
            "computes scores of attention in order to scale them, where one pass over the edges "
            "scales them and writes none",
        "dgl.cuda.gpu_cache: GPUCache":
            "its C++, HugeCTR's cache for one version of CUDA, is not in the wheel",
        "dgl.partition: NDArrayPartition":
            "its C++ is for GPUs alone: the wheel knows the sizes of parts and nothing else of "
            "them",
        "dgl.dataloading.dataloader: is_tensor_adaptor_enabled":
            "prefetches on a stream of its own only with DGL's C++ for torch's allocator, which "
            "is not built for any torch after 2.2",
        "dgl.dataloading.dataloader: _prefetch_update_feats":
            "gpu_cache fails for features of other than one dimension, makes float32 of all, and "
            "asks whether a tensor of ids is true",
        "dgl.storages.pytorch_tensor: _fetch_cuda":
            "torch.index_select takes a block of threads for each row, and longer than the gather "
            "of this package",
        """
            dgl.dataloading.dataloader: recursive_apply recursive_apply_pair
            remove_parent_storage_columns restore_parent_storage_columns
        """:
            "checks the type of each part of a mini-batch many times: a GPU waits for the host",
        "dgl.dataloading.dataloader: _PrefetchingIter.__next__=next_batch":
            "goes over every mini-batch five times to fetch and to move: a GPU waits for the host",
        """
            dgl.dataloading: DataLoader.__iter__=iterate NeighborSampler.sample_blocks
            BlockSampler.assign_lazy_features
        """:
            "samples hop by hop, each through a graph over all nodes, announces no epoch to a "
            "graph, and makes needless views of blocks: a GPU waits most of the time",
        "dgl.dataloading.dataloader: WorkerInitWrapper.__call__=begin_worker":
            "a worker that collects the garbage of its parent is aborted where CUDA events are in "
            "it",
        "dgl.dataloading.dataloader: DataLoader.__init__=init_loader":
            "use_uva=True pins the graph and its features in every process; ranks can share a "
            "store",
        "dgl.dataloading.dataloader: DDPTensorizedDataset.__init__=init_shares":
            "with fewer seeds than fill the ranks' shares it raises on some ranks alone, or gives "
            "them memory that nobody wrote for seeds",
        """
            dgl.heterograph_index: _CAPI_DGLHeteroPinMemory_=pin_index
            _CAPI_DGLHeteroPinMemory=pin_copy _CAPI_DGLHeteroUnpinMemory_=unpin_index
            _CAPI_DGLHeteroIsPinned=is_index_pinned
        """:
            "the wheel cannot pin graphs, and reports none as pinned",
        """
            dgl.heterograph_index: _CAPI_DGLHeteroPickle=pickle_states
            _CAPI_DGLHeteroForkingPickle=forking_pickle_states
            HeteroGraphIndex.__setstate__=set_index_state _forking_rebuild
        """:
            "graphs stay pinned when they are pickled, but the wheel's C++ knows of no pinned "
            "graph",
        "dgl.random: seed":
            "random numbers that this package draws on GPUs in DGL's place must be repeatable, "
            "too",
        """
            dgl.utils.pin_memory: pin_memory_inplace gather_pinned_tensor_rows
            scatter_pinned_tensor_rows
        """:
            "the wheel cannot pin memory; and as NDArrays, tensors would lose whose memory they "
            "are part of, and whether their elements are bool",
        "dgl._ffi.ndarray: NDArrayBase.pin_memory_ NDArrayBase.unpin_memory_":
            "the wheel cannot pin arrays, and silently unpins those that others have pinned",
        "dgl.distributed.dist_graph: gb":
            "checks whether a partition is a graphbolt graph, even where graphbolt is absent",
        "dgl._ffi.function: get_global_func":
            "the wheel's C functions know CPUs alone: calls with graphs or arrays on a GPU come "
            "here",
        """
            dgl.backend.pytorch.tensor: zerocopy_to_dgl_ndarray
            zerocopy_to_dgl_ndarray_for_write zerocopy_from_dgl_ndarray
        """:
            "the wheel's NDArray knows CPUs alone: a tensor on a GPU stays a tensor",
        "dgl.backend.pytorch.tensor: zerocopy_from_numpy":
            "with torch.set_default_device('cuda') it copies what DGL's C++ reads to the GPU",
        "dgl._ffi.ndarray: NDArrayBase.asnumpy":
            "an NDArray can share the memory of a tensor on a GPU, which the wheel cannot read",
        "dgl._ffi.streams: _dgl_get_stream":
            "the wheel knows no GPU, so of no stream that is current on one",
        "dgl.heterograph: DGLGraph.in_degrees":
            "looks each node up: on a GPU four kernels where one does it, in every mean",
        "dgl.heterograph: DGLGraph.out_degrees":
            "checks twice that all nodes exist: on a GPU the host waits, in every GraphConv, and "
            "a step cannot be captured in a CUDA graph",
        "dgl.heterograph: DGLGraph.to":
            "each rank of a script for one process moves a copy of the whole graph to its device; "
            "with --partition it is a part",
        """
            dgl.heterograph: DGLGraph.int=to_int32 DGLGraph.long=to_int64 DGLGraph.clone
            dgl.heterograph: DGLGraph.add_nodes DGLGraph.add_edges DGLGraph.remove_nodes
            dgl.convert: to_homogeneous
            dgl.transforms.functional: remove_edges add_reverse_edges to_bidirected
            dgl.subgraph: node_subgraph edge_subgraph
        """:
            "makes of a graph that is partitioned under --partition one that is not",
        "dgl.heterograph: DGLGraph.update_all":
            "makes a graph of the relation first, also where there is one, views of all features, "
            "and checks what it has made: more than half of its time",
        "dgl.heterograph: DGLGraph.apply_edges":
            "makes views of all features, and checks what it has made: half of its time",
        """
            dgl.frame: Column.clone=clone_column Frame.clone=clone_frame
            dgl.heterograph: DGLGraph._set_n_repr DGLGraph._set_e_repr
        """:
            "checks each time what is known of a graph on a GPU: a third of the host's time of a "
            "layer of a mini-batch",
        "dgl.ops.spmm: gspmm":
            "computes a mean with eight operators on a GPU, and a mini-batch waits for the host "
            "meanwhile",
        "dgl.ops.gather_mm: gather_mm":
            "the host waits for a GPU in every RelGraphConv, which cannot be captured in a CUDA "
            "graph, and a product is queued for each type of edges",
        """
            dgl.ops.sddmm: gsddmm
            dgl.core: invoke_edge_udf
        """:
            "the sources of a partitioned graph's edges may be on other ranks",
        "dgl.optim.pytorch.sparse_optim: SparseAdam.update":
            "reads what a GPU sends to the CPU before it is there: wrong embeddings, now and then",
        "dgl.core: invoke_udf_reduce":
            "calls no function where there are no edges: a rank of a partitioned graph then has "
            "no results, and does not take part in the others' exchange of gradients",
        """
            dgl.readout: readout_nodes readout_edges softmax_nodes softmax_edges broadcast_nodes
            broadcast_edges _topk_on
        """:
            "a rank of a partitioned graph would read out its own nodes and edges alone",
        "dgl.heterograph: DGLGraph.batch_size DGLGraph.batch_num_nodes DGLGraph.batch_num_edges":
            "counts of a rank's own nodes and edges are not those of the partitioned graph",
        """
            dgl.nn.pytorch.glob: SetTransformerEncoder.forward=encode
            SetTransformerDecoder.forward=decode
        """:
            "attends to a process's own nodes: a rank has some of a partitioned graph's",
        "dgl.nn.pytorch.conv.gatedgraphconv: GatedGraphConv.forward":
            "looks for edges of each type: where a rank of a partitioned graph has none, others "
            "wait",
        """
            dgl.nn.pytorch.conv.edgegatconv: EdgeGATConv.forward
        """:
            "writes a row of every edge and head, and views residuals of no rows as so many heads: "
            "a rank may have no nodes",
        """
            dgl.nn.pytorch.conv.gatconv: GATConv.forward
            dgl.nn.pytorch.conv.gatv2conv: GATv2Conv.forward
            dgl.nn.pytorch.conv.dotgatconv: DotGatConv.forward
            dgl.nn.pytorch.conv.agnnconv: AGNNConv.forward
            dgl.nn.pytorch.conv.egatconv: EGATConv.forward
            dgl.nn.pytorch.conv.hgtconv: HGTConv.forward
        """:
            "composes attention of operators that each write something for every edge and head, or "
            "for every edge and column; and views residuals of no rows as so many heads",
        """
            dgl.nn.pytorch.conv.sageconv: SAGEConv.forward
            dgl.nn.pytorch.conv.graphconv: GraphConv.forward
        """:
            "puts features into the graph and takes them out again, and counts edges twice: for a "
            "mini-batch that takes the host longer than the GPU takes",
        "dgl.nn.pytorch.conv.pnaconv: PNAConvTower.forward":
            "makes as many rows as it divides by nodes: a rank of a partitioned graph has fewer",
        "dgl._sparse_ops: _gspmm":
            "message passing on graphs on a GPU: without the detour through C functions and "
            "arrays",
        "dgl._sparse_ops: _gsddmm":
            "messages to edges on a GPU: the same without the detour",
        "dgl.backend.pytorch.sparse: gspmm gsddmm":
            "makes an autograd function of each product of a backward pass, too, where nothing is "
            "recorded",
        "dgl.backend.pytorch.sparse: edge_softmax":
            "DGL needs four operators for it on a GPU; here it is one",
        "dgl.backend.pytorch.sparse: edge_softmax_hetero":
            "a softmax over several relations of a partitioned graph involves all ranks",
        "dgl.transforms.to_block: to_block":
            "reads the context of arrays, which tensors do not have, and takes long to make a "
            "block",
        """
            dgl.sampling.neighbor: F=sampling:backend_for_samplers
            dgl.sampling.randomwalks: F=sampling:backend_for_samplers
        """:
            "some samplers refuse a graph, or walks, on a GPU, where the wheel has none",
        "dgl.sampling.neighbor: select_topk":
            "numbers all nodes on the CPU, and then refuses them for a graph on a GPU",
        """
            dgl.sampling.neighbor: sample_neighbors
            dgl.sampling.randomwalks: random_walk
        """:
            "needs the graph's C++ object, which a store's graph does not have",
        "dgl.sampling.neighbor: _sample_neighbors":
            "keeps nodes' numbers as int64 for its C++, which for int32 ids reads and writes "
            "int32: from the second call on NeighborSampler's blocks have edges that the graph "
            "has not",
        "dgl.sampling.labor: sample_labors":
            "excludes edges on a GPU after sampling, but keeps the weights of all: blocks go "
            "without",
        "dgl.sampling.node2vec_randomwalk: node2vec_random_walk":
            "refuses graphs on a GPU, and reads attributes of NDArrays that tensors lack",
        "dgl.ndarray: array":
            "DGL's samplers make empty arrays on the graph's device: on a GPU they are tensors",
        "dgl.ndarray: create_shared_mem_array":
            "its memory stays in /dev/shm if a tensor of it is alive when the process ends; and it "
            "removes what another process has made under the name since",
        "dgl.utils.internal: alias_func":
            "DGLGraph's methods that are functions too would call those as they were before they "
            "were replaced",
        """
            dgl.nn.pytorch.explain.gnnexplainer: GNNExplainer.explain_graph
            GNNExplainer.explain_node HeteroGNNExplainer.explain_graph=explain_hetero_graph
            HeteroGNNExplainer.explain_node=explain_node_of_type
        """:
            "learns other masks on each rank of a partitioned graph",
        "dgl.subgraph: khop_in_subgraph":
            "looks for edges to nodes: a rank has those to its own",
        "dgl.transforms.module: DropEdge.__call__=drop_edges":
            "numbers the edges that are to go: each rank has some of a partitioned graph's",
        "dgl.transforms.functional: line_graph to_simple":
            "refuses a graph on a GPU, or copies it to the CPU",
        "dgl.transforms.functional: remove_self_loop add_self_loop add_edges":
            "a part of a graph numbers no edges at both ends, but it has self-loops",
        "dgl.transforms.functional: reverse":
            "makes a DGLGraph of a part of a graph, which then does not know whose nodes are "
            "where",
        """
            dgl.data.heterograph_serialize: F=data:backend_for_files
            dgl.data.tensor_serialize: F=data:backend_for_files
        """:
            "writes DGL's arrays to files, which tensors on a GPU are not",
        "dgl.data.graph_serialize: save_graphs":
            "does not accept a part of a graph as a graph",
        "dgl.partition: partition_graph_with_halo":
            "marks a part's edges in a tensor on the CPU, wherever the graph is",
    },
    (GRAPHBOLT,): {
        """
            dgl.graphbolt.base: EndMarker.__iter__=iterate_marked
            dgl.graphbolt.dataloader: _find_and_wrap_parent=wrap_parent
        """:
            "samples layer by layer, each in two stages that wait for a GPU, and makes no "
            "mini-batch ahead",
        """
            dgl.graphbolt.dataloader: DataLoader.__init__=init_loader
            dgl.graphbolt.impl.gpu_cached_feature: GPUCachedFeature.read
        """:
            "every process pins the graph and its features; ranks can share a store",
        """
            dgl.graphbolt.impl.neighbor_sampler: NeighborSampler.__init__=init_neighbor_sampler
            LayerNeighborSampler.__init__=init_layer_neighbor_sampler
            dgl.graphbolt.feature_fetcher: FeatureFetcher.__init__=init_fetcher
        """:
            "refuses overlap_fetch and asynchronous, which newer scripts pass",
        """
            dgl.graphbolt.impl.fused_csc_sampling_graph: fused_csc_sampling_graph
            FusedCSCSamplingGraph._check_sampler_arguments=check_sampler_arguments
            dgl.graphbolt.impl.torch_based_feature_store: TorchBasedFeature.__init__=init_feature
            TorchBasedFeature.update=update_feature
        """:
            "asserts what an argument has to be: of bad input nothing says which it was",
        "dgl.graphbolt.item_sampler: ItemShufflerAndBatcher._collate_batch=collate_batch":
            "indexes items by the general indexing of torch, which takes a CPU up to four times as "
            "long as torch.index_select",
        "dgl.graphbolt.minibatch: MiniBatch.blocks":
            "makes a block by checking and copying what it is made of: longer than sampling it",
    },
    (DGL, TORCH): {
        "dgl.backend.pytorch.sparse: _cast_if_autocast_enabled":
            "torch.cuda.amp.autocast_mode._cast and torch.get_autocast_gpu_dtype are deprecated",
        "dgl.backend.pytorch.sparse: _disable_autocast_if_enabled":
            "torch.cuda.amp.autocast is deprecated: a FutureWarning at every message-passing call",
        "dgl.backend.pytorch.tensor: sparse_matrix":
            "DGLGraph.adj_external() warns that invariant checks are disabled implicitly",
        "dgl.nn.pytorch.conv.grouprevres: InvertibleCheckpoint":
            "GroupRevRes resizes typed storages, which warn that they are to be removed",
    },
    (GRAPHBOLT, TORCH): {
        "dgl.graphbolt.impl.ondisk_dataset: torch=torch_of_graphs":
            "reads graphs of GraphBolt's C++ library as torch.load does by default: by version, "
            "or by TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD, that needs the library",
    },
    (DGL, NUMPY_SCALARS): {
        "dgl.nn.pytorch.explain.subgraphx: np=numpy_for_subgraphx":
            "SubgraphX calls int() on an array of one element, which NumPy warns about or refuses",
        "dgl.utils.data: networkx2tensor networkxbipartite2tensors":
            "calls int() on edge ids that are arrays of one element, which NumPy refuses",
    },
    (DGL, NUMPY_2): {
        "dgl.dataloading.cluster_gcn: np=numpy_for_cluster_gcn":
            "ClusterGCNSampler calls numpy.cumsum on a tensor, which NumPy is about to refuse",
    },
    (GRAPHBOLT, PANDAS_3): {
        "dgl.graphbolt.internal.utils: read_edges":
            "its callers write to the arrays of a table",
    },
    (DGL, NETWORKX_EDGES): {
        "dgl.data.ppi: json_graph=json_graph_of_links":
            "reads the edges of PPI's graphs from a key that networkx no longer looks for: "
            "KeyError",
    },
    (OGB, TORCH): {
        """
            ogb.nodeproppred.dataset: torch ogb.nodeproppred.dataset_dgl: torch
            ogb.nodeproppred.dataset_pyg: torch
            ogb.linkproppred.dataset: torch ogb.linkproppred.dataset_dgl: torch
            ogb.linkproppred.dataset_pyg: torch
            ogb.graphproppred.dataset: torch ogb.graphproppred.dataset_dgl: torch
            ogb.graphproppred.dataset_pyg: torch
            ogb.lsc.mag240m: torch ogb.lsc.wikikg90m: torch ogb.lsc.wikikg90mv2: torch
            ogb.lsc.pcqm4m: torch ogb.lsc.pcqm4m_dgl: torch ogb.lsc.pcqm4m_pyg: torch
            ogb.lsc.pcqm4mv2: torch ogb.lsc.pcqm4mv2_dgl: torch ogb.lsc.pcqm4mv2_pyg: torch
        """.replace("torch", "torch=ogb:torch_for_ogb"):
            "reads pickled NumPy arrays with torch.load, which refuses them by default, and makes "
            "tensors of pandas' arrays, which are read-only since pandas 3",
    },
    (DGL, PYTHON_3_14): {
        "dgl.dataloading.dataloader: GraphDataLoader.__init__=init_graph_loader":
            "starts its workers by forkserver, as Python does now: a script without a main guard "
            "starts itself again, and one that imports DGL first fails in them",
    },
    (GRAPHBOLT, PYTHON_3_14): {
        "dgl.graphbolt.dataloader: MultiprocessingWrapper.__init__=init_workers":
            "starts its workers by forkserver, too",
    },
    (HYDRA, PYTHON_3_14): {
        "hydra.main: get_args_parser=hydra.main:get_args_parser":
            "the help of one option is no string, which argparse refuses: ValueError",
    },
}  # fmt: skip


def _replacements() -> Iterator[Replacement]:
    for versions, reasons in _TABLE.items():
        for targets, reason in reasons.items():
            for word in targets.split():
                if word.endswith(":"):
                    module = word[:-1]
                    continue
                name, _, by = word.partition("=")
                by = by or name.rpartition(".")[2]
                if ":" not in by:
                    by = f"{module.removeprefix('dgl.')}:{by}"
                yield Replacement(f"{module}:{name}", by, versions, reason)


REPLACEMENTS = tuple(_replacements())

SURROUNDINGS: tuple[Surrounding, ...] = (
    Surrounding(
        "dgl",
        "dgl:packages_at_their_first_use",
        (DGL,),
        "imports pandas, SciPy, networkx and requests for a few functions: two thirds of the time "
        "that its import takes; and pandas and ogb without requiring them",
    ),
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


def applies(entry: Replacement | Surrounding) -> bool:
    """Whether all packages an entry names are installed in the versions it is for."""
    versions = ((wanted, installed_version(wanted.package)) for wanted in entry.versions)
    return all(version is not None and wanted.holds(version) for wanted, version in versions)
