"""What a GCN remembers of the graph and the input that it was called with last."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from dgl import DGLGraph

from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.distributed.host_features import HostRows
from dgl_mgpu.graph.distributed import DistributedGraphIndex
from dgl_mgpu.graph.errors import InvalidCallError
from dgl_mgpu.models.gcn.passes import Passes


class Known:
    """What a model has found out about the graph and the input that it was called with last."""

    def __init__(self) -> None:
        self._of_graph: tuple[Any, ...] = (_nothing,)
        self._scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self._of_input: tuple[Any, ...] = (_nothing,)
        self._sums: torch.Tensor | HostRows | None = None

    def __reduce__(self) -> tuple[type[Known], tuple[()]]:
        return type(self), ()  # a copy of the model finds out by itself

    def scales(
        self, g: DGLGraph, norm: str, dtype: torch.dtype, allow_zero_in_degree: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What sources' and what destinations' rows are multiplied with, shape (num_nodes, 1)."""
        asked = norm, dtype, allow_zero_in_degree
        known, *about = self._of_graph
        if known() is not g._graph or tuple(about) != asked:
            if not allow_zero_in_degree:
                _require_in_edges(g)
            precise = torch.promote_types(dtype, torch.float32)
            power = -0.5 if norm == "both" else -1.0
            left, right = (
                degrees().to(precise).clamp(min=1).pow(power).unsqueeze(1) if is_asked else None
                for degrees, is_asked in (
                    (g.out_degrees, norm in ("both", "left")),
                    (g.in_degrees, norm in ("both", "right")),
                )
            )
            self._of_graph, self._scales = (weakref.ref(g._graph), *asked), (left, right)
            self._of_input, self._sums = (_nothing,), None
        return self._scales

    def with_input_sums(self, passes: Passes, x: torch.Tensor | HostRows) -> Passes:
        """The passes, with sums of the input; the graph is the one that scales were asked of.

        They are kept where the input is.
        """
        version = 0 if isinstance(x, HostRows) else x._version
        known, *known_version = self._of_input
        if known() is not x or known_version != [version]:
            self._of_input, self._sums = (_nothing,), None
            with torch.no_grad():
                sums = passes.normalised_sums(0, passes.converted(x))
                self._sums = sums.kept() if isinstance(sums, HostRows) else sums
            self._of_input = weakref.ref(x), version
        assert self._sums is not None
        return passes.with_input_sums(self._sums)


def _nothing() -> None:
    """A reference to what is not there."""


def _require_in_edges(g: DGLGraph) -> None:
    def check() -> None:
        if (g.in_degrees() == 0).any():
            raise InvalidCallError(
                "run a GCN",
                "some nodes have no in-edges, and nothing but the bias would be left of them",
                "add self-loops (dgl.add_self_loop), or pass allow_zero_in_degree=True",
            )

    if isinstance(g._graph, DistributedGraphIndex):
        Communicator.of_all_machines().run_all("run a GCN", check)
    else:
        check()
