"""What the registry puts in place of DGL's and ogb's own names. Imported only when needed."""
