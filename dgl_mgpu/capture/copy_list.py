"""Many small copies at once: the graphs and rows of a mini-batch into static buffers."""

from __future__ import annotations

from torch import Tensor

from dgl_mgpu.ops import device as gpu
from dgl_mgpu.ops.device import Kernel, c_type, packed

#: Items of a launch, which gets as many whether they are used or not: few, or as many as there may
#: be.
_FEW, _MANY = 16, 48
#: As in ``kernels/copy_list.cu``.
_CHUNK = 1 << 14
_COPY, _FILL, _STARTS = range(3)
#: Of an item: its words, and which of them says how many chunks are before it.
_WORDS, _FIRST = 7, 3


class CopyList:
    """Collects what is to be written; on a GPU one kernel writes it.

    Parameters
    ----------
    ids : Tensor
        Of the dtype of all ids that are written, on the device.
    """

    def __init__(self, ids: Tensor) -> None:
        self._device, self._dtype = ids.device, ids.dtype
        self._is_on_gpu = ids.device.type == "cuda"
        self._words: list[int] = []
        self._chunks = 0
        # The driver's pointers are read when the kernel is launched.
        self._kept: list[Tensor] = []

    def copy(self, buffer: Tensor, data: Tensor) -> None:
        """Write ``data`` to the first rows of a contiguous buffer of the same dtype."""
        if not self._is_on_gpu or not data.is_contiguous() or data.dtype != buffer.dtype:
            buffer[: data.shape[0]].copy_(data)
            return
        count = data.nbytes
        if count:
            self._kept.append(data)
            self._words += (
                buffer.data_ptr(), count, _COPY, self._chunks, data.data_ptr(), 0, 0
            )  # fmt: skip
            self._chunks += -(-count // _CHUNK)

    def fill(self, buffer: Tensor, begin: int, value: int) -> None:
        """Write an id to a vector from a place on."""
        if not self._is_on_gpu:
            buffer[begin:].fill_(value)
            return
        address = buffer.data_ptr() + begin * buffer.element_size()
        self._add(address, buffer.shape[0] - begin, _FILL, value)

    def starts(self, indptr: Tensor, begin: int, edges: int, all_edges: int) -> None:
        """Write where padding rows end, from a place in an indptr on.

        Each has one of the edges after the first ``edges``, as long as there are enough, and the
        last rows share the others evenly: atomic additions would serialise in one of them.
        """
        rows = indptr.shape[0] - 1
        count = rows + 1 - begin
        share = -(-all_edges // rows)
        if not self._is_on_gpu:
            numbers = indptr.new_ones(count).cumsum(0)
            even = all_edges - share * (count - numbers)
            indptr[begin:] = (edges + numbers).maximum(even).clamp(max=all_edges)
            return
        address = indptr.data_ptr() + begin * indptr.element_size()
        self._add(address, count, _STARTS, edges + 1, share, all_edges)

    def edges(
        self,
        indptr: Tensor,
        sources: Tensor,
        block_indptr: Tensor,
        block_sources: Tensor,
        padding: int,
    ) -> None:
        """Write a block's edges to ``indptr`` and ``sources``.

        Padding edges begin at node ``padding``.  They are shared out as :meth:`starts` says.
        """
        rows, edges = block_indptr.shape[0], block_sources.shape[0]
        self.copy(indptr, block_indptr)
        self.starts(indptr, rows, edges, sources.shape[0])
        self.copy(sources, block_sources)
        self.fill(sources, edges, padding)

    def run(self) -> None:
        """Write all of it."""
        words, self._words = self._words, []
        chunks, self._chunks = self._chunks, 0
        while len(words) > _MANY * _WORDS:
            rest = words[_MANY * _WORDS :]
            begin = rest[_FIRST]
            self._launch(words[: _MANY * _WORDS], begin)
            for place in range(_FIRST, len(rest), _WORDS):
                rest[place] -= begin
            words, chunks = rest, chunks - begin
        if words:
            self._launch(words, chunks)
        self._kept = []

    def _launch(self, words: list[int], chunks: int) -> None:
        count = len(words) // _WORDS
        items = _FEW if count <= _FEW else _MANY
        kernel = Kernel("copy_list.cu", f"dgl_mgpu::copy_list<{c_type(self._dtype)}, {items}>")
        blocks = min(chunks, 8 * gpu.driver.num_sms(self._device))
        kernel(
            blocks, 256, packed([count, chunks, *words, *[0] * (items * _WORDS - len(words))]),
            device=self._device,
        )  # fmt: skip

    def _add(self, to: int, count: int, kind: int, a: int, b: int = 0, c: int = 0) -> None:
        if count:
            self._words += (to, count, kind, self._chunks, a, b, c)
            self._chunks += -(-count // _CHUNK)
