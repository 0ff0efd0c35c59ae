"""The call of init_process_group that was not reached, and what decided that."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import cuts
from harness.probe.sensors import unjoined


def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> tuple[int, int | None] | None:
    file = tmp_path / "train.py"
    file.write_text(source)
    monkeypatch.setattr(cuts, "user_files", lambda: [str(file)])
    found = unjoined.unreached()
    return None if found is None else (found[0][1], found[1][1] if found[1] is not None else None)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = 1\nargs.on = args.rank != -1\nif args.on:\n    dist.init_process_group()\n", (4, 2)),
        ("def main(args):\n    on = gpus() > 1\n    if on:\n        init_process_group()\n", (4, 2)),
        ("if args.world > 1:\n    dist.init_process_group()\n", (2, 1)),
        ("args.on = False\nargs.on = gpus() > 1\nif args.on:\n    dist.init_process_group()\n", (4, 3)),  # two assign it
        ("def setup():\n    dist.init_process_group()\n\nif gpus() > 1:\n    setup()\n", (2, 4)),
        ("def setup():\n    if gpus() < 2:\n        return\n    dist.init_process_group()\n\nsetup()\n", (4, 2)),
        ("def setup():\n    dist.init_process_group()\n", (2, None)),  # never called
        ("if a > 1:\n    dist.init_process_group('nccl')\nelif b > 1:\n    dist.init_process_group('gloo')\n", (2, None)),
        ("x = 1\n", None),
    ],
)
def test_what_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, found: tuple[int, int | None] | None) -> None:
    assert lines(tmp_path, monkeypatch, source) == found
