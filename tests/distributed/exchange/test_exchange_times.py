"""How long exchanges take: what of the time of a step is theirs, and what of that is not hidden."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import dgl
import pytest
import torch
import torch.distributed as dist

import dgl_mgpu
from dgl_mgpu.distributed.exchange import schedule as rounds
from dgl_mgpu.distributed.exchange.schedule import Message
from dgl_mgpu.train.fullgraph.trainer import FullGraphTrainer
from dgl_mgpu.utils import stages
from dgl_mgpu.utils.stages import StageTimes, stage
from tests.distributed.graphs import homogeneous
from tests.ranks import on_gpus_too
from tests.train.epochs import train_epoch


class _Slow:
    """A message for which a second is waited."""

    def __init__(self, clock: list[float], work: dist.Work) -> None:
        self._clock, self._work = clock, work

    def wait(self) -> None:
        self._work.wait()
        self._clock[0] += 1


@contextlib.contextmanager
def _slow_exchanges(clock: list[float], sent: list[str]) -> Any:
    """Waiting for a message takes a second, a product a hundred; ``sent`` names the messages."""
    product = rounds._summed

    def slow_product(*args: Any) -> torch.Tensor:
        clock[0] += 100
        return product(*args)

    def slow(name: str) -> Callable[..., Any]:
        call = getattr(dist, name)

        def send(*args: Any, **kwargs: Any) -> Any:
            work = call(*args, **kwargs)
            if not kwargs.get("async_op"):
                return work
            sent.append(name)
            return _Slow(clock, work)

        return send

    names = ("all_to_all_single", "broadcast", "reduce", "all_reduce")
    with (
        patch.multiple(dist, **{name: slow(name) for name in names}),
        patch.object(rounds, "_summed", slow_product),
        patch.object(stages.time, "perf_counter", lambda: clock[0]),
    ):
        yield


class _Model(torch.nn.Module):
    """Convolutions, attention and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = dgl.nn.SAGEConv(5, 4, "mean").double()
        self.second = dgl.nn.GATConv(4, 3, 1, allow_zero_in_degree=True).double()

    def forward(self, graph: dgl.DGLGraph, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        found = self.second(graph, self.first(graph, inputs["feat"])).flatten(1)
        with graph.local_scope():
            graph.ndata["h"] = found
            return found - dgl.mean_nodes(graph, "h")


def _trainer(exchange: str) -> FullGraphTrainer:
    pg = dgl_mgpu.partition_graph(homogeneous(), exchange=exchange)
    model = _Model().to(pg.device)
    every = torch.ones(pg.num_nodes(), dtype=torch.bool, device=pg.device)
    return FullGraphTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        pg,
        {"feat": pg.ndata["x"]},
        pg.ndata[dgl.NID].long() % 3,
        dict.fromkeys(("train", "valid", "test"), every),
    )


def _waited_for(exchange: str) -> tuple[float | None, float | None, list[str]]:
    trainer = _trainer(exchange)
    clock, sent, of_step = [0.0], [], []

    with _slow_exchanges(clock, sent):
        for _ in trainer.run_epoch(last=True):
            of_step.extend(sent)
    (report,) = trainer.reports
    assert len(sent) > len(of_step)  # evaluation is no part of it
    return report.seconds.waiting, report.seconds.exchange, of_step


@pytest.mark.parametrize("exchange", ["halo", "broadcast"])
def test_an_epoch_tells_how_long_its_step_waited_for_rows(ranks, exchange):
    for waiting, under_way, sent in ranks.run(_waited_for, exchange):
        assert "all_reduce" in sent
        assert ("all_to_all_single" in sent) == (exchange == "halo")
        assert ("broadcast" in sent) == ("reduce" in sent) == (exchange == "broadcast")
        assert waiting == len(sent) > 0
        assert under_way is None  # gloo does not tell


def test_a_single_rank_waits_for_nobody():
    report = train_epoch(_trainer("halo"))
    assert report.seconds.waiting is report.seconds.exchange is None
    assert report.seconds.forward is not None


def _measured(exchange: str) -> list[str]:
    trainer = _trainer(exchange)
    for _ in range(2):
        report = train_epoch(trainer)
    return list(report.seconds.measured())


@on_gpus_too
def test_gpus_tell_how_long_rows_were_on_their_way(ranks):
    of_gpu = ["exchange"] if ranks._device == "cuda" else []
    expected = ["forward", "backward", *of_gpu, "waiting", "update", "evaluate", "total"]
    for exchange in ranks.exchanges:
        assert ranks.run(_measured, exchange) == [expected] * ranks.size


class _Gpu:
    """Streams by name, of which one is torch's current one, and what is done on them."""

    def __init__(self) -> None:
        self.current, self.done = "main", []

    def stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.done.append((name, f"waits for {other.name}")),
        )

    @contextlib.contextmanager
    def on(self, stream: Any) -> Any:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def note(self, what: str) -> int:
        self.done.append((self.current, what))
        return len(self.done)


def test_on_a_gpu_another_stream_tells_when_a_message_has_come(monkeypatch):
    gpu = _Gpu()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu.stream(gpu.current))
    monkeypatch.setattr(torch.cuda, "stream", gpu.on)
    monkeypatch.setattr(rounds, "_observer_stream", lambda device: gpu.stream("beside"))
    monkeypatch.setattr(stages, "_mark", lambda device: gpu.note("mark"))
    work = SimpleNamespace(wait=lambda: gpu.note("wait"))
    rows = SimpleNamespace(device=torch.device("cuda"))
    with StageTimes(torch.device("cpu")) as times:
        message = Message(work, rows)
        with stage("product"):
            gpu.note("product")
        assert message._used == (rows,)
        message.wait()
    assert gpu.done == [
        ("beside", "waits for main"), ("beside", "mark"), ("beside", "wait"), ("beside", "mark"),
        ("main", "mark"), ("main", "product"), ("main", "mark"),
        ("main", "mark"), ("main", "wait"), ("main", "mark"),
    ]  # fmt: skip
    assert set(times.seconds()) == {"exchange", "product", "waiting"}
    assert message._used == ()
    # Nobody listens now.
    gpu.done.clear()
    Message(work, rows).wait()
    assert gpu.done == [("main", "wait")]
