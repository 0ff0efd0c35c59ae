"""The wheel carries what the command needs: built, unpacked apart, and run from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the built wheel and nothing else of the project."""
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("target")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT)], check=True, capture_output=True
    )
    (wheel,) = wheels.glob("harness-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True, capture_output=True)
    return target


def from_wheel(unpacked: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(unpacked)}
    return subprocess.run(
        [sys.executable, "-m", "harness", *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=170, check=False
    )


def test_the_scenarios_are_inside(unpacked: Path, tmp_path: Path) -> None:
    done = from_wheel(unpacked, tmp_path, "list")
    assert done.returncode == 0, done.stderr
    names = {line.split()[0] for line in done.stdout.splitlines() if line and line[0].isalpha()}
    assert {p.stem for p in (ROOT / "scenarios").glob("*.py")} <= names


def test_a_scenario_runs_from_another_folder(unpacked: Path, tmp_path: Path) -> None:
    done = from_wheel(unpacked, tmp_path, "run", "collectives", "--no-reference")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict     sane" in done.stdout
    assert (
        str(unpacked / "harness") in (tmp_path / ".harness" / "latest" / "plan.json").read_text()
    )  # it ran the wheel's probe, not the tree's
