"""Overrides in `dgl.cuda`."""
