"""What stands in for the binary in `dgl.distributed`'s standalone mode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dgl.distributed.id_map import IdMap

from dgl_mgpu.errors import IdOutOfRangeError
from dgl_mgpu.graph.host import standalone


@pytest.fixture
def ids_of_types() -> IdMap:
    """Ids of two types in three parts, of which one has none of a type."""
    return IdMap({
        "a": np.array([[0, 4], [7, 7], [9, 14]]),
        "b": np.array([[4, 7], [7, 9], [14, 15]]),
    })  # fmt: skip


def mapped(ids: torch.Tensor, ids_of_types: IdMap) -> torch.Tensor:
    ranges = (ids_of_types.range_start, ids_of_types.range_end, ids_of_types.typed_map)
    return standalone.map_ids(ids, *(part.tousertensor() for part in ranges), 3, 2)


def test_ids_are_mapped_as_by_dgl(ids_of_types):
    ids = torch.randperm(15)
    types, within = ids_of_types(ids)
    assert torch.equal(mapped(ids, ids_of_types), torch.cat([types, within]))


def test_ids_that_there_are_not_are_refused(ids_of_types):
    with pytest.raises(IdOutOfRangeError, match="id 15 of a graph with 15"):
        mapped(torch.tensor([3, 15]), ids_of_types)


def test_a_reset_forgets_everything():
    standalone.set_rank(3)
    assert (standalone.next_message(), standalone.next_message()) == (0, 1)
    standalone.reset()
    assert (standalone.get_rank(), standalone.get_message()) == (-1, 0)
