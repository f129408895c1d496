"""DGL's DataLoader with ``use_ddp`` where there are few seeds for the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dgl_mgpu.graph.originals import originals


def init_shares(
    self: Any, indices: Any, batch_size: int, drop_last: bool, ddp_seed: int, shuffle: bool
) -> None:
    """In place of ``DDPTensorizedDataset.__init__``: as many seeds for every rank, and real ones.

    DGL fills up a rank's share from the share itself, which a share with no seed, or with fewer
    than it lacks, cannot give.  Where there is such a one, seeds are repeated from the first on,
    as `torch.utils.data.DistributedSampler` does.
    """
    if not drop_last:
        indices = _filled_up(indices, dist.get_world_size())
    original = originals["dgl.dataloading.dataloader:DDPTensorizedDataset.__init__"]
    original(self, indices, batch_size, drop_last, ddp_seed, shuffle)
    # Workers that live on see each epoch's order, as they do without use_ddp.
    self._indices.share_memory_()


def _filled_up(indices: Any, num_ranks: int) -> Any:
    by_type = indices if isinstance(indices, Mapping) else {"": indices}
    length = sum(len(ids) for ids in by_type.values())
    share = -(-length // num_ranks)
    lacking = share * num_ranks - length
    if 2 * lacking <= share:
        return indices
    repeated = torch.arange(lacking) % length
    filled, begin = {}, 0
    for key, ids in by_type.items():
        own = repeated[(repeated >= begin) & (repeated < begin + len(ids))] - begin
        filled[key] = torch.cat([ids, ids[own.to(ids.device)]])
        begin += len(ids)
    return filled if isinstance(indices, Mapping) else filled[""]
