"""Outputs: one file each. They read a Run and a Verdict and judge nothing."""
