"""Overrides in `dgl.graphbolt.internal`."""
