"""Checkpoints and state_dict."""
