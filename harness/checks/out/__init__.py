"""Logging and saving by rank."""
