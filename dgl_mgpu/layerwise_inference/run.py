"""Inference on all nodes: what users and validation call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from dgl import DGLGraph
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dgl_mgpu.distributed.graph import PartitionedGraph
from dgl_mgpu.errors import InvalidInputError, UnsupportedByPartitionError
from dgl_mgpu.layerwise_inference.group import InferenceGroup
from dgl_mgpu.layerwise_inference.plan import (
    InferencePlan,
    ProbeGraph,
    count_layers,
    eval_mode,
    widest_row_bytes,
)
from dgl_mgpu.layerwise_inference.rows import ASKED, Graph, Tree, as_columns, on_host
from dgl_mgpu.layerwise_inference.strategies import (
    AtOnce,
    LayerByLayer,
    checked_plan,
    unless_out_of_memory,
)
from dgl_mgpu.machine.shared_memory import free_host_bytes, free_shared_bytes
from dgl_mgpu.store.graph import StoreGraph
from dgl_mgpu.store.graph_structure import spread_over_machines


def inference(
    model: nn.Module,
    g: Graph,
    x: torch.Tensor | Mapping[str, torch.Tensor] | str | None = None,
    *,
    layerwise: bool | None = None,
    batch_size: int | None = None,
    num_layers: int | None = None,
    device: torch.device | str | None = None,
    folder: str | os.PathLike | None = None,
) -> Tree:
    """What a model for mini-batches gives for every node of a graph, from all neighbours.

    The model is called as in training, ``model(blocks, x)``, in eval mode and without gradients.
    At once, it is called one time, and every block is the whole graph.  Layer by layer, what each
    convolution gives is kept for all nodes in the host's memory: for one convolution after the
    other, the model is called for batches of nodes with a block of all their in-edges, the
    convolutions before it return what is kept, and the call ends with it.  So every convolution
    runs once for each node, whatever the model does between them.  Convolutions are the modules
    that are called with a block.  Out-degrees of blocks are those of the whole graph.

    On a partitioned graph, every rank calls it; the model is called at once, on the rank's part.
    On a store's graph, every rank of the job calls it too, with the same arguments: ranks take
    batches in turn, and those of a machine share what they keep.  Over machines (``span='job'``)
    each one infers the nodes that it owns, layer by layer, and asks the others for their
    neighbours' rows: it keeps those of its own nodes alone.  All have the same model; of its
    buffers, which may differ (a batch norm's means), the first rank's count, as in
    DistributedDataParallel.  With ``layerwise=False`` each rank does everything by itself, and may
    be the only one that calls it.

    Parameters
    ----------
    model : nn.Module
        Its modes (``training``) are as before when the call ends, however it ends.
    g : DGLGraph, PartitionedGraph or StoreGraph
        Blocks have its features, as in DGL's DataLoader.
    x : Tensor, shape (num_nodes, *row_shape), dict of Tensor or str, optional
        What the model takes besides the blocks: a row for each node, anywhere; on a heterogeneous
        graph a dict by node type, on any other it may be a dict by any name.  A str names the node
        feature of ``g``, or with ``dgl.NID`` the ids of nodes.  By default the features that
        ``model.inputs`` names, as a dict, for models that have this attribute, and 'feat' for
        others.
    layerwise : bool, optional
        By default, all is done at once if it is likely to fit in half of the free memory, if no
        ``batch_size`` is given, and if no other ranks share the work.
    batch_size : int, optional
        Nodes in a batch at most, all types together; by default as many as free memory is likely to
        take, fewer when a GPU's memory runs out, and some for every rank.
    num_layers : int, optional
        How many blocks the model takes; by default as many as it uses when it is offered more.
    device : torch.device, optional
        Where to compute; by default where the model's parameters are, where it has to be for a
        model that has any.
    folder : path, optional
        Where to keep results, also the final ones, in files without names, if the host's memory is
        too small for them; layer by layer only.

    Returns
    -------
    Tensor, or a dict, list or tuple of them, as the model returns it
        A row for each node; in the host's memory.  On a partitioned graph, a row for each of this
        rank's nodes (see :meth:`PartitionedGraph.gather`), on the rank's device.  On a store over
        machines, a row for each of the machine's nodes, ``g.own_nodes(ntype)``.

    Raises
    ------
    InvalidInputError
        If an argument is none of these, if the model takes one graph and not a list of blocks, if
        its layers cannot be counted, or if they cannot be computed one by one: a module that gets a
        block has to return a row for each of the block's destination nodes, and all message passing
        has to be in such modules.  Skip connections and what reads several layers' results (jumping
        knowledge) are no obstacle.  What the model itself raises, as torch does for rows of the
        wrong width, comes out as it is.
    UnsupportedByPartitionError
        If a partitioned graph is to be done layer by layer.
    UnsupportedByStoreError
        If a store over machines is to be done at once.
    DeviceMemoryError
        If a GPU's memory is too small for a batch of one node.
    OutputError
        If ``folder`` cannot be written, or is full, or shared memory is, where ranks share it.
    RankFailedError
        On the ranks that share the work with one that has raised any of these, or is gone.

    Notes
    -----
    Layer by layer, the host keeps the results of all convolutions that later ones still need:
    mostly two layers' at a time.  Rows are then fetched, and what is between convolutions is
    computed, once for each batch that has the node as a source; larger batches are faster.  A GPU
    reads rows of ``x`` in place where they are in pinned memory.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module  # ranks make different numbers of calls
    group = InferenceGroup()
    if isinstance(g, StoreGraph) and layerwise is not False:
        others = g._structure.others
        group = InferenceGroup.of_job(None if others is None else others.machines)
    run_all = partial(group.everyone.run_all, ASKED)  # what is wrong on one rank ends all

    def read() -> tuple[torch.device, Tree]:
        where = _device(model, g, device)
        columns = as_columns(g, _default_inputs(model) if x is None else x)
        _check(g, layerwise, batch_size, num_layers, folder)
        return where, columns

    def look() -> tuple[ProbeGraph, int]:
        pattern = ProbeGraph.of(g, columns, where)
        return pattern, num_layers or count_layers(model, pattern)

    where, columns = run_all(read)
    with eval_mode(model), torch.no_grad(), group.rank0_buffers(model):
        pattern, layers = run_all(look)
        at_once = AtOnce(model, g, columns, layers, where)
        if isinstance(g, PartitionedGraph):
            return at_once.run()
        if layerwise is None and batch_size is None and group.size == 1:
            layerwise = not at_once.fits(widest_row_bytes(model, pattern, layers))
            result = None if layerwise else unless_out_of_memory(at_once.run)
            if result is not None:
                return on_host(result)
        elif layerwise is False:
            return on_host(at_once.run())
        plan = run_all(lambda: checked_plan(model, pattern, layers))
        return LayerByLayer(model, g, columns, plan, where, batch_size, folder, group).run()


def _default_inputs(model: nn.Module) -> Sequence[str]:
    """Names of the node features a model wants, or the name of the only one."""
    names = getattr(model, "inputs", None)
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return names
    return "feat"


def _device(model: nn.Module, g: Graph, device: torch.device | str | None) -> torch.device:
    if not isinstance(model, nn.Module):
        raise InvalidInputError(
            ASKED, f"model is of type {type(model).__name__}, not an nn.Module", "pass an nn.Module"
        )
    if not isinstance(g, DGLGraph | StoreGraph):
        raise InvalidInputError(
            ASKED,
            f"g is of type {type(g).__name__}, not a graph",
            "pass a DGLGraph or a store's graph",
        )
    tensors = [*model.parameters(), *model.buffers()]
    own = tensors[0].device if tensors else g.device
    if device is None:
        return own
    requested = torch.device(device)
    if requested.type == "cuda" and requested.index is None:
        requested = torch.device("cuda", torch.cuda.current_device())
    if tensors and requested != own:
        raise InvalidInputError(
            f"{ASKED} on '{requested}'",
            f"the model's parameters are on '{own}'",
            f"move the model there with model.to('{requested}')",
        )
    return requested


def _check(
    g: Graph,
    layerwise: bool | None,
    batch_size: int | None,
    num_layers: int | None,
    folder: str | os.PathLike | None,
) -> None:
    if isinstance(g, StoreGraph) and g.spans_machines and layerwise is False:
        raise spread_over_machines("infer all nodes of a graph at once")
    if isinstance(g, PartitionedGraph) and (layerwise or batch_size is not None):
        raise UnsupportedByPartitionError(
            "infer a partitioned graph layer by layer",
            "its ranks exchange rows of whole layers",
            "leave layerwise and batch_size out, or pass the whole graph",
        )
    for name, value in (("batch_size", batch_size), ("num_layers", num_layers)):
        if value is not None and (type(value) is not int or value < 1):
            raise InvalidInputError(ASKED, f"{name} is {value!r}", "pass a positive integer")
    if layerwise is False and batch_size is not None:
        raise InvalidInputError(
            ASKED,
            f"batch_size={batch_size} is for layer-by-layer inference, and layerwise is False",
            "leave one of them out",
        )
    if folder is not None and not Path(folder).is_dir():
        raise InvalidInputError(
            ASKED, f"there is no folder '{folder}'", "create it, or name another one"
        )


class RepeatedInference:
    """``inference(model, g, inputs, layerwise=True)`` for validation: the layers are found once.

    Every rank of the job makes it and makes the same calls.  ``inputs`` names the node features
    that the model takes; the model is on ``device``.
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

        Under an autocast, it should be under the same one each time.  Raises as
        `dgl_mgpu.inference`.
        """
        model, everyone = self._model, self._group.everyone
        with eval_mode(model), torch.no_grad(), self._group.rank0_buffers(model):
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
