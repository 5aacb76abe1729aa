"""Tests that read the sources: who may import whom, and what is public."""
