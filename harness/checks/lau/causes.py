"""Causes that an exception does not name, read from what else is known of the rank and of its peers."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from harness.checks.lau import blame, known
from harness.model import Where
from harness.probe import protocol
from harness.record import Recording, Run, where_of

EXISTS = re.compile(r"File exists: '([^']+)'")
NO_GROUP = re.compile(r"[Dd]efault process group has not been initialized")
TWICE = re.compile(r"initialize the default process group twice")

GONE = ("ConnectionRefusedError", "ConnectionResetError", "FileNotFoundError", "EOFError")
HANDED_OUT = re.compile(r"\bin (rebuild_storage_fd|rebuild_storage_filename)\b")


@dataclass(frozen=True)
class Cause:
    note: str
    help: str
    where: Where | None = None  # where the mistake is, if not where it was raised


def of(run: Run, fall: blame.Fall) -> Cause | None:
    """The cause of a fall, as far as it is known: what the recording shows goes before what the text means."""
    return left_behind(fall) or made_by_another(run, fall) or group_gone(run, fall) or joined_twice(run, fall) or producer_gone(run, fall) or meaning(fall)


def meaning(fall: blame.Fall) -> Cause | None:
    """What torch's text means, where it is one of the well known."""
    row = known.meaning(f"{fall.event['type']}: {fall.event['message']}") if fall.event is not None else None
    return Cause(row.means, row.help) if row is not None else None


def _process(run: Run, fall: blame.Fall) -> Recording | None:
    return next((process for process in run.processes if any(e is fall.event for e in process.of(protocol.FAILURE))), None)


def group_gone(run: Run, fall: blame.Fall) -> Cause | None:
    """A collective without a process group: destroyed before, or never made by this process."""
    process = _process(run, fall) if fall.event is not None and NO_GROUP.search(str(fall.event["message"])) else None
    if process is None:
        return None
    destroyed = [e for e in process.of("pg_destroy") if e.t_ns <= fall.t_ns]
    if destroyed:
        raised = f"; line {fall.where.line} still needs it" if fall.where is not None else ""
        return Cause(
            f"this process had destroyed the process group before{raised}",
            "call destroy_process_group() last, after every collective, at the end of the script",
            destroyed[-1].where,
        )
    return Cause(
        "this process has never called init_process_group()",
        "call it first in each process; what also runs without torchrun asks `dist.is_initialized()` before a collective",
    )


def joined_twice(run: Run, fall: blame.Fall) -> Cause | None:
    process = _process(run, fall) if fall.event is not None and TWICE.search(str(fall.event["message"])) else None
    first = next((e for e in process.of("pg") if e["done"]), None) if process is not None else None
    if first is None:
        return None
    at = f" at {first.where.place}" if first.where is not None else ""
    return Cause(f"this process had joined the process group before{at}", "keep one of the two calls, or ask `dist.is_initialized()` first")


def producer_gone(run: Run, fall: blame.Fall) -> Cause | None:
    """A tensor that came through a queue is rebuilt from memory that the process which put it there hands out: that one has ended."""
    if fall.event is None or fall.event["op"] == "data" or str(fall.event["type"]) not in GONE or not HANDED_OUT.search(str(fall.event["trace"])):
        return None
    process = _process(run, fall)
    joined = [e for e in process.of("process_join") if e.t_ns <= fall.t_ns and not e["left"]] if process is not None else []
    waited = where_of(joined[-1]["at"]) if joined else None
    ended = f": {len(joined)} process{'es' * (len(joined) > 1)} had been joined" + (f" at {waited.place}" if waited is not None else "") if joined else ""
    return Cause(
        f"what comes out of the queue is a tensor in shared memory, which its sender hands out, and the sender has ended before it was taken{ended}",
        "take everything out of the queue before the processes are joined, and let them wait for an event until that is done; or send what needs "
        "no sender: `tensor.numpy()`, `tensor.tolist()`, a file",
    )


def left_behind(fall: blame.Fall) -> Cause | None:
    """A plain attribute of a module, which `.to()` has not converted."""
    told = fall.event["left_behind"] if fall.event is not None else None
    if not isinstance(told, dict) or not isinstance(told.get("has"), list) or not isinstance(told.get("wants"), list):
        return None
    name, has, wants = str(told.get("name")), told["has"], told["wants"]
    differs = " on ".join(str(h) for h in has) + ", the parameters are " + " on ".join(str(w) for w in wants)
    at = where_of(told.get("set_at"))
    raised = f"; raised at line {fall.where.line}" if at is not None and fall.where is not None and fall.where.line != at.line else ""
    return Cause(
        f"`self.{name}` of {told.get('module')} is a plain attribute, which `.to()` does not convert: it is {differs}{raised}",
        f'make it a buffer: `self.register_buffer("{name}", ...)`, with persistent=False where it does not belong into the checkpoint',
        at,
    )


def made_by_another(run: Run, fall: blame.Fall) -> Cause | None:
    """A folder, or a file opened with "x", that another rank of the job made: it asked for the same path and did not fail."""
    if fall.event is None or fall.event["type"] != "FileExistsError" or not (found := EXISTS.search(str(fall.event["message"]))):
        return None
    path = posixpath.normpath(found[1])
    failed = {rank for rank, _, e in blame.failures(run) if e["type"] == "FileExistsError"}
    asked = [*run.events("mkdir"), *((rank, e) for rank, e in run.events("open") if e["mode"] == "x")]
    makers = sorted({rank for rank, e in asked if rank not in failed and ("/" + str(e["path"])).endswith("/" + path.lstrip("/"))})
    if not makers:
        return None
    return Cause(
        f"{blame.plural(makers)} of this job made it: every rank runs this line, and only the first one can",
        "`os.makedirs(path, exist_ok=True)` on every rank; or make it on rank 0 only, with a barrier behind it",
    )
