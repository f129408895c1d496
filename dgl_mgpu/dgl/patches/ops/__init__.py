"""Overrides in `dgl.ops`."""
