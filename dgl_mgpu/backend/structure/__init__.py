"""Graphs made of tensors: their index and relations, and what is made from them, as blocks are."""
