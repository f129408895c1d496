"""Every function of DGL's C library, and where it runs for graphs on a GPU.

DGL 2.1's C functions are named ``namespace._CAPI_…``; a test compares this table with those that
the installed wheel has.
"""

from __future__ import annotations

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
    """How one C function is served.

    Parameters
    ----------
    implementation : Implementation
    by : str
        ``"module:function"`` in `dgl_mgpu`, for ``NATIVE`` and ``TORCH``.
    reason : str
        Why it never sees a GPU, for ``NOT_APPLICABLE``; why it goes through the CPU, for ``CPU``.
    """

    implementation: Implementation
    by: str = ""
    reason: str = ""


_NATIVE, _TORCH, _CPU, _NONE = Implementation

_PARTITIONING = "partitions graphs for files on disk, once, on the host"
_TRAVERSAL = "walks one node after the other; DGL's Python copies the graph to the CPU itself"
_SAVING = "writes a file"

# Namespace, then the function without its prefix.
_SERVED: dict[str, dict[str, tuple[Implementation, str]]] = {
    "capi": {
        "DGLToBlock": (_NATIVE, "graph.blocks:to_block"),
    },
    "data.heterograph_serialize": {
        "MakeHeteroGraphData": (_CPU, _SAVING),
    },
    "data.tensor_serialize": {
        "SaveNDArrayDict": (_CPU, _SAVING),
    },
    "geometry": {
        "FarthestPointSampler": (_TORCH, "graph.message_passing.geometry:farthest_point_sampler"),
        "NeighborMatching": (_TORCH, "graph.message_passing.geometry:neighbor_matching"),
    },
    "heterograph_index": {
        "DGLHeteroAddEdge": (_TORCH, "graph.index:TensorIndex.add_edge"),
        "DGLHeteroAddEdges": (_TORCH, "graph.index:TensorIndex.add_edges"),
        "DGLHeteroAddVertices": (_TORCH, "graph.index:TensorIndex.add_nodes"),
        "DGLHeteroAsNumBits": (_TORCH, "graph.index:TensorIndex.asbits"),
        "DGLHeteroClear": (_TORCH, "graph.index:TensorIndex.clear"),
        "DGLHeteroContext": (_TORCH, "graph.creation:context"),
        "DGLHeteroCopyTo": (_TORCH, "graph.creation:copy_to"),
        "DGLHeteroCopyToSharedMem": (_TORCH, "graph.index:TensorIndex.shared_memory"),
        "DGLHeteroCreateFormat": (_TORCH, "graph.index:TensorIndex.create_formats_"),
        "DGLHeteroCreateHeteroGraph": (_TORCH, "graph.creation:create_heterograph"),
        "DGLHeteroCreateHeteroGraphWithNumNodes": (
            _TORCH,
            "graph.creation:create_heterograph",
        ),
        "DGLHeteroCreateUnitGraphFromCOO": (_TORCH, "graph.creation:create_from_coo"),
        "DGLHeteroCreateUnitGraphFromCSR": (_TORCH, "graph.creation:create_from_csr"),
        "DGLHeteroDataType": (_TORCH, "graph.creation:dtype"),
        "DGLHeteroDisjointPartitionBySizes_v2": (
            _TORCH,
            "graph.batch:disjoint_partition",
        ),
        "DGLHeteroDisjointUnion_v2": (_TORCH, "graph.batch:disjoint_union"),
        "DGLHeteroEdgeIdsAll": (_TORCH, "graph.index:TensorIndex.edge_ids_all"),
        "DGLHeteroEdgeIdsOne": (_TORCH, "graph.index:TensorIndex.edge_ids_one"),
        "DGLHeteroEdgeSubgraph": (_TORCH, "graph.subgraph:edge_subgraph"),
        "DGLHeteroEdges": (_TORCH, "graph.index:TensorIndex.edges"),
        "DGLHeteroFindEdges": (_TORCH, "graph.index:TensorIndex.find_edges"),
        "DGLHeteroForkingPickle": (_TORCH, "graph.index:TensorIndex.__reduce__"),
        "DGLHeteroGetAdj": (_TORCH, "graph.creation:adjacency"),
        "DGLHeteroGetAllowedFormats": (_TORCH, "graph.index:TensorIndex.formats"),
        "DGLHeteroGetCreatedFormats": (_TORCH, "graph.index:TensorIndex.formats"),
        "DGLHeteroGetFlattenedGraph": (_TORCH, "graph.batch:flatten_relations"),
        "DGLHeteroGetFormatGraph": (_TORCH, "graph.index:TensorIndex.formats"),
        "DGLHeteroGetMetaGraph": (_TORCH, "graph.creation:metagraph"),
        "DGLHeteroGetRelationGraph": (
            _TORCH,
            "graph.index:TensorIndex.get_relation_graph",
        ),
        "DGLHeteroHasEdgesBetween": (_TORCH, "graph.index:TensorIndex.has_edges_between"),
        "DGLHeteroHasVertices": (_TORCH, "graph.index:TensorIndex.has_nodes"),
        "DGLHeteroInDegrees": (_TORCH, "graph.index:TensorIndex.in_degrees"),
        "DGLHeteroInEdges_2": (_TORCH, "graph.index:TensorIndex.in_edges"),
        "DGLHeteroIsMetaGraphUniBipartite": (
            _TORCH,
            "graph.index:TensorIndex.is_metagraph_unibipartite",
        ),
        "DGLHeteroIsMultigraph": (_TORCH, "graph.index:TensorIndex.is_multigraph"),
        "DGLHeteroIsPinned": (_TORCH, "graph.pinning.pinned_graphs:is_index_pinned"),
        "DGLHeteroIsReadonly": (_TORCH, "graph.index:TensorIndex.is_readonly"),
        "DGLHeteroJointUnion": (_TORCH, "graph.batch:joint_union"),
        "DGLHeteroNumEdges": (_TORCH, "graph.index:TensorIndex.num_edges"),
        "DGLHeteroNumVertices": (_TORCH, "graph.index:TensorIndex.num_nodes"),
        "DGLHeteroOutDegrees": (_TORCH, "graph.index:TensorIndex.out_degrees"),
        "DGLHeteroOutEdges_2": (_TORCH, "graph.index:TensorIndex.out_edges"),
        "DGLHeteroPickle": (_TORCH, "graph.index:TensorIndex.__reduce__"),
        "DGLHeteroPinMemory": (_TORCH, "graph.pinning.pinned_graphs:pin_copy"),
        "DGLHeteroPinMemory_": (_TORCH, "graph.pinning.pinned_graphs:pin_index"),
        "DGLHeteroPredecessors": (_TORCH, "graph.index:TensorIndex.predecessors"),
        "DGLHeteroRecordStream": (_TORCH, "graph.index:TensorIndex.record_stream"),
        "DGLHeteroReverse": (_TORCH, "graph.index:TensorIndex.reverse"),
        "DGLHeteroSlice": (_TORCH, "graph.batch:slice_index"),
        "DGLHeteroSuccessors": (_TORCH, "graph.index:TensorIndex.successors"),
        "DGLHeteroUnpinMemory_": (_TORCH, "graph.pinning.pinned_graphs:unpin_index"),
        "DGLHeteroVertexSubgraph": (_TORCH, "graph.subgraph:node_subgraph"),
    },
    "ndarray": {
        "DGLArrayCastToSigned": (_TORCH, "graph.arrays:cast_to_signed"),
    },
    "ndarray.uvm": {
        "DGLIndexScatterGPUToCPU": (_NATIVE, "graph.pinning.pinning:scatter_rows_to_host"),
        "DGLIndexSelectCPUFromGPU": (_NATIVE, "graph.pinning.pinning:gather_rows_of_host"),
    },
    "partition": {
        "DGLMakeSymmetric_Hetero": (_CPU, _PARTITIONING),
        "DGLMetisPartition_Hetero": (_CPU, _PARTITIONING),
        "DGLNDArrayPartitionCreateRangeBased": (
            _TORCH,
            "graph.partition:NDArrayPartition",
        ),
        "DGLNDArrayPartitionCreateRemainderBased": (
            _TORCH,
            "graph.partition:NDArrayPartition",
        ),
        "DGLNDArrayPartitionGeneratePermutation": (
            _TORCH,
            "graph.partition:NDArrayPartition.generate_permutation",
        ),
        "DGLNDArrayPartitionGetPartSize": (
            _TORCH,
            "graph.partition:NDArrayPartition.local_size",
        ),
        "DGLNDArrayPartitionMapToGlobal": (
            _TORCH,
            "graph.partition:NDArrayPartition.map_to_global",
        ),
        "DGLNDArrayPartitionMapToLocal": (
            _TORCH,
            "graph.partition:NDArrayPartition.map_to_local",
        ),
        "DGLPartitionWithHalo_Hetero": (_CPU, _PARTITIONING),
        "DGLReassignEdges_Hetero": (_CPU, _PARTITIONING),
        "DGLReorderGraph_Hetero": (_CPU, _PARTITIONING),
        "GetHaloSubgraphInnerNodes_Hetero": (_CPU, _PARTITIONING),
    },
    "rng": {
        "Choice": (_TORCH, "graph.random:choice"),
        "SetSeed": (_TORCH, "graph.random:set_seed"),
    },
    "sampling.labor": {
        "DGLSampleLabors": (_TORCH, "sampling.neighbors:sample_labors"),
    },
    "sampling.negative": {
        "DGLGlobalUniformNegativeSampling": (
            _NATIVE,
            "sampling.neighbors:global_uniform_negative_sampling",
        ),
    },
    "sampling.neighbor": {
        "DGLSampleNeighbors": (_NATIVE, "sampling.neighbors:sample_neighbors"),
        "DGLSampleNeighborsBiased": (_NATIVE, "sampling.picking:sample_neighbors_biased"),
        "DGLSampleNeighborsEType": (_NATIVE, "sampling.picking:sample_neighbors_etype"),
        "DGLSampleNeighborsFused": (_NATIVE, "sampling.neighbors:sample_neighbors_fused"),
        "DGLSampleNeighborsTopk": (_TORCH, "sampling.picking:sample_neighbors_topk"),
    },
    "sampling.pinsage": {
        "DGLSamplingSelectPinSageNeighbors": (
            _TORCH,
            "sampling.neighbors:select_pinsage_neighbors",
        ),
    },
    "sampling.randomwalks": {
        "DGLSamplingNode2vec": (_TORCH, "sampling.walks:node2vec"),
        "DGLSamplingPackTraces": (_TORCH, "sampling.walks:pack_traces"),
        "DGLSamplingRandomWalk": (_NATIVE, "sampling.walks:random_walk"),
        "DGLSamplingRandomWalkWithRestart": (_NATIVE, "sampling.walks:random_walk_with_restart"),
        "DGLSamplingRandomWalkWithStepwiseRestart": (
            _NATIVE,
            "sampling.walks:random_walk_with_stepwise_restart",
        ),
    },
    "sparse": {
        "DGLCSRMM": (_TORCH, "graph.message_passing.csr:csrmm"),
        "DGLCSRMask": (_TORCH, "graph.message_passing.csr:csrmask"),
        "DGLCSRSum": (_TORCH, "graph.message_passing.csr:csrsum"),
        "DGLKernelBwdSegmentCmp": (_TORCH, "graph.message_passing.segment:bwd_segment_cmp"),
        "DGLKernelEdge_softmax_backward": (
            _NATIVE,
            "graph.message_passing.sparse_ops:edge_softmax_backward_into",
        ),
        "DGLKernelEdge_softmax_forward": (
            _NATIVE,
            "graph.message_passing.sparse_ops:edge_softmax_into",
        ),
        "DGLKernelGATHERMM": (_TORCH, "graph.message_passing.segment:gather_mm"),
        "DGLKernelGATHERMMSCATTER": (_TORCH, "graph.message_passing.segment:gather_mm_scatter"),
        "DGLKernelSDDMM": (_NATIVE, "graph.message_passing.sparse_ops:sddmm_into"),
        "DGLKernelSDDMMHetero": (_NATIVE, "graph.message_passing.sparse_ops:sddmm_hetero_into"),
        "DGLKernelSEGMENTMM": (_TORCH, "graph.message_passing.segment:segment_mm"),
        "DGLKernelSEGMENTMMBackwardB": (
            _TORCH,
            "graph.message_passing.segment:segment_mm_backward_b",
        ),
        "DGLKernelScatterAdd": (_TORCH, "graph.message_passing.segment:scatter_add"),
        "DGLKernelSegmentReduce": (_NATIVE, "graph.message_passing.segment:segment_reduce"),
        "DGLKernelSpMM": (_NATIVE, "graph.message_passing.sparse_ops:spmm_into"),
        "DGLKernelSpMMHetero": (_NATIVE, "graph.message_passing.sparse_ops:spmm_hetero_into"),
        "DGLKernelUpdateGradMinMaxHetero": (
            _TORCH,
            "graph.message_passing.sparse_ops:update_grad_minmax_hetero",
        ),
    },
    "subgraph": {
        "DGLInSubgraph": (_TORCH, "graph.subgraph:in_subgraph"),
        "DGLOutSubgraph": (_TORCH, "graph.subgraph:out_subgraph"),
    },
    "transform": {
        "DGLCompactGraphs": (_TORCH, "graph.transforms:compact_graphs"),
        "DGLHeteroLineGraph": (_TORCH, "graph.transforms:line_graph"),
        "DGLHeteroSortInEdges": (_TORCH, "graph.transforms:sort_in_edges"),
        "DGLHeteroSortOutEdges": (_TORCH, "graph.transforms:sort_out_edges"),
        "DGLKNN": (_TORCH, "graph.message_passing.geometry:knn"),
        "DGLNNDescent": (_TORCH, "graph.message_passing.geometry:nn_descent"),
        "DGLToSimpleHetero": (_TORCH, "graph.transforms:to_simple"),
    },
    "traversal": {
        "DGLBFSEdges_v2": (_CPU, _TRAVERSAL),
        "DGLBFSNodes_v2": (_CPU, _TRAVERSAL),
        "DGLDFSEdges_v2": (_CPU, _TRAVERSAL),
        "DGLDFSLabeledEdges_v2": (_CPU, _TRAVERSAL),
        "DGLTopologicalNodes_v2": (_CPU, _TRAVERSAL),
    },
    "utils.checks": {
        "DGLCOOIsSorted": (_TORCH, "graph.checks:coo_is_sorted"),
    },
    "utils.filter": {
        "DGLFilterCreateFromSet": (_TORCH, "sampling.filter:create_from_set"),
        "DGLFilterFindExcludedIndices": (_TORCH, "sampling.filter:find_excluded"),
        "DGLFilterFindIncludedIndices": (_TORCH, "sampling.filter:find_included"),
    },
}

#: Modules whose functions take DGL's own graphs too, in host memory.
TAKE_HOST_GRAPHS = frozenset(
    {
        "graph.pinning.pinned_graphs",
        "sampling.neighbors",
        "sampling.picking",
        "sampling.walks",
        "graph.creation",
    }
)

# Why, then namespace and functions.
_NOT_SERVED: dict[str, dict[str, str]] = {
    "no Python of DGL 2.1 calls it": {
        "_deprecate.nodeflow": """
            NodeFlowGetBlockAdj NodeFlowGetBlockOffsets NodeFlowGetEdgeMapping NodeFlowGetGraph
            NodeFlowGetLayerOffsets NodeFlowGetNodeMapping
        """,
        "_deprecate.runtime.degree_bucketing": "DGLDegreeBucketing DGLGroupEdgeByNodeDegree",
        "data.graph_serialize": "SaveDGLGraphs_V0",
        "distributed.server_state": "DGLRPCGetServerState",
        "heterograph_index": """
            DGLHeteroDisjointPartitionBySizes DGLHeteroEdgeId DGLHeteroHasEdgeBetween
            DGLHeteroHasVertex DGLHeteroInDegree DGLHeteroInEdges_1 DGLHeteroNumBits
            DGLHeteroOutDegree DGLHeteroOutEdges_1
        """,
        "sampling": """
            CreateUniformEdgeSampler CreateWeightedEdgeSampler FetchUniformEdgeSample
            FetchWeightedEdgeSample GetEdgeSubgraphHead GetEdgeSubgraphTail GetNegEdgeExistence
            LayerSampling NeighborSampling ResetUniformEdgeSample ResetWeightedEdgeSample
            UniformSampling
        """,
        "sparse": "DGLKernelGetEdgeMapping",
        "transform": """
            DGLAsHeteroGraph DGLAsImmutableGraph DGLMetisPartition DGLPartitionWithHalo
            DGLReassignEdges DGLRemoveEdges DGLReorderGraph DGLToBidirectedImmutableGraph
            DGLToBidirectedMutableGraph DGLToSimpleGraph
        """,
        "traversal": """
            DGLBFSEdges DGLBFSNodes DGLDFSEdges DGLDFSLabeledEdges DGLTopologicalNodes
        """,
    },
    "reads and writes files: graphs and tensors on the CPU": {
        "data.graph_serialize": """
            DGLAsHeteroGraph GDataEdgeTensors GDataGraphHandle GDataNodeTensors GetFileVersion
            LoadGraphFiles_V1 LoadGraphFiles_V2 LoadLabels_V2 MakeGraphData
        """,
        "data.heterograph_serialize": """
            GetEDataFromHeteroGraphData GetEtypesFromHeteroGraphData GetGindexFromHeteroGraphData
            GetNDataFromHeteroGraphData GetNtypesFromHeteroGraphData SaveHeteroGraphData
        """,
        "data.tensor_serialize": "LoadNDArrayDict",
    },
    "DGL's servers for graphs in pieces on several machines": {
        "distributed.id_map": "DGLHeteroMapIds",
        "distributed.rpc": """
            DGLRPCConnectReceiver DGLRPCConnectReceiverFinalize DGLRPCCreateEmptyRPCMessage
            DGLRPCCreateRPCMessage DGLRPCCreateReceiver DGLRPCCreateSender DGLRPCFastPull
            DGLRPCFinalizeReceiver DGLRPCFinalizeSender DGLRPCGetBarrierCount DGLRPCGetClient
            DGLRPCGetGlobalIDFromLocalPartition DGLRPCGetGroupID DGLRPCGetMachineID
            DGLRPCGetMsgSeq DGLRPCGetNumClient DGLRPCGetNumMachines DGLRPCGetNumServer
            DGLRPCGetNumServerPerMachine DGLRPCGetRank DGLRPCHandleSignal DGLRPCIncrMsgSeq
            DGLRPCMessageGetClientId DGLRPCMessageGetData DGLRPCMessageGetGroupId
            DGLRPCMessageGetMsgSeq DGLRPCMessageGetServerId DGLRPCMessageGetServiceId
            DGLRPCMessageGetTensors DGLRPCRecvRPCMessage DGLRPCRegisterClient DGLRPCReset
            DGLRPCSendRPCMessage DGLRPCSetBarrierCount DGLRPCSetGroupID DGLRPCSetMachineID
            DGLRPCSetMsgSeq DGLRPCSetNumClient DGLRPCSetNumMachines DGLRPCSetNumServer
            DGLRPCSetNumServerPerMachine DGLRPCSetRank DGLRPCWaitForSenders
        """,
    },
    "a setting of the host, or a question about the metagraph": {
        "global_config": "DGLConfigGetLibxsmm DGLConfigSetLibxsmm",
        "heterograph": "DGLFindSrcDstNtypes",
        "utils.internal": "DGLGetOMPThreads DGLSetOMPThreads",
    },
    "DGL's index of the metagraph, which is on the CPU always": {
        "graph_index": """
            DGLDisjointPartitionByNum DGLDisjointPartitionBySizes DGLDisjointUnion
            DGLGetSubgraphWithHalo DGLGraphAddEdge DGLGraphAddEdges DGLGraphAddVertices
            DGLGraphCSRCreate DGLGraphCSRCreateMMap DGLGraphClear DGLGraphContext DGLGraphCreate
            DGLGraphCreateMutable DGLGraphEdgeId DGLGraphEdgeIds DGLGraphEdgeSubgraph
            DGLGraphEdges DGLGraphFindEdge DGLGraphFindEdges DGLGraphGetAdj DGLGraphHasEdgeBetween
            DGLGraphHasEdgesBetween DGLGraphHasVertex DGLGraphHasVertices DGLGraphInDegree
            DGLGraphInDegrees DGLGraphInEdges_1 DGLGraphInEdges_2 DGLGraphIsMultigraph
            DGLGraphIsReadonly DGLGraphLineGraph DGLGraphNumBits DGLGraphNumEdges
            DGLGraphNumVertices DGLGraphOutDegree DGLGraphOutDegrees DGLGraphOutEdges_1
            DGLGraphOutEdges_2 DGLGraphPredecessors DGLGraphSuccessors DGLGraphVertexSubgraph
            DGLImmutableGraphAsNumBits DGLImmutableGraphCopyTo DGLImmutableGraphCopyToSharedMem
            DGLMapSubgraphNID DGLSortAdj DGLSubgraphGetGraph DGLSubgraphGetInducedEdges
            DGLSubgraphGetInducedVertices DGLToImmutable GetHaloSubgraphInnerNodes
        """,
    },
    "reads or makes a C++ object, which graphs on a GPU do not have": {
        "heterograph_index": """
            DGLCreateHeteroPickleStates DGLCreateHeteroPickleStatesOld
            DGLHeteroCreateFromSharedMem DGLHeteroForkingUnpickle DGLHeteroPickleStatesGetArrays
            DGLHeteroPickleStatesGetArraysNum DGLHeteroPickleStatesGetMeta
            DGLHeteroPickleStatesGetVersion DGLHeteroSubgraphGetGraph
            DGLHeteroSubgraphGetInducedEdges DGLHeteroSubgraphGetInducedVertices DGLHeteroUnpickle
        """,
        "ndarray": """
            DGLCreateSparseMatrix DGLExistSharedMemArray DGLSparseMatrixGetFlags
            DGLSparseMatrixGetFormat DGLSparseMatrixGetIndices DGLSparseMatrixGetNumCols
            DGLSparseMatrixGetNumRows
        """,
    },
    "DistGNN's partitioning of vertices, on CPUs": {
        "sparse": """
            DGLLibra2dglBuildAdjlist DGLLibra2dglBuildDict DGLLibra2dglSetLR DGLLibraVertexCut
        """,
    },
}


def _entries() -> dict[str, Entry]:
    entries = {}
    for namespace, functions in _SERVED.items():
        for function, (implementation, what) in functions.items():
            how = {"reason": what} if implementation is Implementation.CPU else {"by": what}
            entries[f"{namespace}._CAPI_{function}"] = Entry(implementation, **how)
    for reason, namespaces in _NOT_SERVED.items():
        for namespace, text in namespaces.items():
            for function in text.split():
                entries[f"{namespace}._CAPI_{function}"] = Entry(
                    Implementation.NOT_APPLICABLE, reason=reason
                )
    return entries


#: All functions by name.
ENTRIES = _entries()


def find_entry(name: str) -> Entry:
    """The entry of a C function; one that a newer DGL adds goes through the CPU."""
    return ENTRIES.get(
        name, Entry(Implementation.CPU, reason="unknown to this version of dgl_mgpu")
    )
