"""How a GPU's kernels list rows in the order of their addresses; see ``kernels/buckets.cuh``."""

from __future__ import annotations

#: Runs of addresses that rows are told apart by, at most: more do not bring rows that are read at
#: the same time closer together, and one block of threads adds up how many rows each has.
MOST = 1 << 13
#: Their number is a multiple of what that block adds up at a time: four for each of 256 threads.
_ADDED = 1 << 10


def buckets_of(num_rows: int) -> tuple[int, int]:
    """Buckets for rows at ``num_rows`` positions.

    Returns
    -------
    shift : int
        Each has ``2 ** shift`` positions.
    number : int
    """
    shift = max(0, (num_rows - 1).bit_length() - (MOST.bit_length() - 1))
    return shift, -(-((num_rows - 1 >> shift) + 1) // _ADDED) * _ADDED
