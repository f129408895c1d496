"""What R-GAT and its mini-batches are checked against: the graph itself, and DGL's own modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip
from dgl.nn import GATConv, HeteroGraphConv  # isort: skip

from benchmarks.rgat_training import Blocks
from dgl_mgpu.data.igbh import NODE_TYPES, Igbh
from dgl_mgpu.models.rgat import RGAT

#: Most that logits in mixed precision may be off, of their norm.
MIXED_ERROR = 0.03
#: Rows of a node type that are compared.
ROWS_CHECKED = 1 << 16


class DglRGAT(torch.nn.Module):
    """R-GAT of DGL's modules, as MLPerf's."""

    def __init__(
        self,
        canonical_etypes: Sequence[tuple[str, str, str]],
        width: int,
        num_classes: int,
        hidden: int,
        num_layers: int,
        num_heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        widths = [width, *[hidden] * (num_layers - 1)]
        self.layers = torch.nn.ModuleList(
            HeteroGraphConv(
                {
                    etype: GATConv(given, hidden // num_heads, num_heads, allow_zero_in_degree=True)
                    for etype in canonical_etypes
                }
            )
            for given in widths
        )
        self.linear = torch.nn.Linear(hidden, num_classes)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, blocks: Blocks, rows: torch.Tensor) -> torch.Tensor:
        """Logits of the seeds."""
        counts = [blocks[0].num_src_nodes(ntype) for ntype in NODE_TYPES]
        hidden = dict(zip(NODE_TYPES, rows.split(counts), strict=True))
        for layer, block in zip(self.layers, blocks, strict=True):
            hidden = {ntype: each.flatten(1) for ntype, each in layer(block, hidden).items()}
            if layer is not self.layers[-1]:
                hidden = {
                    ntype: self.dropout(functional.leaky_relu(each))
                    for ntype, each in hidden.items()
                }
        return self.linear(hidden["paper"])


def require_samples(data: Igbh, blocks: Blocks, fanouts: Sequence[int]) -> None:
    """Raise ValueError unless blocks are samples of the graph; fanouts are from the seeds on."""
    for block, fanout in zip(reversed(blocks), fanouts, strict=True):
        for etype, (indptr, indices) in data.edges.items():
            wrong = _wrong(block, etype, indptr, indices, fanout)
            if wrong:
                raise ValueError(f"{etype}, fanout {fanout}: wrong {wrong}")


def _wrong(
    block: dgl.DGLGraph,
    etype: tuple[str, str, str],
    indptr: torch.Tensor,
    indices: torch.Tensor,
    fanout: int,
) -> str:
    """What is wrong with a relation's sample without replacement, if anything is."""
    bounds, sources, _ = block.adj_tensors("csc", etype)
    dst = block.dstnodes[etype[2]].data[dgl.NID].long()
    src = block.srcnodes[etype[0]].data[dgl.NID]
    eids = block.edges[etype].data[dgl.EID].long()
    sizes = bounds.long().diff()
    first, degrees = indptr[dst].long(), (indptr[dst + 1] - indptr[dst]).long()
    if not torch.equal(sizes, degrees.clamp(max=fanout)):
        return "number of edges"
    row = torch.repeat_interleave(sizes)
    within = eids - first[row]
    if not ((within >= 0) & (within < degrees[row])).all() or len(eids.unique()) != len(eids):
        return "edge ids"
    if not torch.equal(indices[eids], src[sources.long()]):
        return "sources"
    return ""


def require_rows(data: Igbh, blocks: Blocks, rows: torch.Tensor) -> None:
    """Raise ValueError unless rows, which are cast, and labels are those of a batch's nodes."""
    for ntype in NODE_TYPES:
        ids = blocks[0].srcnodes[ntype].data[dgl.NID].long()
        found, rows = rows[: len(ids)], rows[len(ids) :]
        # As bytes: not all indexing operators know float8.
        features = data.features_of(ntype)
        stored = features.view(torch.uint8)[ids[:ROWS_CHECKED]].view(features.dtype)
        if not torch.equal(found[:ROWS_CHECKED], stored.to(rows.dtype)):
            raise ValueError(f"wrong rows of type {ntype}")
    labels = blocks[-1].dstnodes["paper"].data
    if not torch.equal(labels["label"], data.labels[labels[dgl.NID].long()]):
        raise ValueError("wrong labels")


def require_same(ours: RGAT, theirs: DglRGAT, blocks: Blocks, rows: torch.Tensor) -> torch.Tensor:
    """Raise AssertionError unless both models have the same logits and gradients in float64.

    Our model takes over the other one's parameters.  Returns the other one's logits.
    """
    theirs.double().eval()
    ours.double().eval()
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        mine.copy_from({each: other.mods[str(each)] for each in mine.canonical_etypes})
    ours.linear.load_state_dict(theirs.linear.state_dict())
    found, expected = ours(blocks, rows), theirs(blocks, rows)
    torch.testing.assert_close(found, expected)
    for logits in (found, expected):
        logits.square().sum().backward()
    for parameter in theirs.parameters():  # of relations that lead to no seeds
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        for relation, etype in enumerate(mine.canonical_etypes):
            conv = other.mods[str(etype)]
            attention = torch.cat([conv.attn_l.grad, conv.attn_r.grad]).transpose(0, 1)
            for grad, wanted in (
                (mine.weight.grad, conv.fc.weight.grad),
                (mine.attention.grad, attention),
                (mine.bias.grad, conv.bias.grad),
            ):
                torch.testing.assert_close(grad[relation].flatten(), wanted.flatten())
    return expected.detach()


@torch.no_grad()
def require_near(
    model: RGAT, dtype: torch.dtype, blocks: Blocks, rows: torch.Tensor, expected: torch.Tensor
) -> None:
    """Raise ValueError unless a model's logits in mixed precision are near those expected."""
    with torch.autocast(rows.device.type, dtype):
        mixed = model.float()(blocks, rows.float())
    error = float((mixed - expected).norm() / expected.norm())
    if not error < MIXED_ERROR:
        raise ValueError(f"logits in {dtype} are off by {error:.2g} of their norm")
