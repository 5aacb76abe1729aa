"""Ends of things: threads, what is closed when its owner is dropped, and what forked children leave alone."""
