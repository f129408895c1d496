"""Blocks of all in-edges, and blocks that know their layer."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import dgl
import torch
from dgl import DGLGraph, utils
from dgl.base import ALL, is_all
from dgl.dataloading import NeighborSampler
from dgl.heterograph import DGLBlock

from dgl_mgpu.graph.dispatch import TensorBacked
from dgl_mgpu.layerwise_inference.rows import Column, Graph
from dgl_mgpu.store.graph import StoreGraph
from dgl_mgpu.utils.types import CanonicalEtype


class LayerBlock(DGLBlock):
    """A block that knows which layer it is for, and the degrees of the whole graph.

    Made of existing blocks by `Blocks.for_layer`.
    """

    layer: int
    _blocks: Blocks

    def __getitem__(self, key: Any) -> LayerBlock:
        part = super().__getitem__(key)
        part.layer, part._blocks = self.layer, self._blocks
        return part

    def out_degrees(self, u: Any = ALL, etype: Any = None) -> Any:
        full = self.to_canonical_etype(etype)
        degrees = self._blocks.degrees("out", full, self.srcnodes[full[0]].data[dgl.NID])
        return degrees if is_all(u) else degrees[u]

    def in_degrees(self, v: Any = ALL, etype: Any = None) -> Any:
        full = self.to_canonical_etype(etype)
        self._blocks.asked_degrees.add(("in", full))
        if self.num_edges(full):
            return super().in_degrees(v, full)
        # Of a layer that has been done a block has no edges.
        degrees = self._blocks.degrees("in", full, self.dstnodes[full[2]].data[dgl.NID])
        return degrees if is_all(v) else degrees[v]


class Blocks:
    """Makes blocks of a graph, on the device that computes."""

    def __init__(self, g: Graph, device: torch.device) -> None:
        self.g = g
        self.device = device
        in_c = isinstance(g, DGLGraph) and not isinstance(g._graph, TensorBacked)
        pinned = in_c and device.type == "cuda" and g.is_pinned()
        # DGL's C++ would shuffle the in-edges it samples, which some convolutions do not like.
        self._sampler = None if in_c and not pinned else NeighborSampler([-1])
        #: Where node ids have to be.
        self._ids_device = device if pinned else g.device
        self._degrees: dict[tuple[str, CanonicalEtype], Column] = {}
        #: The degrees that blocks were asked for so far.
        self.asked_degrees: set[tuple[str, CanonicalEtype]] = set()

    def whole(self) -> DGLGraph:
        """A block of which all nodes are sources and destinations."""
        g = self.g
        counts = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
        if isinstance(g, StoreGraph):
            return self.of_in_edges({ntype: range(count) for ntype, count in counts.items()})
        block = dgl.create_block(
            {etype: ("csc", g.adj_tensors("csc", etype)) for etype in g.canonical_etypes},
            counts,
            counts,
            idtype=g.idtype,
            device=g.device,
        )
        for ntype in g.ntypes:
            for data in (block.srcnodes[ntype].data, block.dstnodes[ntype].data):
                data.update(g.nodes[ntype].data)
                data[dgl.NID] = g.nodes(ntype)
        for etype in g.canonical_etypes:
            data = block.edges[etype].data
            data.update(g.edges[etype].data)
            data[dgl.EID] = torch.arange(g.num_edges(etype), dtype=g.idtype, device=g.device)
        return block.to(self.device)

    def of_in_edges(self, ranges: Mapping[str, range]) -> DGLGraph:
        """A block of all in-edges of some nodes: a range of ids of each type."""
        seeds = {
            ntype: torch.arange(ids.start, ids.stop, dtype=self.g.idtype, device=self._ids_device)
            for ntype, ids in ranges.items()
        }
        if self._sampler is not None:
            _, _, [block] = self._sampler.sample_blocks(self.g, seeds)
        else:
            frontier = dgl.in_subgraph(self.g, seeds)
            block = dgl.to_block(frontier, seeds)
            for etype in self.g.canonical_etypes:
                block.edges[etype].data[dgl.EID] = frontier.edges[etype].data[dgl.EID]
        return block.to(self.device)

    def without_edges(self, ids: Mapping[str, torch.Tensor]) -> DGLGraph:
        """A block of some nodes, sources and destinations alike."""
        g = self.g
        ids = {ntype: nodes.to(self._ids_device) for ntype, nodes in ids.items()}
        counts = {ntype: len(nodes) for ntype, nodes in ids.items()}
        none = torch.empty(0, dtype=g.idtype, device=self._ids_device)
        block = dgl.create_block(
            dict.fromkeys(g.canonical_etypes, (none, none)),
            counts,
            counts,
            idtype=g.idtype,
            device=self._ids_device,
        )
        if isinstance(g, DGLGraph):
            by_type = [ids[ntype] for ntype in g.ntypes]
            utils.set_new_frames(
                block,
                node_frames=utils.extract_node_subframes_for_block(g, by_type, by_type),
                edge_frames=utils.extract_edge_subframes(g, [none] * len(g.canonical_etypes)),
            )
        else:
            for ntype, nodes in ids.items():
                block.srcnodes[ntype].data[dgl.NID] = nodes
                block.dstnodes[ntype].data[dgl.NID] = nodes
            for etype in g.canonical_etypes:
                block.edges[etype].data[dgl.EID] = none
            g.add_features_to_block(block)
        return block.to(self.device)

    def for_layer(self, block: DGLGraph, layer: int) -> LayerBlock:
        """A block that shares all with another one, and is for one layer."""
        layer_block = copy.copy(block)
        layer_block.__class__ = LayerBlock
        layer_block.layer, layer_block._blocks = layer, self
        return layer_block

    def degrees(self, way: str, etype: CanonicalEtype, ids: torch.Tensor) -> torch.Tensor:
        """In the whole graph, 'out' of source nodes or 'in' of destinations; dtype of ids."""
        self.asked_degrees.add((way, etype))
        if (way, etype) not in self._degrees:
            self.count_degrees([(way, etype)])
        return self._degrees[way, etype].take(ids)

    def count_degrees(self, ways: Iterable[tuple[str, CanonicalEtype]]) -> None:
        """Count degrees before they are asked for, as ranks do together over machines."""
        for way, etype in sorted(ways):
            ntype = etype[0] if way == "out" else etype[2]
            self._degrees[way, etype] = Column(ntype, self._count_degrees(way, etype))

    def _count_degrees(self, way: str, etype: CanonicalEtype) -> torch.Tensor:
        g, outgoing = self.g, way == "out"
        if isinstance(g, DGLGraph):
            return g.out_degrees(etype=etype) if outgoing else g.in_degrees(etype=etype)
        if g.spans_machines:
            return g.count_degrees(way, etype)
        size = g.num_nodes(etype[0] if outgoing else etype[2])
        counts = torch.zeros(size, dtype=g.idtype, device=self.device)
        num_dst = g.num_nodes(etype[2])
        step = max(1, num_dst * (1 << 24) // max(g.num_edges(), 1))
        for low in range(0, num_dst, step):
            high = min(low + step, num_dst)
            block = self.of_in_edges(
                dict.fromkeys(g.ntypes, range(0)) | {etype[2]: range(low, high)}
            )
            if outgoing:
                ends = block.srcnodes[etype[0]].data[dgl.NID][block.edges(etype=etype)[0].long()]
                counts.index_add_(0, ends.long(), torch.ones_like(ends))
            else:
                counts[low:high] = block.in_degrees(etype=etype)
        return counts
