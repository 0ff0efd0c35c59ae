"""The wheel carries what the command needs: built, installed into a fresh venv, and run there from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh venv that holds the built wheel and nothing else of the project; torch and the like are lent by the one that runs the tests."""
    wheels, venv = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("fresh") / "ve nv"
    subprocess.run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT)], check=True, capture_output=True)
    (wheel,) = wheels.glob("harness-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    subprocess.run([*PIP, "--python", str(venv / "bin" / "python"), "install", "--no-deps", str(wheel)], check=True, capture_output=True)
    (site,) = venv.glob("lib/python3.*/site-packages")
    # a folder added by a .pth has its own .pth files left alone: the editable install of this tree stays invisible
    lent = [path for path in sys.path if "site-packages" in path] or [sysconfig.get_paths()["purelib"]]
    (site / "lent.pth").write_text("\n".join(lent) + "\n")
    return venv


def from_wheel(venv: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(venv / "bin" / "harness"), *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=170, check=False
    )


def test_the_scenarios_are_inside(venv: Path, tmp_path: Path) -> None:
    done = from_wheel(venv, tmp_path, "list")
    assert done.returncode == 0, done.stderr
    names = {line.split()[0] for line in done.stdout.splitlines() if line and line[0].isalpha()}
    assert {p.stem for p in (ROOT / "scenarios").glob("*.py")} <= names


def test_a_scenario_runs_from_another_folder(venv: Path, tmp_path: Path) -> None:
    done = from_wheel(venv, tmp_path, "run", "collectives", "--no-reference")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict     sane" in done.stdout
    plan = (tmp_path / ".harness" / "latest" / "plan.json").read_text()
    assert str(venv / "lib") in plan and str(ROOT / "harness") not in plan  # it ran the wheel's probe, not the tree's
