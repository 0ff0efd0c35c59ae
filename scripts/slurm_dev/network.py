"""A network of its own for the cluster (`start --network`): each node a host with one cable to a switch, and a cable to this machine.

All of it lives in network namespaces: with the cluster's first process everything is gone, this machine's end of its cable too. A node whose cable
is pulled (`cut-node`) keeps running, and its packets vanish without a word, as behind a dead switch. The addresses are of the range that is set
aside for trying out networks (RFC 2544), which nobody routes.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from slurm_dev.cluster import Cluster, Refused

LIMIT_S = 10.0
SWITCH, UPLINK, CARD = "switch", "uplink", "eth0"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def require() -> None:
    """Whether a switch and a cable can be made here; tried in a namespace that is thrown away."""
    makes = f"ip link add name {SWITCH} type bridge && ip link add name port type veth peer name {CARD}"
    try:
        tried = subprocess.run(["unshare", "--net", "sh", "-c", makes], capture_output=True, text=True)
    except OSError as error:
        raise Refused(f"--network: {error}") from None
    if tried.returncode:
        raise Refused(f"--network needs `ip` (iproute2), network namespaces, bridges and veth pairs: {tried.stderr.strip()}")


def plug_in_this_machine(c: Cluster, pid: int) -> None:
    """From outside: the cable between this machine and the switch, so that its Slurm commands reach the cluster and srun is reached."""
    _wait_for_own_namespace(pid)
    ours = f"hs{c.mark}"
    ip("link", "add", "name", ours, "type", "veth", "peer", "name", UPLINK, "netns", str(pid))
    ip("addr", "add", f"{c.net}.1/24", "dev", ours)
    ip("link", "set", ours, "up")


def make_switch(c: Cluster) -> None:
    """Inside: the switch, on which the head stands, and its cable to this machine."""
    ip("link", "set", "lo", "up")
    ip("link", "add", "name", SWITCH, "type", "bridge")
    ip("addr", "add", f"{c.net}.10/24", "dev", SWITCH)
    ip("link", "set", SWITCH, "up")
    _wait_for_link(UPLINK)
    join(UPLINK)


def plug_in_node(node: str, pid: int) -> None:
    _wait_for_own_namespace(pid)
    ip("link", "add", "name", _port(node), "type", "veth", "peer", "name", CARD, "netns", str(pid))
    join(_port(node))


def join(port: str) -> None:
    ip("link", "set", port, "master", SWITCH, "up")


def join_node(node: str) -> None:
    join(_port(node))


def cut_node(node: str) -> None:
    """The node's own card stays up: nobody there is told."""
    ip("link", "set", _port(node), "nomaster")


def configure_card(c: Cluster, node: str) -> None:
    """On the node itself."""
    _wait_for_link(CARD)
    ip("link", "set", "lo", "up")
    ip("addr", "add", f"{c.address(node)}/24", "dev", CARD)
    ip("link", "set", CARD, "up")


def _port(node: str) -> str:
    return f"port-{node}"


def _wait_for_own_namespace(pid: int) -> None:
    """`unshare` has just been started."""
    until = time.monotonic() + LIMIT_S
    while Path(f"/proc/{pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
        if time.monotonic() > until:
            raise Refused(f"process {pid} got no network namespace")
        time.sleep(0.01)


def _wait_for_link(name: str) -> None:
    until = time.monotonic() + LIMIT_S
    while not _has_link(name):
        if time.monotonic() > until:
            raise OSError(f"no network link {name} came")
        time.sleep(0.01)


def _has_link(name: str) -> bool:
    return any(line.split(":")[0].strip() == name for line in Path("/proc/net/dev").read_text().splitlines())
