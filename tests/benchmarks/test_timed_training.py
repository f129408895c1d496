"""What is said of times and losses."""

from __future__ import annotations

import pytest
import torch

from benchmarks.timed_training import medians, require_same_losses


def test_a_turn_takes_as_long_as_its_slowest_rank():
    ranks = [{"model": [1.0, 5.0, 2.0]}, {"model": [4.0, 3.0, 2.0]}]
    assert medians(ranks) == {"model": 4.0}


def test_losses_are_the_same_as_far_as_both_go():
    losses = torch.tensor([2.0, 1.0, 0.5])
    near = losses * (1 + 1e-6)
    assert require_same_losses("all", {"ahead": losses, "model": losses[:2].clone()}) is True
    assert require_same_losses("all", {"ahead": losses, "model": near}) is False
    with pytest.raises(ValueError, match=r"all: losses .* of 'model', .* of 'ahead'"):
        require_same_losses("all", {"ahead": losses, "model": losses * (1 + 1e-4)})
    with pytest.raises(ValueError, match=r"of 'ahead', .* of 'ahead'"):
        require_same_losses("all", {"ahead": torch.tensor([float("inf")])})
