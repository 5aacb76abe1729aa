"""Threads and ends: who may call when, what is closed with its owner, what forked children leave alone."""
