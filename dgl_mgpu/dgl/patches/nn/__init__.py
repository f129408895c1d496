"""Overrides in `dgl.nn`."""
