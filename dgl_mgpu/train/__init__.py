"""What every way of training has in common: configuration, models, ranks, checkpoints, reports."""
