"""Inference of all nodes layer by layer, again and again while a model is trained."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from dgl_mgpu.layerwise_inference.group import InferenceGroup
from dgl_mgpu.layerwise_inference.modules import evaluating
from dgl_mgpu.layerwise_inference.plan import InferencePlan
from dgl_mgpu.layerwise_inference.probe_graph import ProbeGraph
from dgl_mgpu.layerwise_inference.rows import ASKED, Tree, as_columns
from dgl_mgpu.layerwise_inference.strategies import LayerByLayer, checked_plan
from dgl_mgpu.machine.shared_memory import free_host_bytes, free_shared_bytes
from dgl_mgpu.store.graph import StoreGraph


class RepeatedInference:
    """What ``inference(model, g, inputs, layerwise=True)`` gives, whose layers are found once.

    Every rank of the job makes it and makes the same calls.

    Parameters
    ----------
    model : nn.Module
    g : StoreGraph
    inputs : sequence of str
        Names of the node features that the model takes.
    num_layers : int
    device : torch.device
        Where the model is.
    """

    def __init__(
        self,
        model: nn.Module,
        g: StoreGraph,
        inputs: tuple[str, ...],
        num_layers: int,
        device: torch.device,
    ) -> None:
        self._model, self._g, self._device = model, g, device
        self._num_layers = num_layers
        self._columns = as_columns(g, inputs)
        self._group = InferenceGroup.of_job()
        self._plan: InferencePlan | None = None

    def __call__(self) -> Tree | None:
        """The model's result for all nodes; None if half of the free memory is too small for it.

        Under an autocast, it should be under the same one each time.

        Raises
        ------
        DGLMGPUError
            As :func:`dgl_mgpu.inference`.
        """
        model, everyone = self._model, self._group.everyone
        with evaluating(model), torch.no_grad(), self._group.first_ones_buffers(model):
            plan = everyone.run_all(ASKED, self._planned)
            counts = {ntype: self._g.num_nodes(ntype) for ntype in self._g.ntypes}
            fits = plan.peak_bytes(counts) <= self._free_bytes() // 2
            if not all(everyone.all_gather(fits)):
                return None
            run = partial(LayerByLayer, model, self._g, self._columns, plan, self._device)
            return run(None, None, self._group).run()

    def _planned(self) -> InferencePlan:
        if self._plan is None:
            pattern = ProbeGraph.of(self._g, self._columns, self._device)
            self._plan = checked_plan(self._model, pattern, self._num_layers)
        return self._plan

    def _free_bytes(self) -> int:
        """Where layers' rows would be kept."""
        if self._group.machine.size == 1:
            return free_host_bytes()
        return min(free_host_bytes(), free_shared_bytes())
