"""What DGL's binary does on the host alone, for where it is not used."""
