"""A host of the job is cut off from the network, or comes back, on a cluster whose nodes have network namespaces of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Cluster, cluster_of, no_slurm
from cut_cases import CASES, NUM_NODES, CutCase, desk_in, misses, play

pytestmark = pytest.mark.timeout(300)
SLOW = ("host_cut_off_of_two", "host_cut_off_until_slurm_notices")


@pytest.fixture(scope="module")
def wired() -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        try:
            one = stack.enter_context(cluster_of("--nodes", str(NUM_NODES), "--network", "--no-accounting"))
        except (RuntimeError, OSError) as error:
            no_slurm(error)
        yield one


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.name in SLOW else []) for c in CASES])
def test_the_finding_names_the_host(wired: Cluster, tmp_path: Path, case: CutCase) -> None:
    seen = play(wired, desk_in(tmp_path), case)
    assert not misses(case, seen), f"{misses(case, seen)}\n{seen.text}"
    wired.nothing_left(str(tmp_path), 30.0)
