"""Overrides in `dgl.optim`."""
