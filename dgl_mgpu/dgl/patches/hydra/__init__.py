"""Overrides in Hydra."""
