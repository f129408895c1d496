"""Overrides in `dgl.storages`."""
