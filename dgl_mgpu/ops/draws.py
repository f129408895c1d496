"""The random numbers of `dgl_mgpu.ops.philox` for tensors of counters, on every device.

For what is put together of torch's functions; a kernel draws its own.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def draw_blocks(
    nodes: torch.Tensor, blocks: torch.Tensor | int, streams: torch.Tensor | int, key: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two draws of counter blocks, as int64 with the bits of `dgl_mgpu.ops.philox.philox`.

    Parameters
    ----------
    nodes, blocks, streams : Tensor, int64, or int
        The counters' words, of shapes that broadcast.
    key : int
        A folded `SampleKey`.
    """
    nodes, block, stream = torch.broadcast_tensors(
        nodes,
        torch.as_tensor(blocks, device=nodes.device),
        torch.as_tensor(streams, device=nodes.device),
    )
    c0, c1, c2, c3 = nodes & _LOW, (nodes >> 32) & _LOW, block & _LOW, stream & _LOW
    k0, k1 = key & _LOW, (key >> 32) & _LOW
    for _ in range(10):
        product_0, product_1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = _high(product_1) ^ c1 ^ k0, _high(product_0) ^ c3 ^ k1
        c1, c3 = product_1 & _LOW, product_0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0 | (c1 << 32), c2 | (c3 << 32)


def _high(products: torch.Tensor) -> torch.Tensor:
    return (products >> 32) & _LOW


def as_uniform(draws: torch.Tensor) -> torch.Tensor:
    """Draws as multiples of 2**-53 in [0, 1), float64."""
    return top_bits(draws).double() * 2.0**-53


def top_bits(draws: torch.Tensor) -> torch.Tensor:
    """The 53 highest bits of draws, int64."""
    return (draws >> 11) & ((1 << 53) - 1)
