"""Whether the nodes of a cluster can see a folder of this machine: what can be known before anything is submitted."""

from __future__ import annotations

import subprocess
from pathlib import Path

from harness import mounts

CLIENT_LIMIT_S = 10.0


def doubt(folder: Path) -> str:
    """Why the nodes may not see this folder; empty where there is no reason to think so."""
    kind = mounts.file_system_of(folder)
    if kind not in mounts.LOCAL or nodes_are_here(node_addresses()):
        return ""
    sure = "no other machine sees" if kind in mounts.NEVER else "other machines see only where this one exports it"
    return f"the run folder lies on {kind}, which {sure}: if the nodes are other machines, name a folder that all share with --out"


def node_addresses() -> list[str]:
    try:
        done = subprocess.run(["sinfo", "-h", "-N", "-o", "%o"], capture_output=True, text=True, timeout=CLIENT_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted(set(done.stdout.split()))


def nodes_are_here(addresses: list[str]) -> bool:
    """Loopback addresses: a cluster within this machine (scripts/slurm-dev-cluster)."""
    return bool(addresses) and all(address.startswith("127.") for address in addresses)


def cluster_is_here(num_nodes: int) -> bool:
    """Asks Slurm only where there is more than one node to ask about."""
    return num_nodes > 1 and nodes_are_here(node_addresses())
