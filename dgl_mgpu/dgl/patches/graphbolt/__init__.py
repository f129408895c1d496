"""Overrides in `dgl.graphbolt`."""
