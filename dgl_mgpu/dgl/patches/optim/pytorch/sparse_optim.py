"""DGL's Adam for node embeddings on the CPU whose gradients come from a GPU."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def update(self: Any, idx: torch.Tensor, grad: torch.Tensor, emb: Any) -> None:
    """In place of ``SparseAdam.update``: the host waits for what it reads.

    DGL's copies to the host without waiting and has the GPU wait for its own events in place of
    the host, which then reads memory that is not written yet.
    """
    from dgl.utils import gather_pinned_tensor_rows, scatter_pinned_tensor_rows

    steps, mem, power = emb.optm_state
    host = steps.device
    if self._is_using_uva[emb.name] is None:
        if host.type == "cpu" and grad.is_cuda:
            self._setup_uva(emb.name, mem, power)
        else:
            self._is_using_uva[emb.name] = False
    # Samples repeat nodes, whose gradients are averaged.
    ids, inverse, counts = torch.unique(idx, return_inverse=True, return_counts=True)
    gradient = grad.new_zeros(len(ids), grad.shape[1]).index_add_(0, inverse, grad)
    gradient /= counts.unsqueeze(1)

    rows = ids.to(host)
    steps[rows] += 1
    step = steps[rows].to(grad.device).unsqueeze(1)
    corrected = []
    for state, beta, message in (
        (mem, self._beta1, gradient),
        (power, self._beta2, gradient * gradient),
    ):
        if self._is_using_uva[emb.name]:
            before = gather_pinned_tensor_rows(state, ids)
        else:
            before = state[rows].to(grad.device)
        moment = beta * before.to(grad.dtype) + (1 - beta) * message
        if self._is_using_uva[emb.name]:
            scatter_pinned_tensor_rows(state, ids, moment.to(self._dtype))
        else:
            state[rows] = moment.to(self._dtype).to(host)
        corrected.append(moment / (1 - torch.pow(torch.tensor(beta, device=grad.device), step)))
    change = self._lr * corrected[0] / (corrected[1].sqrt() + self._eps)
    emb.weight[rows] -= change.to(host)
