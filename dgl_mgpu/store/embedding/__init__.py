"""Rows of a store that are learned: where they lie, how they are looked up, trained and saved."""
