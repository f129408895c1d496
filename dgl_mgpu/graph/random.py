"""Random numbers for what this package does in DGL's place, seeded by ``dgl.seed``.

As DGL's own engines, these do not disturb torch's.  Where DGL was never seeded, torch's seed is
taken: that of ``torch.manual_seed``, or one of torch's choice.

Mini-batches of a DataLoader have random numbers of their own (`BatchDraws`), so that it does not
matter when one is sampled.  What torch draws for them, such as negative edges, is seeded by torch's
seed alone.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.dispatch import is_null
from dgl_mgpu.utils.fork_safe import freed_at_fork

#: How many times what is drawn a population has to be for few numbers to be drawn twice.
_SPARSE = 4


class _Sequences:
    """Random sequences of one seed, by default torch's."""

    def __init__(self, seed: int | None = None) -> None:
        self._lock = threading.Lock()
        self._seed, self._calls = seed, 0
        self._restarts = 0
        self._generators: dict[torch.device, torch.Generator] = {}

    @property
    def seeding(self) -> tuple[int, int | None]:
        """How often a seed was given, and the last one."""
        return self._restarts, self._seed

    def restart(self, seed: int) -> None:
        """Start over with another seed."""
        with self._lock:
            self._seed, self._calls = seed, 0
            self._restarts += 1
            for generator in self._generators.values():
                generator.manual_seed(seed)

    def generator(self, device: torch.device) -> torch.Generator:
        with self._lock:
            generator = self._generators.get(device)
            if generator is None:
                generator = torch.Generator(device).manual_seed(self._current_seed())
                self._generators[device] = generator
            return generator

    def next_key(self) -> tuple[int, int]:
        with self._lock:
            self._calls += 1
            return self._current_seed(), self._calls - 1

    def _current_seed(self) -> int:
        return torch.initial_seed() if self._seed is None else self._seed


_common = _Sequences()
freed_at_fork(_common._lock)
# Those of the mini-batch that a thread is making, in place of the common ones.
_local = threading.local()


def _current() -> _Sequences:
    return getattr(_local, "of_batch", None) or _common


def set_seed(seed: int) -> None:
    """Start all random sequences over: ``_CAPI_SetSeed``, beside DGL's own."""
    seed = int(seed) & (1 << 64) - 1
    _common.restart(seed)
    _current().restart(seed)


def generator(device: torch.device) -> torch.Generator:
    """The generator of a device, for torch's functions."""
    return _current().generator(device)


def next_key() -> tuple[int, int]:
    """The seed and the number of calls before this one: a key for one call of a sampler."""
    return _current().next_key()


def seeding() -> tuple[int, int | None]:
    """How often ``dgl.seed`` was called, and with what last; None if never."""
    return _common.seeding


class BatchDraws:
    """Random numbers of the mini-batches of one pass over a DataLoader, sampled on a device.

    What is drawn for a batch depends on the seed, on how many passes and other calls there were
    since then and on the number of the batch, but on nothing that is drawn meanwhile.
    ``torchs_seed`` is what torch's generator gave for this pass: the seed of what torch draws, and
    of all where ``dgl.seed`` was never called.
    """

    def __init__(self, device: torch.device, torchs_seed: int) -> None:
        key = next_key()
        self._torchs_key = torchs_seed, 0
        self._key = self._torchs_key if seeding()[1] is None else key
        self._device = device

    def of_batch(self, number: int, *, with_torchs: bool = True) -> AbstractContextManager[object]:
        """Draw for batch ``number``, from 0.

        Torch's own generators, of the CPU and of the device, then draw for it too, and go on
        afterwards where they were: torch draws negative edges, and no dropout shall depend on when.
        They are the process's; a thread that draws meanwhile gets numbers of the batch.
        """
        draws = _Draws(_Sequences(_digest(*self._key, number)))
        return self._with_torchs(draws, number) if with_torchs else draws

    @contextmanager
    def _with_torchs(self, draws: _Draws, number: int) -> Iterator[None]:
        torchs = [torch.default_generator]
        if self._device.type == "cuda":
            torchs.append(torch.cuda.default_generators[self._device.index])
        states = [torchs_generator.get_state() for torchs_generator in torchs]
        with draws:
            try:
                for torchs_generator in torchs:
                    torchs_generator.manual_seed(_digest(*self._torchs_key, number))
                yield
            finally:
                for torchs_generator, state in zip(torchs, states, strict=True):
                    torchs_generator.set_state(state)


class _Draws:
    """Within, this thread draws from sequences of its own."""

    # No generator: this takes microseconds of every batch.
    __slots__ = ("_before", "_sequences")

    def __init__(self, sequences: _Sequences) -> None:
        self._sequences = sequences

    def __enter__(self) -> None:
        self._before = getattr(_local, "of_batch", None)
        _local.of_batch = self._sequences

    def __exit__(self, *exception: object) -> None:
        _local.of_batch = self._before


def _digest(*numbers: int) -> int:
    words = b"".join((number % (1 << 64)).to_bytes(8, "little") for number in numbers)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


@torch.no_grad()
def choice(
    count: int, population: int, weights: torch.Tensor, replace: bool, bits: int
) -> torch.Tensor:
    """Draw numbers below ``population``, of 32 or 64 bits, in the order drawn: ``_CAPI_Choice``.

    Weights, of shape (population,), are not negative and of any sum; null for equal ones.  The
    result is on their device.  Raises `InvalidInputError` if there are not as many numbers, of some
    weight, to draw.
    """
    where = weights.device
    dtype = torch.int32 if bits == 32 else torch.int64
    action = f"draw {count} of {population} numbers"
    if count > (population if not replace else count * min(1, population)):
        raise InvalidInputError(
            action, "that is more than there are", "draw fewer, or with replacement"
        )
    if not is_null(weights) and len(weights) != population:
        raise InvalidInputError(
            action, f"there are {len(weights)} weights", "pass a weight for each"
        )
    random = generator(where)
    if is_null(weights) and replace:
        return torch.randint(population, (count,), generator=random, device=where, dtype=dtype)
    if is_null(weights):
        return _distinct(count, population, random, where).to(dtype)
    if replace:
        ends = weights.double().cumsum(0)
        draws = torch.rand(count, generator=random, device=where, dtype=torch.float64) * ends[-1]
        # Behind the ends that are not greater lies a number of some weight, but for rounding.
        drawn = torch.searchsorted(ends, draws, right=True)
        return drawn.clamp_(max=population - 1).to(dtype)
    # Efraimidis and Spirakis: whose exponential waiting time is over first.
    waits = torch.empty(population, dtype=torch.float64, device=where)
    waits.exponential_(generator=random).div_(weights)
    times, drawn = waits.topk(count, largest=False)
    if count and not times[-1].isfinite():
        raise InvalidInputError(
            action, "fewer of them have a weight above 0", "draw fewer, or with replacement"
        )
    return drawn.to(dtype)


def _distinct(
    count: int, population: int, random: torch.Generator, where: torch.device
) -> torch.Tensor:
    """``count`` distinct numbers below ``population``, in the order drawn, int64.

    Of a large population, such as all pairs of nodes, numbers are drawn with replacement, and those
    that come again are left out: that is the same distribution, and takes memory for ``count``.
    """
    if population <= _SPARSE * count:
        return torch.randperm(population, generator=random, device=where)[:count]
    drawn = torch.empty(0, dtype=torch.int64, device=where)
    while len(drawn) < count:
        more = torch.randint(
            population, (count + count // _SPARSE + 1,), generator=random, device=where
        )
        drawn = torch.cat([drawn, more])
        numbers, order = drawn.sort(stable=True)
        is_first = torch.ones_like(numbers, dtype=torch.bool)
        is_first[1:] = numbers[1:] != numbers[:-1]
        drawn = drawn[order[is_first].sort().values]
    return drawn[:count]
