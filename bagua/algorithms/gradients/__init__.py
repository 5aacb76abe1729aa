"""Algorithms that exchange gradients in each step, with their optimizers."""
