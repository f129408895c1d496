"""The files that docs/architecture.md names on three ways through the package are those that run.

On the way are the files of the call stacks at which something is done to what travels: an operator
is started, a kernel of the CPU runs, a block or the loss is made.  What is only asked something in
between, as for a dtype, is not on it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import dgl
import torch
from dgl import function as fn

import dgl_mgpu
from dgl_mgpu.cli import main
from dgl_mgpu.graph.dispatch import tensor_backed_graphs
from dgl_mgpu.models.homogeneous import NodeModel
from dgl_mgpu.ops import cpu, sample_future
from dgl_mgpu.sampling import block_sampling
from dgl_mgpu.store.memory.segment import Segment
from dgl_mgpu.train.minibatch.samplers import SeedBatches
from dgl_mgpu.train.minibatch.trainer import MiniBatchTrainer
from dgl_mgpu.train.objectives import SingleLabel
from tests.train.jobs import SMALL

PACKAGE = Path(dgl_mgpu.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text()


def named(beginning: str) -> set[str]:
    """Files of the paragraph of the page that begins so."""
    (paragraph,) = re.findall(rf"^{re.escape(beginning)}.*?\n\n", PAGE, re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`([\w/]+\.py)`", paragraph))


class Way:
    """The files of the package on the stacks at which some functions are called."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self.seen: dict[str, set[str]] = {}
        self._names: dict[CodeType, str] = {
            function.__code__: function.__qualname__ for function in functions
        }

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Called at every call, as a profiler."""
        if event == "call" and frame.f_code in self._names:
            files = self.seen.setdefault(self._names[frame.f_code], set())
            at: FrameType | None = frame
            while at is not None:
                path = Path(at.f_code.co_filename)
                if path.is_relative_to(PACKAGE):
                    files.add(path.relative_to(PACKAGE).as_posix())
                at = at.f_back

    @contextmanager
    def noted(self) -> Iterator[None]:
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def files(self) -> set[str]:
        assert self.seen.keys() == set(self._names.values())
        return set.union(*self.seen.values())


def test_from_a_seed_to_its_loss(tmp_path, monkeypatch):
    way = Way(
        SeedBatches.__iter__,
        sample_future.start,
        cpu.run,
        block_sampling.block_index_on_cpu,
        NodeModel.forward,
        SingleLabel.loss,
    )
    steps = MiniBatchTrainer._train_rounds

    def one_noted(*arguments: Any) -> Iterator[Any]:
        rounds = steps(*arguments)
        yield next(rounds)  # which fills caches
        with way.noted():
            second = next(rounds)
        yield second
        yield from rounds

    monkeypatch.setattr(MiniBatchTrainer, "_train_rounds", one_noted)
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "trainer.epochs=1", f"hydra.run.dir={tmp_path}/run", f"data.root={tmp_path}"]
    assert main(["train", *words]) == 0
    assert way.files() == named("From the command line, a seed goes through")


def test_from_the_disk_to_a_kernel(tmp_path):
    g = dgl.rand_graph(2000, 20000)
    g.ndata["feat"] = torch.rand(2000, 16)
    options = {"gpu_memory": "200KiB", "host_memory": 0, "disk_path": str(tmp_path)}
    written, way = Way(Segment.write), Way(cpu.run)
    with written.noted():
        store = dgl_mgpu.GlobalStore.from_dgl(g, device="cpu", **options)
    assert written.files() == named("Once it is planned, in shared memory, a row goes to the disk")
    ids = torch.arange(2000)
    with way.noted():
        rows = store.gather("feat", ids)
    assert torch.equal(rows, g.ndata["feat"])
    assert "disk" in {memory for _, memory in store.graph.traffic.take().rows}
    store.close()
    assert way.files() == named("`GlobalStore.gather` reads it through")


def test_from_update_all_to_a_kernel():
    with tensor_backed_graphs():
        g = dgl.rand_graph(500, 5000)
    g.ndata["h"] = torch.rand(500, 4)
    way = Way(cpu.run)
    with way.noted():
        g.update_all(fn.copy_u("h", "m"), fn.sum("m", "sum"))
    assert way.files() == named("On the CPU, `update_all` of a sum goes through")
