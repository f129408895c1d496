"""Overrides in `dgl.transforms`."""
