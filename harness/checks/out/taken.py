"""A rank that failed because another one had renamed the file that both of them had written. A removal is OUT107's."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass

from harness.checks.ckp import files
from harness.checks.lau import blame
from harness.model import Where
from harness.record import Event, Run

QUOTED = re.compile(r"'([^']+)'")
FOLLOWS = ("LAU101", "LAU102", "LAU122", "LAU124", "HNG*")  # what the end of that rank leads to


@dataclass(frozen=True)
class Taken:
    """Which rank fell, where, and who took the file before."""

    path: str
    rank: int
    where: Where | None
    said: str
    taker: int
    act: Event  # of the taker: its "rename"

    @property
    def note(self) -> str:
        at = f" at line {self.act.where.line}" if self.act.where is not None else ""
        return f"rank {self.taker} renames it to {files.name(str(self.act['dst']))}{at}, and rank {self.rank} finds it gone: {self.said}"


def find(run: Run, paths: Iterable[str]) -> Taken | None:
    """The first rank that failed, where its exception says that one of these is missing."""
    fall = blame.culprit(run)
    if fall is None or fall.victim or fall.event is None or fall.event["type"] != "FileNotFoundError":
        return None
    missing = {path for path in paths if _names(str(fall.event["message"]), path)}
    for rank, event in run.events("rename") if missing else ():
        if rank != fall.rank and event["src"] in missing and event.t_ns <= fall.t_ns:
            return Taken(str(event["src"]), fall.rank, fall.where, fall.headline[:200], rank, event)
    return None


def _names(message: str, path: str) -> bool:
    """A message has the path as the script gave it, the recording has the real one."""
    return any(("/" + path.lstrip("/")).endswith("/" + posixpath.normpath(named).lstrip("/")) for named in QUOTED.findall(message))
