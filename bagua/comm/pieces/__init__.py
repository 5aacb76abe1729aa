"""Large contents that one process offers and others fetch, piece by piece, from several at once."""
