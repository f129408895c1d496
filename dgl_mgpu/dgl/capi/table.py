"""Every function of DGL's C library, and where it runs for graphs on a GPU.

DGL 2.1's C functions are named ``namespace._CAPI_…``; a test compares this table with those that
the installed wheel has.  GraphBolt's are functions of ``torch.ops.graphbolt``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum


class Implementation(Enum):
    """What runs when a C function is given graphs or arrays on a GPU."""

    NATIVE = "kernel"
    TORCH = "torch"
    CPU = "CPU round trip"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Entry:
    """How one C function is served."""

    implementation: Implementation
    by: str = ""  # "module:function" in dgl_mgpu, for NATIVE and TORCH
    reason: str = ""  # why it never sees a GPU (NOT_APPLICABLE) or goes through the CPU (CPU)


_NATIVE, _TORCH, _CPU, _NOT_APPLICABLE = Implementation

# By implementation: module or class in dgl_mgpu, or the reason why there is none; then namespaces
# and functions without their prefix, with the names of what implements them.
_TABLE: dict[Implementation, dict[str, str]] = {
    _NATIVE: {
        "graph.blocks:": "capi: DGLToBlock=to_block",
        "graph.message_passing.segment:": "sparse: DGLKernelSegmentReduce=segment_reduce",
        "graph.message_passing.c_functions:": """
            sparse: DGLKernelEdge_softmax_backward=edge_softmax_backward_into
                DGLKernelEdge_softmax_forward=edge_softmax_into DGLKernelSDDMM=sddmm_into
                DGLKernelSDDMMHetero=sddmm_hetero_into DGLKernelSpMM=spmm_into
                DGLKernelSpMMHetero=spmm_hetero_into
        """,
        "graph.pinning.pinning:": """
            ndarray.uvm: DGLIndexScatterGPUToCPU=scatter_pinned_tensor_rows
                DGLIndexSelectCPUFromGPU=gather_pinned_tensor_rows
        """,
        "sampling.neighbors:": """
            sampling.negative: DGLGlobalUniformNegativeSampling=global_uniform_negative_sampling
            sampling.neighbor: DGLSampleNeighbors=sample_neighbors
                DGLSampleNeighborsFused=sample_neighbors_fused
        """,
        "sampling.picking:": """
            sampling.neighbor: DGLSampleNeighborsBiased=sample_neighbors_biased
                DGLSampleNeighborsEType=sample_neighbors_etype
        """,
        "sampling.walks:": """
            sampling.randomwalks: DGLSamplingRandomWalk=random_walk
                DGLSamplingRandomWalkWithRestart=random_walk_with_restart
                DGLSamplingRandomWalkWithStepwiseRestart=random_walk_with_stepwise_restart
        """,
    },
    _TORCH: {
        "graph.dispatch:": "ndarray: DGLArrayCastToSigned=cast_to_signed",
        "graph.batch:": """
            heterograph_index: DGLHeteroDisjointPartitionBySizes_v2=disjoint_partition
                DGLHeteroDisjointUnion_v2=disjoint_union
                DGLHeteroGetFlattenedGraph=flatten_relations DGLHeteroJointUnion=joint_union
                DGLHeteroSlice=slice_index
        """,
        "graph.creation:": """
            heterograph_index: DGLHeteroContext=context DGLHeteroCopyTo=copy_to
                DGLHeteroCreateHeteroGraph=create_heterograph
                DGLHeteroCreateHeteroGraphWithNumNodes=create_heterograph
                DGLHeteroCreateUnitGraphFromCOO=create_from_coo
                DGLHeteroCreateUnitGraphFromCSR=create_from_csr DGLHeteroDataType=dtype
                DGLHeteroGetAdj=adjacency DGLHeteroGetMetaGraph=metagraph
        """,
        "graph.index:TensorIndex.": """
            heterograph_index: DGLHeteroAddEdge=add_edge DGLHeteroAddEdges=add_edges
                DGLHeteroAddVertices=add_nodes DGLHeteroAsNumBits=asbits DGLHeteroClear=clear
                DGLHeteroCopyToSharedMem=shared_memory DGLHeteroCreateFormat=create_formats_
                DGLHeteroEdgeIdsAll=edge_ids_all DGLHeteroEdgeIdsOne=edge_ids_one
                DGLHeteroEdges=edges DGLHeteroFindEdges=find_edges DGLHeteroForkingPickle=__reduce__
                DGLHeteroGetAllowedFormats=formats DGLHeteroGetCreatedFormats=formats
                DGLHeteroGetFormatGraph=formats DGLHeteroGetRelationGraph=get_relation_graph
                DGLHeteroHasEdgesBetween=has_edges_between DGLHeteroHasVertices=has_nodes
                DGLHeteroInDegrees=in_degrees DGLHeteroInEdges_2=in_edges
                DGLHeteroIsMetaGraphUniBipartite=is_metagraph_unibipartite
                DGLHeteroIsMultigraph=is_multigraph DGLHeteroIsReadonly=is_readonly
                DGLHeteroNumEdges=num_edges DGLHeteroNumVertices=num_nodes
                DGLHeteroOutDegrees=out_degrees DGLHeteroOutEdges_2=out_edges
                DGLHeteroPickle=__reduce__ DGLHeteroPredecessors=predecessors
                DGLHeteroRecordStream=record_stream DGLHeteroReverse=reverse
                DGLHeteroSuccessors=successors
        """,
        "graph.message_passing.geometry:": """
            geometry: FarthestPointSampler=farthest_point_sampler NeighborMatching=neighbor_matching
            transform: DGLKNN=knn DGLNNDescent=nn_descent
        """,
        "graph.message_passing.segment:": """
            sparse: DGLKernelBwdSegmentCmp=bwd_segment_cmp DGLKernelGATHERMM=gather_mm
                DGLKernelGATHERMMSCATTER=gather_mm_scatter DGLKernelSEGMENTMM=segment_mm
                DGLKernelSEGMENTMMBackwardB=segment_mm_backward_b DGLKernelScatterAdd=scatter_add
        """,
        "graph.message_passing.c_functions:": """
            sparse: DGLCSRMM=csrmm DGLCSRMask=csrmask DGLCSRSum=csrsum
                DGLKernelUpdateGradMinMaxHetero=update_grad_minmax_hetero
        """,
        "graph.partition:": """
            partition: DGLNDArrayPartitionCreateRangeBased=NDArrayPartition
                DGLNDArrayPartitionCreateRemainderBased=NDArrayPartition
        """,
        "graph.partition:NDArrayPartition.": """
            partition: DGLNDArrayPartitionGeneratePermutation=generate_permutation
                DGLNDArrayPartitionGetPartSize=local_size
                DGLNDArrayPartitionMapToGlobal=map_to_global
                DGLNDArrayPartitionMapToLocal=map_to_local
        """,
        "graph.pinning.pinned_graphs:": """
            heterograph_index: DGLHeteroIsPinned=is_index_pinned DGLHeteroPinMemory=pin_copy
                DGLHeteroPinMemory_=pin_index DGLHeteroUnpinMemory_=unpin_index
        """,
        "graph.random:": "rng: Choice=choice SetSeed=set_seed",
        "graph.subgraph:": """
            heterograph_index: DGLHeteroEdgeSubgraph=edge_subgraph
                DGLHeteroVertexSubgraph=node_subgraph
            subgraph: DGLInSubgraph=in_subgraph DGLOutSubgraph=out_subgraph
        """,
        "graph.transforms:": """
            transform: DGLCompactGraphs=compact_graphs DGLHeteroLineGraph=line_graph
                DGLHeteroSortInEdges=sort_in_edges DGLHeteroSortOutEdges=sort_out_edges
                DGLToSimpleHetero=to_simple
            utils.checks: DGLCOOIsSorted=coo_is_sorted
        """,
        "sampling.seed_edges:": """
            utils.filter: DGLFilterCreateFromSet=create_from_set
                DGLFilterFindExcludedIndices=find_excluded
                DGLFilterFindIncludedIndices=find_included
        """,
        "sampling.neighbors:": """
            sampling.labor: DGLSampleLabors=sample_labors
            sampling.pinsage: DGLSamplingSelectPinSageNeighbors=select_pinsage_neighbors
        """,
        "sampling.picking:": "sampling.neighbor: DGLSampleNeighborsTopk=sample_neighbors_topk",
        "sampling.walks:": """
            sampling.randomwalks: DGLSamplingNode2vec=node2vec DGLSamplingPackTraces=pack_traces
        """,
    },
    _CPU: {
        "writes a file": """
            data.heterograph_serialize: MakeHeteroGraphData
            data.tensor_serialize: SaveNDArrayDict
        """,
        "partitions graphs for files on disk, once, on the host": """
            partition: DGLMakeSymmetric_Hetero DGLMetisPartition_Hetero DGLPartitionWithHalo_Hetero
                DGLReassignEdges_Hetero DGLReorderGraph_Hetero GetHaloSubgraphInnerNodes_Hetero
        """,
        "walks one node after the other; DGL's Python copies the graph to the CPU itself": """
            traversal: DGLBFSEdges_v2 DGLBFSNodes_v2 DGLDFSEdges_v2 DGLDFSLabeledEdges_v2
                DGLTopologicalNodes_v2
        """,
    },
    _NOT_APPLICABLE: {
        "no Python of DGL 2.1 calls it": """
            _deprecate.nodeflow: NodeFlowGetBlockAdj NodeFlowGetBlockOffsets NodeFlowGetEdgeMapping
                NodeFlowGetGraph NodeFlowGetLayerOffsets NodeFlowGetNodeMapping
            _deprecate.runtime.degree_bucketing: DGLDegreeBucketing DGLGroupEdgeByNodeDegree
            data.graph_serialize: SaveDGLGraphs_V0
            distributed.server_state: DGLRPCGetServerState
            heterograph_index: DGLHeteroDisjointPartitionBySizes DGLHeteroEdgeId
                DGLHeteroHasEdgeBetween DGLHeteroHasVertex DGLHeteroInDegree DGLHeteroInEdges_1
                DGLHeteroNumBits DGLHeteroOutDegree DGLHeteroOutEdges_1
            sampling: CreateUniformEdgeSampler CreateWeightedEdgeSampler FetchUniformEdgeSample
                FetchWeightedEdgeSample GetEdgeSubgraphHead GetEdgeSubgraphTail GetNegEdgeExistence
                LayerSampling NeighborSampling ResetUniformEdgeSample ResetWeightedEdgeSample
                UniformSampling
            sparse: DGLKernelGetEdgeMapping
            transform: DGLAsHeteroGraph DGLAsImmutableGraph DGLMetisPartition DGLPartitionWithHalo
                DGLReassignEdges DGLRemoveEdges DGLReorderGraph DGLToBidirectedImmutableGraph
                DGLToBidirectedMutableGraph DGLToSimpleGraph
            traversal: DGLBFSEdges DGLBFSNodes DGLDFSEdges DGLDFSLabeledEdges DGLTopologicalNodes
        """,
        "reads and writes files: graphs and tensors on the CPU": """
            data.graph_serialize: DGLAsHeteroGraph GDataEdgeTensors GDataGraphHandle
                GDataNodeTensors GetFileVersion LoadGraphFiles_V1 LoadGraphFiles_V2 LoadLabels_V2
                MakeGraphData
            data.heterograph_serialize: GetEDataFromHeteroGraphData GetEtypesFromHeteroGraphData
                GetGindexFromHeteroGraphData GetNDataFromHeteroGraphData
                GetNtypesFromHeteroGraphData SaveHeteroGraphData
            data.tensor_serialize: LoadNDArrayDict
        """,
        "DGL's servers for graphs in pieces on several machines": """
            distributed.id_map: DGLHeteroMapIds
            distributed.rpc: DGLRPCConnectReceiver DGLRPCConnectReceiverFinalize
                DGLRPCCreateEmptyRPCMessage DGLRPCCreateRPCMessage DGLRPCCreateReceiver
                DGLRPCCreateSender DGLRPCFastPull DGLRPCFinalizeReceiver DGLRPCFinalizeSender
                DGLRPCGetBarrierCount DGLRPCGetClient DGLRPCGetGlobalIDFromLocalPartition
                DGLRPCGetGroupID DGLRPCGetMachineID DGLRPCGetMsgSeq DGLRPCGetNumClient
                DGLRPCGetNumMachines DGLRPCGetNumServer DGLRPCGetNumServerPerMachine DGLRPCGetRank
                DGLRPCHandleSignal DGLRPCIncrMsgSeq DGLRPCMessageGetClientId DGLRPCMessageGetData
                DGLRPCMessageGetGroupId DGLRPCMessageGetMsgSeq DGLRPCMessageGetServerId
                DGLRPCMessageGetServiceId DGLRPCMessageGetTensors DGLRPCRecvRPCMessage
                DGLRPCRegisterClient DGLRPCReset DGLRPCSendRPCMessage DGLRPCSetBarrierCount
                DGLRPCSetGroupID DGLRPCSetMachineID DGLRPCSetMsgSeq DGLRPCSetNumClient
                DGLRPCSetNumMachines DGLRPCSetNumServer DGLRPCSetNumServerPerMachine DGLRPCSetRank
                DGLRPCWaitForSenders
        """,
        "a setting of the host, or a question about the metagraph": """
            global_config: DGLConfigGetLibxsmm DGLConfigSetLibxsmm
            heterograph: DGLFindSrcDstNtypes
            utils.internal: DGLGetOMPThreads DGLSetOMPThreads
        """,
        "DGL's index of the metagraph, which is on the CPU always": """
            graph_index: DGLDisjointPartitionByNum DGLDisjointPartitionBySizes DGLDisjointUnion
                DGLGetSubgraphWithHalo DGLGraphAddEdge DGLGraphAddEdges DGLGraphAddVertices
                DGLGraphCSRCreate DGLGraphCSRCreateMMap DGLGraphClear DGLGraphContext DGLGraphCreate
                DGLGraphCreateMutable DGLGraphEdgeId DGLGraphEdgeIds DGLGraphEdgeSubgraph
                DGLGraphEdges DGLGraphFindEdge DGLGraphFindEdges DGLGraphGetAdj
                DGLGraphHasEdgeBetween DGLGraphHasEdgesBetween DGLGraphHasVertex DGLGraphHasVertices
                DGLGraphInDegree DGLGraphInDegrees DGLGraphInEdges_1 DGLGraphInEdges_2
                DGLGraphIsMultigraph DGLGraphIsReadonly DGLGraphLineGraph DGLGraphNumBits
                DGLGraphNumEdges DGLGraphNumVertices DGLGraphOutDegree DGLGraphOutDegrees
                DGLGraphOutEdges_1 DGLGraphOutEdges_2 DGLGraphPredecessors DGLGraphSuccessors
                DGLGraphVertexSubgraph DGLImmutableGraphAsNumBits DGLImmutableGraphCopyTo
                DGLImmutableGraphCopyToSharedMem DGLMapSubgraphNID DGLSortAdj DGLSubgraphGetGraph
                DGLSubgraphGetInducedEdges DGLSubgraphGetInducedVertices DGLToImmutable
                GetHaloSubgraphInnerNodes
        """,
        "reads or makes a C++ object, which graphs on a GPU do not have": """
            heterograph_index: DGLCreateHeteroPickleStates DGLCreateHeteroPickleStatesOld
                DGLHeteroCreateFromSharedMem DGLHeteroForkingUnpickle DGLHeteroPickleStatesGetArrays
                DGLHeteroPickleStatesGetArraysNum DGLHeteroPickleStatesGetMeta
                DGLHeteroPickleStatesGetVersion DGLHeteroSubgraphGetGraph
                DGLHeteroSubgraphGetInducedEdges DGLHeteroSubgraphGetInducedVertices
                DGLHeteroUnpickle
            ndarray: DGLCreateSparseMatrix DGLExistSharedMemArray DGLSparseMatrixGetFlags
                DGLSparseMatrixGetFormat DGLSparseMatrixGetIndices DGLSparseMatrixGetNumCols
                DGLSparseMatrixGetNumRows
        """,
        "DistGNN's partitioning of vertices, on CPUs": """
            sparse: DGLLibra2dglBuildAdjlist DGLLibra2dglBuildDict DGLLibra2dglSetLR
                DGLLibraVertexCut
        """,
    },
}

# What runs without DGL's binary in addition to the kernels and the torch code above: modules of
# dgl_mgpu, then namespaces and functions, as there.
_WITHOUT_LIBRARY: dict[str, str] = {
    "graph.host.metagraph:": """
        graph_index: DGLGraphCreate=create DGLGraphCreateMutable=create_mutable
            DGLGraphAddVertices=add_nodes DGLGraphAddEdge=add_edges DGLGraphAddEdges=add_edges
            DGLGraphClear=clear DGLGraphNumVertices=num_nodes DGLGraphNumEdges=num_edges
            DGLGraphIsReadonly=is_readonly DGLGraphIsMultigraph=is_multigraph
            DGLGraphHasVertex=has_node DGLGraphHasVertices=has_nodes
            DGLGraphHasEdgeBetween=has_edge_between DGLGraphHasEdgesBetween=has_edges_between
            DGLGraphPredecessors=predecessors DGLGraphSuccessors=successors
            DGLGraphEdgeId=edge_ids_between DGLGraphEdgeIds=edge_ids_all
            DGLGraphFindEdge=find_edges DGLGraphFindEdges=find_edges DGLGraphEdges=edges
            DGLGraphInEdges_1=in_edges DGLGraphInEdges_2=in_edges
            DGLGraphOutEdges_1=out_edges DGLGraphOutEdges_2=out_edges
            DGLGraphInDegree=in_degree DGLGraphInDegrees=in_degrees
            DGLGraphOutDegree=out_degree DGLGraphOutDegrees=out_degrees
            DGLGraphGetAdj=adjacency DGLToImmutable=to_immutable DGLGraphContext=context
            DGLGraphNumBits=num_bits
    """,
    "graph.host.settings:": """
        global_config: DGLConfigGetLibxsmm=get_libxsmm DGLConfigSetLibxsmm=set_libxsmm
        heterograph: DGLFindSrcDstNtypes=find_src_dst_ntypes
        utils.internal: DGLGetOMPThreads=get_num_threads DGLSetOMPThreads=set_num_threads
    """,
    "graph.host.standalone:": """
        distributed.id_map: DGLHeteroMapIds=map_ids
        distributed.rpc: DGLRPCReset=reset DGLRPCIncrMsgSeq=next_message
            DGLRPCGetGroupID=get_group_id DGLRPCSetGroupID=set_group_id
            DGLRPCGetMachineID=get_machine_id DGLRPCSetMachineID=set_machine_id
            DGLRPCGetMsgSeq=get_message DGLRPCSetMsgSeq=set_message
            DGLRPCGetNumClient=get_num_clients DGLRPCSetNumClient=set_num_clients
            DGLRPCGetNumMachines=get_num_machines DGLRPCSetNumMachines=set_num_machines
            DGLRPCGetNumServer=get_num_servers DGLRPCSetNumServer=set_num_servers
            DGLRPCGetNumServerPerMachine=get_num_servers_per_machine
            DGLRPCSetNumServerPerMachine=set_num_servers_per_machine
            DGLRPCGetRank=get_rank DGLRPCSetRank=set_rank
    """,
    "graph.host.traversal:": """
        traversal: DGLBFSEdges_v2=bfs_edges DGLBFSNodes_v2=bfs_nodes DGLDFSEdges_v2=dfs_edges
            DGLDFSLabeledEdges_v2=dfs_labeled_edges DGLTopologicalNodes_v2=topological_nodes
    """,
    "graph.host.files:": """
        data.graph_serialize: DGLAsHeteroGraph=as_heterograph GDataEdgeTensors=old_edges_of
            GDataGraphHandle=old_index_of GDataNodeTensors=old_nodes_of GetFileVersion=file_version
            LoadGraphFiles_V1=load_old_graphs LoadGraphFiles_V2=load_graphs
            LoadLabels_V2=load_labels
        data.heterograph_serialize: GetEDataFromHeteroGraphData=edges_of
            GetEtypesFromHeteroGraphData=etypes_of GetGindexFromHeteroGraphData=index_of
            GetNDataFromHeteroGraphData=nodes_of GetNtypesFromHeteroGraphData=ntypes_of
            MakeHeteroGraphData=make_graph_data SaveHeteroGraphData=save_graphs
        data.tensor_serialize: LoadNDArrayDict=load_tensors SaveNDArrayDict=save_tensors
    """,
    "graph.host.pickles:": """
        heterograph_index: DGLCreateHeteroPickleStates=create_states DGLHeteroUnpickle=unpickle
            DGLHeteroPickleStatesGetArrays=arrays_of DGLHeteroPickleStatesGetMeta=meta_of
            DGLHeteroPickleStatesGetArraysNum=num_arrays_of
            DGLHeteroPickleStatesGetVersion=version_of
            DGLHeteroCreateFromSharedMem=from_shared_memory
            DGLHeteroCopyToSharedMem=copy_to_shared_memory
    """,
    "graph.host.partition:": """
        partition: DGLMakeSymmetric_Hetero=make_symmetric DGLMetisPartition_Hetero=assign_nodes
            DGLPartitionWithHalo_Hetero=partition_with_halo DGLReassignEdges_Hetero=reassign_edges
            DGLReorderGraph_Hetero=reorder GetHaloSubgraphInnerNodes_Hetero=inner_nodes
    """,
    "graph.shared_memory:": "ndarray: DGLExistSharedMemArray=exists_shared_memory",
}

#: Modules whose functions take DGL's own graphs too, in host memory.
TAKE_HOST_GRAPHS = frozenset({
    "graph.creation", "graph.pinning.pinned_graphs", "sampling.neighbors", "sampling.picking",
    "sampling.walks",
})  # fmt: skip


def _entries() -> dict[str, Entry]:
    entries = {}
    for implementation, texts in _TABLE.items():
        for key, text in texts.items():
            for word in text.split():
                if word.endswith(":"):
                    namespace = word[:-1]
                    continue
                function, _, name = word.partition("=")
                served = {"by": key + name} if name else {"reason": key}
                entries[f"{namespace}._CAPI_{function}"] = Entry(implementation, **served)
    return entries


#: All functions by name.
ENTRIES = _entries()


def _without_library() -> dict[str, str]:
    places = {name: entry.by for name, entry in ENTRIES.items() if entry.by}
    for module, text in _WITHOUT_LIBRARY.items():
        for word in text.split():
            if word.endswith(":"):
                namespace = word[:-1]
                continue
            function, _, name = word.partition("=")
            places[f"{namespace}._CAPI_{function}"] = module + name
    return places | {name: f"dgl.ffi.containers:{name}" for name in INTERNAL_NAMES}


#: Functions of DGL's API for its own containers, which have no namespace.
INTERNAL_NAMES = (
    *("_EmptyStrMap", "_GetDeviceAttr", "_List", "_ListGetItem", "_ListSize", "_Map", "_MapCount"),
    *("_MapGetItem", "_MapItems", "_MapSize", "_TestPythonCallback", "_TestPythonCallbackThread"),
    *("_Value", "_ValueGet"),
)
#: By name, "module:function" of what runs without DGL's binary.
WITHOUT_LIBRARY = _without_library()


def names_without_library() -> dict[str, None]:
    """Names of all functions that there are without DGL's binary, also of those that only raise."""
    return dict.fromkeys([*ENTRIES, *INTERNAL_NAMES])


_GRAPHBOLT_OPERATORS = "dgl.graphbolt.operators:"
_GRAPHBOLT_GRAPH = "dgl.graphbolt.graph:"
#: Functions of ``torch.ops.graphbolt``, by name.
GRAPHBOLT_ENTRIES = {
    "expand_indptr": Entry(_TORCH, f"{_GRAPHBOLT_OPERATORS}expand_indptr"),
    "fused_csc_sampling_graph": Entry(_NATIVE, f"{_GRAPHBOLT_GRAPH}FusedCSCSamplingGraph"),
    "gpu_cache": Entry(_TORCH, f"{_GRAPHBOLT_OPERATORS}_GPUCache"),
    "index_select": Entry(_NATIVE, "dgl.graphbolt.picking:index_select"),
    "index_select_csc": Entry(_TORCH, f"{_GRAPHBOLT_OPERATORS}index_select_csc"),
    "isin": Entry(_TORCH, f"{_GRAPHBOLT_OPERATORS}isin"),
    "load_from_shared_memory": Entry(_NOT_APPLICABLE, reason="reads the host's memory"),
    "set_max_uva_threads": Entry(_NOT_APPLICABLE, reason="the kernels choose their own launches"),
    "set_seed": Entry(_NOT_APPLICABLE, reason="seeds are the host's"),
    "unique_and_compact": Entry(_TORCH, f"{_GRAPHBOLT_OPERATORS}unique_and_compact"),
}


def find_entry(name: str) -> Entry:
    """The entry of a C function; one that a newer DGL adds goes through the CPU."""
    unknown = Entry(Implementation.CPU, reason="unknown to this version of dgl_mgpu")
    return ENTRIES.get(name, unknown)


def coverage_report() -> str:
    """Where each C function runs for graphs on a GPU, one a line, and a summary."""
    entries = ENTRIES | {f"graphbolt.{name}": it for name, it in GRAPHBOLT_ENTRIES.items()}
    width = max(map(len, entries))
    lines = []
    for name, entry in sorted(entries.items()):
        where = f"dgl_mgpu.{entry.by}" if entry.by else entry.reason
        lines.append(f"{name:<{width}}  {entry.implementation.value:<14}  {where}")
    counts = Counter(entry.implementation for entry in entries.values())
    lines.append(", ".join(f"{counts[kind]} {kind.value}" for kind in Implementation))
    return "\n".join(lines)
