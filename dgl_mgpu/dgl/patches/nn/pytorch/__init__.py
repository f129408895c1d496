"""Overrides in `dgl.nn.pytorch`."""
