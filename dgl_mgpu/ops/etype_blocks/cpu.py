"""All hops over edge types one after another, each by the operators for one hop."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dgl_mgpu.ops.etype_blocks.schema import (
    EdgeType,
    EdgeTypeArguments,
    Hops,
    at_moments,
    edge_types,
    num_nodes,
    sample_etype_hops_op,
)


@sample_etype_hops_op.cpu
def hop_by_hop(
    seeds: Sequence[torch.Tensor],
    moments: Sequence[torch.Tensor],
    until: torch.Tensor | None,
    etypes: EdgeTypeArguments,
    fanouts: Sequence[int],
    replace: bool,
    keys: Sequence[int],
    sms: int,
    ordered_from: Sequence[int],
) -> Hops:
    """``sample_etype_hops`` on the device of the seeds, whatever it is."""
    types, idtype = edge_types(etypes), etypes.idtype
    counts = num_nodes(types)
    # Nodes by type and their times, and what they are numbered by.
    nodes, ids = seeds, seeds
    if until is not None:
        ids = [at_moments(each, moments[n], counts[n]) for n, each in enumerate(seeds)]
    indptrs, sources, eids = [], [], []
    sizes = [[len(each) for each in ids]]
    draws = list(zip(fanouts, keys, strict=True))
    for hop in range(len(fanouts) // len(types)):
        neighbors = []
        for each, (fanout, key) in zip(types, draws[hop * len(types) :], strict=False):
            at = None if until is None else moments[each.target]
            sampled = _sample(
                each, nodes[each.target], at, until, idtype, fanout, replace, key, sms
            )
            neighbors.append(sampled[1])
            indptrs.append(sampled[0])
            eids.append(sampled[2])
        numbered: dict[int, torch.Tensor] = {}
        joined = list(ids)
        for ntype, known in enumerate(ids):
            mine = [n for n, each in enumerate(types) if each.source == ntype]
            if mine:
                found = [neighbors[n] for n in mine]
                all_found = found[0] if len(found) == 1 else torch.cat(found)
                joined[ntype], local = torch.ops.dgl_mgpu.append_unique.default(known, all_found)
                parts = local.to(idtype).split([len(each) for each in found])
                # What an operator returns must not share memory.
                parts = parts if len(found) == 1 else tuple(each.clone() for each in parts)
                numbered.update(zip(mine, parts, strict=True))
        sources += [numbered[n] for n in range(len(types))]
        nodes = ids = joined
        if until is not None:
            moments = [each // counts[n] for n, each in enumerate(ids)]
            nodes = [(each % counts[n]).to(idtype) for n, each in enumerate(ids)]
        sizes.append([len(each) for each in ids])
    # Nodes of a type that is no edge's source are the seeds themselves.
    ids = [each.clone() if any(each is seed for seed in seeds) else each for each in ids]
    return ids, indptrs, sources, eids, torch.tensor(sizes, device="cpu")


def _sample(
    of: EdgeType,
    nodes: torch.Tensor,
    moments: torch.Tensor | None,
    until: torch.Tensor | None,
    idtype: torch.dtype,
    fanout: int,
    replace: bool,
    key: int,
    sms: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One hop of an edge type; the neighbors are at the nodes' times."""
    draw = (fanout, replace, key, sms)
    if of.is_uniform:
        indptr, neighbors, eids = torch.ops.dgl_mgpu.sample_neighbors.default(
            nodes, *of.rows, idtype, *draw
        )
    else:
        weighting = of.weighting
        if until is not None and weighting.time_dtype is not None:
            weighting = weighting._replace(until=until[moments])
        indptr, neighbors, eids = torch.ops.dgl_mgpu.sample_neighbors_weighted.default(
            nodes, *of.rows, idtype, *weighting, *draw
        )
    if moments is not None:
        at = moments.repeat_interleave(indptr.diff(), output_size=len(neighbors))
        neighbors = neighbors + at * of.num_sources
    return indptr, neighbors, eids
