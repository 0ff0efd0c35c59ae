"""Every scenario once on 2 nodes x 2 ranks, by arrays of some at a time, so that a part can be run alone: -k every."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import ROOT, Cluster
from test_core import hosts

NAMES = sorted(path.stem for path in (ROOT / "scenarios").glob("*.py"))
AT_ONCE = 4
PARTS = [NAMES[at : at + AT_ONCE] for at in range(0, len(NAMES), AT_ONCE)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", PARTS, ids=" ".join)
def test_every_scenario_on_two_nodes(cluster: Cluster, tmp_path: Path, names: list[str]) -> None:
    """One element of the array after another: the nodes are one machine of few cores."""
    words = ("--launcher", "slurm", "--nodes", "2", "-n", "2", "--no-reference", "--slurm", "parallel=1")
    code, text = cluster.start(tmp_path, "run", *names, *words).end(800)
    folders = {path.parent: json.loads(path.read_text()) for path in (tmp_path / ".harness").glob("2*/report.json")}
    assert {r["name"]: r["verdict"] for r in folders.values()} == dict.fromkeys(names, "sane"), text[-3000:]
    assert all([rank["reported"] for rank in r["ranks"]] == [True] * 4 for r in folders.values())
    assert [len(set(hosts(folder).values())) for folder in folders] == [2] * len(names)
    assert code == 0
    cluster.nothing_left(str(tmp_path))
