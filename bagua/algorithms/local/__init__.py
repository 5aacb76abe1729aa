"""Algorithms whose ranks train alone for some steps, and exchange weights or differences then."""
