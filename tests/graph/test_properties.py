"""Structure of arbitrary small graphs, against DGL's C++."""

from __future__ import annotations

import dgl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.scenarios import Where, compare


@st.composite
def edges(draw):
    """Numbers of source and destination nodes, and edges between them."""
    num_src, num_dst = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    pair = st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1))
    return num_src, num_dst, draw(st.lists(pair, max_size=12))


def _ends(where: Where, pairs: list[tuple[int, int]]):
    return where.ids(*(u for u, _ in pairs)), where.ids(*(v for _, v in pairs))


@settings(max_examples=20)
@given(edges(), st.data())
def test_parts_and_queries(edges, data):
    num_src, num_dst, pairs = edges
    nodes = {
        "a": data.draw(st.permutations(range(num_src)))[: num_src // 2 + 1],
        "b": data.draw(st.permutations(range(num_dst)))[: num_dst // 2 + 1],
    }
    chosen = data.draw(st.lists(st.integers(0, len(pairs) - 1), max_size=5)) if pairs else []

    def run(where):
        g = dgl.heterograph({("a", "to", "b"): _ends(where, pairs)}, {"a": num_src, "b": num_dst})
        ids = {ntype: where.ids(*numbers) for ntype, numbers in nodes.items()}
        return [
            g.subgraph(ids),
            dgl.edge_subgraph(g, where.ids(*chosen)),
            dgl.in_subgraph(g, {"b": ids["b"]}, relabel_nodes=True),
            dgl.out_subgraph(g, {"a": ids["a"]}),
            dgl.compact_graphs(g),
            dgl.to_simple(g, writeback_mapping=True),
            g.is_multigraph,
            g.in_degrees(),
            g.out_degrees(),
        ]

    compare(run, "tensors", torch.int64)


@settings(max_examples=20)
@given(edges(), edges())
def test_batches_and_line_graphs(first, second):
    def run(where):
        graphs = [
            dgl.graph(_ends(where, pairs), num_nodes=max(num_src, num_dst))
            for num_src, num_dst, pairs in (first, second)
        ]
        together = dgl.batch(graphs)
        return [
            together,
            dgl.unbatch(together),
            dgl.slice_batch(together, 1),
            dgl.line_graph(together),
            dgl.line_graph(together, backtracking=False),
            dgl.to_bidirected(together),
        ]

    compare(run, "tensors", torch.int32)
