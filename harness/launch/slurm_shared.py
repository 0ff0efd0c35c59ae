"""Whether the nodes of a cluster can see a folder of this machine: what can be known before anything is submitted."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
NEVER = ("tmpfs", "ramfs", "overlay", "squashfs")  # no other machine sees what lies there
LOCAL = (*NEVER, "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs")  # another one sees it only where this machine exports it
CLIENT_LIMIT_S = 10.0


def doubt(folder: Path) -> str:
    """Why the nodes may not see this folder; empty where there is no reason to think so."""
    kind = file_system_of(folder, MOUNTS.read_text() if MOUNTS.is_file() else "")
    if kind not in LOCAL or nodes_are_here(node_addresses()):
        return ""
    sure = "no other machine sees" if kind in NEVER else "other machines see only where this one exports it"
    return f"the run folder lies on {kind}, which {sure}: if the nodes are other machines, name a folder that all share with --out"


def file_system_of(folder: Path, mounts: str) -> str:
    """The type of the file system on which a folder lies, or will: by the longest mount point above it."""
    best, kind = "", ""
    place = str(folder.absolute())
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        words = fields.split()
        if len(words) < 5 or not rest:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), words[4])
        if (place == point or place.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, rest.split()[0]
    return kind


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
