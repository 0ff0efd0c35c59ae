"""Hangs."""
