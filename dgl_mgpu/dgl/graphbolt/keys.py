"""Random numbers of GraphBolt's: by ``graphbolt.seed``, and else by DGL's or torch's seed."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
from collections.abc import Iterator

import torch

from dgl_mgpu.graph.random import seeding
from dgl_mgpu.ops import SampleKey
from dgl_mgpu.sampling.seed_edges import new_key
from dgl_mgpu.utils.fork_safe import freed_at_fork


class _Keys:
    """Keys of calls that draw: those after a seed are the same after each time it is set."""

    def __init__(self) -> None:
        self._seed: int | None = None
        self._num_calls = 0
        #: How often a seed was set.
        self.num_seedings = 0
        self._lock = freed_at_fork(threading.Lock())
        #: Those of the mini-batch that a thread is making, in place of the common ones.
        self._local = threading.local()

    def set_seed(self, seed: int) -> None:
        with self._lock:
            self._seed, self._num_calls = seed % (1 << 64), 0
            self.num_seedings += 1

    def next(self) -> SampleKey:
        """The key of a new call; without a seed, one of those of DGL's own sampling.

        Workers of a DataLoader, which begin with what their parent had, draw other numbers each,
        and others in each epoch.
        """
        of_batch: Iterator[SampleKey] | None = getattr(self._local, "of_batch", None)
        if of_batch is not None:
            return next(of_batch)
        worker = torch.utils.data.get_worker_info()
        with self._lock:
            if self._seed is None and worker is None:
                return new_key()
            self._num_calls += 1
            own = 0 if worker is None else worker.seed
            return SampleKey((self._seed or 0) ^ own, batch=self._num_calls)

    def of_pass(self) -> SampleKey:
        """The key of a pass over a loader.

        Without a seed of its own or of DGL's, it is one of torch's generator, as it is now: other
        passes and workers have others, and the same after ``torch.manual_seed``.
        """
        if self._seed is not None or seeding()[1] is not None:
            return self.next()
        state = torch.get_rng_state().numpy().tobytes()
        return SampleKey(int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little"))

    @contextlib.contextmanager
    def of_batch(self, of_pass: SampleKey, number: int) -> Iterator[None]:
        """Within, this thread draws for a mini-batch of a pass, the same whenever it is made."""
        seed = of_pass.fold() % (1 << 64)
        self._local.of_batch = (SampleKey(seed, number, call) for call in itertools.count())
        try:
            yield
        finally:
            self._local.of_batch = None


keys = _Keys()
