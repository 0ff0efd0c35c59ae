"""The host's name and the network interface that gloo or NCCL would take."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from harness.doctor.line import ERROR, OK, WARNING, Host, Line

WHY = "gloo listens where the host name resolves to; a name without an address, or an interface that is not there, makes ranks wait or fail"
NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def look(host: Host) -> Iterable[Line]:
    yield _hostname(host)
    there = {p.name for p in (host.proc / "net/dev_snmp6").glob("*")} | interfaces(host)
    for name in NAMES:
        for wanted in filter(None, host.environ.get(name, "").split(",")):
            bare = wanted.lstrip("^=")
            if wanted.startswith("^") or any(each.startswith(bare) for each in there):
                yield Line("interface", OK, f"{name}={wanted}", WHY)
            else:
                yield Line("interface", ERROR, f"{name}={wanted}, but this host has {', '.join(sorted(there))}", WHY, f"unset {name}, or name one of these")


def interfaces(host: Host) -> set[str]:
    try:
        lines = (host.proc / "net/dev").read_text().splitlines()[2:]
    except OSError:
        return set()
    return {line.partition(":")[0].strip() for line in lines}


def _hostname(host: Host) -> Line:
    name = socket.gethostname()
    try:
        found = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        level = WARNING if host.nodes == 1 else ERROR
        return Line("hostname", level, f"{name} has no address ({error.strerror or error})", WHY, f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME")
    if host.nodes > 1 and all(address.startswith("127.") or address == "::1" for address in found):
        return Line("hostname", ERROR, f"{name} is {', '.join(found)}: other nodes cannot reach it", WHY, "give the name an address of the network")
    return Line("hostname", OK, f"{name} is {', '.join(found)}", WHY)
