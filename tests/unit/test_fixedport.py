"""A port that the script fixes and that is taken is refused before a process is started."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.fixedport import check_fixed_port

FIXED = """
import os

def setup(rank):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "{port}"

if __name__ == "__main__":
    setup(0)
"""


@pytest.fixture
def port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        yield listener.getsockname()[1]


def free() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        found: int = one.getsockname()[1]
        return found


def test_a_taken_port_is_named_with_its_line(tmp_path: Path, port: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(FIXED.format(port=port))
    with pytest.raises(UsageError, match=rf"train.py:6 sets MASTER_PORT to {port}.* listens"):
        check_fixed_port(script)


@pytest.mark.parametrize(
    "source",
    [
        FIXED.replace('    os.environ["MASTER_PORT"]', '    if "MASTER_PORT" not in os.environ: os.environ["MASTER_PORT"]'),
        FIXED.replace('os.environ["MASTER_PORT"] = "{port}"', 'os.environ.setdefault("MASTER_PORT", "{port}")'),
        FIXED + "    os.environ['MASTER_PORT'] = str(find_free_port())\n",
        "def broken(:\n",
    ],
)
def test_what_may_never_be_used_is_not_refused(tmp_path: Path, port: int, source: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(source.replace("{port}", str(port)))
    check_fixed_port(script)


def test_a_free_port_and_a_missing_file_are_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    check_fixed_port(script)
    script.write_text(FIXED.format(port=free()))
    check_fixed_port(script)
