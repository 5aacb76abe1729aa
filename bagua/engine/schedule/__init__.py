"""Carries exchanges out: lanes, flights and the order of what is due in a step."""
