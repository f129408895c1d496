"""What graphs made of tensors refuse: with a DGLError, as DGL, and before a kernel reads it.

An index out of range in a kernel of torch's would end all work on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import dgl_mgpu  # noqa: F401  # isort: skip  # mends the import of dgl below

import dgl
import pytest
import torch

from dgl_mgpu.errors import InvalidInputError
from tests.dgl.nn.devices import DEVICES, on_tensors


def graph(device: str, idtype: torch.dtype = torch.int64) -> dgl.DGLGraph:
    src, dst = torch.tensor([0, 1, 2, 1, 1]), torch.tensor([1, 2, 0, 0, 1])
    return dgl.graph((src.to(device, idtype), dst.to(device, idtype)), num_nodes=4)


def other_types(device: str) -> dgl.DGLGraph:
    end = torch.zeros(1, dtype=torch.int64, device=device)
    return dgl.heterograph({("a", "to", "b"): (end, end)})


def csr(device: str, num_nodes: int) -> dgl.DGLGraph:
    indptr, indices = torch.tensor([0, 2, 3], device=device), torch.tensor([1, 0, 1], device=device)
    return dgl.graph(("csr", (indptr, indices, [])), num_nodes=num_nodes)


#: Refused by DGL's C++, too.
REFUSED: dict[str, Callable[[str], Any]] = {
    "in-edges of no node": lambda device: graph(device).in_edges([9]),
    "out-edges of no node": lambda device: graph(device).out_edges([9]),
    "out-degree of no node": lambda device: graph(device).out_degrees([9]),
    "subgraph of no node": lambda device: graph(device).subgraph([9]),
    "subgraph of no edge": lambda device: graph(device).edge_subgraph([9]),
    "in-subgraph of no node": lambda device: dgl.in_subgraph(graph(device), [9]),
    "endpoints of no edge": lambda device: graph(device).find_edges([9]),
    "no edge between nodes": lambda device: graph(device).edge_ids(0, 3),
    "ids that are floats": lambda device: dgl.graph((torch.ones(2, device=device),) * 2),
    "ids of two dtypes": lambda device: dgl.graph(
        (torch.ones(2, dtype=torch.int32, device=device), torch.ones(2, device=device).long())
    ),
    "an indptr for fewer nodes": lambda device: csr(device, 10),
    "in-degrees of a CSR": lambda device: graph(device).formats("csr").in_degrees(),
    "out-degrees of a CSC": lambda device: graph(device).formats("csc").out_degrees([0]),
    "no such format": lambda device: graph(device).formats("dense"),
    "no such matrix": lambda device: graph(device)._graph.adjacency_matrix_tensors(
        0, False, "dense"
    ),
    "a batch of two kinds": lambda device: dgl.batch([graph(device), other_types(device)]),
    "too few rows of nodes": lambda device: dgl.ops.copy_u_sum(
        graph(device), torch.ones(3, 2, device=device)
    ),
    "too few rows of edges": lambda device: dgl.ops.copy_e_sum(
        graph(device), torch.ones(4, 2, device=device)
    ),
    "too many rows": lambda device: dgl.ops.u_add_v(
        graph(device), torch.ones(4, 2, device=device), torch.ones(5, 2, device=device)
    ),
    "too few scores": lambda device: dgl.ops.edge_softmax(
        graph(device), torch.ones(4, 2, device=device)
    ),
    "sums of integers": lambda device: dgl.ops.copy_u_sum(
        graph(device), torch.arange(4, device=device)
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_dgls_error(case, device):
    with on_tensors(device), pytest.raises(dgl.DGLError):
        REFUSED[case](device)


#: What DGL's C++ reads beyond its arrays for.
NOT_TRIED_IN_CPP = {"too few rows of nodes", "too few rows of edges", "too few scores"}


@pytest.mark.parametrize("case", sorted(REFUSED.keys() - NOT_TRIED_IN_CPP))
def test_refused_by_dgl_itself(case):
    with pytest.raises(dgl.DGLError):
        REFUSED[case]("cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_errors_are_typed_as_well(device):
    with on_tensors(device):
        for case in ("in-edges of no node", "ids that are floats", "sums of integers"):
            with pytest.raises(InvalidInputError):
                REFUSED[case](device)


@pytest.mark.parametrize("device", DEVICES)
def test_the_gpu_works_on_after_an_id_out_of_range(device):
    with on_tensors(device):
        g = graph(device)
        for ids in ([9], [-1]):
            with pytest.raises(dgl.DGLError):
                g.in_edges(ids)
        assert g.in_degrees([9, 1, -1]).tolist() == [0, 2, 0]
        assert g.in_edges([0])[0].tolist() == [2, 1]


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("device", DEVICES)
def test_degrees_of_all_nodes(device, idtype):
    with on_tensors(device):
        g = graph(device, idtype)
        for formats in (["coo"], ["csr", "coo"], ["csc", "coo"], ["coo", "csr", "csc"]):
            some = g.formats(formats)
            for degrees, expected in (
                (some.in_degrees(), [2, 2, 1, 0]),
                (some.out_degrees(), [1, 3, 1, 0]),
            ):
                assert degrees.dtype == idtype and degrees.tolist() == expected
        assert g.formats("csc").in_degrees().tolist() == [2, 2, 1, 0]
        assert g.formats("csr").out_degrees().tolist() == [1, 3, 1, 0]


@pytest.mark.parametrize("given", ["csr", "csc"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_matrix_without_edge_ids_has_none_when_asked_for(given, device):
    def run(place: str) -> list[list[int]]:
        indptr, indices = torch.tensor([0, 2, 3], device=place), torch.tensor([1, 0, 1])
        g = dgl.graph((given, (indptr, indices.to(place), [])))
        g.edges()
        return [part.tolist() for fmt in ("csr", "csc") for part in g.adj_tensors(fmt)]

    expected = run("cpu")
    with on_tensors(device):
        assert run(device) == expected
    assert [] in expected


@pytest.mark.parametrize("device", DEVICES)
def test_a_shared_graph_is_on_the_cpu(device):
    with on_tensors(device):
        g = graph(device)
        shared = g.shared_memory(f"test_shared_{os.getpid()}_{device}")
    assert shared.device.type == "cpu"
    found = dgl.hetero_from_shared_memory(f"test_shared_{os.getpid()}_{device}")
    for end, expected in zip(found.edges(), g.edges(), strict=True):
        assert torch.equal(end, expected.cpu())


@pytest.mark.parametrize("num_nodes", [3_037_000_500, 1 << 40])
def test_a_random_graph_has_no_more_pairs_of_nodes_than_64_bits_number(num_nodes: int) -> None:
    with pytest.raises(InvalidInputError, match=f"draw 5 of {num_nodes**2} numbers") as raised:
        dgl.rand_graph(num_nodes, 5)
    assert isinstance(raised.value, dgl.DGLError)
    with pytest.raises(InvalidInputError, match="draw 5 of"):
        dgl.rand_bipartite("a", "to", "b", num_nodes, num_nodes, 5)
    g = dgl.rand_graph(3_037_000_499, 5)
    assert g.num_edges() == 5 and max(map(int, map(max, g.edges()))) < g.num_nodes()
