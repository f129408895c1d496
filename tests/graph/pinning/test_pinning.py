"""Pinned memory: which memory is registered and for how long, and rows that are read in place.

Without a GPU the driver is one that only counts, and kernels are those of the CPU.
"""

from __future__ import annotations

import copy
import gc
import pickle
from multiprocessing.reduction import ForkingPickler

import dgl
import numpy as np
import pytest
import torch
from dgl import backend as F
from dgl.utils import (
    gather_pinned_tensor_rows,
    pin_memory_inplace,
    scatter_pinned_tensor_rows,
)

from dgl_mgpu.errors import (
    DeviceMemoryError,
    IdOutOfRangeError,
    InvalidInputError,
    UnavailableError,
)
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.graph.pinning import pinned_graphs, pinning
from dgl_mgpu.graph.relation import Compressed
from dgl_mgpu.ops import gather, scatter
from dgl_mgpu.sampling.views import compressed_view
from tests.kernels.conftest import emulated  # noqa: F401  (kernels run on the CPU)


class Driver:
    """Registers memory, and refuses what CUDA refuses."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.fails_at: int | None = None

    def register(self, address: int, nbytes: int) -> None:
        if address == self.fails_at:
            raise DeviceMemoryError("map host memory", "no", "do not")
        for start, size in self.registered.items():
            assert address + nbytes <= start or start + size <= address, "registered twice"
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether each byte of a tensor is registered."""
        first = tensor.data_ptr()
        covered = np.zeros(tensor.numel() * tensor.element_size(), bool)
        for start, size in self.registered.items():
            covered[max(0, start - first) : max(0, start + size - first)] = True
        return bool(covered.all())


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(pinning, "find_runtime", lambda: driver)
    # torch asks CUDA's driver, by address.
    monkeypatch.setattr(
        torch.Tensor,
        "is_pinned",
        lambda t: any(a <= t.data_ptr() < a + n for a, n in driver.registered.items()),
    )
    yield driver
    gc.collect()
    assert not driver.registered, "still registered"


def test_memory_is_pinned_as_long_as_what_is_returned_lives(driver):
    tensor = torch.arange(10)
    pinned = pin_memory_inplace(tensor)
    assert driver.covers(tensor)
    del pinned
    assert not driver.registered
    pin_memory_inplace(tensor)  # not kept
    assert not driver.registered


def test_what_is_pinned_lives_on(driver):
    pinned = pin_memory_inplace(torch.arange(1000))
    gc.collect()
    assert driver.covers(pinned.tensor) and pinned.tensor.tolist() == list(range(1000))
    del pinned


def test_unpinning_twice_is_no_error(driver):
    pinned = pin_memory_inplace(torch.arange(10))
    for _ in range(2):
        pinned.unpin_memory_()
        assert not driver.registered


def test_pinning_what_is_pinned_is_no_error_and_the_last_one_unpins(driver):
    tensor = torch.zeros(6, 4)
    views = [tensor, tensor[2:], tensor.view(-1)[3:9], tensor]
    held = [pin_memory_inplace(view) for view in views]
    assert len(driver.registered) == 1 and driver.covers(tensor)
    for pinned in held[:-1]:
        pinned.unpin_memory_()
        assert driver.covers(tensor)
    held[-1].unpin_memory_()
    assert not driver.registered


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)], ids=str)
def test_tensors_that_overlap_are_pinned_piece_by_piece(driver, order):
    """Arrays over one memory have a storage each, which do not know of each other."""
    memory = np.zeros(1000, np.uint8)
    tensors = [torch.from_numpy(memory[a:b]) for a, b in ((0, 400), (300, 700), (100, 1000))]
    held = {}
    for number in order:
        held[number] = pin_memory_inplace(tensors[number])
        assert all(driver.covers(tensors[number]) for number in held)
    for number in reversed(order):
        held.pop(number).unpin_memory_()
        assert all(driver.covers(tensors[number]) for number in held)
    assert not driver.registered


def test_what_others_have_pinned_is_theirs(driver):
    tensor = torch.arange(10)
    driver.registered[tensor.data_ptr()] = 80
    pinned = pin_memory_inplace(tensor)
    with pytest.raises(dgl.DGLError, match="has not pinned"):
        pinned.unpin_memory_()
    del pinned
    assert driver.covers(tensor)
    driver.registered.clear()


def test_arrays_of_dgl_are_pinned_until_they_are_unpinned_or_given_up(driver):
    tensor = torch.arange(10)
    array, other = F.to_dgl_nd(tensor), F.to_dgl_nd(tensor)
    array.unpin_memory_()  # not pinned: nothing to do
    array.pin_memory_()
    assert driver.covers(tensor)
    with pytest.raises(dgl.DGLError, match="has not pinned"):
        other.unpin_memory_()
    assert driver.covers(tensor)
    array.unpin_memory_()
    assert not driver.registered
    array.pin_memory_()
    del array
    assert not driver.registered


def test_nothing_stays_registered_where_the_driver_refuses(driver):
    memory = np.zeros(300, np.uint8)
    middle = pin_memory_inplace(torch.from_numpy(memory[100:200]))
    driver.fails_at = memory.ctypes.data + 200
    with pytest.raises(DeviceMemoryError):
        pin_memory_inplace(torch.from_numpy(memory))
    assert list(driver.registered.values()) == [100]
    driver.fails_at = None
    whole = pin_memory_inplace(torch.from_numpy(memory))
    del middle
    assert driver.covers(whole.tensor)
    del whole


def test_memory_given_up_while_other_memory_is_pinned(driver, monkeypatch):
    """The garbage collector runs whenever it likes: also while a tensor is being pinned."""
    memory = np.zeros(200, np.uint8)
    first = [pin_memory_inplace(torch.from_numpy(memory[:100]))]
    register = driver.register

    def register_and_collect(address: int, nbytes: int) -> None:
        first.clear()
        register(address, nbytes)

    monkeypatch.setattr(driver, "register", register_and_collect)
    whole = pin_memory_inplace(torch.from_numpy(memory))
    assert driver.covers(whole.tensor)
    whole.unpin_memory_()
    assert not driver.registered


def test_no_memory_is_pinned_for_tensors_of_nothing(driver):
    pinned = pin_memory_inplace(torch.empty(0, 5))
    assert not driver.registered
    pinned.unpin_memory_()


def test_frames_of_a_graph_pin_their_columns(driver):
    graph = dgl.rand_graph(10, 20)
    graph.ndata["x"] = torch.randn(10, 3)
    graph.ndata["same"] = graph.ndata["x"]
    for column in graph._node_frames[0]._columns.values():
        column.pin_memory_()
        column.pin_memory_()
    assert driver.covers(graph.ndata["x"])
    for column in graph._node_frames[0]._columns.values():
        column.unpin_memory_()
    assert not driver.registered


def pinned_tensors(graph: dgl.DGLGraph) -> list[torch.Tensor]:
    index = pinned_graphs.pinned_tensors(graph._graph)
    return [] if index is None else [t for each in index.relations for t in each.tensors()]


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_a_graph_is_pinned_where_it_is_in_all_its_formats(driver, idtype):
    graph = dgl.heterograph(
        {
            ("user", "follows", "user"): (torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])),
            ("user", "plays", "game"): (torch.tensor([2, 0]), torch.tensor([0, 1])),
            ("user", "sells", "game"): ([], []),
        },
        idtype=idtype,
    )
    graph.nodes["game"].data["x"] = torch.randn(2, 3)
    graph.create_formats_()
    assert not graph.is_pinned()
    for _ in range(2):
        assert graph.pin_memory_() is graph
        assert graph.is_pinned()
    tensors = pinned_tensors(graph)
    assert all(map(driver.covers, [*tensors, graph.nodes["game"].data["x"]]))
    for etype in graph.etypes:
        memory = graph[etype]._graph.adjacency_matrix_tensors(0, True, "csr")[2:]
        addresses = {t.data_ptr() for t in tensors if t.numel()}
        assert {t.data_ptr() for t in memory[:2] if t.numel()} <= addresses
    for _ in range(2):
        graph.unpin_memory_()
        assert not graph.is_pinned() and not driver.registered
    assert torch.equal(graph.in_degrees(etype="follows"), torch.ones(3, dtype=idtype))


def two_relations() -> dgl.DGLGraph:
    """A graph in the format in which DGL makes it."""
    return dgl.heterograph(
        {
            ("user", "follows", "user"): (torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])),
            ("user", "plays", "game"): (torch.tensor([2, 0]), torch.tensor([0, 1])),
        }
    )


SHARING = {
    "in its format": lambda g: g.formats("coo"),
    "a relation": lambda g: g["plays"],
    "the first relation": lambda g: g["follows"],
    "clone": lambda g: g.clone(),
    "local": lambda g: g.local_var(),
    "reverse": lambda g: dgl.reverse(g),
    "types": lambda g: g.edge_type_subgraph(["follows"]),
}


@pytest.mark.parametrize("sharing", SHARING.values(), ids=SHARING)
def test_graphs_that_share_memory_are_pinned_and_unpinned_together(driver, sharing):
    graph = two_relations()
    before = sharing(graph)
    assert not before.is_pinned()
    graph.pin_memory_()
    shared = sharing(graph)
    assert shared.is_pinned() and before.is_pinned()
    assert pinned_tensors(shared) and all(map(driver.covers, pinned_tensors(shared)))
    shared.pin_memory_()
    shared.unpin_memory_()
    assert not any(each.is_pinned() for each in (graph, before, shared))
    assert not pinned_tensors(shared)
    graph.pin_memory_()
    assert (
        graph.is_pinned() and shared.is_pinned() and all(map(driver.covers, pinned_tensors(graph)))
    )
    graph.unpin_memory_()
    assert not any(each.is_pinned() for each in (graph, before, shared))
    assert not driver.registered


def test_graphs_with_memory_of_their_own_are_not_pinned_with_another(driver):
    graph = two_relations().pin_memory_()
    of_its_own = {
        "csc": graph.formats("csc"),
        "csr": graph.formats("csr"),
        "int32": graph.int(),
        "subgraph": graph.subgraph({"user": [0, 1], "game": [0]}),
        "loops": dgl.add_self_loop(graph["follows"]),
        "another": two_relations(),
    }
    for name, other in of_its_own.items():
        assert not other.is_pinned(), name
        other.pin_memory_().unpin_memory_()
        assert graph.is_pinned() and all(map(driver.covers, pinned_tensors(graph))), name
    graph.unpin_memory_()


def test_memory_stays_pinned_for_those_who_have_asked(driver):
    graph = two_relations().pin_memory_()
    plays = graph["plays"]
    assert plays.is_pinned()
    del graph
    gc.collect()
    assert plays.is_pinned() and all(map(driver.covers, pinned_tensors(plays)))
    plays.unpin_memory_()
    assert not plays.is_pinned() and not driver.registered


def test_what_dgl_makes_of_a_pinned_graph_later_leaves_it_pinned(driver):
    graph = two_relations().pin_memory_()
    assert graph.in_degrees(etype="follows").tolist() == [1, 1, 1]
    assert graph.is_pinned()
    graph.create_formats_()
    assert graph.is_pinned() and graph["follows"].is_pinned()
    graph.unpin_memory_()
    assert not driver.registered


def test_graphs_of_tensors_are_pinned_as_those_of_dgl(driver):
    with tensor_backed_graphs():  # as all are without DGL's binary
        graph = two_relations().formats(["coo", "csc"])
        graph.nodes["game"].data["x"] = torch.randn(2, 3)
        follows = graph["follows"]
        graph.create_formats_()
        assert not graph.is_pinned() and graph.pin_memory_().is_pinned()
        assert follows.is_pinned() and all(map(driver.covers, pinned_tensors(graph)))
        assert len(pinned_tensors(graph)) >= 8
        assert driver.covers(graph.nodes["game"].data["x"])
        assert not graph.int().is_pinned() and not two_relations().is_pinned()
        for twin in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
            assert twin.is_pinned() and all(map(driver.covers, pinned_tensors(twin)))
            twin.unpin_memory_()
            assert not twin.is_pinned() and graph.is_pinned()
        graph.unpin_memory_()
        assert not graph.is_pinned() and not follows.is_pinned() and not driver.registered


def test_to_ask_a_graph_makes_no_formats(driver):
    pinned = two_relations().pin_memory_()
    graph = two_relations()
    graph.in_degrees(etype="follows")
    assert not graph.is_pinned() and pinned.is_pinned()
    for asked in (graph, pinned):
        assert asked["plays"].formats()["created"] == ["coo"]
    pinned.unpin_memory_()


def test_a_format_made_later_is_pinned_as_long_as_it_is_seen(driver):
    indptr, indices = torch.tensor([0, 2, 3]), torch.tensor([1, 0, 1])
    here, elsewhere = torch.device("cpu"), torch.device("meta")
    view = compressed_view(Compressed(indptr, indices, None), 2, 2, elsewhere)
    assert driver.covers(indices)
    del view
    assert not driver.registered
    compressed_view(Compressed(indptr, indices, None), 2, 2, here)
    assert not driver.registered


def test_graphs_without_edges_are_pinned(driver):
    graph, other = dgl.graph(([], [])), dgl.graph(([], []))
    graph.pin_memory_()
    assert graph.is_pinned() and not other.is_pinned()
    graph.unpin_memory_()
    assert not graph.is_pinned()


def forked(graph: dgl.DGLGraph) -> dgl.DGLGraph:
    return ForkingPickler.loads(ForkingPickler.dumps(graph))


COPIES = {
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "deepcopy": copy.deepcopy,
    "another process": forked,
}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("formats", ["coo", ["csr", "csc"], ["coo", "csr", "csc"]], ids=str)
def test_pickled_graphs_stay_pinned(driver, make_copy, formats):
    graph = two_relations().formats(formats)
    graph.create_formats_()
    twin = make_copy(graph)
    assert not twin.is_pinned()
    graph = graph.clone().formats(formats)  # DGL keeps what it made for another process
    graph.pin_memory_()
    twin = make_copy(graph)
    assert twin.is_pinned() and all(map(driver.covers, pinned_tensors(twin)))
    assert twin.out_edges([2], etype="plays")[1].tolist() == [0]
    graph.unpin_memory_()
    assert not graph.is_pinned() and twin.is_pinned()
    twin.unpin_memory_()
    assert not make_copy(graph.clone().formats(formats)).is_pinned()


def test_a_graph_that_was_pinned_is_unpickled_where_there_is_no_gpu(driver, monkeypatch):
    pickled = pickle.dumps(two_relations().pin_memory_())
    monkeypatch.setattr(pinning, "find_runtime", lambda: None)
    graph = pickle.loads(pickled)
    assert not graph.is_pinned() and graph.num_edges("follows") == 3


def test_a_copy_of_a_graph_in_pinned_memory(driver, monkeypatch):
    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor.clone()
        driver.registered[pinned.data_ptr()] = pinned.nbytes
        return pinned

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    graph = two_relations()
    graph.create_formats_()
    index = graph._graph.pin_memory()
    assert index.is_pinned() and not graph.is_pinned()
    assert index.pin_memory() is index
    copied = dgl.DGLGraph(index, graph.ntypes, graph.etypes)
    assert copied.formats() == graph.formats()
    assert all(map(driver.covers, pinned_tensors(copied))) and copied["plays"].is_pinned()
    for etype in graph.etypes:
        for found, expected in zip(
            copied.edges(etype=etype), graph.edges(etype=etype), strict=True
        ):
            assert torch.equal(found, expected) and found.data_ptr() != expected.data_ptr()
    with pytest.raises(dgl.DGLError, match="has not pinned"):
        copied.unpin_memory_()
    driver.registered.clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_no_graph_can_be_pinned():
    graph = two_relations()
    for pin in (graph.pin_memory_, graph._graph.pin_memory):
        with pytest.raises(UnavailableError, match="no GPU"):
            pin()
    graph.unpin_memory_()
    assert not graph.is_pinned()


def test_a_graph_that_nobody_has_any_more_is_not_pinned(driver):
    graph = dgl.rand_graph(10, 20).pin_memory_()
    assert driver.registered
    del graph
    gc.collect()
    assert not driver.registered


def test_nothing_of_a_graph_is_pinned_where_the_driver_refuses(driver):
    graph = dgl.rand_graph(10, 20)
    graph.create_formats_()
    graph.pin_memory_()
    addresses = list(driver.registered)
    graph.unpin_memory_()
    driver.fails_at = addresses[-1]
    with pytest.raises(DeviceMemoryError):
        graph.pin_memory_()
    assert not graph.is_pinned() and not driver.registered


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("where", [{}, {"device": "cpu"}])
def test_a_dataloader_that_is_to_pin_without_a_gpu_says_what_to_leave_out(where):
    sampler = dgl.dataloading.NeighborSampler([4])
    with pytest.raises(UnavailableError, match=r"leave use_uva out.*--store=on SCRIPT"):
        dgl.dataloading.DataLoader(
            dgl.rand_graph(50, 300), torch.arange(50), sampler, use_uva=True, **where
        )
    # Of this sampler a store does not have all that it needs.
    sampler = dgl.dataloading.SAINTSampler("node", 4)
    with pytest.raises(UnavailableError, match=r"use device='cpu'$"):
        dgl.dataloading.DataLoader(
            dgl.rand_graph(50, 300), torch.arange(50), sampler, use_uva=True, **where
        )


@pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")
def test_dataloaders_pin_their_graph_as_often_as_they_are_made(driver):
    graph = dgl.rand_graph(50, 300)
    graph.ndata["x"] = torch.randn(50, 4)
    sampler = dgl.dataloading.NeighborSampler([4, 4], prefetch_node_feats=["x"])
    for _ in range(3):
        loader = dgl.dataloading.DataLoader(
            graph, torch.arange(50), sampler, device="cpu", use_uva=True, batch_size=10
        )
        for input_nodes, _, blocks in loader:
            assert torch.equal(blocks[0].srcdata["x"], graph.ndata["x"][input_nodes])
    assert graph.is_pinned() and driver.covers(graph.ndata["x"])
    graph.unpin_memory_()


def test_what_cannot_be_pinned_is_refused(driver):
    for tensor, reason in (
        (torch.empty(3, device="meta"), "meta"),
        (torch.zeros(3, 4).t(), "not contiguous"),
    ):
        with pytest.raises(InvalidInputError, match=reason):
            pin_memory_inplace(tensor)
        with pytest.raises(dgl.DGLError):
            pin_memory_inplace(tensor)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_can_be_pinned():
    with pytest.raises(UnavailableError, match="no GPU"):
        pin_memory_inplace(torch.zeros(3))


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def table(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row_shape", [(), (1,), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 300])
def test_rows_are_gathered_and_scattered(row_shape, dtype, idtype, count):
    tensor = table((50, *row_shape), dtype)
    ids = torch.randint(0, 50, (count,), dtype=idtype)
    found = gather_pinned_tensor_rows(tensor, ids)
    assert found.dtype == dtype and torch.equal(found, tensor[ids.long()])
    places = torch.randperm(50)[: min(count, 50)].to(idtype)
    rows = table((len(places), *row_shape), dtype)
    expected = tensor.clone()
    expected[places.long()] = rows
    scatter_pinned_tensor_rows(tensor, places, rows)
    assert torch.equal(tensor, expected)


@pytest.mark.parametrize("width", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("skipped", range(5))
def test_rows_of_a_part_of_a_tensor_are_gathered_where_it_begins(skipped, width):
    """Kernels need the first row aligned: views of parts begin where one would be."""
    whole = table((60, width), torch.float32)
    part = whole[skipped:]
    ids = torch.randint(0, len(part), (100,))
    view = pinning.host_view(part, torch.device("cpu"))
    assert view.pointers.item() % 16 == 0
    assert whole.data_ptr() - 16 * width * 4 < view.pointers.item() <= part.data_ptr()
    assert torch.equal(gather_pinned_tensor_rows(part, ids), part[ids])
    rows = torch.randn(1, width)
    scatter_pinned_tensor_rows(part, torch.tensor([0]), rows)
    assert torch.equal(whole[skipped], rows[0])
    for bad in (-1, len(part)):
        with pytest.raises(IdOutOfRangeError, match=str(bad)):
            gather_pinned_tensor_rows(part, torch.tensor([0, bad]))


@pytest.mark.parametrize("width", [1, 3, 4])
@pytest.mark.parametrize("count", [10, 5000])
def test_kernels_read_and_write_rows_of_a_part(emulated, width, count):  # noqa: F811
    """Few rows as they come, many by their address."""
    part = table((300, width), torch.float32)[1:]
    view = pinning.host_view(part, torch.device("cpu"))
    where = view.tiers, view.pointers, view.position
    ids = torch.randint(0, len(part), (count,))
    found = torch.empty(count, width)
    gather._gather_rows_cuda(
        found, ids, *where, view.num_rows, view.host_start, view.sms, view.host_sms
    )
    assert torch.equal(found, part[ids])
    places, rows = torch.randperm(len(part))[:20], torch.randn(20, width)
    no_shares = torch.empty(0, 2, dtype=torch.int64)
    scatter._scatter_rows_cuda(places, rows, *where, no_shares, view.num_rows)
    assert torch.equal(part[places], rows)


def test_a_tensor_that_is_changed_or_replaced_is_read_as_it_is():
    ids = torch.tensor([2, 0])
    for _ in range(5):
        tensor = torch.randn(3, 2)
        assert torch.equal(gather_pinned_tensor_rows(tensor, ids), tensor[ids])
        tensor.add_(1)
        assert torch.equal(gather_pinned_tensor_rows(tensor, ids), tensor[ids])
        del tensor


def test_the_view_of_a_tensor_is_made_once():
    tensor, cpu = torch.randn(3, 2), torch.device("cpu")
    assert pinning.host_view(tensor, cpu) is pinning.host_view(tensor, cpu)
    assert pinning.host_view(tensor, cpu) is not pinning.host_view(tensor[:2], cpu)


def test_c_functions_take_arrays_of_dgl():
    tensor, ids = torch.randn(4, 2), torch.tensor([1, 1])
    array = dgl.backend.zerocopy_to_dgl_ndarray(tensor)
    assert torch.equal(pinning.gather_pinned_tensor_rows(array, ids), tensor[ids])
    pinning.scatter_pinned_tensor_rows(array, torch.tensor([3]), torch.ones(1, 2))
    assert tensor[3].tolist() == [1, 1]


def misaligned() -> torch.Tensor:
    memory = torch.zeros(16 * 5 + 4, dtype=torch.uint8)
    return memory[4:].view(5, 16)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.tensor(1.0), "single element"),
        (torch.zeros(3, 4).t(), "not contiguous"),
        (torch.zeros(3, 4)[:, :2], "not contiguous"),
        (torch.empty(3, 2, device="meta"), "meta"),
        (misaligned(), "multiple of 16"),
    ],
    ids=["scalar", "transposed", "columns", "elsewhere", "misaligned"],
)
def test_rows_that_kernels_cannot_read_are_refused(tensor, reason):
    with pytest.raises(InvalidInputError, match=reason):
        gather_pinned_tensor_rows(tensor, torch.tensor([0]))
    with pytest.raises(dgl.DGLError, match=reason):
        scatter_pinned_tensor_rows(tensor, torch.tensor([0]), torch.zeros(1, 2))


def test_a_gpu_is_refused_what_is_not_pinned():
    with pytest.raises(InvalidInputError, match="not pinned"):
        pinning.host_view(torch.zeros(3, 2), torch.device("cuda", 0))
