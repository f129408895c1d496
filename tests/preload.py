"""What a process imports once, so that those forked from it need not."""

from __future__ import annotations

import pytest  # noqa: F401
import torch._dynamo
import torch.utils.tensorboard  # noqa: F401
from numba.core.registry import cpu_target

import dgl_mgpu.train.fullgraph.run
import dgl_mgpu.train.minibatch.run  # noqa: F401

# Else the first kernel of every process does so.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
