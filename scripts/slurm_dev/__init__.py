"""The parts of scripts/slurm-dev-cluster. Standard library only: it runs as root with whatever Python the machine has."""
