"""Algorithms whose ranks mix weights with their neighbors."""
