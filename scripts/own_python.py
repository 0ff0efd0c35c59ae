"""A script of ours that another python started goes on with the one that scripts/setup-venv made."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

OWN = Path(__file__).resolve().parents[1] / ".venv" / "bin" / "python"
NEEDED = ("msgspec", "psutil", "torch")


def ensure() -> None:
    """Replaces this process where its python lacks what the project needs; ends with one line where there is no other."""
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not lacking:
        return
    if not OWN.exists() or Path(sys.prefix) == OWN.parents[1]:
        sys.exit(f"{Path(sys.argv[0]).name}: {sys.executable} has no {lacking[0]}: run scripts/setup-venv test first")
    os.execv(OWN, [str(OWN), *sys.argv])
