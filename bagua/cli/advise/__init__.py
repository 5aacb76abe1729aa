"""``bagua advise``: which algorithm is the fastest for a script on a network."""
