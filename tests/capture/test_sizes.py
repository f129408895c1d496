"""Mini-batches of other sizes than those that were captured."""

from __future__ import annotations

import itertools

import dgl
import pytest
import torch

from dgl_mgpu.capture import model as captured_model
from dgl_mgpu.capture.call import inside
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from tests.capture.scripts import (
    LinkPredictor,
    Model,
    assert_same_training,
    here,
    kinds_of,
    of,
    plain_step,
    replays_of,
)


def chain(*counts):
    """Blocks with these numbers of nodes, each source with one edge."""
    blocks = []
    for src, dst in itertools.pairwise(counts):
        sources = torch.arange(src, device=here.device)
        targets = (sources % dst).sort()[0]
        with tensor_backed_graphs():
            blocks.append(
                dgl.create_block((sources, targets), num_src_nodes=src, num_dst_nodes=dst)
            )
    return blocks


class WithHidden(Model):
    def forward(self, blocks, x):
        h = torch.relu(self.layers[0](blocks[0], x))
        return self.layers[1](blocks[1], h), h


def test_an_output_whose_rows_could_be_of_two_sizes(capturing):
    """The sources of both blocks are as many, until they are not."""
    model = of(WithHidden)().to(here.device)
    for hidden in [60] * 8 + [45] * 8:
        scores, h = model(chain(60, hidden, 10), torch.randn(60, 6, device=here.device))
        assert (len(scores), len(h)) == (10, hidden)
        (scores.sum() + h.sum()).backward()
    assert replays_of(model) > 3


def test_a_comparison_of_as_many_pairs_as_there_is_room_for(capturing, monkeypatch):
    """Else an output would seem to have the same number of rows in all calls."""
    monkeypatch.setattr(captured_model, "FIRST_CHECK", 1)
    model = LinkPredictor().to(here.device)

    def scores(count):
        ends = torch.randint(0, 10, (2, count), device=here.device)
        with tensor_backed_graphs():
            pairs = dgl.graph((ends[0], ends[1]), num_nodes=10)
        found = model(pairs, pairs, chain(40, 20, 10), torch.randn(40, 6, device=here.device))
        assert [*map(len, found)] == [count, count]
        sum(found).sum().backward()

    for _ in range(5):
        scores(20)
    (kind,) = kinds_of(model)
    scores(kind.graphs._buffers.sizes.pairs[0][0])
    scores(20)


class WithMask(Model):
    def forward(self, blocks, x):
        scores = super().forward(blocks, x)
        return scores * 3 if "mask" in blocks[-1].dstdata else scores


def test_a_feature_that_some_mini_batches_have(capturing):
    counts = {}

    def step(model, optimizer, blocks):
        counts[model] = counts.get(model, 0) + 1
        if counts[model] % 10 > 6:
            blocks[-1].dstdata["mask"] = torch.ones(blocks[-1].num_dst_nodes(), device=here.device)
        return plain_step(model, optimizer, blocks)

    assert_same_training(of(WithMask), step, epochs=4)


class Squeezing(Model):
    def forward(self, blocks, x):
        return super().forward(blocks, x).squeeze()


#: Sizes of blocks whose first one has none.
NO_EDGES = (30, 30, 10)


class SkippingEmpty(Model):
    def forward(self, blocks, x):
        scores = super().forward(blocks, x)
        return scores if blocks[0].num_edges() else scores + 1


@pytest.mark.parametrize(("kind", "rare"), [(Squeezing, (60, 30, 1)), (SkippingEmpty, NO_EDGES)])
def test_mini_batches_with_nothing_or_one_of_something(kind, rare, capturing):
    model = of(kind)().to(here.device)
    for sizes in [(60, 30, 10)] * 8 + [rare, (60, 30, 10)]:
        blocks, x = chain(*sizes), torch.randn(sizes[0], 6, device=here.device)
        if sizes == NO_EDGES:
            indptr = torch.zeros(sizes[1] + 1, dtype=torch.int64, device=here.device)
            with tensor_backed_graphs():
                csc = "csc", (indptr, indptr[:0], indptr[:0])
                blocks[0] = dgl.create_block(csc, num_src_nodes=30, num_dst_nodes=30)
        with inside(), torch.no_grad():
            expected = model(blocks, x)
        found = model(blocks, x)
        assert found.shape == expected.shape
        torch.testing.assert_close(found.detach(), expected, rtol=1e-4, atol=1e-5)
        found.sum().backward()
    assert replays_of(model) > 3
