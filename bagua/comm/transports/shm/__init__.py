"""Shared memory between processes of one Linux host."""
