"""Keeps the probe out of compiled code. `torch.compile(ddp)` meets our wrappers frame by frame: dynamo would trace and guard them, and compile
them again at each step (the step counter is one of the guards): 1 s a step until its limit is reached, and warnings that name our files.

It skips the files of the folders in its SKIP_DIRS, torch's own and the standard library's; ours are added when it is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import seethrough
from ..arm import on_import
from ..patching import quiet

PROBE = Path(__file__).resolve().parent.parent


def arm() -> None:
    on_import("torch._dynamo.trace_rules", quiet(skip))


def skip(rules: Any) -> None:
    """Once a process; a warm server does it for its ranks, since dynamo compiles an expression of all its folders anew."""
    seen = Path(seethrough.__file__).name
    if not any(folder.startswith(PROBE.as_posix()) for folder in rules.SKIP_DIRS):
        entries = [path for path in PROBE.iterdir() if path.name != seen and (path.suffix == ".py" or path.name == "sensors")]
        rules.SKIP_DIRS.extend(sorted(path.as_posix() for path in entries))
        rules._recompile_re()
