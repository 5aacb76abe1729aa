"""Tuning the engine while a model trains."""
