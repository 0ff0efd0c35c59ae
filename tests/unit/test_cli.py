"""The command line: what is ours, what is the script's, and what a mistake is answered with."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness import cli
from harness.errors import UsageError, first_by_precedence

ROOT = Path(__file__).parents[2]


def error_of(argv: list[str]) -> str:
    with pytest.raises(UsageError) as caught:
        cli.parse(argv)
    return str(caught.value)


def test_the_first_double_dash_splits_and_later_ones_are_the_scripts() -> None:
    args = cli.parse(["run", "train.py", "-n", "4", "--", "--lr", "0.1", "--", "-n", "9"])
    assert args.script_args == ["--lr", "0.1", "--", "-n", "9"]
    assert (args.nproc, args.scripts) == ("4", ["train.py"])


def test_our_options_stand_in_any_order() -> None:
    for words in (["run", "-n", "3", "a", "b"], ["run", "a", "-n", "3", "b"], ["run", "a", "b", "-n", "3"], ["-n", "3", "run", "a", "b"]):
        args = cli.parse(words)
        assert (args.nproc, args.scripts) == ("3", ["a", "b"]), words


def test_a_negative_number_is_a_value_and_not_an_option() -> None:
    assert cli.parse(["run", "a", "-n", "-1"]).nproc == "-1"


def test_an_unknown_option_says_where_arguments_of_the_script_go() -> None:
    message = error_of(["run", "train.py", "--lr", "0.1"])
    assert "arguments for the script go after --" in message
    assert "-- --lr" in message
    assert "did you mean --nproc?" in error_of(["run", "train.py", "--nprocs", "2"])


def test_abbreviated_options_are_refused() -> None:
    assert "unknown option --time" in error_of(["run", "a", "--time", "3"])


@pytest.mark.parametrize(("typed", "meant"), [("rnu", "run"), ("exlpain", "explain"), ("lst", "list")])
def test_an_unknown_verb_is_answered_with_the_nearest(typed: str, meant: str) -> None:
    assert f"did you mean {meant}" in error_of([typed])


def test_a_script_without_a_verb_is_understood() -> None:
    assert "did you mean harness run ./train.py?" in error_of(["./train.py"])


def test_only_run_passes_arguments_on() -> None:
    assert "only harness run passes it on" in error_of(["list", "--", "x"])


def test_a_missing_value_is_a_usage_error() -> None:
    assert "expected one argument" in error_of(["run", "a", "-n"])


def test_run_cli_turns_errors_into_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_cli(["run", "no_such_scenario_here"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("harness: error: ")
    assert err.count("\n") == 1


def test_help_lists_the_verbs_and_hides_the_developers_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_cli(["--help"]) == 0
    out = capsys.readouterr().out
    for verb in ("run", "list", "explain", "report", "config", "completion"):
        assert f"\n    {verb}" in out
    assert "docs" not in out


def test_no_arguments_prints_help_and_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_cli([]) == 2
    assert "usage: harness" in capsys.readouterr().out


def test_an_internal_error_is_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from harness import briefs

    def broken() -> list[str]:
        raise RuntimeError("boom")

    monkeypatch.setattr(briefs, "names", broken)
    assert cli.run_cli(["list"]) == 3
    assert "bug of harness" in capsys.readouterr().err


def test_exit_codes_by_precedence() -> None:
    assert first_by_precedence([0, 5, 1]) == 1
    assert first_by_precedence([1, 4]) == 4
    assert first_by_precedence([4, 2, 3]) == 3
    assert first_by_precedence([3, 143]) == 143
    assert first_by_precedence([143, 130]) == 130
    assert first_by_precedence([0, 0]) == 0
    assert first_by_precedence([]) == 5  # nothing was checked


HEAVY = ("torch", "numpy", "rich", "msgspec", "jinja2", "psutil", "shtab", "submitit")


@pytest.mark.parametrize("argv", [["--help"], ["list"], ["run", "--help"], ["config"]])
def test_the_light_paths_import_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys; from harness.cli import run_cli; rc = run_cli(sys.argv[1:]);"
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]; print('HEAVY', rc, heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY 0 []"


@pytest.mark.parametrize("argv", [["--help"], ["list"]])
def test_help_and_list_import_little_of_the_standard_library_too(argv: list[str]) -> None:
    """Each of these costs as much as argparse; together they would break the bar of 4x and 6x `python -c pass`."""
    costly = ("dataclasses", "inspect", "tomllib", "pathlib", "typing", "shutil", "json", "subprocess", "difflib", "asyncio")
    code = (
        f"import sys; before = set(sys.modules); sys.path.insert(0, {str(ROOT)!r}); from harness.cli import run_cli;"
        f"run_cli(sys.argv[1:]); print('COSTLY', [m for m in {costly!r} if m in sys.modules and m not in before])"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "COSTLY []"


def test_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} -m harness list | true", shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""


def test_verbs_are_the_files_of_the_folder() -> None:
    files = {p.stem for p in (ROOT / "harness" / "commands").glob("*.py") if not p.stem.startswith("_")}
    assert set(cli.verbs()) == files >= {"run", "list", "explain", "report", "config"}


def test_help_shows_no_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_cli(["--help"]) == 0
    assert "None" not in capsys.readouterr().out


def test_an_abbreviation_is_answered_with_the_whole_option() -> None:
    assert "did you mean --no-reference?" in error_of(["run", "a", "--no-ref"])
