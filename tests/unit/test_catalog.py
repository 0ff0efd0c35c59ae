"""Finding scripts and reading their headers: every malformed one is a line with the place and the fix."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness import briefs, catalog
from harness.errors import UsageError

HEADER = """\
#!/usr/bin/env python
# /// script
# requires-python = ">=3.11"
#
# [tool.harness]
# nproc = 4
# timeout_s = "2m"
# summary = "what it proves"
#
# [tool.harness.args]
# seed = "--seed {}"
#
# [tool.harness.reference]
# nproc = 1
# args = ["--fp32"]
#
# [tool.harness.expect]
# loss_falls = true
# ///
import torch
"""


def refusal(source: str) -> str:
    with pytest.raises(UsageError) as caught:
        catalog.parse_block(source, "train.py")
    return str(caught.value)


def block(*lines: str) -> str:
    return "\n".join(["import os", "# /// script", *(f"# {line}" if line else "#" for line in lines), "# ///", ""])


def test_a_header_is_read_without_importing_the_script() -> None:
    header = catalog.header_of(catalog.parse_block(HEADER, "train.py"))
    assert header.nproc == 4
    assert header.timeout_s == 120.0
    assert header.summary == "what it proves"
    assert header.args == {"seed": "--seed {}"}
    assert (header.reference_nproc, header.reference_args) == (1, ("--fp32",))
    assert header.expect == {"loss_falls": True}


def test_a_script_without_a_header_has_an_empty_one() -> None:
    header = catalog.header_of(catalog.parse_block("import torch\n# a comment\n", "train.py"))
    assert header == catalog.Header()


def test_a_block_of_another_tool_is_none_of_our_business() -> None:
    assert catalog.parse_block(block('dependencies = ["torch"]', "[tool.uv]", "x = 1"), "train.py").table == {}


def test_windows_line_ends_are_read() -> None:
    assert catalog.parse_block(HEADER.replace("\n", "\r\n"), "train.py").table["nproc"] == 4


@pytest.mark.parametrize(
    ("lines", "place", "words"),
    [
        (["[tool.harness]", "nproc = = 2"], "train.py:4:", "malformed header block"),
        (["[tool.harness]", "nproc = 0"], "train.py:4:", "whole number of 1 or more"),
        (["[tool.harness]", "", "nprocs = 2"], "train.py:5:", "did you mean nproc"),
        (["[tool.harness]", 'device = "gpu"'], "train.py:4:", "auto, cpu, cuda"),
        (["[tool.harness]", "[tool.harness.args]", 'seed = "--seed"'], "train.py:5:", "one {} in it"),
        (["[tool.harness.args]", 'sed = "--seed {}"'], "train.py:4:", "did you mean seed"),
        (["[tool.harness.args]", 'seed = "--seed \'{}"'], "train.py:4:", "No closing quotation"),
        (["[tool.harness.reference]", "np = 1"], "train.py:4:", "valid are nproc, args"),
        (["[tool.harness.reference]", "nproc = -1"], "train.py:4:", "whole number of 1 or more"),
        (["[tool.harness.reference]", 'args = "--fp32"'], "train.py:4:", "list of text"),
        (["[tool]", "harness = 3"], "train.py:", "must be a table"),
        (["[tool.harness]", "expect = 1"], "train.py:4:", "must be a table"),
    ],
)
def test_a_malformed_block_names_file_line_and_fix(lines: list[str], place: str, words: str) -> None:
    message = refusal(block(*lines))
    assert message.startswith(place), message
    assert words in message
    assert "\n" not in message


def test_a_block_that_is_never_closed() -> None:
    assert "train.py:1: the '# /// script' block is never closed" in refusal("# /// script\n# [tool.harness]\n# nproc = 2\n")
    assert "train.py:3: the '# /// script' block of line 1 is not closed" in refusal("# /// script\n# x = 1\nimport torch\n")


def test_two_blocks_are_refused() -> None:
    assert "a second '# /// script' block" in refusal(block("[tool.harness]") + block("[tool.harness]"))


# ---- what the user typed


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("train.py", "trial.py", "eval.py"):
        (tmp_path / name).write_text("import torch\n")
    (tmp_path / "folder").mkdir()
    return tmp_path


def find(words: list[str], cwd: Path) -> list[str]:
    return [s.name for s in catalog.find(words, cwd)]


def refused(word: str, cwd: Path) -> str:
    with pytest.raises(UsageError) as caught:
        catalog.find([word], cwd)
    return str(caught.value)


def test_names_paths_globs_and_all(project: Path) -> None:
    assert find(["ddp_cifar"], project) == ["ddp_cifar"]
    assert find(["./train.py"], project) == ["train"]
    assert find(["t*.py"], project) == ["train", "trial"]
    assert find(["ddp_c*", "train.py"], project) == ["ddp_cifar", "train"]
    assert find(["all"], project) == catalog.names()
    assert find(["ddp_cifar", "all"], project).count("ddp_cifar") == 1


def test_the_path_stays_as_typed(project: Path) -> None:
    assert catalog.find(["./train.py"], project)[0].path == "./train.py"


def test_a_users_script_is_not_builtin_and_a_scenario_is(project: Path) -> None:
    assert [s.builtin for s in catalog.find(["train.py", "ddp_cifar"], project)] == [False, True]


def test_unknown_names_are_answered_with_the_nearest(project: Path) -> None:
    assert "did you mean ddp_cifar" in refused("ddp_cifra", project)
    assert "did you mean ./train.py" in refused("./tarin.py", project)
    assert "there is no folder" in refused("nowhere/train.py", project)
    assert "matches no scenario" in refused("zzz*", project)


def test_a_directory_is_refused(project: Path) -> None:
    assert refused("folder", project).startswith("folder is a directory; name a script in it")


def test_a_broken_link_and_a_fifo_are_refused(project: Path) -> None:
    (project / "link.py").symlink_to("gone.py")
    assert "is a link to gone.py, which does not exist" in refused("link.py", project)
    os.mkfifo(project / "pipe.py")
    assert "no regular file" in refused("pipe.py", project)


def test_an_unreadable_script_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # as root no mode bits would keep us out
    assert refused("train.py", project) == f"script {project / 'train.py'} is not readable; chmod u+r {project / 'train.py'}"


def test_a_binary_is_refused(project: Path) -> None:
    (project / "train.pyc").write_bytes(b"\xa7\r\r\n\0\0\0\0")
    assert "not Python source" in refused("train.pyc", project)


def test_every_builtin_scenario_has_a_valid_header_and_a_summary() -> None:
    scenarios = catalog.all_builtin()
    assert "ddp_cifar" in [s.name for s in scenarios]
    for scenario in scenarios:
        assert scenario.header.summary, scenario.name
        assert Path(scenario.path).is_file()


def test_the_brief_listing_agrees_with_the_real_parser() -> None:
    for scenario in catalog.all_builtin():
        assert briefs.brief(scenario.name) == (scenario.header.nproc or 2, scenario.header.summary), scenario.name


def test_fault_files_lie_beside_scenarios() -> None:
    assert set(catalog.fault_files()) <= set(catalog.names())
