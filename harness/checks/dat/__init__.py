"""Data and samplers."""
