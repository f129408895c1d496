"""Dropout of attention: which edges are dropped is a function of their numbers and the seed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgl_mgpu.ops.attention import Entries
from dgl_mgpu.ops.philox import ATTENTION_STREAM
from dgl_mgpu.ops.transpose import transpose
from tests.ops import reference
from tests.ops.attention_cases import (
    KINDS,
    NAMES,
    SCALE,
    SLOPE,
    attend,
    case_of,
    compare,
    composed,
    graph_of,
    small_graph,
    sum_op,
)


def keep_of(numbers: Tensor, heads: int, key: int, dropout: float) -> Tensor:
    """What edges' weights are multiplied by, in plain integers."""
    threshold = int(dropout * 2**32)
    rows = []
    for number in numbers.tolist():
        words: list[int] = []
        for block in range(-(-heads // 4)):
            for draw in reference.block(number, block, ATTENTION_STREAM, key):
                words += [draw & reference.MASK32, draw >> 32]
        rows.append([0.0 if word < threshold else 1 / (1 - dropout) for word in words[:heads]])
    return torch.tensor(rows, dtype=torch.float64).view(len(rows), heads)


def drawn_key(seed: int) -> int:
    torch.manual_seed(seed)
    return int(torch.empty(1, dtype=torch.int64).random_())


@pytest.mark.parametrize("heads", [1, 4, 5, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_by_the_edges_numbers(kind, heads):
    for dropout, eids, dtype in (
        (0.4, False, torch.float64),
        (0.9, True, torch.float64),
        (0.25, True, torch.float32),
    ):
        case = case_of(kind, small_graph(eids=eids), heads, 3, dtype)
        keep = keep_of(torch.arange(250), heads, drawn_key(7), dropout)
        compare(case, keep, seed=7, dropout=dropout)


@pytest.mark.parametrize("kind", KINDS[:4])
def test_dropout_of_large_edge_numbers(kind):
    """Both halves of an edge's number count, as do both of a negative key."""
    case = case_of(kind, small_graph(eids=False))
    numbers = torch.randint(0, 1 << 62, (250,))
    numbers[1], numbers[2] = numbers[0] ^ 1 << 32, numbers[0] ^ 1
    indptr, indices, _ = case.graph.entries
    by_source = transpose(indptr, indices, None, case.graph.num_src)
    case = case._replace(graph=case.graph._replace(entries=Entries(indptr, indices, numbers)))
    keep = keep_of(numbers, 2, drawn_key(3), 0.5)
    assert not torch.equal(keep[0], keep[1]) or not torch.equal(keep[0], keep[2])

    def rows() -> Entries:
        return Entries(*by_source[:2], numbers[by_source[2]])

    compare(case, keep, seed=3, dropout=0.5, by_source=rows)
    key = -(1 << 63) + 12345
    given = map(case.arguments.get, NAMES)
    tensors = (indptr, indices, numbers, *given, None, torch.tensor([key]), None)
    out, _ = sum_op(*tensors, case.score, SLOPE, SCALE, 0.5)
    del case.arguments["bias"]
    torch.testing.assert_close(out, composed(case, case.arguments, keep_of(numbers, 2, key, 0.5)))


def test_a_word_at_the_threshold_is_kept():
    graph = graph_of(torch.zeros(5).long(), torch.arange(5), 1, 5, eids=False)
    case = case_of("additive", graph, 1, 1, bias=False)
    words = [reference.block(edge, 0, ATTENTION_STREAM, drawn_key(4))[0] for edge in range(5)]
    words = [word & reference.MASK32 for word in words]
    for edge, word in enumerate(words):
        dropout = word / 2**32
        keep = keep_of(torch.arange(5), 1, drawn_key(4), dropout)
        assert keep[edge] > 0
        compare(case, keep, seed=4, dropout=dropout)


def test_dropout_is_repeatable():
    case = case_of("additive", small_graph())
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(attend(case, case.arguments, dropout=0.5))
    outs.append(attend(case, case.arguments, dropout=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2]) and not torch.equal(outs[2], outs[3])
    # Without dropout nothing is drawn.
    before = torch.get_rng_state()
    attend(case, case.arguments)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.85])
def test_the_share_that_is_dropped(dropout):
    """Each destination has one in-edge, whose value is 1."""
    count, heads = 10_000, 8
    graph = graph_of(torch.zeros(count).long(), torch.arange(count), 1, count, eids=True)
    case = case_of("additive", graph, heads, 1, bias=False)
    case.arguments["values"].fill_(1)
    keep = attend(case, case.arguments, dropout=dropout).squeeze(2)
    assert set(keep.unique().tolist()) == {0.0, 1 / (1 - dropout)}
    dropped = (keep == 0).double()
    deviation = (dropout * (1 - dropout) / count) ** 0.5
    assert (dropped.mean(0) - dropout).abs().max() < 4.5 * deviation
    # Neither heads nor neighboring edges are dropped together.
    assert (dropped.T.corrcoef() - torch.eye(heads)).abs().max() < 4.5 / count**0.5
    both = torch.stack((dropped[:-1, 0], dropped[1:, 0])).corrcoef()[0, 1]
    assert abs(both) < 4.5 / count**0.5


def test_almost_all_and_almost_none_dropped():
    case = case_of("dot", small_graph())
    compare(case, keep_of(torch.arange(250), 2, drawn_key(0), 0.999), dropout=0.999)
    compare(case, 1 / (1 - 1e-12), dropout=1e-12)
