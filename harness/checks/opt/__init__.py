"""Optimizer, loss and precision."""
