"""Where the agents of a job meet: a port that agent 0 finds free, derived from the job's id, told to the others through the shared folder."""

from __future__ import annotations

import json
import os
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import attempt

FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below the range from which Linux takes ports for clients
NUM_TRIES = 64
WAIT_S, LOOK_EVERY_S = 300.0, 0.1


@dataclass(frozen=True)
class Endpoint:
    host: str
    ip: str
    port: int
    number: int  # 0: the first one; the agents start again where agent 0 names a later one

    @property
    def address(self) -> str:
        return f"{self.host if resolves(self.host) else self.ip}:{self.port}"


def candidates(job_id: str, restarts: int) -> Iterator[int]:
    """The same ports in the same order for the same job; neighbours in the queue begin far apart."""
    start = zlib.crc32(f"{job_id}/{restarts}".encode())
    return ((FIRST_PORT + (start + 101 * number) % NUM_PORTS) for number in range(NUM_TRIES))


def free_port(job_id: str, restarts: int, skip: int = 0) -> int:
    ports = [port for port in candidates(job_id, restarts) if is_free(port)]
    if len(ports) <= skip:
        raise OSError(f"none of {NUM_TRIES} ports from {FIRST_PORT} on is free")
    return ports[skip]


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def resolves(host: str) -> bool:
    return bool(addresses(host))


def addresses(host: str) -> list[str]:
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError):
        return []


def own_ip(towards: str) -> str:
    """The address of this node that faces another host; "" where there is no way there. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return ""


def own_name(environ: Mapping[str, str], towards: str) -> str:
    """Under which name the other nodes reach this one: Slurm's name of it, else the host's, where they resolve; else an address."""
    for name in (environ.get("SLURMD_NODENAME", ""), socket.gethostname()):
        if name and resolves(name):
            return name
    return own_ip(towards) or "127.0.0.1"


def publish(folder: Path, environ: Mapping[str, str], number: int) -> Endpoint:
    towards = environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    port = free_port(environ.get("SLURM_JOB_ID", "0"), int(environ.get("SLURM_RESTART_COUNT", "0") or 0), skip=number)
    endpoint = Endpoint(own_name(environ, towards), own_ip(towards), port, number)
    attempt.write_note(folder / attempt.NODES_DIR / attempt.ENDPOINT, json.dumps(endpoint.__dict__))
    return endpoint


def published(folder: Path) -> Endpoint | None:
    raw: Mapping[str, Any] = attempt.read_json_note(folder / attempt.NODES_DIR / attempt.ENDPOINT)
    try:
        return Endpoint(str(raw["host"]), str(raw["ip"]), int(raw["port"]), int(raw["number"]))
    except (KeyError, ValueError, TypeError):
        return None


def wait_for(folder: Path, limit_s: float = WAIT_S) -> Endpoint:
    until = time.monotonic() + limit_s
    while (endpoint := published(folder)) is None:
        if time.monotonic() > until:
            raise OSError(f"agent 0 named no meeting point within {limit_s:.0f} s")
        time.sleep(LOOK_EVERY_S)
    return endpoint


def network_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """What a node knows of its own place on the network, for the checks."""
    name = socket.gethostname()
    return {
        "host": name,
        "node": environ.get("SLURMD_NODENAME", name),
        "addresses": addresses(name),
        "ip": own_ip(environ.get("SLURM_LAUNCH_NODE_IPADDR", "")),
        "interfaces": [entry for _, entry in socket.if_nameindex()],
        "pinned": {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ},
    }
