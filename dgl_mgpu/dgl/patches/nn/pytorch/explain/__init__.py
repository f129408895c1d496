"""Overrides in `dgl.nn.pytorch.explain`."""
