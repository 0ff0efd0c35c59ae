"""Hosts that no longer answer: sockets whose data the kernel sends again and again. Passive, so nothing is sent and no port has to be known.

A process that hangs still has a kernel that acknowledges what it is sent; a host that is cut off, or has no power, does not.
"""

from __future__ import annotations

import contextlib
import ipaddress
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness.launch import proctable

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
RETRANSMITTING = "01"  # the timer that runs; zero-window probes to a process that does not read are "04"
ENOUGH = 3  # in a row: each waits twice as long as the one before, from 0.2 s on
MAX_PEERS = 64


def silent_peers(pids: Iterable[int], tables: Iterable[Path] = TABLES) -> list[dict[str, Any]]:
    """Addresses that do not acknowledge what these processes send: {"ip", "retransmissions", "num_bytes"}, one entry an address."""
    inodes = {inode for pid in pids for inode in proctable.socket_inodes(pid)}
    found: dict[str, dict[str, Any]] = {}
    for ip, tries, num_bytes, inode in _unanswered(tables):
        if inode in inodes and len(found) < MAX_PEERS:
            known = found.setdefault(ip, {"ip": ip, "retransmissions": 0, "num_bytes": 0})
            known["retransmissions"] = max(known["retransmissions"], tries)
            known["num_bytes"] += num_bytes
    return sorted(found.values(), key=lambda peer: str(peer["ip"]))


def _unanswered(tables: Iterable[Path]) -> Iterator[tuple[str, int, int, str]]:
    for table in tables:
        with contextlib.suppress(OSError, ValueError, IndexError, struct.error), open(table) as lines:
            next(lines, None)
            for fields in map(str.split, lines):
                tries = int(fields[6], 16)
                if fields[5].startswith(RETRANSMITTING) and tries >= ENOUGH:
                    yield address(fields[2].rpartition(":")[0]), tries, int(fields[4].partition(":")[0], 16), fields[9]


def address(digits: str) -> str:
    """As the kernel prints it: words of 32 bits in the machine's own byte order."""
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    ip = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)
