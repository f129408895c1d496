"""Overrides in `dgl.backend.pytorch`."""
