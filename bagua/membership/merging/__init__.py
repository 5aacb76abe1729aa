"""Merges by a quorum: who contributes what, and when it is merged."""
