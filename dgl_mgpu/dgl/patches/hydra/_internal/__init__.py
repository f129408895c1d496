"""Modules that are not for users of Hydra."""
