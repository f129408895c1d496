"""The peer pylibwholegraph (WholeGraph's successor), where it is installed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dgl_mgpu.comm.communicator import Communicator

_CHUNK = 1 << 26

Hop = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: Both make rows of their ids; the second one reads them.
Make = Gather = Callable[[torch.Tensor], torch.Tensor]


class Cache(NamedTuple):
    """The peer's cache of a table's rows in GPUs' memory.

    Attributes
    ----------
    kind : str
        'local_device', a cache of each GPU's own, or 'all_devices', one over all GPUs.
    share : float
        Of all rows, those that a cache holds.
    """

    kind: str
    share: float


def numbered_words(width: int) -> Make:
    """What makes rows as :class:`benchmarks.gpu.NumberedWords`."""

    def make(ids: torch.Tensor) -> torch.Tensor:
        words = ids[:, None] * width + torch.arange(width, device=ids.device)
        return words.to(torch.int32).view(torch.float32)

    return make


class Loaded(NamedTuple):
    """A mini-batch for layers of torch-geometric, the layer nearest the input first.

    Attributes
    ----------
    nodes : Tensor, shape (num_inputs,)
    rows : Tensor, shape (num_inputs, width)
        Their features.
    edges : list of Tensor, int64, shape (2, E)
        Each layer's sources and destinations, numbered as they are among the layer's sources, of
        which destinations are the first.
    sizes : list of int
        Destinations of each layer.
    """

    nodes: torch.Tensor
    rows: torch.Tensor
    edges: list[torch.Tensor]
    sizes: list[int]


def connect(ranks: Communicator, wanted: bool) -> WholeGraph | None:
    """The peer, on every rank; None, and the first rank says so, where there is none."""
    reason = None
    if not wanted:
        reason = "it is not wanted"
    elif not torch.cuda.is_available():
        reason = "this machine has no GPU"
    elif importlib.util.find_spec("pylibwholegraph") is None:
        reason = "it is not installed"
    elif ranks.size > torch.cuda.device_count():
        reason = "ranks share GPUs, and NCCL wants one for each"
    if reason is None:
        return WholeGraph(ranks)
    if ranks.rank == 0:
        print(f"without the peer pylibwholegraph: {reason}")
    return None


class WholeGraph:
    """Its memory over all ranks' GPUs ('cuda') or the host's ('cpu').

    It is of type 'continuous', the fastest one, in which a rank reads the others' memory directly,
    where no method says otherwise; that of type 'distributed' ranks ask each other for, by NCCL.
    """

    def __init__(self, ranks: Communicator) -> None:
        import pylibwholegraph.torch as wholegraph

        self._wholegraph = wholegraph
        # It wants a job of torch.distributed, also for one rank.
        self._own_job = not dist.is_initialized()
        if self._own_job:
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        wholegraph.init(ranks.rank, ranks.size, ranks.rank, ranks.size, "warn")
        self._communicator = wholegraph.get_global_communicator("nccl")

    @contextlib.contextmanager
    def _memory(
        self, where: str, shape: list[int], dtype: torch.dtype, kind: str = "continuous"
    ) -> Iterator[Any]:
        strides = [*shape[1:], 1]
        tensor = self._wholegraph.create_wholememory_tensor(
            self._communicator, kind, where, shape, dtype, strides
        )
        try:
            yield tensor
        finally:
            torch.cuda.synchronize()
            self._communicator.barrier()
            self._wholegraph.destroy_wholememory_tensor(tensor)

    def _filled(self) -> None:
        torch.cuda.synchronize()
        self._communicator.barrier()

    def numbered_table(
        self, where: str, num_rows: int, row_bytes: int
    ) -> contextlib.AbstractContextManager[Gather]:
        """The gather from a table as :class:`benchmarks.gpu.NumberedWords`; collective."""
        return self.table(where, num_rows, row_bytes // 4, numbered_words(row_bytes // 4))

    @contextlib.contextmanager
    def table(
        self, where: str, num_rows: int, width: int, make: Make, kind: str = "continuous"
    ) -> Iterator[Gather]:
        """The gather from a table of float32 rows that ``make`` makes of their ids; collective.

        From memory of type 'distributed' so is each gather.
        """
        with self._memory(where, [num_rows, width], torch.float32, kind) as tensor:
            self._fill(tensor, num_rows, make)
            yield tensor.gather

    @contextlib.contextmanager
    def cached_table(
        self,
        where: str,
        num_rows: int,
        width: int,
        make: Make,
        cache: Cache,
        reads: Iterable[torch.Tensor],
    ) -> Iterator[dict[str, Gather]]:
        """Gathers from a table as :meth:`table`'s with a cache in the GPUs' memory; collective.

        The cache has been filled by ``reads`` of ids before.  One gather goes on to change it by
        what is read, as the peer does by default; the other leaves it as it is.  The cache's tags
        and counts of reads take memory beside its rows.
        """
        library = self._wholegraph
        policy = library.create_builtin_cache_policy(
            cache.kind, "continuous", where, "readonly", cache.share
        )
        embedding = library.create_embedding(
            self._communicator, "continuous", where, torch.float32, [num_rows, width],
            cache_policy=policy,
        )  # fmt: skip
        try:
            self._fill(embedding.get_embedding_tensor(), num_rows, make)

            def gather(ids: torch.Tensor, adjust: bool) -> torch.Tensor:
                embedding.set_adjust_cache(adjust)
                return embedding.gather(ids)

            for ids in reads:
                gather(ids, adjust=True)
            yield {
                f"{cache.kind} cache, adjusted": partial(gather, adjust=True),
                f"{cache.kind} cache, as it is": partial(gather, adjust=False),
            }
        finally:
            self._filled()
            library.destroy_embedding(embedding)  # and its policy with it

    def _fill(self, tensor: Any, num_rows: int, make: Make) -> None:
        """Have the rows of a tensor in the peer's memory, which may be more than a table's."""
        rows, first = tensor.get_local_tensor()
        for chunk in rows[: max(0, num_rows - first)].split(_CHUNK // rows.shape[1]):
            chunk.copy_(make(torch.arange(first, first + len(chunk), device=rows.device)))
            first += len(chunk)
        self._filled()

    @contextlib.contextmanager
    def sampler(
        self, where: str, indptr: torch.Tensor, indices: torch.Tensor
    ) -> Iterator[Callable[[torch.Tensor, Sequence[int]], list[Hop]]]:
        """Sampling of all hops of a graph that every rank has in full; collective.

        Called with seeds and fanouts, beginning at the seeds, it gives for each hop the
        destination nodes, their offsets, and the sampled neighbours as node ids.
        """
        with contextlib.ExitStack() as memories:
            parts = []
            for whole in (indptr, indices):
                memory = memories.enter_context(self._memory(where, [len(whole)], whole.dtype))
                mine, first = memory.get_local_tensor()
                mine.copy_(whole[first : first + len(mine)])
                parts.append(memory)
            self._filled()
            graph = self._wholegraph.GraphStructure()
            graph.set_csr_graph(*parts)
            yield graph.multilayer_sample_without_replacement

    @contextlib.contextmanager
    def loader(
        self,
        where: str,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        width: int,
        make: Make,
    ) -> Iterator[Callable[[torch.Tensor, Sequence[int]], Loaded]]:
        """Mini-batches for layers of torch-geometric, as its own examples make them; collective.

        Called as :meth:`sampler`'s; features are those of :meth:`table`.
        """
        with contextlib.ExitStack() as using:
            sample = using.enter_context(self.sampler(where, indptr, indices))
            gather = using.enter_context(self.table(where, len(indptr) - 1, width, make))

            def load(seeds: torch.Tensor, fanouts: Sequence[int]) -> Loaded:
                nodes, edges, _, _ = sample(seeds, list(fanouts))
                sizes = [len(targets) for targets in nodes[1:]]
                return Loaded(nodes[0], gather(nodes[0]), [each.long() for each in edges], sizes)

            yield load

    def close(self) -> None:
        """End it; collective, and nothing of it may be in use."""
        from pylibwholegraph.binding import wholememory_binding
        from pylibwholegraph.torch.comm import reset_communicators

        wholememory_binding.finalize()
        reset_communicators()
        if self._own_job:
            dist.destroy_process_group()


def hops(sampled: tuple[list, list, list, list]) -> list[Hop]:
    """Destination nodes, offsets and neighbours of each hop, that of the seeds first."""
    nodes, _, offsets, neighbors = sampled
    return [
        (nodes[hop + 1], offsets[hop], nodes[hop][neighbors[hop]])
        for hop in reversed(range(len(offsets)))
    ]
