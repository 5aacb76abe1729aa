"""Measurements against a peer in the same run; see ``benchmarks/paired.py`` for the method."""
