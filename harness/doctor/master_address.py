"""MASTER_ADDR and MASTER_PORT, where the environment sets them."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

from harness.doctor.line import ERROR, OK, WARNING, Host, Line

WHY = "all ranks meet at this address; one that cannot be resolved, or a port that is taken, is an error on every rank after a long wait"


def look(host: Host) -> Iterable[Line]:
    address, port = host.environ.get("MASTER_ADDR"), host.environ.get("MASTER_PORT")
    if address is None and port is None:
        return [Line("master address", OK, "not set: the launcher chooses address and port", WHY)]
    return [*([_address(address)] if address is not None else []), *([_port(port)] if port is not None else [])]


def _address(address: str) -> Line:
    try:
        found = sorted({str(info[4][0]) for info in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError):
        return Line("master address", ERROR, f"MASTER_ADDR={address} cannot be resolved", WHY, "unset MASTER_ADDR, or take a name that every node knows")
    return Line("master address", OK, f"MASTER_ADDR={address} is {', '.join(found)}", WHY)


def _port(port: str) -> Line:
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return Line("master port", ERROR, f"MASTER_PORT={port} is no port", WHY, "unset MASTER_PORT")
    with socket.socket() as probe:
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            says = f"MASTER_PORT={port} is taken" if taken else f"MASTER_PORT={port}: {(error.strerror or str(error)).lower()}"
            return Line("master port", WARNING, says, WHY, "unset MASTER_PORT, so that the launcher picks a free one")
    return Line("master port", OK, f"MASTER_PORT={port} is free", WHY)
