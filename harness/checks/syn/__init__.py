"""Gradient and parameter sync."""
