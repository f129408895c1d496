"""Three ways through the package lead through few files, those that docs/architecture.md names."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import dgl
import dgl.function as fn
import numpy as np
import torch

import dgl_mgpu
from dgl_mgpu.cli import main
from dgl_mgpu.data import Dataset
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.models.homogeneous import NodeModel
from dgl_mgpu.ops import cpu, sample_future
from dgl_mgpu.sampling import block_sampling
from dgl_mgpu.store.memory.format import FeatureSource
from dgl_mgpu.store.memory.segment import Segment
from dgl_mgpu.store.memory.table import Table
from dgl_mgpu.train.minibatch.samplers import SeedBatches
from dgl_mgpu.train.minibatch.trainer import MiniBatchTrainer
from dgl_mgpu.train.objectives import SingleLabel
from tests.train.jobs import SMALL

PACKAGE = Path(dgl_mgpu.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text()


def named(beginning: str, end: str) -> list[str]:
    """Files that a sentence of the page names."""
    sentence = re.search(f"{re.escape(beginning)}(.*?){re.escape(end)}\n", PAGE, re.DOTALL)
    assert sentence
    return sorted(re.findall(r"`([\w/]+\.py)`", sentence[1]))


class Walk:
    """Files of the package whose functions are called, and those on the stack of some of them.

    These functions do something to what the walk follows; the walk ends with ``last``.
    """

    def __init__(self, *steps: Callable[..., Any], last: Callable[..., Any] | None = None) -> None:
        self._steps: dict[CodeType, str] = {step.__code__: step.__qualname__ for step in steps}
        self._last = None if last is None else last.__code__
        self._taken: set[str] = set()
        self.called: set[str] = set()
        self._on_stack: set[str] = set()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow what is called within."""
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        self.called |= self._files(frame)
        if frame.f_code in self._steps:
            self._taken.add(self._steps[frame.f_code])
            at: FrameType | None = frame
            while at is not None:
                self._on_stack |= self._files(at)
                at = at.f_back
        if frame.f_code is self._last:
            sys.setprofile(None)

    @staticmethod
    def _files(frame: FrameType) -> set[str]:
        path = Path(frame.f_code.co_filename)
        is_here = path.is_relative_to(PACKAGE) and frame.f_code.co_name != "<module>"
        return {path.relative_to(PACKAGE).as_posix()} if is_here else set()

    @property
    def on_stack(self) -> set[str]:
        """Files on the stack where each of the functions was called."""
        assert self._taken == set(self._steps.values())
        return self._on_stack


def test_from_a_seed_to_its_loss(tmp_path, monkeypatch, without_pictures):
    walk = Walk(
        SeedBatches.__iter__,  # seeds are drawn
        sample_future.start,  # sampling is started
        cpu.run,  # a kernel samples, numbers nodes, gathers
        block_sampling.block_index_on_cpu,  # a block is made
        NodeModel.forward,
        SingleLabel.loss,
        last=SingleLabel.loss,
    )
    train = MiniBatchTrainer._train_rounds

    def train_followed(*arguments: Any) -> Iterator[Any]:
        steps = train(*arguments)
        yield next(steps)  # which loads modules
        with walk.followed():
            step = next(steps)
        yield step
        yield from steps

    monkeypatch.setattr(MiniBatchTrainer, "_train_rounds", train_followed)
    options = f"data.root={tmp_path}", "trainer.epochs=1", f"hydra.run.dir={tmp_path / 'run'}"
    assert main(["train", *SMALL, *options]) == 0
    assert sorted(walk.on_stack) == named("a seed goes through", "has the loss.")
    assert len(walk.on_stack) <= 22
    assert len(walk.called | walk.on_stack) <= 49


def dataset(folder: Path, num_nodes: int = 2000) -> Dataset:
    """Nodes with five in-edges each, and features in a file."""
    rng = np.random.default_rng(0)
    np.save(folder / "feat.npy", rng.random((num_nodes, 16), dtype=np.float32))
    nodes = np.arange(num_nodes)
    return Dataset(
        name="rows",
        num_nodes=num_nodes,
        num_classes=2,
        indptr=np.arange(num_nodes + 1, dtype=np.int64) * 5,
        indices=rng.integers(0, num_nodes, 5 * num_nodes),
        labels=nodes % 2,
        train=nodes[:100],
        valid=nodes[100:110],
        test=nodes[110:120],
        node_features={"feat": np.load(folder / "feat.npy", mmap_mode="r")},
    )


def test_from_the_disk_to_a_kernel(tmp_path):
    data, ids = dataset(tmp_path), torch.arange(2000)
    memory = {"gpu_memory": "8KiB", "host_memory": "220KiB", "disk_path": tmp_path}
    build, gather = Walk(FeatureSource.bytes_of, Segment.write, Table._map), Walk()
    with build.followed():
        store = dgl_mgpu.GlobalStore.from_dataset(data, device="cpu", **memory)
    with store:
        assert store.plan.tables["node/_N/feat"].tiers[-1].memory == "disk"
        store.gather("feat", ids)  # compiles the kernel
        with gather.followed():
            rows = store.gather("feat", ids)
        assert np.array_equal(rows, data.node_features["feat"])
    files = build.on_stack | gather.called
    assert sorted(files) == named("a row from the disk goes through", "to the kernel.")
    assert len(files) <= 13


def test_from_update_all_to_a_kernel():
    with tensor_backed_graphs():
        g = dgl.rand_graph(50, 300)
        g.ndata["h"] = torch.randn(50, 8).requires_grad_()
        g.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))  # makes formats, loads modules
        walk = Walk()
        with walk.followed():
            g.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))
    assert sorted(walk.called) == named("`update_all` of a sum goes through", ".")
    assert len(walk.called) <= 6
