"""Overrides in `dgl.optim.pytorch`."""
