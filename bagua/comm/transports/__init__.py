"""Transports: what moves the bytes of a communicator, one module or package for each."""
