"""Captures the models of a script as it calls them with mini-batches of DGL's loaders."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from dgl.heterograph import DGLGraph
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from dgl_mgpu.capture.call import first_block, thread
from dgl_mgpu.capture.cuda_graph import captures
from dgl_mgpu.capture.model import CapturedModel
from dgl_mgpu.sampling.async_blocks import prepare_gradients

#: Call their module themselves, which is what is captured.
_WRAPPERS = (DistributedDataParallel, DataParallel)

_models: WeakKeyDictionary[nn.Module, CapturedModel] = WeakKeyDictionary()
_torchs_call = nn.Module.__call__


def capture_models(on: bool = True) -> None:
    """Capture models as CUDA graphs from here on, or stop doing so.

    A model on a GPU that is called with the blocks of mini-batches, ``model(blocks, x)``, runs its
    forward and backward pass by two CUDA graphs, over padded copies of its arguments.  Loss,
    optimizer and everything else of the training loop stay as they are.  The first calls of a kind
    are eager; then two graphs are captured, and used if outputs and gradients are those of the
    eager passes, which is checked again from time to time.  A call is eager, too, if the mini-batch
    does not fit, or while a backward pass of the call before may still come.  If the model is
    changed in between, it is captured again.  What cannot be captured runs as always, with one
    warning that says why; then modules in it are captured that can be.

    Dropout draws other numbers than without capture, the same ones in every run with the same seed.
    On a CPU nothing happens.  ``python -m dgl_mgpu --capture=on SCRIPT`` calls this for a script.

    Parameters
    ----------
    on : bool

    Notes
    -----
    CUDA graphs are those of ``torch.cuda.CUDAGraph``.  They are freed with their model.
    """
    nn.Module.__call__ = _call if on else _torchs_call  # type: ignore[method-assign]
    if not on:
        _models.clear()
        prepare_gradients(True)


def _call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """In place of ``nn.Module.__call__``."""
    if thread.is_inside:
        if thread.flags is not None and getattr(self, "_allow_zero_in_degree", True) is False:
            return _noting_in_degrees(self, args, kwargs)
        return _torchs_call(self, *args, **kwargs)
    block = first_block(args) or (first_block(kwargs.values()) if kwargs else None)
    if (
        block is None
        or not captures(block.device)
        or isinstance(self, _WRAPPERS)
        or _is_in_the_way()
    ):
        return _torchs_call(self, *args, **kwargs)
    model = _models.get(self)
    if model is None:
        model = _models[self] = CapturedModel(type(self).__name__)
    return model(self, args, kwargs)


def _is_in_the_way() -> bool:
    """Whether whoever calls models now wants to see each operation."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or (torch.cuda.is_initialized() and torch._C._cuda_isCurrentStreamCapturing())
        or not all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
    )


def _noting_in_degrees(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a convolution of DGL's that asks whether nodes lack in-edges, and note the answer."""
    graph = next((each for each in (*args, *kwargs.values()) if isinstance(each, DGLGraph)), None)
    assert thread.flags is not None
    if graph is not None:
        thread.flags.append((graph.in_degrees() == 0).any())
    module._allow_zero_in_degree = True
    try:
        return _torchs_call(module, *args, **kwargs)
    finally:
        module._allow_zero_in_degree = False
