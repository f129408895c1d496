"""Overrides of DGL's and ogb's own names, in files that mirror their trees.

A file is imported when the module that it mirrors has been executed, and not before.
"""
