"""How ranks exchange the rows of nodes."""
