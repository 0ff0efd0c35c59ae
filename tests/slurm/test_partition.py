"""A host of the job is cut off from the network, or comes back, on a cluster whose nodes have network namespaces of their own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import TINY, Cluster, bring_up, no_slurm, wait_idle
from cut_cases import CASES, CutCase, misses, play

pytestmark = pytest.mark.timeout(300)
SLOW = ("host_cut_off_of_two", "host_cut_off_until_slurm_notices")


@pytest.fixture(scope="module")
def wired() -> Iterator[Cluster]:
    try:
        one = bring_up("--nodes", "3", "--network", "--no-accounting")
    except (RuntimeError, OSError) as error:
        no_slurm(error)
    yield one
    one.stop()
    shutil.rmtree(one.folder, ignore_errors=True)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.name in SLOW else []) for c in CASES])
def test_the_finding_names_the_host(wired: Cluster, tmp_path: Path, case: CutCase) -> None:
    shutil.copy(TINY, tmp_path / "tiny.py")
    wait_idle(wired, 3)
    seen = play(wired, tmp_path, case)
    assert not misses(case, seen), f"{misses(case, seen)}\n{seen.text}"
    wired.nothing_left(str(tmp_path), 30.0)
