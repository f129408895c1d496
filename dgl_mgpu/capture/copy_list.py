"""Many small copies at once: the graphs and rows of a mini-batch into static buffers."""

from __future__ import annotations

from torch import Tensor

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.device import Kernel, c_type, struct

#: As in ``kernels/copy_list.cu``.
_ITEMS, _CHUNK = 48, 1 << 14
_COPY, _FILL, _STARTS = range(3)
_WORDS = 7  # of an item


class CopyList:
    """Collects what is to be written; on a GPU one kernel writes it.

    Parameters
    ----------
    ids : Tensor
        Of the dtype of all ids that are written, on the device.
    """

    def __init__(self, ids: Tensor) -> None:
        self._device, self._dtype = ids.device, ids.dtype
        self._words: list[int] = []
        self._chunks = 0
        # The driver's pointers are read when the kernel is launched.
        self._kept: list[Tensor] = []

    def copy(self, buffer: Tensor, data: Tensor) -> None:
        """Write ``data`` to the first rows of a contiguous buffer of the same dtype."""
        if not self._is_on_gpu or not data.is_contiguous() or data.dtype != buffer.dtype:
            buffer[: len(data)].copy_(data)
            return
        self._kept.append(data)
        self._add(buffer.data_ptr(), data.nbytes, _COPY, data.data_ptr())

    def fill(self, buffer: Tensor, begin: int, value: int) -> None:
        """Write an id to a vector from a place on."""
        if not self._is_on_gpu:
            buffer[begin:].fill_(value)
            return
        address = buffer.data_ptr() + begin * buffer.element_size()
        self._add(address, len(buffer) - begin, _FILL, value)

    def starts(self, indptr: Tensor, begin: int, edges: int, all_edges: int) -> None:
        """Write where padding rows end, from a place in an indptr on.

        Each has one of the edges after the first ``edges``, as long as there are enough, and the
        last rows share the others evenly: atomic additions would serialise in one of them.
        """
        count, rows = len(indptr) - begin, len(indptr) - 1
        share = -(-all_edges // rows)
        if not self._is_on_gpu:
            numbers = indptr.new_ones(count).cumsum(0)
            even = all_edges - share * (count - numbers)
            indptr[begin:] = (edges + numbers).maximum(even).clamp(max=all_edges)
            return
        address = indptr.data_ptr() + begin * indptr.element_size()
        self._add(address, count, _STARTS, edges + 1, share, all_edges)

    def run(self) -> None:
        """Write all of it."""
        step = _ITEMS * _WORDS
        for begin in range(0, len(self._words), step):
            words = self._words[begin : begin + step]
            first = words[3]
            end = self._words[begin + step + 3] if begin + step < len(self._words) else self._chunks
            for place in range(3, len(words), _WORDS):
                words[place] -= first
            chunks, count = end - first, len(words) // _WORDS
            kernel = Kernel("copy_list.cu", f"dgl_mgpu::copy_list<{c_type(self._dtype)}>")
            blocks = min(chunks, 8 * gpu.driver.num_sms(self._device))
            items = struct(count, chunks, *words, *[0] * (step - len(words)))
            kernel(blocks, 256, items, device=self._device)
        self._words, self._kept, self._chunks = [], [], 0

    @property
    def _is_on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _add(self, to: int, count: int, kind: int, a: int, b: int = 0, c: int = 0) -> None:
        if count:
            self._words += (to, count, kind, self._chunks, a, b, c)
            self._chunks += -(-count // _CHUNK)
