"""The verbs as a user types them, up to what needs no process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from controller_samples import make_plan, write_recording

from harness import catalog, rundir
from harness.cli import run_cli
from harness.commands import _run, docs
from harness.commands._output import Target, targets
from harness.commands._pages import Page, all_pages, split_title
from harness.errors import UsageError
from harness.settings import SETTINGS


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("HARNESS_")]:
        monkeypatch.delenv(name)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = run_cli(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    code, out, err = run(capsys, *argv, "--format", "json")
    assert code == 0, err
    return json.loads(out)


# ---- --format


def test_the_console_stays_unless_another_kind_takes_standard_output() -> None:
    assert targets(None, "run") == [Target("console", None)]
    assert targets(["json=a.json"], "run") == [Target("console", None), Target("json", "a.json")]
    assert targets(["json"], "run") == [Target("json", None)]
    assert targets(["json", "console=log.txt"], "run") == [Target("json", None), Target("console", "log.txt")]


@pytest.mark.parametrize(
    ("raw", "words"), [(["jsn"], "did you mean json"), (["json="], "no file named"), (["json", "junit"], "cannot share standard output")]
)
def test_wrong_formats(raw: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        targets(raw, "run")


def test_a_format_beside_the_runs_own_files_waits_for_the_folder(tmp_path: Path) -> None:
    run_folder = tmp_path / "all" / "train"
    inside, beside, elsewhere = run_folder / "r.json", tmp_path / "all" / "r.json", tmp_path / "r.json"
    _run._claim_files([Target("json", str(f)) for f in (inside, beside, elsewhere)], [run_folder])
    assert not run_folder.parent.exists() and elsewhere.read_text() == "\n"  # --out takes an empty folder only
    with pytest.raises(UsageError, match="of its own"):
        _run._claim_files([Target("json", str(run_folder / "report.json"))], [run_folder])
    with pytest.raises(UsageError, match="cannot be written"):
        _run._claim_files([Target("json", str(tmp_path / "no" / "r.json"))], [run_folder])


def test_a_format_into_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "list", "--format", "json=scenarios.json")
    assert code == 0
    assert "ddp_cifar" in out  # the console stays
    assert "ddp_cifar" in [s["name"] for s in json.loads((tmp_path / "scenarios.json").read_text())]
    code, _, err = run(capsys, "list", "--format", "json=no/such/folder.json")
    assert (code, "cannot be written: no such file" in err) == (2, True)


# ---- list, config, explain


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert [s["name"] for s in run_json(capsys, "list")] == catalog.names()
    assert run(capsys, "list", "--names")[1].split() == catalog.names()
    assert [s["name"] for s in run_json(capsys, "list", "ddp_c*")] == ["ddp_cifar"]
    code, _, err = run(capsys, "list", "ddp_cifra")
    assert (code, "did you mean ddp_cifar" in err) == (2, True)


def test_config_shows_every_setting_with_its_origin(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("# /// script\n# [tool.harness]\n# timeout_s = 33\n# ///\n")
    (tmp_path / "pyproject.toml").write_text('[tool.harness]\nfail_on = "warning"\n')
    monkeypatch.setenv("HARNESS_SEED", "7")
    entries = {e["key"]: e for e in run_json(capsys, "config", "train.py", "-n", "4")}
    assert list(entries) == [s.key for s in SETTINGS]
    found = {key: (entries[key]["value"], entries[key]["origin"]) for key in ("nproc", "seed", "timeout_s", "fail_on", "launcher")}
    assert found == {
        "nproc": (4, "-n/--nproc"),
        "seed": (7, "HARNESS_SEED"),
        "timeout_s": (33.0, "header of train.py"),
        "fail_on": ("warning", str(tmp_path / "pyproject.toml")),
        "launcher": ("warm", "default"),
    }
    code, out, _ = run(capsys, "config")
    assert code == 0
    assert len(out.splitlines()) == len(SETTINGS)


def test_config_refuses_what_run_would_refuse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_NPROCS", "7")
    code, _, err = run(capsys, "config")
    assert (code, "did you mean HARNESS_NPROC?" in err) == (2, True)


def test_explain_prints_the_page_and_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    pages = all_pages()
    first = pages[0]
    code, out, _ = run(capsys, "explain", first.code.lower())
    assert code == 0
    assert out.startswith(f"{first.severity}[{first.code}] {first.name}: {first.title}\n")
    code, out, _ = run(capsys, "explain")
    assert all(p.code in out for p in pages)
    code, _, err = run(capsys, "explain", first.code[:-1] + "99")
    assert code == 2
    assert "unknown check" in err


# ---- docs


def test_a_page_becomes_markdown() -> None:
    title, body = split_title(
        "first line\nof the title\n\nWhat it does\n    Compares\n    two.\n\nWrong\n    for x in y:\n        pass\n\nKnown limits\n    No."
    )
    assert title == "first line of the title"
    assert docs.to_markdown(body) == (
        "## What it does\n\nCompares\ntwo.\n\n## Wrong\n\n```python\nfor x in y:\n    pass\n```\n\n## Known limits\n\nNo."
    )
    assert docs._finding_page(Page("DAT101", "x", "error", "t", ("DAT102",), "b")).startswith("# DAT101 x\n\nt\n\nSeverity: error\n\nFolds")


def test_docs_are_generated_checked_and_left_over_pages_removed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, "docs", "--out", "pages")[0] == 0
    assert (tmp_path / "pages" / "scenarios" / "ddp_cifar.md").read_text().startswith("# ddp_cifar\n")
    assert run(capsys, "docs", "--out", "pages", "--check")[0] == 0
    (tmp_path / "pages" / "findings" / "ZZZ999.md").write_text("old")
    (tmp_path / "pages" / "scenarios" / "ddp_cifar.md").write_text("edited")
    code, out, _ = run(capsys, "docs", "--out", "pages", "--check")
    assert (code, len(out.splitlines())) == (1, 2)
    run(capsys, "docs", "--out", "pages")
    assert run(capsys, "docs", "--out", "pages", "--check")[0] == 0


# ---- completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "completion", shell)
    assert code == 0, err
    assert "nproc" in out
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=out, text=True, check=False).returncode == 0
        assert "_harness_scripts()" in out
        assert "(warm torchrun inline slurm)" in out and "(kill dump)" in out  # every word that a setting takes


def test_completion_of_an_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "completion", "bsh")
    assert (code, "did you mean bash" in err) == (2, True)


# ---- run, up to the launch


def test_dry_run_prints_command_and_environment_and_makes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    code, out, err = run(
        capsys, "run", "train.py", "-n", "3", "--launcher", "torchrun", "--device", "cpu", "--dry-run", "--", "--lr", "0.1", "--", "it's"
    )
    assert code == 0, err
    assert "--nproc-per-node 3" in out
    assert """train.py --lr 0.1 -- 'it'"'"'s'""" in out
    assert "CUDA_VISIBLE_DEVICES" in out
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(("nproc", "told"), [("2", True), ("1", False)])
def test_dry_run_tells_the_threads_of_warm_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, nproc: str, told: bool
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run_cli(["run", "ddp_cifar", "-n", nproc, "--no-reference", "--dry-run"]) == 0
    assert ("export OMP_NUM_THREADS=1" in capsys.readouterr().out) is told


def test_dry_run_prints_the_reference_run_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["run", "ddp_cifar", "--launcher", "torchrun", "--dry-run", "--format", "json"]
    entry = json.loads(run(capsys, *argv)[1])[0]
    assert "--nproc-per-node 2" in " ".join(entry["command"]) and "--nproc-per-node 1" in " ".join(entry["reference"]["command"])
    assert entry["reference"]["env"]["OMP_NUM_THREADS"] == "1"
    assert "# its reference run, after it" in run(capsys, *argv[:-2])[1]
    assert "reference" not in json.loads(run(capsys, *argv, "--no-reference")[1])[0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["run"], "no script named"),
        (["run", "gone.py"], "does not exist"),
        (["run", "."], "is a directory"),
        (["run", "a.py", "-n", "0"], "whole number of 1 or more"),
        (["run", "a.py", "-n", "two"], "whole number of 1 or more"),
        (["run", "a.py", "b.py", "--", "-x"], "arguments after -- go to one script, but 2 are named"),
        (["run", "a.py", "--launcher", "slurm", "--slurm", "partitoin=x"], "sbatch has no option"),
        (["run", "a.py", "--nodes", "2"], "needs a launcher that has nodes"),
        (["run", "a.py", "--seed", "1"], "cannot reach a"),
        (["run", "a.py", "--select", "XYZ123"], "unknown check 'XYZ123'"),
        (["run", "a.py", "--fail-on", "errors"], "did you mean error"),
        (["run", "a.py", "--out", "a.py"], "is a file; name a folder"),
        (["run", "bad.py"], "bad.py:3: malformed header block"),
        (["run", "a.py", "--launcher", "inline", "--format", "json"], "gives standard output to the script"),
        (["run", "a.py", "--format", "json=no/folder/x.json"], "cannot be written"),
        (["run", "ddp_cifar", "--data", "nowhere"], "does not exist"),
    ],
)
def test_bad_input_is_one_line_and_2_before_anything_starts(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("import torch\n")
    (tmp_path / "bad.py").write_text("# /// script\n# [tool.harness]\n# nproc = = 2\n# ///\n")
    code, _, err = run(capsys, *argv)
    assert code == 2, err
    assert words in err
    assert err.startswith("harness: error: ")
    assert err.count("\n") == 1


# ---- report


def make_folder(cwd: Path, **report: Any) -> Path:
    folder = rundir.create("train", None, cwd)
    rundir.write_plan(folder, make_plan(), ["torchrun"], {})
    write_recording(folder, 0)
    write_recording(folder, 1, end=False)
    if report:
        rundir.write_json(folder / "report.json", report)
    return folder


def test_report_finishes_a_run_whose_controller_was_killed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_folder(tmp_path, status="running", controller={"pid": 2**22, "start_ticks": 1})
    code, out, _ = run(capsys, "report")
    assert code == 130
    assert "the controller of this run was killed; judged from what it left" in out
    assert "verdict     interrupted" in out
    document = json.loads((folder / "report.json").read_text())
    assert (document["status"], document["verdict"], document["summary"]["num_steps"]) == ("recovered", "interrupted", 40)
    again = run(capsys, "report", "train", "--format", "json")
    assert json.loads(again[1]) == document


def test_report_of_a_run_that_goes_on_is_provisional_and_leaves_the_folder_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from harness.procfs import start_ticks

    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        folder = make_folder(tmp_path, status="running", controller={"pid": sleeper.pid, "start_ticks": start_ticks(sleeper.pid)})
        before = (folder / "report.json").read_bytes()
        _, out, _ = run(capsys, "report")
        assert "this run still goes on" in out
        assert (folder / "report.json").read_bytes() == before
    finally:
        sleeper.communicate(b"\n")


def test_report_without_a_report_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_folder(tmp_path)
    assert run(capsys, "report")[0] == 130


def test_report_junit_and_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "report")
    assert (code, "no run yet" in err) == (2, True)
    make_folder(tmp_path)
    _, out, _ = run(capsys, "report", "--format", "junit")
    assert out.startswith('<?xml version="1.0"')
