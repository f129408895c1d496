"""Many small copies at once: the graphs and rows of a mini-batch into static buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.device import Kernel, c_type, packed

#: Buffers of a launch, which gets as many items whether they are used or not: few, or as many as
#: there may be.
_FEW, _MANY = 16, 48
#: As in ``kernels/copy_list.cu``.
_CHUNK = 1 << 14
_ROWS, _IDS, _STARTS = range(1, 4)
#: Words of an item, and the first that differs from batch to batch.
_WORDS, _OF_BATCH = 9, 5


class CopyList:
    """Collects what a batch writes to static buffers, with the padding behind it.

    On a GPU one kernel writes it all.  What is the same for every batch is prepared when a buffer
    is added.

    Parameters
    ----------
    ids : Tensor
        Of the dtype of all ids that are written, on the device.
    """

    def __init__(self, ids: Tensor) -> None:
        self._device, self._dtype = ids.device, ids.dtype
        self._is_on_gpu = ids.device.type == "cuda"
        self._buffers: list[Tensor] = []
        #: Items without a batch, and with what has been collected of the next one.
        self._blank: list[int] = []
        self._words: list[int] = []
        # The driver's pointers are read when the kernel is launched.
        self._kept: list[Tensor] = []

    def add_rows(self, buffer: Tensor) -> int:
        """Add a contiguous buffer of rows, padded with ones where they are floats; its number."""
        value = 0
        if buffer.is_floating_point():
            ones = torch.ones(8 // buffer.element_size()).to(buffer.dtype)
            value = int(ones.view(torch.int64))
        return self._add(buffer, buffer.nbytes, value, 0)

    def add_ids(self, buffer: Tensor, padding: int) -> int:
        """Add a vector of ids, padded with one of them; returns its number."""
        return self._add(buffer, buffer.shape[0], padding, 0)

    def add_starts(self, buffer: Tensor, all_edges: int) -> int:
        """Add an indptr, of a buffer for ``all_edges``; returns its number.

        Each padding row has one of the padding edges, as long as there are enough, and the last
        rows share the others evenly: atomic additions would serialise in one of them.
        """
        rows = max(1, buffer.shape[0] - 1)
        return self._add(buffer, buffer.shape[0], all_edges, -(-all_edges // rows))

    def _add(self, buffer: Tensor, size: int, padding: int, share: int) -> int:
        number = len(self._buffers)
        first = 0
        if number % _MANY:  # else it begins another launch
            _, before, first_before, *_ = self._blank[-_WORDS:]
            first = first_before + -(-before // _CHUNK)
        self._buffers.append(buffer)
        item = buffer.data_ptr(), size, first, padding, share, 0, 0, 0, 0
        self._blank += item
        self._words += item
        return number

    def rows(self, number: int, data: Tensor, padded: int) -> None:
        """Write ``data`` to the first rows of a buffer, and padding up to row ``padded``."""
        buffer, rows = self._buffers[number], data.shape[0]
        if not self._is_served(data, buffer):
            buffer[:rows].copy_(data)
            buffer[rows:padded].fill_(1)
        elif padded:
            row_bytes = buffer.nbytes // buffer.shape[0]
            self._set(number, _ROWS, data, rows * row_bytes, padded * row_bytes)

    def ids(self, number: int, data: Tensor) -> None:
        """Write ids to the beginning of a buffer, and padding to the rest."""
        count, buffer = data.shape[0], self._buffers[number]
        if self._is_served(data, buffer):
            self._set(number, _IDS, data, count, 0)
        else:
            buffer[:count].copy_(data)
            buffer[count:].fill_(self._blank[number * _WORDS + 3])

    def starts(self, number: int, data: Tensor, edges: int) -> None:
        """Write a block's indptr, of ``edges``, to the beginning of a buffer; then where the
        padding rows end."""
        count, buffer = data.shape[0], self._buffers[number]
        if self._is_served(data, buffer):
            self._set(number, _STARTS, data, count, edges)
            return
        all_edges, share = self._blank[number * _WORDS + 3 :][:2]
        buffer[:count].copy_(data)
        numbers = buffer.new_ones(len(buffer) - count).cumsum(0)
        even = all_edges - share * (len(numbers) - numbers)
        buffer[count:] = (edges + numbers).maximum(even).clamp(max=all_edges)

    def _is_served(self, data: Tensor, buffer: Tensor) -> bool:
        """Whether the kernel copies it."""
        return self._is_on_gpu and data.is_contiguous() and data.dtype == buffer.dtype

    def _set(self, number: int, kind: int, data: Tensor, count: int, last: int) -> None:
        self._kept.append(data)
        at = number * _WORDS + _OF_BATCH
        self._words[at : at + 4] = kind, data.data_ptr(), count, last

    def run(self) -> None:
        """Write all of it."""
        if not self._kept:
            return
        words, self._words = self._words, self._blank.copy()
        for begin in range(0, len(words), _MANY * _WORDS):
            self._launch(words[begin : begin + _MANY * _WORDS])
        self._kept = []

    def _launch(self, words: list[int]) -> None:
        count = len(words) // _WORDS
        items = _FEW if count <= _FEW else _MANY
        kernel = Kernel("copy_list.cu", f"dgl_mgpu::copy_list<{c_type(self._dtype)}, {items}>")
        _, size, first, *_ = words[-_WORDS:]
        chunks = first + -(-size // _CHUNK)
        if not chunks:
            return  # rows without bytes alone
        blocks = min(chunks, 8 * gpu.driver.num_sms(self._device))
        kernel(
            blocks, 256, packed([count, chunks, *words, *[0] * (items * _WORDS - len(words))]),
            device=self._device,
        )  # fmt: skip
