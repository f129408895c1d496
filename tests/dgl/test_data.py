"""DGL's data sets read their archives' files with this networkx."""

from __future__ import annotations

import json
from pathlib import Path

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import dgl
import networkx as nx
import numpy as np
import pytest
import torch
from dgl.data import PPIDataset

LINKS = [(0, 1), (1, 2), (3, 4)]
GRAPH_IDS = np.array([1, 1, 1, 2, 2])


class PPI(PPIDataset):
    """PPI from a folder with its files in it: the archive's would be named after its address."""

    @property
    def save_path(self):
        return self.save_dir

    raw_path = save_path


@pytest.fixture
def ppi(tmp_path: Path) -> PPIDataset:
    graph = {
        "directed": False,
        "multigraph": False,
        "graph": {},
        "nodes": [{"id": node} for node in range(len(GRAPH_IDS))],
        "links": [{"source": u, "target": v} for u, v in LINKS],
    }
    (tmp_path / "train_graph.json").write_text(json.dumps(graph))
    np.save(tmp_path / "train_graph_id.npy", GRAPH_IDS)
    np.save(tmp_path / "train_feats.npy", np.arange(len(GRAPH_IDS) * 2.0).reshape(-1, 2))
    np.save(tmp_path / "train_labels.npy", np.ones((len(GRAPH_IDS), 121)))
    return PPI(mode="train", raw_dir=str(tmp_path))


def test_ppi_reads_edges_that_its_files_call_links(ppi):
    whole = set(zip(*(ids.tolist() for ids in ppi.graph.edges()), strict=True))
    assert whole == {*LINKS, *((v, u) for u, v in LINKS)}
    assert [(g.num_nodes(), g.num_edges()) for g in ppi.graphs[:3]] == [(3, 4), (2, 2), (0, 0)]
    torch.testing.assert_close(ppi[1].ndata["feat"], torch.tensor([[6.0, 7.0], [8.0, 9.0]]))


@pytest.mark.parametrize("ids", [[1, 0, 2], [np.array([1]), np.array([0]), np.array([2])]])
def test_edge_ids_of_networkx_graphs(ids):
    graph = nx.DiGraph()
    for (u, v), eid in zip([(0, 3), (1, 4), (2, 3)], ids, strict=True):
        graph.add_edge(u, v, id=eid)
    for node in graph:
        graph.nodes[node]["bipartite"] = int(node >= 3)
    src, dst = dgl.from_networkx(graph, edge_id_attr_name="id").edges()
    assert list(zip(src.tolist(), dst.tolist(), strict=True)) == [(1, 4), (0, 3), (2, 3)]
    two = dgl.bipartite_from_networkx(graph, "u", "e", "v", edge_id_attr_name="id")
    assert [end.tolist() for end in two.edges()] == [[1, 0, 2], [1, 0, 0]]
    assert graph.edges[0, 3]["id"] is ids[0]
