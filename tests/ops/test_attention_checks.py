"""What attention takes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.ops.attention import Entries, attention
from dgl_mgpu.ops.transpose import transpose
from tests.ops.attention_cases import KINDS, attend, case_of, leaves_of, small_graph


def test_edges_by_source_of_other_sources_are_refused():
    case = case_of("dot", small_graph())
    by_source = transpose(*case.graph.entries, case.graph.num_src + 3)
    out = attend(case, leaves_of(case.arguments), by_source=lambda: by_source)
    with pytest.raises(InvalidInputError, match="indptr of 26 rows, and there are 23"):
        out.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_derivative_is_refused(kind):
    case = case_of(kind, small_graph())
    for name in case.arguments:
        leaves = leaves_of(case.arguments)
        out = attend(case, leaves)
        (gradient,) = torch.autograd.grad(out.square().sum(), leaves[name], create_graph=True)
        with pytest.raises(InvalidInputError, match="differentiate attention twice"):
            gradient.sum().backward()


FLOATS = torch.zeros(3, 2, 4)
INDPTR, INDICES = torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1])
GOOD: dict[str, Any] = {
    "indptr": INDPTR,
    "indices": INDICES,
    "eids": None,
    "values": FLOATS,
    "left": None,
    "right": FLOATS[:2],
    "score": "dot",
    "vector": None,
    "bias": None,
    "dropout": 0.0,
}
ADDITIVE = {"score": "additive", "left": torch.zeros(3, 2), "right": torch.zeros(2, 2)}
GATV2 = {"score": "gatv2", "vector": torch.zeros(2, 4)}


def attend_to(arguments: dict[str, Any]) -> Tensor:
    given = GOOD | arguments
    entries = Entries(*(given.pop(name) for name in ("indptr", "indices", "eids")))
    return attention(*entries, given.pop("values"), given.pop("left"), given.pop("right"), **given)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"left": FLOATS}, {"eids": INDICES, "bias": torch.ones(2, 4)}, ADDITIVE, GATV2]
    + [{"edge_scores": torch.zeros(3, 1), "edge_weights": torch.zeros(3, 2)}]
    + [{"eids": INDICES, "edge_weights": torch.zeros(7, 2)}]
    + [ADDITIVE | {"values": FLOATS.to(dtype)} for dtype in (torch.float16, torch.bfloat16)],
)
def test_what_fits(arguments):
    assert attend_to(arguments).shape == (2, 2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"score": "cosine"}, "compute 'cosine' attention: there is no such score"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"dropout": float("nan")}, "dropout is nan"),
        ({"values": FLOATS.long()}, r"values has shape \(3, 2, 4\) and dtype torch.int64"),
        ({"values": FLOATS[0]}, r"values has shape \(2, 4\)"),
        ({"indptr": INDPTR.float()}, "indptr has shape .* and dtype torch.float32"),
        ({"indptr": INDPTR.view(1, 3)}, r"indptr has shape \(1, 3\)"),
        ({"indptr": INDPTR[:0]}, r"indptr has shape \(0,\)"),
        ({"indptr": INDPTR.to("meta")}, "indptr has shape .* on 'meta'"),
        ({"indices": INDICES.int()}, "indices has shape .* and dtype torch.int32"),
        ({"indices": INDICES.view(1, 3)}, r"indices has shape \(1, 3\)"),
        ({"indices": INDICES.to("meta")}, "indices has shape .* on 'meta'"),
        ({"eids": INDICES.int()}, "eids has shape .* and dtype torch.int32"),
        ({"eids": INDICES[:2]}, r"eids has shape \(2,\)"),
        (ADDITIVE | {"left": None}, "left is None"),
        (GATV2 | {"left": FLOATS}, "left is given"),
        (GATV2 | {"vector": None}, "vector is None"),
        ({"vector": torch.zeros(2, 4)}, "vector is given"),
        (ADDITIVE | {"vector": torch.zeros(2, 4)}, "vector is given"),
        ({"left": FLOATS[:2]}, r"left has shape \(2, 2, 4\)"),
        ({"left": FLOATS.double()}, "left has shape .* and dtype torch.float64"),
        (ADDITIVE | {"left": FLOATS}, r"left has shape \(3, 2, 4\)"),
        (ADDITIVE | {"left": torch.zeros(3, 2).half()}, "left has .* dtype torch.float16"),
        (
            ADDITIVE | {"values": FLOATS.half(), "left": torch.zeros(3, 2).half()},
            "left has .* dtype torch.float16",
        ),
        ({"right": FLOATS}, r"right has shape \(3, 2, 4\)"),
        (ADDITIVE | {"right": None}, "right is None"),
        (
            {"right": None, "values": FLOATS[:1], "indices": torch.zeros(3).long()},
            "there are 2 destinations and 1 sources",
        ),
        ({"right": FLOATS[:2].half()}, "right has shape .* and dtype torch.float16"),
        (ADDITIVE | {"right": torch.zeros(2, 1)}, r"right has shape \(2, 1\)"),
        ({"right": FLOATS[:2].to("meta")}, "right has shape .* on 'meta'"),
        (GATV2 | {"vector": torch.zeros(1, 2, 4)}, r"vector has shape \(1, 2, 4\)"),
        (GATV2 | {"vector": torch.zeros(2, 4).half()}, "vector has .* dtype torch.float16"),
        ({"edge_scores": torch.zeros(3)}, r"edge_scores has shape \(3,\)"),
        ({"edge_scores": torch.zeros(2, 2)}, r"edge_scores has shape \(2, 2\)"),
        ({"edge_scores": torch.zeros(4, 2)}, r"edge_scores has shape \(4, 2\)"),
        ({"edge_weights": torch.zeros(3, 3)}, r"edge_weights has shape \(3, 3\)"),
        ({"edge_weights": torch.zeros(3, 2).half()}, "edge_weights has .* dtype torch.float16"),
        ({"edge_weights": torch.zeros(3, 2, device="meta")}, "edge_weights has .* on 'meta'"),
        ({"edge_weights": torch.zeros(2, 2), "eids": INDICES}, r"edge_weights has shape \(2, 2\)"),
        ({"bias": torch.zeros(8)}, r"bias has shape \(8,\)"),
        ({"bias": torch.zeros(2, 4).double()}, "bias has shape .* and dtype torch.float64"),
    ],
)
def test_what_does_not_fit(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        attend_to(arguments)
