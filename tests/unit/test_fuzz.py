"""Hostile input: recordings, headers, configuration and JSON of any shape never crash the controller; what is wrong is refused in one line."""

from __future__ import annotations

import json
import os
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import catalog, replay, rundir
from harness import settings as our_settings
from harness.assembly import assemble
from harness.cli import run_cli
from harness.doctor import torch_child
from harness.errors import UsageError
from harness.model import Ending, OutcomeKind, Plan, RankExit, Scenario
from harness.probe import protocol
from harness.record import Run, load_recordings
from harness.replay import Judging
from harness.report import console, junit
from harness.report import json as report_json
from harness.report.console import Style
from harness.watch.pages import Pages

FUZZ = settings(max_examples=int(os.environ.get("FUZZ_EXAMPLES", "60")), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
# Kinds and fields as the sensors write them, so that the fuzz gets behind the first look; values of any shape.
KINDS = (
    "start", "end", "failure", "pg", "coll", "params", "stacks", "stall", "wrap", "loader", "pass", "loop", "rss", "oom_kills", "exit_call",
    "kill_call", "rendezvous", "torch", "process_start", "process_join", "profile", "keepers", "save", "load", "metric", "print", "rng",
)  # fmt: skip
FIELDS = (
    "rank", "world_size", "done", "op", "op_site", "threads", "stack", "samples", "names", "numels", "shapes", "dtypes", "devices", "ddp", "opt",
    "steps", "code", "how", "pid", "ppid", "signal", "message", "type", "trace", "frames", "site", "ranges", "exits", "of", "n", "world", "role",
    "num_workers", "lines", "grown", "request", "asked", "address", "port", "method", "y", "host", "start_ticks", "env", "argv", "path", "epoch",
)  # fmt: skip
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=20))
names = st.sampled_from(FIELDS) | st.text(max_size=5)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=8)
sites = st.fixed_dictionaries({"file": st.text(max_size=12), "line": st.integers(0, 99), "func": st.text(max_size=5), "text": st.text(max_size=12)})
documents = values.map(lambda v: json.dumps(v).encode())
WORDS = ("run", "list", "report", "doctor", "--nproc", "-n", "--out", "--format", "json", "--select", "x.py", "\x00", "-", "--", "=", "é")
events = st.builds(
    lambda kind, t, s, fields, site: {"k": kind, "t": t, "s": s, **fields, **({"site": site} if site else {})},
    st.sampled_from(KINDS), st.integers(0, 2**62), st.integers(0, 50), st.dictionaries(st.sampled_from(FIELDS), values, max_size=8), st.none() | sites,
)  # fmt: skip
recordings = st.lists(st.one_of(events.map(lambda e: json.dumps(e).encode()), st.binary(max_size=40)), max_size=25)
endings = st.builds(
    Ending,
    reason=st.sampled_from(["exited", "hang", "timeout", "interrupted", "fail-fast", "folder-deleted"]),
    exits=st.lists(st.builds(RankExit, st.integers(0, 3), st.integers(0, 9), st.integers(-80, 255), st.integers(0, 2**62), st.booleans()), max_size=4).map(tuple),
    left_behind=st.lists(st.text(max_size=20), max_size=2).map(tuple),
    launcher_error=st.text(max_size=30),
)


def plan(nproc: int = 2) -> Plan:
    return Plan("fuzz", Scenario("x", "train.py"), (), nproc)


def written(folder: Path, ranks: list[list[bytes]], rows: bytes) -> Path:
    rec = folder / protocol.REC_DIR
    rec.mkdir(exist_ok=True)
    for path in rec.iterdir():
        path.unlink()
    for rank, lines in enumerate(ranks):
        start = json.dumps({"k": "start", "t": 1, "rank": rank, "pid": 100 + rank, "role": "main", "ppid": 1}).encode()
        (rec / f"0-{100 + rank}-1.jsonl").write_bytes(b"\n".join([start, *lines]))
        (rec / f"0-{100 + rank}-1.rows").write_bytes(protocol.ROWS_MAGIC + rows)
        (rec / f"0-{100 + rank}-1.params").write_bytes(protocol.PARAMS_MAGIC + rows)
        (rec / f"0-{100 + rank}-1.status").write_bytes(rows[: protocol.STATUS_BYTES])
    return rec


@FUZZ
@given(ranks=st.lists(recordings, min_size=2, max_size=2), rows=st.binary(max_size=3 * protocol.ROW.size), ending=endings, live=st.booleans())
def test_recordings(tmp_path: Path, ranks: list[list[bytes]], rows: bytes, ending: Ending, live: bool) -> None:
    """Judged, reported in every format, and watched. A field of a shape that no sensor writes leaves the check that reads it inconclusive, and the
    run is never "sane"; all others go on."""
    rec = written(tmp_path, ranks, rows)
    run = assemble(plan(), load_recordings(rec), ending=ending, live=live)
    verdict = replay.settle(run, Judging())
    assert [(o.code, o.reason) for o in verdict.outcomes if o.kind is OutcomeKind.CRASHED] == []
    assert len(run.unreadable) <= len(verdict.outcomes) // 4, run.unreadable
    assert not run.unreadable or live or "LAU125" in {f.code for f in verdict.findings} | {c for f in verdict.findings for c in f.consequences}
    assert not run.unreadable or verdict.exit_code != 0
    rendered(run, verdict)
    assert isinstance(Pages(tmp_path).read(), list)


def rendered(run: Run, verdict: Any) -> None:
    document = report_json.finished(run, verdict, [], 0)
    json.dumps(document, allow_nan=False)
    junit.render([document])
    shown = console.render(run, verdict, Path("/x"), "/", Style())
    assert "\x1b" not in shown and "\r" not in shown


@FUZZ
@given(body=st.text(alphabet=string.printable, max_size=200))
def test_headers(body: str) -> None:
    block = "# /// script\n" + "".join(f"# {line}\n" for line in body.splitlines()) + "# ///\n"
    for source in (block, body, block + "# [tool.harness]\n" + block):
        try:
            catalog.parse_block(source, "train.py")
        except UsageError as error:
            assert str(error)


@FUZZ
@given(table=st.dictionaries(st.sampled_from([*our_settings.BY_KEY, "nporc"]), values, max_size=5))
def test_header_tables(table: dict[str, Any]) -> None:
    try:
        our_settings.resolve({}, {}, Path("/"), {k: v for k, v in table.items() if k in our_settings.HEADER_KEYS}, "header")
    except UsageError as error:
        assert str(error)


@FUZZ
@given(text=st.text(alphabet=string.printable, max_size=120))
def test_pyproject(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.harness]\n{text}", encoding="utf-8")
    try:
        our_settings.resolve({}, {}, tmp_path)
    except UsageError as error:
        assert str(error)


@FUZZ
@given(variables=st.dictionaries(st.sampled_from([s.env for s in our_settings.SETTINGS] + ["HARNESS_NPROX", "HARNESS_X"]), st.text(max_size=20), max_size=4))
def test_environment(variables: dict[str, str]) -> None:
    try:
        our_settings.resolve({}, variables, Path("/"))
    except UsageError as error:
        assert str(error)


@FUZZ
@given(plan_file=st.binary(max_size=80) | documents, report=st.binary(max_size=60) | documents)
def test_run_folders(tmp_path: Path, plan_file: bytes, report: bytes) -> None:
    """`harness report` of a folder in which anything may lie: refused in one line."""
    (tmp_path / protocol.PLAN_FILE).write_bytes(plan_file)
    (tmp_path / protocol.REPORT_FILE).write_bytes(report)
    with pytest.raises(UsageError):
        replay.open_folder(tmp_path)


@FUZZ
@given(report=values, supervisor=st.lists(st.binary(max_size=40) | documents, max_size=5))
def test_folders_with_a_good_plan(tmp_path: Path, report: Any, supervisor: list[bytes]) -> None:
    rundir.write_plan(tmp_path, plan(), [], {})
    (tmp_path / protocol.REPORT_FILE).write_text(json.dumps(report))
    (tmp_path / protocol.SUPERVISOR_FILE).write_bytes(b"\n".join(supervisor))
    try:
        folder = replay.open_folder(tmp_path)
        _, verdict = replay.recover(folder, folder.judging)
        assert verdict.exit_code != 0
    except UsageError as error:
        assert str(error)


@FUZZ
@given(words=st.lists(st.sampled_from(WORDS) | st.text(max_size=8), max_size=6))
def test_command_lines(tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Any words end in an exit code. Verbs that would start something get no script to start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch_child, "ask", lambda *_: {})
    if {"docs", "selftest", "completion", "ddp_cifar", "all"} & set(words):
        return
    assert run_cli(words) in (0, 1, 2, 4, 5)


@FUZZ
@given(stdout=st.text(max_size=60), stderr=st.text(max_size=30), code=st.integers(-20, 255))
def test_torch_child(stdout: str, stderr: str, code: int) -> None:
    assert isinstance(torch_child.answer(stdout, stderr, code), dict)
