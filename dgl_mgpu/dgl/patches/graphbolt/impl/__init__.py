"""Overrides in `dgl.graphbolt.impl`."""
