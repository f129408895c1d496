"""Attention against a composition of torch's own operations in float64, edge by edge."""

from __future__ import annotations

from typing import Any, NamedTuple

import dgl
import pytest
import torch
from torch import Tensor

import dgl_mgpu.ops.attention_cpu as cpu
from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.attention import AttentionOperands, AttentionScore, Entries, attention
from dgl_mgpu.ops.transpose import transpose
from tests.ops import reference

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INF = float("inf")
SLOPE, SCALE = 0.2, 0.3
#: Scores, and whether a dot product's left operands are the values.
KINDS = {
    "additive": ("additive", False),
    "dynamic": ("dynamic", False),
    "dot": ("dot", False),
    "dot of values": ("dot", True),
}
NAMES = ("values", "left", "right", "vector", "bias")
SUM = torch.ops.dgl_mgpu.attention.default
PRODUCTS = torch.ops.dgl_mgpu.attention_products.default
OF_DESTINATIONS = torch.ops.dgl_mgpu.attention_of_destinations.default
OF_SOURCES = torch.ops.dgl_mgpu.attention_of_sources.default


class Case(NamedTuple):
    """A graph, whose edges are numbered by ``eids``, and an attention's arguments."""

    entries: Entries
    src: Tensor
    dst: Tensor
    score: str
    arguments: dict[str, Tensor | None]

    def attend(self, arguments: dict[str, Tensor | None] | None = None, **others: Any) -> Tensor:
        values, left, right, vector, bias = (arguments or self.arguments)[name_of] = NAMES  # noqa
