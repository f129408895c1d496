"""Overrides in `dgl.utils`."""
