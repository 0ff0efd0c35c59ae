"""What runs inside a rank. Loaded there under the private name `_harness_probe` (see bootstrap.py); imports stdlib and the user's torch only.

The controller imports nothing from this package but `protocol`.
"""
