"""What the ranks do right now, seen from outside: progress, process trees, stacks. Imports no torch."""
