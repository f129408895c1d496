"""The global store as users meet it: the store itself, its graph, tables and embeddings."""
