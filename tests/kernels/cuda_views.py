"""Views whose tables and segments lie on a device, made from those of ``tests/ops/views.py``."""

from __future__ import annotations

from dataclasses import replace

import torch

from dgl_mgpu.ops.view import PAIRED
from tests.ops.views import View


def on_device(view: View, device: torch.device | str, host_segments: bool = False) -> View:
    """A view equal to ``view`` for operators of ``device``.

    Parameters
    ----------
    view : GraphView or RowView
        Made by ``tests.ops.views``: its owner is the list of its segments.
    device : torch.device or str
        Where it is there already, as on ``"cpu"``, whose kernels an emulator runs, it is returned
        as it is.
    host_segments : bool
        Leave every second segment in host memory, pinned, so that a kernel reads both.
    """
    device = torch.device(device)
    if device.type == view.tiers.device.type:
        return view

    def moved(tensor: torch.Tensor, number: int) -> torch.Tensor:
        return tensor.pin_memory() if host_segments and number % 2 else tensor.to(device)

    segments: list = [
        [moved(part, number) for part in segment]
        if isinstance(segment, list)
        else moved(segment, number)
        for number, segment in enumerate(view.owner)
    ]
    addresses = torch.tensor(
        [
            [part.data_ptr() for part in segment]
            if isinstance(segment, list)
            else segment.data_ptr()
            for segment in segments
        ],
        dtype=torch.int64,
    )
    return replace(
        view,
        tiers=view.tiers.to(device),
        # What is no address says that an array is left out; an empty one's address says nothing.
        pointers=torch.where(
            (view.pointers == 0) | (view.pointers == PAIRED),
            view.pointers,
            addresses.reshape(view.pointers.shape),
        ).to(device),
        position=view.position.to(device),
        owner=segments,
    )
