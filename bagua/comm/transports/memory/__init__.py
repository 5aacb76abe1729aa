"""The collectives of everything that shares memory, written once."""
