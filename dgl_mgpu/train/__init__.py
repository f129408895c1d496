"""Training runs: the launcher, trainers, objectives, CUDA graphs, checkpoints."""
