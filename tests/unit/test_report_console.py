"""What the user reads. After a wanted change: `python tests/unit/test_report_console.py` rewrites the golden files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from controller_samples import FINDING, GOLDEN, OUTCOMES, T0, exits, make_plan, make_recording, make_run

from harness.model import Ending, Finding, Outcome, OutcomeKind, Severity, Verdict, Where
from harness.record import Run
from harness.report import console, figures
from harness.report.console import Style, finding_lines, render, style_for

PLAIN = Style()
FOLDER = Path("/home/u/project/.harness/20260101-000000-train")
TRACE = (
    "Traceback (most recent call last):\n"
    '  File "<frozen runpy>", line 198, in _run_module_as_main\n'
    '  File "/site/harness/launch/warm_rank.py", line 9, in main\n    run()\n'
    '  File "/home/u/project/train.py", line 12, in main\n    x = 1 / 0\n        ~~^~~\n'
    "ZeroDivisionError: division by zero\n"
)


def verdict_of(
    run: Run, code: int, findings: tuple[Finding, ...] = (), outcomes: tuple[Outcome, ...] = OUTCOMES, **summary: object
) -> Verdict:
    whole = {**figures.summarise(run), "suppressed": {"silenced": [], "unused": []}, **summary}
    return Verdict(run.plan, outcomes, findings, code, whole, run.ending)


def failing_run() -> Run:
    def failure(rank: int, after_s: int, kind: str, message: str, trace: str) -> dict[str, object]:
        return {"k": "failure", "t": T0 + after_s * 10**9, "s": 40, "type": kind, "message": message, "trace": trace, "frames": []}

    victim = failure(
        0, 2, "RuntimeError", "Connection closed by peer", "Traceback (most recent call last):\nRuntimeError: Connection closed by peer\n"
    )
    culprit = failure(1, 1, "ZeroDivisionError", "division by zero", TRACE)
    recordings = [make_recording(0, more=[victim]), make_recording(1, more=[culprit])]
    return make_run(recordings, ending=Ending(exits=exits(1, 1), wall_s=4.0))


def samples() -> dict[str, str]:
    """Name of a golden file -> what it must hold."""
    healthy, failing, silent = make_run(), failing_run(), make_run([])
    reference = make_run([make_recording(0, world=1, wall_s=0.018)], plan=make_plan(nproc=1))
    nothing = tuple(Outcome(o.code, o.name, OutcomeKind.NOT_APPLICABLE, "no rank reported") for o in OUTCOMES)
    warning = replace(
        FINDING,
        code="MEM104",
        name="memory-imbalance",
        severity=Severity.WARNING,
        where=None,
        ranks=(0, 2, 3, 4),
        help="",
        consequences=("MEM103",),
    )
    return {
        "sane": render(make_run(reference=reference), verdict_of(make_run(reference=reference), 0), FOLDER, "/home/u/project", PLAIN),
        "findings": render(healthy, verdict_of(healthy, 1, (warning, FINDING)), FOLDER, "/home/u/project", PLAIN),
        "failed": render(failing, verdict_of(failing, 1), FOLDER, "/home/u/project", PLAIN),
        "nothing_checked": render(silent, verdict_of(silent, 5, (), nothing), FOLDER, "/home/u/project", PLAIN),
        "header": console.header(make_plan(), PLAIN) + "\n",
    }


@pytest.mark.parametrize("name", ["sane", "findings", "failed", "nothing_checked", "header"])
def test_golden(name: str) -> None:
    assert samples()[name] == (GOLDEN / f"{name}.txt").read_text("utf-8")


def test_a_finding_reads_like_a_compilers() -> None:
    assert "\n".join(finding_lines(FINDING, PLAIN, "/home/u/project")) == (
        "error[DAT101]: sampler-epoch-not-set: epochs 0, 1 and 2 drew the same sample order\n"
        "  --> train.py:41 (ranks 0-1)\n"
        "   |  for x, y in loader:\n"
        "   = note: 1024 of 1024 positions identical\n"
        "   = help: call `sampler.set_epoch(epoch)` before the loop"
    )


def test_forged_text_cannot_make_a_line_of_its_own() -> None:
    forged = replace(
        FINDING,
        message="x\nverdict     sane\r\x1b[2J",
        notes=("a\n\nerror[XXX999]: b",),
        where=Where("/tmp/\x1b]0;t\x07evil.py\nverdict", 3, "f", "code\rverdict     sane"),
    )
    lines = finding_lines(forged, PLAIN)
    assert len(lines) == 5
    assert not any(line.startswith("verdict") for line in lines)
    assert "\x1b" not in "".join(lines)
    assert "\r" not in "".join(lines)


def test_the_failing_rank_comes_first_without_launcher_frames() -> None:
    text = samples()["failed"]
    assert text.startswith("rank 1 failed first: ZeroDivisionError: division by zero\n")
    assert "x = 1 / 0" in text
    assert "runpy" not in text
    assert "warm_rank" not in text


def test_a_rank_killed_without_a_word_shows_the_end_of_its_log() -> None:
    run = make_run(ending=Ending(exits=exits(-9, 0)), logs={0: "line\n\x1b[31mlast words\x1b[0m\n", 1: ""})
    text = render(run, verdict_of(run, 1), FOLDER, "", PLAIN)
    assert text.startswith("rank 0 was killed by SIGKILL; the end of its output:\n  | line\n  | last words\n")


def test_every_check_that_did_not_run_is_listed_with_its_reason() -> None:
    run = make_run()
    text = render(run, verdict_of(run, 0), FOLDER, "", PLAIN)
    assert "no process was made by the script (SHM101-102)" in text
    assert "40 steps; a trend needs 200 (MEM103)" in text
    assert "deselected: 1 check\n  EVL104" in text


def test_a_thousand_ranks_make_a_short_table() -> None:
    ranks = [figures.RankFigures(r, True, 10, step_p50_s=0.01 + (r == 700), peak_rss_bytes=1 + (r == 900)) for r in range(1024)]
    lines = console.table_lines(ranks, PLAIN)
    assert len(lines) <= console.MAX_TABLE_RANKS + 2
    shown = [line.split()[0] for line in lines[1:-1]]
    assert {"0", "700", "900"} <= set(shown)
    assert f"... {1024 - len(shown)} more ranks" in lines[-1]


def test_a_rank_that_never_reported_is_said() -> None:
    run = make_run([make_recording(0)])
    text = render(run, verdict_of(run, 1), FOLDER, "", PLAIN)
    assert "1  did not report" in text
    assert "1 of 2 ranks reported" in text


@pytest.mark.parametrize(
    ("code", "ending", "changes", "command"),
    [
        (0, Ending(exits=exits(0, 0)), {}, "harness report '/runs/a b' --format json"),
        (1, Ending(exits=exits(0, 1)), {}, "less '/runs/a b'/logs/rank1.log"),
        (1, Ending("hang"), {}, "harness report '/runs/a b'"),
        (4, Ending(started=False), {}, "harness run /home/u/project/train.py --launcher torchrun"),
        (4, Ending(started=False), {"launcher": "torchrun"}, "harness report '/runs/a b'"),
        (5, Ending(exits=exits(0, 0)), {}, "harness run ddp_cifar"),
    ],
)
def test_the_next_command(code: int, ending: Ending, changes: dict[str, str], command: str) -> None:
    run = make_run(ending=ending, plan=make_plan(**changes))
    assert console.next_command(verdict_of(run, code), "/runs/a b") == command


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (Ending("hang", exits=(), hang_after_s=21.0), "hung for 21.0 s"),
        (Ending("timeout", exits=()), "ended at the limit of 10 min 0 s; raise it with --timeout"),
        (Ending("exited", exits=exits(0, 3)), "rank 1 failed"),
    ],
)
def test_how_a_run_failed(ending: Ending, words: str) -> None:
    run = make_run(ending=ending)
    assert words in console.verdict_line(verdict_of(run, 1), PLAIN)


def test_could_not_launch_quotes_the_launcher() -> None:
    run = make_run(
        [], ending=Ending("launch-failed", started=False, launcher_error="the launcher ended\nTraceback\n  File x\nOSError: no such file")
    )
    line = console.verdict_line(verdict_of(run, 4), PLAIN)
    assert "could not launch; no line of the script ran: the launcher ended: OSError: no such file, exit code 4" in line


def test_unused_suppressions_are_reported() -> None:
    run = make_run()
    text = render(run, verdict_of(run, 0, suppressed={"silenced": ["DAT101"], "unused": ["train.py:3 ignore[SYN101]"]}), FOLDER, "", PLAIN)
    assert "silenced: DAT101" in text
    assert "suppression that matched nothing, so it can go: train.py:3 ignore[SYN101]" in text


def test_colours_only_where_they_are_wanted() -> None:
    assert not style_for({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True).colour
    assert style_for({}, True).colour
    assert not style_for({}, False).colour
    assert not style_for({"TERM": "dumb"}, True).colour
    assert style_for({"FORCE_COLOR": "1"}, False).colour
    assert "\x1b[31;1merror[DAT101]\x1b[0m" in finding_lines(FINDING, Style(True))[0]


def test_output_is_ascii_so_that_every_terminal_shows_it() -> None:
    for text in samples().values():
        assert text.isascii()


def test_ranks_that_the_script_started_are_the_scripts_to_end() -> None:
    for role, said in (("main", "not known: nobody told of the end of rank 1"), ("child", "nothing: no process")):
        ranks = [make_recording(0), make_recording(1)]
        ranks[1].start["role"] = role  # type: ignore[index]
        of = make_run(ranks, ending=Ending(started=True, exits=exits(0)))
        assert said in render(of, verdict_of(of, 0), FOLDER, "/home/u/project", PLAIN)


def test_where_most_checks_do_not_apply_their_families_are_counted() -> None:
    codes = [f"{family}{number}" for family in ("DAT", "SYN") for number in range(101, 120)]
    outcomes = tuple(Outcome(c, c.lower(), OutcomeKind.NOT_APPLICABLE, f"why not {c}") for c in codes)
    text = render(make_run(), verdict_of(make_run(), 0, outcomes=(*OUTCOMES, *outcomes)), FOLDER, "/home/u/project", PLAIN)
    assert "not applicable: 40 checks\n  DAT 19, SHM 2, SYN 19; the reason of each is in report.json" in text
    assert "why not" not in text
    assert "a trend needs 200 (MEM103)" in text  # what could not be judged is always told


if __name__ == "__main__":
    for file_name, content in samples().items():
        (GOLDEN / f"{file_name}.txt").write_text(content, "utf-8")
