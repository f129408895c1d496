"""What the benchmarks that train through a store's loader share: the papers' models, mini-batches
and graphs, training that can begin anew, clocks for its steps and traces of them.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dgl_mgpu  # noqa: F401  makes DGL import

import dgl  # isort: skip
from dgl.dataloading import DataLoader, NeighborSampler, Sampler  # isort: skip

from benchmarks.fullgraph import Job
from dgl_mgpu.comm.communicator import Communicator
from dgl_mgpu.config.schema import ModelConfig
from dgl_mgpu.data.generate import SHAPES, GraphSpec
from dgl_mgpu.models.homogeneous import build_model
from dgl_mgpu.report.profile import Profile, StepProfile, read_profile
from dgl_mgpu.store.graph import StoreGraph
from dgl_mgpu.train.capture import CapturedStep
from dgl_mgpu.train.minibatch.samplers import RandomWalkSampler
from dgl_mgpu.utils.stages import stage

#: Steps of a pass before those that are timed.
WARM_UP = 5
#: Of PinSAGE: neighbours of a node in a layer, walks from it, and their steps.
NEIGHBORS, WALKS, WALK_LENGTH = 5, 4, 3
#: Share of a GPU's free memory that batches may take.
_BATCHES_SHARE = 0.4
#: Between losses of the same batches; those of others differ by a hundred times as much.
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Network:
    """A model and its mini-batches.

    Attributes
    ----------
    model : str
        As :func:`~dgl_mgpu.models.homogeneous.build_model` knows it.
    fanouts : tuple of int
        Beginning at the seeds.
    walks : bool
        Neighbours are those that random walks visit most.
    xgnn : mapping of str to float
        End-to-end time over training time on each graph in XGNN's table 4.
    heads : int
        Of attention, which share the width of a hidden layer.
    """

    model: str
    fanouts: tuple[int, ...]
    xgnn: Mapping[str, float] = field(default_factory=dict)
    walks: bool = False
    heads: int = 1

    def sampler(self, inputs: Sequence[str], walk_length: int = WALK_LENGTH) -> Sampler:
        """What makes its mini-batches, with node features ``inputs``."""
        prefetch = {"prefetch_node_feats": list(inputs), "prefetch_labels": ["label"]}
        if self.walks:
            layers = len(self.fanouts)
            return RandomWalkSampler(layers, NEIGHBORS, WALKS, walk_length, **prefetch)
        return NeighborSampler(list(self.fanouts[::-1]), **prefetch)


@dataclass(frozen=True)
class Setting:
    """What a paper trains: every network on every graph.

    Attributes
    ----------
    networks : mapping of str to Network
    graphs : mapping of str to GraphSpec
    batch : int
        Seeds of a mini-batch.
    """

    networks: Mapping[str, Network]
    graphs: Mapping[str, GraphSpec]
    batch: int


_XGNNS_GRAPHS = ("papers100M", "twitter", "uk-2006", "friendster")


def _quotients(*by_graph: float) -> dict[str, float]:
    return dict(zip(_XGNNS_GRAPHS, by_graph, strict=True))


def _unlabelled(name: str, nodes: int, edges: int) -> GraphSpec:
    """A graph of which 1 % of the nodes have labels, made up, and 80 % of these train."""
    return GraphSpec(nodes, edges, 128, 64, train=0.008, valid=0.001, test=0.001, shape=name)


_OGB = SHAPES["papers100M"]
#: XGNN, section 6.1.
_XGNN = Setting(
    {
        "graphsage": Network(
            "graphsage", (25, 10), _quotients(0.26 / 0.23, 0.08 / 0.07, 0.33 / 0.16, 0.33 / 0.17)
        ),
        "gcn": Network(
            "gcn", (15, 10, 5), _quotients(0.62 / 0.54, 0.25 / 0.20, 0.88 / 0.43, 8.67 / 1.14)
        ),
        "pinsage": Network(
            "pinsage",
            (NEIGHBORS,) * 3,
            _quotients(0.83 / 0.81, 0.36 / 0.34, 1.37 / 0.90, 2.35 / 1.43),
            walks=True,
        ),
    },
    {name: SHAPES[name] for name in _XGNNS_GRAPHS},
    batch=6000,
)
#: WholeGraph, section IV.  Edges of OGB's graphs are there in both directions.
_WHOLEGRAPH = Setting(
    {
        "gcn": Network("gcn", (30, 30, 30)),
        "graphsage": Network("graphsage", (30, 30, 30)),
        "gat": Network("gat", (30, 30, 30), heads=4),
    },
    {
        "products": SHAPES["products"],
        "papers100M": replace(_OGB, num_edges=2 * _OGB.num_edges),
        "friendster": _unlabelled("friendster", 68_300_000, 2_600_000_000),
        "uk-domain": _unlabelled("uk-domain", 105_200_000, 3_300_000_000),
    },
    batch=512,
)
#: By paper.
SETTINGS = {"xgnn": _XGNN, "wholegraph": _WHOLEGRAPH}


def network_model(network: Network, spec: GraphSpec, hidden: int) -> torch.nn.Module:
    """Its model, the same on all ranks."""
    torch.manual_seed(0)
    heads = network.heads
    config = ModelConfig(name=network.model, hidden=hidden // heads, heads=heads)
    return build_model(config, spec.num_features, spec.num_classes, len(network.fanouts))


def loader_of(
    graph: StoreGraph, ids: torch.Tensor, sampler: Sampler, batch: int, ranks: Communicator
) -> DataLoader:
    """What makes mini-batches of ``batch`` of a rank's share of the nodes ``ids``."""
    return DataLoader(
        graph,
        ids,
        sampler,
        device=graph.device,
        batch_size=batch,
        drop_last=True,
        use_ddp=ranks.size > 1,
    )


def blocks_of(loader: DataLoader, ahead: str = "1") -> Iterator[Any]:
    """As :func:`batches_of`, the blocks alone."""
    return (blocks for *_, blocks in batches_of(loader, ahead))


def batches_of(loader: DataLoader, ahead: str) -> Iterator[Any]:
    """One pass over a loader, with batches made ahead ('1') or one by one ('0')."""
    with patch.dict(os.environ, DGL_MGPU_PREFETCH=ahead):
        return iter(loader)


class Training:
    """A model that is trained on mini-batches, always from the same beginning.

    Parameters
    ----------
    model : nn.Module
        Called with ``inputs_of`` a batch's blocks, gives scores of its seeds.
    device : torch.device
    inputs_of : callable
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        inputs_of: Callable[[Any], tuple] = lambda blocks: (blocks, dict(blocks[0].srcdata)),
    ) -> None:
        self.model = model.to(device)
        self._called: torch.nn.Module = self.model
        if dist.is_initialized() and dist.get_world_size() > 1:
            ids = [device] if device.type == "cuda" else None
            self._called = DistributedDataParallel(self.model, device_ids=ids)
        self._inputs_of = inputs_of
        self._optimizer = torch.optim.Adam(
            self.model.parameters(), lr=0.003, fused=device.type == "cuda"
        )
        self._parts = self.model, self._optimizer
        self._beginning = copy.deepcopy([part.state_dict() for part in self._parts])

    def restart(self) -> None:
        """Be as at the beginning, with the same numbers for dropout."""
        for part, state in zip(self._parts, copy.deepcopy(self._beginning), strict=True):
            part.load_state_dict(state)
        torch.manual_seed(0)

    def step(self, batch: Any, labels: torch.Tensor) -> torch.Tensor:
        """The loss, before the step."""
        with stage("forward"):
            scores = self._called(*self._inputs_of(batch))
            loss = torch.nn.functional.cross_entropy(scores, labels)
        self._optimizer.zero_grad()
        with stage("backward"):
            loss.backward()
        with stage("update"):
            self._optimizer.step()
        return loss.detach()

    def step_on_blocks(self, blocks: Sequence[dgl.DGLGraph]) -> torch.Tensor:
        """As :meth:`step`, for a batch of DGL's loader."""
        return self.step(blocks, blocks[-1].dstdata["label"])

    def captured_batches(self, loader: DataLoader) -> Iterator[Any]:
        """A pass over a loader for :meth:`captured_step`, in place where that has been captured."""
        return self._captured.batches(loader)

    def captured_step(self, batch: Any) -> torch.Tensor:
        """As :meth:`step_on_blocks`, as one CUDA graph once it has been captured."""
        with stage("compute"):
            loss = self._captured(batch)
        with stage("update"):
            self._optimizer.step()
        return loss

    @functools.cached_property
    def _captured(self) -> CapturedStep:
        return self.capturing()

    def capturing(self) -> CapturedStep:
        """What captures the model's forward and backward pass as it is now."""
        return CapturedStep(
            self.model,
            lambda blocks: self.model(*self._inputs_of(blocks)),
            torch.nn.functional.cross_entropy,
        )

    def require_captured_right(
        self, what: str, begin: Callable[[], object], loader: DataLoader, count: int
    ) -> None:
        """Raise ValueError unless captured steps have the losses of others, without dropout.

        Both are of the first ``count`` batches of a pass, before which ``begin`` is called.
        """
        self.model.eval()
        capturing = self.capturing()
        begin()
        expected = []
        for blocks in itertools.islice(blocks_of(loader), count):
            with torch.no_grad():
                outputs = self.model(*self._inputs_of(blocks))
            labels = blocks[-1].dstdata["label"]
            expected.append(torch.nn.functional.cross_entropy(outputs, labels))
        begin()
        for other, batch in zip(expected, capturing.batches(loader), strict=False):
            found = capturing(batch)
            if not torch.allclose(found, other, _TOLERANCE, 0.0):
                raise ValueError(f"{what}: loss {found} of a captured step, {other} of another")
        self.model.train()


class Clock:
    """Times loops of a job: all ranks begin together, and the GPU is waited for at both ends."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def seconds_a_step(self, steps: Iterable[Any], count: int, warm_up: int = WARM_UP) -> float:
        """Of ``count`` steps after those that warm up; the loop is left then."""
        begin = 0.0
        for number, _ in enumerate(steps, start=1):
            if number == warm_up:
                self._job.wait()
                begin = time.perf_counter()
            elif number == warm_up + count:
                self._wait()
                return (time.perf_counter() - begin) / count
        raise ValueError(f"fewer than {warm_up} + {count} steps")

    def host_seconds(self, call: Callable[[], object]) -> float:
        """Of the host alone, for a call that does not wait for the GPU."""
        self._wait()
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self._job.device.type == "cuda":
            torch.cuda.synchronize()


def profiled(
    train: Callable[[Any], object], batches: Iterable[Any], steps: int, folder: Path | None
) -> StepProfile | None:
    """The trace of ``steps`` of a pass over batches, if any; kept in a folder, if any.

    The whole pass is trained on, as it is on ranks that trace nothing.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or Path(temporary)
        with Profile(steps, folder) as profile:
            for batch in batches:
                train(batch)
                profile.step()
        return read_profile(folder) if steps else None


def room_for_batches(training: Training, loader: DataLoader) -> int:
    """How many of a loader's batches fit this GPU's memory, beside training."""
    before = torch.cuda.memory_allocated()
    batch = next(batches_of(loader, "0"))
    nbytes = torch.cuda.memory_allocated() - before
    training.step_on_blocks(batch[2])
    del batch
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(_BATCHES_SHARE * torch.cuda.mem_get_info()[0] / nbytes)


def medians(each_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Of each way's times over all turns; in a turn ranks wait for the slowest one."""
    turns = {way: zip(*(rank[way] for rank in each_rank), strict=True) for way in each_rank[0]}
    return {way: statistics.median(map(max, times)) for way, times in turns.items()}


def require_same_losses(what: str, losses: Mapping[str, torch.Tensor]) -> bool:
    """Raise ValueError unless the ways have the same losses; whether they have the same bits.

    The first way has at least as many steps as the others.
    """
    first, expected = next(iter(losses.items()))
    same_bits = True
    for way, found in losses.items():
        those = expected[: len(found)]
        same_bits &= torch.equal(found, those)
        if not (found.isfinite().all() and torch.allclose(found, those, _TOLERANCE, 0.0)):
            raise ValueError(
                f"{what}: losses {found.tolist()} of '{way}', {those.tolist()} of '{first}'"
            )
    return same_bits
