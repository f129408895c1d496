"""All layers of a PinSAGE mini-batch against walks, selection and relabelling by hand."""

from __future__ import annotations

from dataclasses import replace as with_fields

import pytest
import torch

from dgl_mgpu.errors import IdOutOfRangeError, InvalidInputError
from dgl_mgpu.ops import pinsage_blocks
from tests.ops import reference
from tests.ops.test_sample import GRAPHS, KEY
from tests.ops.test_walk import TO_ITEMS, TO_USERS
from tests.ops.views import LAYOUTS

SQUARE = GRAPHS["power law"]
WALKS = {
    "num_traversals": 3,
    "termination_prob": 0.2,
    "num_random_walks": 4,
    "num_neighbors": 3,
}


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("path", [[SQUARE], [TO_ITEMS, TO_USERS]])
@pytest.mark.parametrize("seeds", [[], [3], [4, 0, 2, 1]])
def test_matches_reference(seeds, path, idtype):
    blocks = pinsage_blocks(
        [graph.view(LAYOUTS["three tiers"], idtype) for graph in path],
        torch.tensor(seeds, dtype=idtype),
        3,
        KEY,
        **WALKS,
    )
    hops = len(path)
    stop = [0.2 if step and step % hops == 0 else 0.0 for step in range(3 * hops)]
    nodes = seeds
    for hop, block in enumerate(blocks[::-1]):
        key = with_fields(KEY, hop=KEY.hop + hop).fold()
        visited = [
            reference.select_visited(
                [reference.walk(path, node, number, stop, key) for number in range(4)], hops, 3
            )
            for node in nodes
        ]
        assert block.num_dst == len(nodes)
        assert block.indptr.diff().tolist() == [len(each) for each in visited]
        assert block.counts.tolist() == [count for each in visited for _, count in each]
        neighbors = [node for each in visited for node, _ in each]
        nodes, src = reference.append_unique(nodes, neighbors)
        assert block.src.tolist() == src
        assert block.src_nodes.tolist() == nodes
        assert block.src.dtype == block.src_nodes.dtype == idtype
        assert block.indptr.dtype == block.counts.dtype == torch.int64
    assert len(blocks) == 3


def test_no_layers():
    assert pinsage_blocks(SQUARE.view(), torch.arange(3), 0, KEY, **WALKS) == []


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_seed_out_of_range(idtype):
    for bad in (-1, 200, 2**32):
        with pytest.raises(IdOutOfRangeError, match="at place 1 is not among the 200 rows"):
            pinsage_blocks(
                SQUARE.view(idtype=idtype), torch.tensor([199, bad, -5]), 2, KEY, **WALKS
            )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", -1),
        ("num_traversals", 0),
        ("num_random_walks", 0),
        ("num_neighbors", -1),
        ("termination_prob", 2.0),
        ("seeds", torch.arange(3.0)),
        ("views", [TO_ITEMS.view()]),
    ],
)
def test_bad_arguments(name, value):
    arguments = {
        "views": SQUARE.view(), "seeds": torch.arange(3), "num_layers": 2, "key": KEY, **WALKS
    }  # fmt: skip
    with pytest.raises(InvalidInputError):
        pinsage_blocks(**{**arguments, name: value})


def test_registration():
    view = SQUARE.view()
    graph = ([view.tiers], [view.pointers], [view.position], [view.num_rows], view.idtype)
    stops, keys = [0, 1 << 52, 1 << 53], KEY.fold_hops(2)
    torch.library.opcheck(
        torch.ops.dgl_mgpu.pinsage_hops.default,
        (torch.arange(20), *graph, stops, 4, 3, keys),
        test_utils=("test_schema", "test_faketensor"),
    )
