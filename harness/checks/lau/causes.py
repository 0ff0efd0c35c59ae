"""Causes that an exception does not name, read from what else is known of the rank and of its peers."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from harness.checks.lau import blame
from harness.model import Where
from harness.record import Run, where_of

EXISTS = re.compile(r"File exists: '([^']+)'")


@dataclass(frozen=True)
class Cause:
    note: str
    help: str
    where: Where | None = None  # where the mistake is, if not where it was raised


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
