"""Graphs of IGBH's schema as data sets, in the host's memory."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from dgl_mgpu.data import blockmodel
from dgl_mgpu.data.csc import CSC
from dgl_mgpu.data.hetero import HeteroDataset
from dgl_mgpu.data.igbh import NODE_TYPES, IgbhSpec, generate_igbh
from dgl_mgpu.errors import ConfigError, nearest

NAME = "generated-igbh"
#: Shares of papers for training, validation and test, as of IGBH's.
_SPLIT = (0.6, 0.2, 0.2)


def load(name: str, root: Path, **parameters: float) -> HeteroDataset:
    """Generate a graph like IGBH in the host's memory, with float16 features.

    Parameters
    ----------
    name : str
        ``"generated-igbh"``.
    root : Path
        Not used.
    **parameters
        As of `named_spec`.

    Raises
    ------
    ConfigError
        A parameter is unknown or out of range.
    """
    spec = named_spec(**parameters)
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


def named_spec(**parameters: float) -> IgbhSpec:
    """Return what `load` generates for its options: fields of `IgbhSpec`.

    By default it has a ten-thousandth of IGBH's papers and the fewer of its two sets of classes.

    Raises
    ------
    ConfigError
        A parameter is unknown or out of range.
    """
    known = [field.name for field in fields(IgbhSpec)]
    for key in parameters:
        if key not in known:
            raise ConfigError(
                f"load {NAME} with option {key!r}", "there is no such option", nearest(key, known)
            )
    return IgbhSpec(**{"scale": 1e-4, "num_classes": 19, **parameters})  # type: ignore[arg-type]
