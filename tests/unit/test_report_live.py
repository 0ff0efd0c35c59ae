"""What is shown while the script runs, and that showing it can never end the run."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from controller_samples import FINDING, make_plan

from harness.model import Outcome, OutcomeKind
from harness.report import live
from harness.report.console import Style
from harness.report.live import Live, Tail, animated

ROOT = Path(__file__).parents[2]


def test_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "rank0.log"
    tail = Tail(path)
    assert tail.lines() == []  # not there yet
    path.write_text("one\ntw")
    assert tail.lines() == ["one"]
    with path.open("a") as file:
        file.write("o\nthree")
    assert tail.lines() == ["two"]
    assert tail.lines(final=True) == ["three"]
    assert tail.lines(final=True) == []


def test_a_progress_bar_is_shown_by_its_last_state_and_not_at_every_repaint(tmp_path: Path) -> None:
    path = tmp_path / "rank0.log"
    path.write_text("\r10%\r20%\r30%")
    tail = Tail(path)
    assert tail.lines() == ["20%"]
    with path.open("a") as file:
        file.write("\r40%\r50%")
    assert tail.lines() == []  # within a second
    assert tail.lines(final=True) == ["50%"]


def test_a_flood_is_taken_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_READ", 100)
    path = tmp_path / "rank0.log"
    path.write_text("x" * 9 + "\n" + ("y" * 9 + "\n") * 50)
    tail = Tail(path)
    assert len(tail.lines()) == 10
    assert len(tail.lines(final=True)) == 41


def test_script_lines_bear_a_prefix_and_no_control() -> None:
    stream = io.StringIO()
    Live(stream, Style()).script(0, ["\x1b[2Jverdict     sane, exit code 0", "", "a\rb"])
    assert stream.getvalue() == "rank 0 | verdict     sane, exit code 0\nrank 0 | b\n"


def test_progress_repaints_one_line_on_a_terminal_and_goes_before_other_lines() -> None:
    stream = io.StringIO()
    screen = Live(stream, Style(), animate=True)
    screen.progress("step 10", 1.0)
    screen.progress("step 2", 2.0)
    screen.note("hello")
    painted = stream.getvalue()
    assert painted.count("\n") == 1
    assert painted.startswith("\r  1.0 s  step 10\r  2.0 s  step 2 ")
    assert painted.endswith("\rnote        hello\n")


def test_progress_off_a_terminal_is_a_plain_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    screen = Live(stream, Style())
    screen.progress("step 1", 1.0)
    assert stream.getvalue() == ""
    monkeypatch.setattr(live, "PLAIN_EVERY_S", 0.0)
    screen.progress("step 2", 2.0)
    assert stream.getvalue() == "  2.0 s  step 2\n"


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_leaves_does_not_end_the_run() -> None:
    screen = Live(Broken(), Style(), animate=True)
    screen.begin(make_plan())
    screen.progress("step 1", 1.0)
    screen.suspect(FINDING)
    screen.end()


def test_a_closed_pipe_does_not_change_the_exit_code() -> None:
    code = (
        "import sys; from harness.report.live import Live; from harness.report.console import Style\n"
        "screen = Live(sys.stdout, Style())\n"
        "for i in range(10000): screen.note('x' * 80)\n"
        "sys.exit(7)"
    )
    done = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$0" -c "$1" | head -1', sys.executable, code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (7, "")


def test_suspects_are_marked_as_provisional() -> None:
    stream = io.StringIO()
    Live(stream, Style(), cwd="/home/u/project").suspect(FINDING)
    assert (
        stream.getvalue() == "suspect error[DAT101]: sampler-epoch-not-set: epochs 0, 1 and 2 drew the same sample order at train.py:41\n"
    )


def test_no_animation_in_ci_or_off_a_terminal() -> None:
    assert animated({}, True)
    assert not animated({}, False)
    assert not animated({"CI": "true"}, True)
    assert not animated({"TERM": "dumb"}, True)


def test_a_suspect_that_the_verdict_does_not_hold_is_unsaid() -> None:
    stream = io.StringIO()
    shown = Live(stream, Style())
    shown.taken_back(())
    assert stream.getvalue() == ""
    shown.taken_back({"SYN126", "LAU101"})
    assert "taken back: LAU101, SYN126," in stream.getvalue()


def test_a_suspect_that_could_not_be_judged_in_the_end_is_left_open() -> None:
    stream = io.StringIO()
    busy = Outcome("PRF102", "straggler", OutcomeKind.INCONCLUSIVE, "the host has other work: load 8.5 on 2 cores")
    Live(stream, Style()).taken_back({"PRF102", "SYN126"}, [busy, Outcome("SYN126", "drift", OutcomeKind.RAN)])
    assert stream.getvalue().splitlines() == [
        "note        taken back: SYN126, suspected while it ran, which the whole recording does not show",
        "note        left open: PRF102, suspected while it ran, which could not be judged at the end: the host has other work: load 8.5 on 2 cores",
    ]


def test_a_suspect_that_another_finding_explains_is_folded_not_unsaid() -> None:
    stream = io.StringIO()
    Live(stream, Style()).folded({"DAT102": "DAT107"})
    assert "DAT102, suspected while it ran, is folded under DAT107, which explains it" in stream.getvalue()
