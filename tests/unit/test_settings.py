"""Settings: where a value comes from, and what a wrong one is answered with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import settings
from harness.commands._options import SETTING_FLAGS
from harness.errors import UsageError
from harness.settings import resolve


def refused(**sources: Any) -> str:
    sources.setdefault("flags", {})
    sources.setdefault("environ", {})
    with pytest.raises(UsageError) as caught:
        resolve(**sources)
    return str(caught.value)


def test_every_source_beats_the_one_below_it(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.harness]\nnproc = 3\n")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    below = resolve({}, {}, tmp_path.parent)
    assert (below["nproc"], below.origin("nproc")) == (2, "default")
    file = resolve({}, {}, inner)
    assert (file["nproc"], file.origin("nproc")) == (3, str(tmp_path / "pyproject.toml"))
    header = resolve({}, {}, inner, {"nproc": 4}, "header of train.py")
    assert (header["nproc"], header.origin("nproc")) == (4, "header of train.py")
    env = resolve({}, {"HARNESS_NPROC": "5"}, inner, {"nproc": 4})
    assert (env["nproc"], env.origin("nproc")) == (5, "HARNESS_NPROC")
    flag = resolve({"nproc": "6"}, {"HARNESS_NPROC": "5"}, inner, {"nproc": 4})
    assert (flag["nproc"], flag.origin("nproc")) == (6, "-n/--nproc")


def test_the_nearest_pyproject_with_our_table_counts(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.harness]\nnproc = 3\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    assert resolve({}, {}, inner)["nproc"] == 3
    (inner / "pyproject.toml").write_text("[tool.harness]\nnproc = 7\n")
    assert resolve({}, {}, inner)["nproc"] == 7


def test_paths_of_a_pyproject_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.harness]\nout = "runs"\n')
    inner = tmp_path / "inner"
    inner.mkdir()
    assert resolve({}, {}, inner)["out"] == str(tmp_path / "runs")


@pytest.mark.parametrize("raw", ["0", "-1", "two", "1.5", ""])
def test_a_wrong_nproc_is_named_with_its_origin(raw: str, tmp_path: Path) -> None:
    message = refused(flags={"nproc": raw}, cwd=tmp_path)
    assert message.startswith("-n/--nproc: ")
    assert "whole number of 1 or more" in message


def test_wrong_values_from_each_source_name_the_source(tmp_path: Path) -> None:
    assert "HARNESS_TIMEOUT_S" in refused(environ={"HARNESS_TIMEOUT_S": "soon"}, cwd=tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.harness]\ndevice = "gpu"\n')
    message = refused(cwd=tmp_path)
    assert "pyproject.toml" in message
    assert "auto, cpu, cuda" in message


def test_unknown_keys_are_answered_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.harness]\nnprocs = 2\n")
    message = refused(cwd=tmp_path)
    assert "unknown key 'nprocs'" in message
    assert "did you mean nproc" in message


def test_a_broken_pyproject_is_one_line_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.harness]\nnproc = = 2\n")
    message = refused(cwd=tmp_path)
    assert "pyproject.toml is not valid TOML" in message
    assert "line 2" in message


@pytest.mark.parametrize(
    ("name", "meant"), [("HARNESS_NPROCS", "HARNESS_NPROC"), ("HARNESS_TIMEOUT", "HARNESS_TIMEOUT_S"), ("HARNESS_nproc", "HARNESS_NPROC")]
)
def test_a_near_miss_in_the_environment_is_refused(name: str, meant: str, tmp_path: Path) -> None:
    assert f"did you mean {meant}?" in refused(environ={name: "2"}, cwd=tmp_path)


@pytest.mark.parametrize("name", ["HARNESS_API_KEY", "HARNESS_BUILD_ID", "HARNESS_ACCOUNT", "HARNESSX", "_HARNESS_RUN_DIR", "HARNESS_"])
def test_a_foreign_variable_is_left_alone(name: str, tmp_path: Path) -> None:
    assert resolve({}, {name: "x"}, tmp_path).values_with_origin["nproc"].is_default


def test_every_setting_but_format_has_its_flag_spelled_in_the_options() -> None:
    spelled = {key: "/".join(flags) for key, (flags, _, _) in SETTING_FLAGS.items()}
    assert spelled == {s.key: s.flag for s in settings.SETTINGS if s.key != "format"}


@pytest.mark.parametrize(("raw", "value"), [("90", 90.0), ("1.5", 1.5), ("5m", 300.0), ("2h", 7200.0), (30, 30.0)])
def test_seconds(raw: Any, value: float) -> None:
    assert settings.seconds(raw) == value


@pytest.mark.parametrize("raw", ["0", "-3", "nan", "inf", "1..2", "", "5 days", True, None])
def test_seconds_refuses(raw: Any) -> None:
    with pytest.raises(ValueError, match="positive number of seconds"):
        settings.seconds(raw)


@pytest.mark.parametrize(("raw", "value"), [("2GiB", 2 * 2**30), ("500MB", 500_000_000), ("1.5 KiB", 1536), (1000, 1000)])
def test_memory_size(raw: Any, value: int) -> None:
    assert settings.memory_size(raw) == value


def test_words_are_split_and_repeated_flags_join(tmp_path: Path) -> None:
    assert resolve({"select": ["SYN101,DAT101", "OPT"]}, {}, tmp_path)["select"] == ("SYN101", "DAT101", "OPT")


@pytest.mark.parametrize("raw", ["jsn", "json=", "html=x"])
def test_formats_are_checked(raw: str, tmp_path: Path) -> None:
    assert "console, json, junit" in refused(flags={"format": [raw]}, cwd=tmp_path)


@given(st.text(max_size=20))
def test_no_text_makes_a_parser_fail_in_another_way(raw: str) -> None:
    for setting in settings.SETTINGS:
        try:
            setting.parse(raw)
        except ValueError as error:
            assert str(error).startswith("must be ")
