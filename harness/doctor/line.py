"""What a line of the doctor is, and the host that it looks at.

A file of this folder that has `look(host)` is found by `every()`; there is no list to edit. `QUICK = True`: needs neither torch nor a
child process nor the network, and takes about a millisecond; `harness run` does these itself.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OK, WARNING, ERROR = "ok", "warning", "error"
LEVELS = (OK, WARNING, ERROR)


@dataclass(frozen=True)
class Line:
    """One statement about this host: what is, why it matters, what to do."""

    name: str
    level: str
    says: str
    why: str
    fix: str = ""


@dataclass(frozen=True)
class Host:
    """Everything a line may look at. Tests give folders, environment and torch's answers of their own."""

    nproc: int = 2
    nodes: int = 1
    nodes_are_here: bool = False  # a cluster within this machine (scripts/slurm-dev-cluster)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    cwd: Path = field(default_factory=Path.cwd)
    folder: Path | None = None  # where run folders will lie; None: .harness in cwd
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    shm: Path = Path("/dev/shm")
    num_cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    torch: Mapping[str, Any] = field(default_factory=dict)  # what the child process says (torch_child.py); empty: not asked
    python: str = sys.executable

    @property
    def gpus(self) -> list[Mapping[str, Any]]:
        """The devices that torch sees."""
        found = self.torch.get("devices")
        return [d for d in found if isinstance(d, Mapping)] if isinstance(found, list) else []


Look = Callable[[Host], Iterable[Line]]


def every(quick_only: bool = False) -> list[tuple[str, Look]]:
    """(name, look) of each line, in the order of their names."""
    found = []
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if quick_only and b"\nQUICK = True\n" not in path.read_bytes():  # not even imported
            continue
        module = importlib.import_module(f"harness.doctor.{path.stem}")
        if hasattr(module, "look"):
            found.append((path.stem, module.look))
    return found


def examine(host: Host, quick_only: bool = False) -> list[Line]:
    """All lines. One that fails says so and does not end the others."""
    lines: list[Line] = []
    for name, look in every(quick_only):
        try:
            lines += look(host)
        except Exception as error:
            lines.append(Line(name, WARNING, f"could not be looked at: {type(error).__name__}: {error}", "a bug of harness, or an unusual host"))
    return lines
