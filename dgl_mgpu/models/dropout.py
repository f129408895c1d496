"""Dropout that does not bound a model on CPUs."""

from __future__ import annotations

import torch
from torch import nn

# Chances are multiples of one in so many, which a draw of 16 bits is compared with.
_CHANCES = 1 << 16


class Dropout(nn.Dropout):
    """``nn.Dropout``, of which torch's generator draws four elements at a time on CPUs.

    Torch draws each by itself there, on one core: a third of the time of GraphSAGE's steps on two.
    The chance is the nearest multiple of 2^-16, and means stay exactly.
    """

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows with elements dropped out, of any shape."""
        taken = round(self.p * _CHANCES)
        is_tensor_backed_argument = (
            rows.device.type == "cpu" and self.training and 0 < taken < _CHANCES
        )
        # Compilers do not know how these are drawn, and draw torch's by themselves.
        if not is_tensor_backed_argument or torch.compiler.is_compiling():
            return super().forward(rows)
        words = torch.empty(-(-rows.numel() // 4), dtype=torch.int64, device=rows.device)
        draws = words.random_(torch.iinfo(torch.int64).min, None).view(torch.int16)
        kept = draws[: rows.numel()].view(rows.shape) >= taken - _CHANCES // 2
        return rows * kept.to(rows.dtype).mul_(_CHANCES / (_CHANCES - taken))
