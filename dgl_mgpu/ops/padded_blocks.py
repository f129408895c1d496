"""All hops of a mini-batch without any wait for their sizes: the contract, and the CPU version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.blocks import check_one_node_type, hop_by_hop
from dgl_mgpu.ops.check import check_integer
from dgl_mgpu.ops.edges import HopsOptions, to_idtype
from dgl_mgpu.ops.library import Operator
from dgl_mgpu.ops.philox import SampleKey
from dgl_mgpu.ops.view import GraphView, TieredGraph, tiered_graph

_ACTION = "sample padded blocks"
#: As many hops as the kernel has parameters for, and edges that its 32-bit numbers can count.
MAX_HOPS, _MAX_EDGES = 6, 1 << 28

# The hops' `indptr`, `sources` and `eids` one after another, each in a buffer of its largest size
# (`max_sizes`). `counts` has two numbers of no meaning and then edges and nodes of each hop.
#: What the operator returns.
PaddedHops = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def max_sizes(count: int, fanouts: Sequence[int], num_cols: int) -> tuple[list[int], list[int]]:
    """The most nodes known before each hop and after the last, and the most edges of each hop."""
    nodes, edges = [count], []
    for fanout in fanouts:
        edges.append(nodes[-1] * fanout)
        nodes.append(min(nodes[-1] + edges[-1], count + num_cols))
    return nodes, edges


@Operator
def sample_hops_padded_op(seeds: Tensor, graph: TieredGraph, options: HopsOptions) -> PaddedHops:
    idtype, fanouts = graph.idtype, options.fanouts
    nodes, edges = max_sizes(seeds.shape[0], fanouts, graph.num_cols)
    return (
        seeds.new_empty(nodes[-1], dtype=idtype),
        seeds.new_empty(sum(nodes[:-1]) + len(fanouts), dtype=idtype),
        seeds.new_empty(sum(edges), dtype=idtype),
        seeds.new_empty(sum(edges), dtype=idtype),
        seeds.new_empty(2 + 2 * len(fanouts), dtype=torch.int64),
    )


@sample_hops_padded_op.cpu
def _sample_hops_padded(seeds: Tensor, graph: TieredGraph, options: HopsOptions) -> PaddedHops:
    nodes, indptrs, sources, eids = hop_by_hop(seeds, *graph, *options)
    max_nodes, max_edges = max_sizes(len(seeds), options.fanouts, graph.num_cols)
    counts = [-1, -1]
    for hop, vector in enumerate(sources):
        after = indptrs[hop + 1] if hop + 1 < len(indptrs) else None
        counts += [len(vector), len(nodes) if after is None else len(after) - 1]
    return (
        _padded([nodes], max_nodes[-1:]),
        torch.cat(
            [
                torch.cat([indptr, indptr[-1:].expand(most + 1 - len(indptr))])
                for indptr, most in zip(indptrs, max_nodes[:-1], strict=True)
            ]
        ),
        _padded(sources, max_edges),
        _padded(eids, max_edges),
        torch.tensor(counts),
    )


def _padded(vectors: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    return torch.cat(
        [
            torch.nn.functional.pad(vector, (0, most - len(vector)))
            for vector, most in zip(vectors, lengths, strict=True)
        ]
    )


class PaddedBlock(NamedTuple):
    """A message-flow graph in buffers for the largest that its fanouts allow.

    What is beyond the counts may be used as an index: it is 0, but in ``src_nodes`` the nodes that
    the blocks before it add come first.  Destination nodes beyond have no edges.

    Attributes
    ----------
    indptr : Tensor, the graph's idtype, shape (max_dst + 1,)
        Destination node ``i`` has the edges ``indptr[i]`` to ``indptr[i + 1]``; ``num_edges`` from
        ``indptr[num_dst]`` on.
    src : Tensor, the graph's idtype, shape (max_edges,)
        Source of each edge, as an index into ``src_nodes``.
    eids : Tensor, the graph's idtype, shape (max_edges,)
        Edge ids in the whole graph.
    src_nodes : Tensor, the graph's idtype, shape (max_src,)
        Ids of the source nodes; the first ``num_dst`` are the destination nodes.
    num_dst, num_src, num_edges : Tensor, int64, shape ()
        How many of them there are, on the graph's device.
    """

    indptr: Tensor
    src: Tensor
    eids: Tensor
    src_nodes: Tensor
    num_dst: Tensor
    num_src: Tensor
    num_edges: Tensor


def sample_padded_blocks(
    view: GraphView,
    seeds: Tensor,
    fanouts: Sequence[int],
    key: SampleKey,
    *,
    replace: bool = False,
    sms: int = 0,
) -> list[PaddedBlock]:
    """Sample uniformly as :func:`dgl_mgpu.ops.sample_blocks` does, without waiting for the GPU.

    Shapes depend on the number of seeds, the fanouts and the number of nodes alone.  Of the last
    layer ``max_dst`` is the number of seeds; of each, ``max_edges`` is ``max_dst * fanout``, and
    ``max_src``, the ``max_dst`` of the layer before it, is the sum of both, but no more than
    ``len(seeds) + view.num_cols``.

    Parameters
    ----------
    view, seeds, key, replace, sms
        As in :func:`dgl_mgpu.ops.sample_blocks`.
    fanouts : sequence of int
        Edges per node for each layer, the one nearest the input first; at most 6, none of them
        negative, and together no more than 2**28 edges.

    Returns
    -------
    list of PaddedBlock
        In the order of ``fanouts``.

    Raises
    ------
    InvalidInputError
        If there is no bound to the number of edges, or a too large one; else as
        :func:`dgl_mgpu.ops.sample_blocks`.
    IdOutOfRangeError
        On a CPU, if a seed is not a node.  On a GPU it has no edges, and the next operator call on
        that GPU raises the error.

    Notes
    -----
    It takes its memory from torch, none from what operators keep, so that a CUDA graph may capture
    it after a first call.  The graph samples with the key of the capture.
    """
    check_one_node_type(view, _ACTION)
    seeds = to_idtype(seeds, view, view.num_rows)
    sms = check_integer(sms, "sms", 0, _ACTION) or view.sms
    hops = [check_integer(fanout, "fanout", 0, _ACTION) for fanout in reversed(fanouts)]
    max_nodes, max_edges = max_sizes(len(seeds), hops, view.num_cols)
    if len(hops) > MAX_HOPS or sum(max_edges) > _MAX_EDGES:
        raise InvalidInputError(
            _ACTION,
            f"{len(hops)} hops may have {sum(max_edges)} edges",
            f"sample at most {MAX_HOPS} hops and {_MAX_EDGES} edges, or use sample_blocks",
        )
    if not hops:
        return []
    nodes, indptr, sources, eids, counts = torch.ops.dgl_mgpu.sample_hops_padded.default(
        seeds, *tiered_graph(view), hops, replace, key.fold_hops(len(hops)), sms
    )
    known = [counts.new_full((), len(seeds)), *counts[3::2].unbind()]
    starts = indptr.split_with_sizes([most + 1 for most in max_nodes[:-1]])
    by_hop = zip(
        starts,
        sources.split_with_sizes(max_edges),
        eids.split_with_sizes(max_edges),
        [nodes[:most] for most in max_nodes[1:]],
        known[:-1],
        known[1:],
        counts[2::2].unbind(),
        strict=True,
    )
    return [PaddedBlock(*hop) for hop in by_hop][::-1]
