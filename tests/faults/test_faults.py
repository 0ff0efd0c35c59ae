"""Every row of the table: the right culprit, the right line, the right code, in time, with a valid report, and nothing left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from fault_cases import CASES, Case
from fault_judge import logs, misses
from fault_stage import Evidence, Stage, can_limit_memory

SAMPLE = [case for case in CASES if case.sample]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("warm"))
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("torchrun"), "torchrun")
    yield stage
    stage.close()


def test_the_table_is_as_long_as_it_must_be() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_warm(warm: Stage, case: Case) -> None:
    if case.memory_bytes and not can_limit_memory():
        pytest.skip("no control group can be made here")
    if case.disk_bytes and os.geteuid():
        pytest.skip("only root can mount a small disk")
    hold(case, warm.play(case))


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_torchrun(torchrun: Stage, case: Case) -> None:
    hold(case, torchrun.play(case))


def hold(case: Case, seen: Evidence) -> None:
    problems = misses(case, seen)
    assert not problems, f"{problems}\n{seen.report['findings']}\n{seen.report['ending']}\n{logs(seen)}"
