"""Areas under ROC curves, of many labels at once and of all ranks' nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

#: Scores that are ranked at a time, which takes some 60 bytes each.
_AT_ONCE = 1 << 24


def mean_area(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean of the areas of labels that have one; a half where none has.

    float64, shape (), on the device, without waiting for it; NaN if a score of such a label is.
    ``scores`` and ``targets`` are those of `areas`.
    """
    found, is_told = areas(scores, targets)
    count = is_told.sum()
    mean = found.masked_fill(~is_told, 0).sum() / count.clamp(min=1)
    return mean.masked_fill(count == 0, 0.5)


def areas(scores: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The area under each label's ROC curve: how often one that has it scores above one without.

    Equal scores count a half: Mann and Whitney, «On a test of whether one of two random variables
    is stochastically larger than the other», 1947. ``scores``: Tensor, floating, shape (nodes,
    labels). ``targets`` (Tensor, integer, shape (nodes, labels)): 1 and 0; what is below is not
    known, and left aside. ``areas`` (Tensor, float64, shape (labels,)): anything where there is
    none, and NaN of scores that are NaN. ``is_told`` (Tensor, bool, shape (labels,)): whether some
    nodes have the label and others have it not.
    """
    is_known, is_positive = targets >= 0, targets == 1
    known, positives = is_known.sum(0), is_positive.sum(0)
    negatives = known - positives
    # What is not known comes after all others, whose ranks it leaves as they are.
    scores = scores.float().masked_fill(~is_known, torch.inf).T.contiguous()
    ordered, order = scores.sort(1)
    # Looked up in their order, neighbours look at the same places.
    below = torch.searchsorted(ordered, ordered)
    not_above = torch.searchsorted(ordered, ordered, right=True).minimum(known[:, None])
    # Twice the mean rank of equal scores, counted from 1.
    ranks = ((below + not_above + 1) * is_positive.T.gather(1, order)).sum(1)
    wins = (ranks - positives * (positives + 1)).double() / 2
    # NaNs come last in order, and are above and below nothing.
    wins = wins.masked_fill(ordered[:, -1:].isnan().any(1), torch.nan)
    pairs = positives.double() * negatives
    return wins / pairs, pairs > 0


def areas_of_all_ranks(
    parts: Iterable[tuple[torch.Tensor, torch.Tensor]], num_labels: int, device: torch.device
) -> float:
    """The mean area, as `mean_area`, over the nodes of all ranks; collective.

    ``parts``: this rank's, none or several; kept until all are there. ``device``: where they are
    compared.
    """
    own_scores = [torch.empty(0, num_labels, device=device)]
    own_targets = [torch.empty(0, num_labels, dtype=torch.int8, device=device)]
    for scores, targets in parts:
        own_scores.append(scores.to(device, torch.float32))
        own_targets.append(targets.to(device, torch.int8))
    own = torch.cat(own_scores), torch.cat(own_targets)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for scores, targets in _of_all_ranks(*own):
        found, is_told = areas(scores, targets)
        total += torch.stack([found.masked_fill(~is_told, 0).sum(), is_told.sum()])
    summed, count = total.tolist()
    return summed / count if count else 0.5


def _of_all_ranks(
    scores: torch.Tensor, targets: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """All ranks' nodes, some labels at a time."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    most = torch.tensor(len(scores), device=scores.device)
    if num_ranks > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX)
    rows = int(most)
    step = max(1, _AT_ONCE // max(1, rows * num_ranks))
    for first in range(0, scores.shape[1], step):
        both = scores[:, first : first + step], targets[:, first : first + step]
        if num_ranks == 1:
            yield both
            continue
        width = both[0].shape[1]
        # Ranks send as much as each other: what a rank has not is of no known label.
        padded = scores.new_zeros(rows, width), targets.new_full((rows, width), -1)
        gathered = []
        for own, room in zip(both, padded, strict=True):
            room[: len(own)] = own
            of_all = room.new_empty(num_ranks, rows, width)
            dist.all_gather(list(of_all), room)
            gathered.append(of_all.flatten(0, 1))
        yield gathered[0], gathered[1]
