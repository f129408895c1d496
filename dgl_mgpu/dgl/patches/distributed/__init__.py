"""Overrides in `dgl.distributed`."""
