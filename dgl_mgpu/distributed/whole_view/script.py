"""``python -m dgl_mgpu --partition``: a script for one process, run by several ranks alike."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from dgl_mgpu.comm.communicator import Communicator, forget_groups
from dgl_mgpu.errors import ConfigError, PartitionedRowsError

#: How graphs that are moved to a device are partitioned (`dgl_mgpu.partition_graph`); None if they
#: are not.
by: str | None = None
_num_partitioned = 0


def start(partition_by: str) -> None:
    """Have graphs partitioned from now on, if torchrun has started several ranks.

    Every rank has a GPU of its own, which it sees alone, and random numbers that are the same on
    every rank.  What it prints is seen of the first rank.

    Raises
    ------
    ConfigError
        If the machine has GPUs, but fewer than ranks.
    """
    global by
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    by = partition_by
    _hash_alike()
    _take_gpu()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    _seed_alike()
    if dist.get_rank():
        sys.stdout.flush()
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
    _refuse_autograd_functions()
    _weight_l1_loss()
    _save_once()


def finish() -> None:
    """Warn if the script has moved no graph to a device, and leave the other ranks."""
    if by is None or not dist.is_initialized():
        return
    if not _num_partitioned and not dist.get_rank():
        print(
            "python -m dgl_mgpu --partition: nothing was partitioned, each rank did all of the "
            "work: only a DGLGraph that the script moves by g.to(device) is",
            file=sys.stderr,
        )
    # Else a process may be aborted at its end, while threads of gloo's still run.
    Communicator.of_all_machines().all_gather(None)
    forget_groups()
    dist.destroy_process_group()


def partition(graph: Any, device: Any) -> Any:
    """A graph that a script moves to a device, as a part that looks like the whole graph."""
    global _num_partitioned
    from dgl_mgpu.distributed.whole_view import graph as whole_view

    assert by is not None
    device = torch.empty(0, device=device).device
    if whole_view.is_whole_view(graph):
        if device == graph.device:
            return graph
        with _whole_graphs():
            graph = whole_view.unpartitioned(graph)
    _num_partitioned += 1
    return whole_view.partition(graph, device, by)


def partition_anew(function: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
    """What a function makes of the whole graph, partitioned again; collective."""
    from dgl_mgpu.distributed.whole_view import graph as whole_view

    with _whole_graphs():
        return whole_view.partition_anew(function, graph, *args, **kwargs)


@contextlib.contextmanager
def _whole_graphs() -> Iterator[None]:
    """A context in which graphs that are moved stay whole."""
    global by
    before, by = by, None
    try:
        yield
    finally:
        by = before


def _take_gpu() -> None:
    """See one GPU alone, this rank's: a script's "cuda:0" is that one."""
    count, rank = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
    if not count:
        return
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if count < ranks:
        raise ConfigError(
            f"--partition with {ranks} ranks on this machine",
            f"it has {count} GPUs, and each rank takes one",
            "start as many ranks as there are GPUs, or set CUDA_VISIBLE_DEVICES= to use none",
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)


def _hash_alike() -> None:
    """Have sets of strings in the same order on every rank: start this process anew, if need be."""
    if "PYTHONHASHSEED" not in os.environ:
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _seed_alike() -> None:
    """Give all ranks the same random numbers, until the script seeds them itself."""
    import dgl

    ranks = Communicator.of_all_machines()
    seed = ranks.broadcast_from_rank0("seed random numbers", lambda: torch.seed() % 2**31)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    dgl.seed(seed)
    # Generators without a seed have one of their own in each process.
    default_rng, seeds = np.random.default_rng, np.random.SeedSequence(seed)

    def seeded_rng(seed: Any = None) -> np.random.Generator:
        return default_rng(seeds.spawn(1)[0] if seed is None else seed)

    np.random.default_rng = seeded_rng


def _refuse_autograd_functions() -> None:
    """Refuse partitioned rows where a function has a gradient of its own.

    torch does not ask its operands' types before, and their gradients would be lost.
    """
    from dgl_mgpu.distributed.whole_view.tensor import PartitionedTensor, leaves

    original = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, PartitionedTensor) for value in leaves([args, kwargs])):
            raise PartitionedRowsError(
                f"call {cls.__name__}, an autograd function, with rows of a partitioned graph",
                "its gradients would be of one rank's rows alone",
                "use torch's own functions in its place, or run without --partition",
            )
        return original(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]


def _weight_l1_loss() -> None:
    """Have ``l1_loss`` heed its weights, of which torch tells no class of tensors."""
    original = functional.l1_loss

    def l1_loss(
        input: Any, target: Any, size_average: Any = None, reduce: Any = None,
        reduction: str = "mean", weight: Any = None,
    ) -> Any:  # fmt: skip
        if weight is None:
            return original(input, target, size_average, reduce, reduction)
        each = original(input, target, reduction="none") * weight
        if reduction == "none":
            return each
        return each.sum() if reduction == "sum" else each.sum() / weight.sum()

    functional.l1_loss = l1_loss  # type: ignore[assignment]


def _save_once() -> None:
    """Have the first rank alone write what a script saves by ``torch.save``: all name one file."""
    from dgl_mgpu.distributed.whole_view.tensor import whole

    original = torch.save

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, str | os.PathLike):
            return original(obj, f, *args, **kwargs)
        everything = whole(obj)
        ranks = Communicator.of_all_machines()
        ranks.broadcast_from_rank0(
            f"save {os.fspath(f)}", lambda: original(everything, f, *args, **kwargs)
        )
        return None

    torch.save = save
