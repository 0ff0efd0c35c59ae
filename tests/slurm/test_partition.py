"""Hosts that do not reach each other, on a cluster whose nodes have network namespaces of their own: cut off, or with a name that leads nowhere."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Cluster, cluster_of, no_slurm, wait_idle
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


@contextlib.contextmanager
def known_as(cluster: Cluster, line: str) -> Iterator[None]:
    """What /etc/hosts says of n2, on every node. Written in place: the file is mounted there."""
    hosts = cluster.folder / "etc/hosts"
    plain = hosts.read_text()
    hosts.write_text("".join(old for old in plain.splitlines(keepends=True) if not old.endswith(" n2\n")) + line)
    try:
        yield
    finally:
        hosts.write_text(plain)


NAMELESS = [("", "the host name n2 does not resolve"), ("127.0.1.1 n2\n", "the host name n2 resolves to 127.0.1.1, where no other node finds it")]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "says"), NAMELESS, ids=["does not resolve", "is loopback"])
def test_a_host_name_that_leads_nowhere_is_named_and_the_advised_interface_helps(wired: Cluster, desk: Path, line: str, says: str) -> None:
    wait_idle(wired, NUM_NODES)
    words = ("run", "tiny.py", "--launcher", "slurm", "--slurm", "ranks=task", "--nodes", "2", "-n", "1", "--slurm", "nodelist=n1,n2")
    with known_as(wired, line):
        code, text = wired.run(desk, *words)
        found = [f["code"] for f in json.loads((desk / ".harness" / "latest" / "report.json").read_text())["findings"]]
        assert code == 1 and found == ["LAU136"] and f"error[LAU136]: host-name: {says}" in text, text
        assert "export GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) as one of eth0" in text, text
        code, text = wired.run(desk, *words, GLOO_SOCKET_IFNAME="eth0")
    assert code == 0, text
    wired.nothing_left(str(desk))
