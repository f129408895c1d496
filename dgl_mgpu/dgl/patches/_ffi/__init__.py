"""Overrides in `dgl._ffi`."""
