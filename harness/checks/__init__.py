"""Checks: pure functions of a recorded run. One folder a family, one file a check, its docstring its page."""
