"""docs/architecture.md names files that exist: a picture of a house that was rebuilt helps nobody."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = (ROOT, ROOT / "harness", ROOT / "harness" / "probe", ROOT / "harness" / "checks")


def test_every_file_it_names_is_there() -> None:
    named = set(re.findall(r"`([a-z_/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text()))
    assert named
    assert [name for name in sorted(named) if not any((room / name).is_file() for room in ROOMS) and not list(ROOT.glob(f"harness/*/{name}"))] == []
