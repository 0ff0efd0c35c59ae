"""Shared memory (hogwild)."""
