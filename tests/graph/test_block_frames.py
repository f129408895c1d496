"""Frames of blocks, whose columns are made when they are read."""

from __future__ import annotations

import pickle

import dgl
import pytest
import torch
from dgl.base import EID, NID
from dgl.frame import Frame

from dgl_mgpu.graph.block_frames import BlockFrame, Features


@pytest.fixture
def graph():
    g = dgl.rand_graph(20, 90)
    g.ndata["x"], g.ndata["y"] = torch.randn(20, 3), torch.randint(9, (20,))
    g.edata["w"] = torch.randn(90)
    return g


IDS = torch.tensor([4, 2, 19, 4, 0])


def frame_of(graph, ids=IDS, count=5, part="node"):
    features = Features.of_graph(graph, torch.device("cpu"))
    if part == "edge":
        return BlockFrame(EID, ids, count, features.of_edges[0])
    return BlockFrame(NID, ids, count, features.of_nodes[0])


@pytest.mark.parametrize("part", ["node", "edge"])
@pytest.mark.parametrize("count", [0, 3, 5])
def test_a_frame_has_rows_of_its_graphs_features_and_their_ids(graph, part, count):
    frame = frame_of(graph, count=count, part=part)
    whole = graph._node_frames[0] if part == "node" else graph._edge_frames[0]
    expected = whole.subframe(IDS[:count])
    names = frame.unmade_names
    assert frame.unmade_ids is IDS
    assert torch.equal(frame[NID if part == "node" else EID], IDS[:count])
    assert frame.unmade_ids is None and frame.unmade_names is None
    assert set(names) == {*frame} == {*expected, NID if part == "node" else EID}
    for name in expected:
        assert torch.equal(frame[name], expected[name])
    assert frame.num_rows == count


def test_a_frame_without_features_has_the_ids_alone():
    frame = BlockFrame(NID, IDS, 4)
    assert frame.unmade_names == (NID,) and frame.unmade_ids is IDS
    assert torch.equal(frame[NID], IDS[:4]) and [*frame] == [NID]


def test_features_are_those_that_the_graph_had(graph):
    before = graph.ndata["x"]
    frame = frame_of(graph)
    graph.ndata["x"] = torch.zeros(20, 3)
    graph.ndata.pop("y")
    graph.ndata["z"] = torch.ones(20)
    assert torch.equal(frame["x"], before[IDS]) and "y" in frame and "z" not in frame


@pytest.mark.parametrize("is_read", [False, True])
def test_a_clone_has_columns_of_its_own(graph, is_read):
    """As local_scope makes them."""
    frame = frame_of(graph)
    if is_read:
        _ = frame["x"]
    clone = frame.clone()
    clone["x"] = torch.zeros(5, 3)
    clone["new"] = torch.zeros(5)
    assert torch.equal(frame["x"], graph.ndata["x"][IDS]) and "new" not in frame


@pytest.mark.parametrize("is_read", [False, True])
def test_a_pickled_frame_is_a_frame_with_all_columns(graph, is_read):
    frame = frame_of(graph)
    if is_read:
        _ = frame["y"]
    copy = pickle.loads(pickle.dumps(frame))
    assert type(copy) is Frame and copy.num_rows == 5
    for name in ("x", "y", NID):
        assert torch.equal(copy[name], frame[name])


def test_columns_that_are_themselves_rows_are_made_at_once(graph):
    part = dgl.node_subgraph(graph, torch.arange(10, 20))
    ids = torch.tensor([3, 0])
    expected = part.ndata["x"].clone()[ids]
    again = dgl.node_subgraph(graph, torch.arange(10, 20))
    frame = frame_of(again, ids, 2)
    assert frame.unmade_ids is None
    assert torch.equal(frame["x"], expected)


def test_a_frame_that_is_emptied_unread_is_empty(graph):
    frame = frame_of(graph)
    frame.clear()
    assert frame.unmade_ids is None and frame.unmade_names is None and not [*frame]
    assert not [*frame.clone()]


def test_what_is_not_there_is_an_attribute_error(graph):
    with pytest.raises(AttributeError, match="no attribute '_nothing'"):
        _ = frame_of(graph)._nothing
