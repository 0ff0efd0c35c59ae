"""The launched processes and how they looked for each other."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.model import Where
from harness.record import Event, Recording, Run, where_of

FAILED = re.compile(
    r"address already in use|EADDRINUSE|DistNetworkError|DistStoreError|failed to (connect|bind|listen)|no route to host"
    r"|name or service not known"
    r"|temporary failure in name resolution|getaddrinfo|gaierror|connection refused|timed out after \d+.*clients|rendezvous"
    r"|environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected|unable to (resolve|find address|connect)|socket timeout"
    r"|wait timeout|ifname|invalid port|connection timed out",
    re.IGNORECASE | re.DOTALL,
)


def mains(run: Run) -> list[tuple[int, Recording]]:
    """(rank as launched, recording) of the processes that the launcher started."""
    found = [r for r in run.processes if r.role == "main"]
    return sorted(((r.env_rank if r.env_rank >= 0 else 0, r) for r in found), key=lambda item: item[0])


def joined(recording: Recording) -> bool:
    return any(e["done"] for e in recording.of("pg"))


def waiting(recording: Recording) -> Event | None:
    """The init_process_group, or the TCPStore of its own, that this process has entered and not left; None where there is none."""
    calls = sorted((*recording.of("pg"), *recording.of("store")), key=lambda e: e.t_ns)
    return calls[-1] if calls and not calls[-1]["done"] else None


def init_failure(recording: Recording) -> Event | None:
    """The failure that was raised inside init_process_group."""
    if joined(recording) or not recording.of("pg"):
        return None
    for event in recording.of("failure"):
        if event["op"] == "init" or event["phase"] == "init" or "init_process_group" in str(event["trace"]):
            return event
    return None


def effective(recording: Recording) -> tuple[int, int]:
    """(rank, world size) that the process brought to its rendezvous: what it asked for, else the environment then; -1: unknown."""
    calls = recording.of("rendezvous")
    if not calls:
        return -1, -1
    event = calls[-1]
    return _number(event["asked_rank"], event["rank"]), _number(event["asked_world_size"], event["world_size"])


def _number(asked: object, environment: object) -> int:
    if isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0:
        return asked
    text = str(environment or "")
    return int(text) if text.isdecimal() else -1


def foreign(found: Sequence[tuple[int, Recording]]) -> tuple[str, Where | None]:
    """(the address that rank 0, whom all have to reach there, does not have on its machine; the line of the script that sets it)."""
    for rank, recording in found:
        calls = recording.of("rendezvous")
        if rank == 0 and calls and calls[-1]["foreign"]:
            return str(calls[-1]["foreign"]), where_of(calls[-1]["set_at"])
    return "", None


def ranked(run: Run) -> list[tuple[int, Recording]]:
    """Launched processes, and children that asked for a group; where children did, a parent that never asked is no rank."""
    asked = [r for r in run.processes if r.role != "main" and (r.of("pg") or r.of("store"))]
    children = [(_rank_of_child(r, asked), r) for r in asked]
    parents = {r.ppid for _, r in children}
    return [*((rank, r) for rank, r in mains(run) if r.pid not in parents or r.of("pg")), *children]


def _rank_of_child(recording: Recording, siblings: Sequence[Recording]) -> int:
    """What it has, or asked for; who only looks for a store has told no number yet, and counts as mp.spawn counts, by its start."""
    if recording.rank >= 0:
        return recording.rank
    if recording.of("rendezvous"):
        return effective(recording)[0]
    return sorted(r.pid for r in siblings if r.ppid == recording.ppid).index(recording.pid)


def address(recording: Recording) -> str:
    """Where the process looked for the others."""
    if (event := waiting(recording)) is not None and event.kind == "store":
        return f"TCPStore {event['host_name'] or '?'}:{event['port'] or '?'}"
    calls = recording.of("rendezvous")
    if not calls:
        return "address unknown"
    event = calls[-1]
    method = event["method"]
    return (
        f"init_method {method}"
        if method and method != "env://"
        else f"MASTER_ADDR {event['address'] or 'unset'}, MASTER_PORT {event['port'] or 'unset'}"
    )
