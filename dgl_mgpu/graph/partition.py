"""Which process owns which row: ``dgl.partition.NDArrayPartition``.

DGL's C++ has it for GPUs alone, and the wheel not at all; this one is for tensors of any device.
"""

from __future__ import annotations

from typing import Any

import torch

from dgl_mgpu.errors import InvalidInputError
from dgl_mgpu.graph.dispatch import as_tensor


class NDArrayPartition:
    """Rows of an array, dealt out over parts.

    In mode 'remainder', row ``i`` is in part ``i % num_parts``.  In mode 'range', ``part_ranges``
    has the first row of each part, and ``array_size``.
    """

    def __init__(
        self, array_size: int, num_parts: int, mode: str = "remainder", part_ranges: Any = None
    ) -> None:
        action = f"cut {array_size} rows into {num_parts} parts by {mode!r}"
        if num_parts < 1 or mode not in ("remainder", "range"):
            raise InvalidInputError(
                action,
                "there is no such partition",
                "pass 1 part or more, and 'remainder' or 'range'",
            )
        if (part_ranges is None) != (mode == "remainder"):
            raise InvalidInputError(
                action,
                "part_ranges is None" if part_ranges is None else "part_ranges is given",
                "pass part_ranges for 'range', and only then",
            )
        self._array_size, self._num_parts = array_size, num_parts
        self._bounds, self._starts = None, [0]
        if part_ranges is None:
            return
        if isinstance(part_ranges, list | tuple):
            part_ranges = torch.tensor(part_ranges)
        self._bounds = as_tensor(part_ranges).to(torch.int64, copy=True)
        self._starts = self._bounds.tolist()
        ends = self._starts[:1] + self._starts[-1:]
        ascending = self._starts == sorted(self._starts)
        if len(self._starts) != num_parts + 1 or ends != [0, array_size] or not ascending:
            raise InvalidInputError(
                action,
                f"part_ranges is {self._starts}",
                f"pass {num_parts + 1} ascending numbers from 0 to {array_size}",
            )

    def num_parts(self) -> int:
        return self._num_parts

    def array_size(self) -> int:
        return self._array_size

    def get(self) -> NDArrayPartition:
        """What DGL passes to C functions for a partition; none takes one."""
        return self

    def get_local_indices(self, part: int, ctx: Any) -> torch.Tensor:
        """The rows of a part, int64, on device ``ctx``."""
        return self.map_to_global(torch.arange(self.local_size(part), device=ctx), part)

    def local_size(self, part: int) -> int:
        """Rows of a part."""
        self._check_part(part)
        if self._bounds is None:
            return self._array_size // self._num_parts + (part < self._array_size % self._num_parts)
        return self._starts[part + 1] - self._starts[part]

    def map_to_local(self, idxs: torch.Tensor) -> torch.Tensor:
        """The place of each row in its part."""
        if self._bounds is None:
            return idxs // self._num_parts
        return idxs - self._bounds.to(idxs.device)[self._owners(idxs).long()].to(idxs.dtype)

    def map_to_global(self, idxs: torch.Tensor, part_id: int) -> torch.Tensor:
        """The rows at some places of a part."""
        self._check_part(part_id)
        if self._bounds is None:
            return idxs * self._num_parts + part_id
        return idxs + self._starts[part_id]

    def generate_permutation(self, idxs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort rows by part, and count those of each.

        Returns the places in ``idxs`` of the rows of part 0, of part 1, …, each in their order; and
        int64 counts, shape (num_parts,).
        """
        owners, order = torch.sort(self._owners(idxs), stable=True)
        parts = torch.arange(self._num_parts + 1, dtype=idxs.dtype, device=idxs.device)
        return order.to(idxs.dtype), torch.searchsorted(owners, parts).diff()

    def _owners(self, rows: torch.Tensor) -> torch.Tensor:
        """The part that each row is in."""
        if self._bounds is None:
            return rows % self._num_parts
        bounds = self._bounds[1:-1].to(rows.device)
        return torch.searchsorted(bounds, rows.long(), right=True).to(rows.dtype)

    def _check_part(self, part: int) -> None:
        if not 0 <= part < self._num_parts:
            raise InvalidInputError(
                f"use part {part}",
                f"there are {self._num_parts} parts",
                f"pass one in [0, {self._num_parts})",
            )
