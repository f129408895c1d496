"""Graphs of IGBH's schema as data sets, in the host's memory."""

from __future__ import annotations

from pathlib import Path

import torch

from . import blockmodel
from .csc import CSC
from .hetero import HeteroDataset
from .igbh import NODE_TYPES, IgbhSpec, generate_igbh

NAME = "generated-igbh"
#: Shares of papers for training, validation and test, as of IGBH's.
_SPLIT = (0.6, 0.2, 0.2)


def load(
    name: str,
    root: Path,
    *,
    scale: float = 1e-4,
    num_classes: int = 19,
    num_features: int = 1024,
    homophily: float = IgbhSpec.homophily,
    signal: float = IgbhSpec.signal,
    seed: int = IgbhSpec.seed,
) -> HeteroDataset:
    """Generate a graph like IGBH in the host's memory, with float16 features.

    Parameters
    ----------
    name : str
        ``"generated-igbh"``.
    root : Path
        Not used.
    scale, num_classes, num_features, homophily, signal, seed
        See `IgbhSpec`; IGBH has labels of 19 and of 2,983 classes.

    Raises
    ------
    ConfigError
        If a value is out of its range.
    """
    spec = IgbhSpec(scale, num_classes, num_features, homophily, signal, seed)
    narrow = spec.most_ids <= torch.iinfo(torch.int32).max
    graph = generate_igbh(spec, idtype=torch.int32 if narrow else torch.int64)
    train, valid, test = blockmodel.split(spec.num_nodes["paper"], _SPLIT, spec.seed)
    return HeteroDataset(
        name=NAME,
        num_nodes=graph.num_nodes,
        edges={
            etype: CSC(indptr.long().numpy(), indices.numpy(), None)
            for etype, (indptr, indices) in graph.edges.items()
        },
        target="paper",
        num_classes=spec.num_classes,
        labels=graph.labels.numpy(),
        train=train,
        valid=valid,
        test=test,
        node_features={ntype: {"feat": graph.features_of(ntype)} for ntype in NODE_TYPES},
        description=f"generated, not real data, after IGBH's schema and size: {spec}",
        checked=True,
    )
