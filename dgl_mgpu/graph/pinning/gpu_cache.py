"""A cache of feature rows on the GPU: ``dgl.cuda.GPUCache``, which the wheel lacks.

Set associative, least recently used first out: a hash of its key gives a row its set, in which it
can be in a few places only, the *ways*.  Look-ups and replacements are a few torch operators each;
the host waits only for the number of missing rows, which DGL asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dgl_mgpu.errors import InvalidInputError

#: Places that a row can be in: 128 bytes of keys, what a GPU reads at a time.
_WAYS = 16
#: Knuth's multiplier, 2^64 divided by the golden ratio, as a signed number.
_MULTIPLIER = -7046029254386353131
_NO_KEY = -1


class GPUCache:
    """The most recently used rows, by int32 or int64 key.

    Takes its memory where the keys of its first query are, and keeps rows in the element type of
    the first that it is given.  ``num_items`` is rounded up to full sets.
    """

    def __init__(self, num_items: int, num_feats: int, idtype: torch.dtype = torch.int64) -> None:
        if idtype not in (torch.int32, torch.int64) or num_items < 1 or num_feats < 0:
            raise InvalidInputError(
                f"cache {num_items} rows of {num_feats} elements by keys of {idtype}",
                "there is no such cache",
                "pass num_items of 1 or more, num_feats of 0 or more, and idtype int32 or int64",
            )
        self.idtype = idtype
        self.total_miss = 0
        self.total_queries = 0
        self._num_feats = num_feats
        self._ways = min(_WAYS, num_items)
        self._sets = -(-num_items // self._ways)
        self._calls = 0
        self._allocated: tuple[torch.Tensor, torch.Tensor] | None = None
        self._rows: torch.Tensor | None = None

    def query(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Look rows up, by keys of shape (n,).

        Returns rows of shape (n, num_feats), with anything where they are missing; the places in
        ``keys`` of those that are missing; and their keys.
        """
        keys = keys.to(self.idtype)
        table, stamps = self._memory(keys.device)
        place, is_cached = self._find(table, self._set_of(keys), keys)
        self._calls += 1
        stamps.index_fill_(0, torch.where(is_cached, place, len(stamps) - 1), self._calls)
        missing_index = (~is_cached).nonzero()[:, 0]
        missing_keys = keys[missing_index]
        self.total_queries += len(keys)
        self.total_miss += len(missing_keys)
        if self._rows is None:
            return torch.empty(len(keys), self._num_feats, device=keys.device), missing_index, keys
        return self._rows[place], missing_index, missing_keys

    def replace(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put rows into the cache, in place of the least recently used ones.

        Rows that are there already are overwritten, and of repeated ones the first counts; where
        more rows come for a set than it holds, the last stay out.
        """
        count = len(keys)
        if values.numel() != count * self._num_feats:
            raise InvalidInputError(
                f"cache {count} rows of {self._num_feats} elements",
                f"the values have shape {tuple(values.shape)}",
                "pass a row for each key",
            )
        if count == 0:
            return
        keys = keys.to(self.idtype)
        table, stamps = self._memory(keys.device)
        nowhere = len(stamps) - 1
        if self._rows is None:
            shape = (len(stamps), self._num_feats)
            self._rows = torch.empty(shape, dtype=values.dtype, device=keys.device)
        keys, order = torch.sort(keys, stable=True)
        sets, by_set = torch.sort(self._set_of(keys), stable=True)
        keys, order = keys[by_set], order[by_set]
        repeated = torch.zeros_like(keys, dtype=torch.bool)
        repeated[1:] = keys[1:] == keys[:-1]

        place, is_cached = self._find(table, sets, keys)
        self._calls += 1
        stamps.index_fill_(0, torch.where(is_cached, place, nowhere), self._calls)
        # The new keys of a set take its ways from the one that was not asked for longest on, but
        # none that is written in this very call.
        new = ~(is_cached | repeated) & (keys >= 0)
        before = new.cumsum(0) - new.long()
        rank = before - before[torch.searchsorted(sets, sets)]
        by_age = stamps[:-1].view(self._sets, self._ways)[sets].argsort(dim=1, stable=True)
        way = by_age.gather(1, rank.clamp(max=self._ways - 1)[:, None])[:, 0]
        victim = sets * self._ways + way
        fits = new & (rank < self._ways) & (stamps[victim] != self._calls)
        place = torch.where(fits, victim, torch.where(is_cached & ~repeated, place, nowhere))

        table[place] = keys
        table[nowhere:].fill_(_NO_KEY)
        stamps.index_fill_(0, place, self._calls)
        self._rows[place] = values.reshape(count, self._num_feats)[order].to(self._rows.dtype)

    def fetch(self, keys: torch.Tensor, source: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        """Rows from the cache, and those that are missing from ``source``, which are then cached.

        ``source`` gives the rows of keys, or something whose ``wait()`` gives them.  The result has
        their shape and element type; its ``__cache_miss__`` is the share that came from there.
        """
        values, missing_index, missing_keys = self.query(keys)
        missing = source(missing_keys)
        if hasattr(missing, "wait"):
            missing = missing.wait()
        self.replace(missing_keys, missing)
        values = values.view(len(keys), *missing.shape[1:]).to(missing.dtype)
        values[missing_index] = missing
        values.__cache_miss__ = len(missing_keys) / max(1, len(keys))  # type: ignore[attr-defined]
        return values

    @property
    def miss_rate(self) -> float:
        """The share of all rows asked for that were not there."""
        return self.total_miss / self.total_queries

    def _memory(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and times of last use; after the last way a place for what is left out."""
        if self._allocated is None:
            places = self._sets * self._ways + 1
            self._allocated = (
                torch.full((places,), _NO_KEY, dtype=self.idtype, device=device),
                torch.zeros(places, dtype=torch.int64, device=device),
            )
        if self._allocated[0].device != device:
            raise InvalidInputError(
                f"look up rows cached on {self._allocated[0].device}",
                f"the keys are on {device}",
                "use a cache for each device",
            )
        return self._allocated

    def _set_of(self, keys: torch.Tensor) -> torch.Tensor:
        """Upper bits of a product: keys that follow on, or share factors, spread over all sets."""
        return ((keys.long() * _MULTIPLIER) >> 33 & 0x7FFFFFFF) % self._sets

    def _find(
        self, table: torch.Tensor, sets: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each key is, and whether it is there at all."""
        same = table[:-1].view(self._sets, self._ways)[sets] == keys[:, None]
        way = same.to(torch.uint8).argmax(1)
        return sets * self._ways + way, same.any(1) & (keys >= 0)
