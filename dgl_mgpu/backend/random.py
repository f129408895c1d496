"""Random numbers for what this package does in DGL's place, seeded by ``dgl.seed``.

DGL has random engines of its own, which do not disturb torch's; so do we.  Where DGL was never
seeded, torch's seed is taken: that of ``torch.manual_seed``, or one of torch's choice.
"""

from __future__ import annotations

import threading

import torch

from dgl_mgpu.backend.arrays import is_null
from dgl_mgpu.errors import InvalidInputError

_lock = threading.Lock()
_seed: int | None = None
_calls = 0
_generators: dict[torch.device, torch.Generator] = {}


def set_seed(seed: int) -> None:
    """Begin all random sequences anew: ``_CAPI_SetSeed``, beside DGL's own."""
    global _seed, _calls
    with _lock:
        _seed, _calls = int(seed) & (1 << 64) - 1, 0
        for each in _generators.values():
            each.manual_seed(_seed)


def _current_seed() -> int:
    return torch.initial_seed() if _seed is None else _seed


def generator(device: torch.device) -> torch.Generator:
    """The generator of a device, for torch's functions."""
    with _lock:
        found = _generators.get(device)
        if found is None:
            found = _generators[device] = torch.Generator(device).manual_seed(_current_seed())
        return found


def next_key() -> tuple[int, int]:
    """The seed, and how many calls there were before this one: a key for a call of our samplers."""
    global _calls
    with _lock:
        _calls += 1
        return _current_seed(), _calls - 1


@torch.no_grad()
def choice(
    count: int, population: int, weights: torch.Tensor, replace: bool, bits: int
) -> torch.Tensor:
    """Draw numbers below ``population``: ``_CAPI_Choice``.

    Parameters
    ----------
    count, population : int
    weights : Tensor, float, shape (population,)
        Not negative, of any sum; null for equal ones.
    replace : bool
        Whether a number can be drawn again.
    bits : int
        32 or 64, of the numbers.

    Returns
    -------
    Tensor, int32 or int64, shape (count,)
        In the order in which they are drawn, on the device of ``weights``.

    Raises
    ------
    InvalidInputError
        If there are not as many numbers to draw, or not as many of some weight.
    """
    where = weights.device
    dtype = torch.int32 if bits == 32 else torch.int64
    asked = f"draw {count} of {population} numbers"
    if count > (population if not replace else count * min(1, population)):
        raise InvalidInputError(asked, "there are too few", "draw fewer, or with replacement")
    if not is_null(weights) and len(weights) != population:
        raise InvalidInputError(asked, f"{len(weights)} weights", "pass a weight for each")
    random = generator(where)
    if is_null(weights) and replace:
        return torch.randint(population, (count,), generator=random, device=where, dtype=dtype)
    if is_null(weights):
        return torch.randperm(population, generator=random, device=where)[:count].to(dtype)
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
            asked, "fewer have a weight above 0", "draw fewer, or with replacement"
        )
    return drawn.to(dtype)
