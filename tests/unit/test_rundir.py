"""The run folder: private, atomic, found again, refused in one line where it cannot be."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from controller_samples import make_plan

from harness import rundir
from harness.errors import UsageError


def test_a_fresh_folder_is_private_and_latest_points_to_it(tmp_path: Path) -> None:
    first = rundir.create("train", None, tmp_path)
    second = rundir.create("train", None, tmp_path)
    assert first != second
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    assert (first / "rec").is_dir()
    assert (first / "logs").is_dir()
    assert (tmp_path / ".harness" / "latest").readlink() == Path(second.name)
    assert (tmp_path / ".harness" / ".gitignore").read_text() == "*\n"


def test_a_weird_name_makes_a_tame_folder(tmp_path: Path) -> None:
    assert rundir.create("../../etc/pass wd", None, tmp_path).parent == tmp_path / ".harness"
    assert rundir.safe_name("..") == "run"


def test_out_is_the_folder_itself(tmp_path: Path) -> None:
    folder = rundir.create("train", "runs/a", tmp_path)
    assert folder == tmp_path / "runs" / "a"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not (tmp_path / ".harness").exists()


def refused(out: str | None, cwd: Path) -> str:
    with pytest.raises(UsageError) as caught:
        rundir.create("train", out, cwd)
    return str(caught.value)


def test_out_that_is_a_file_or_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "is a file; name a folder" in refused("file", tmp_path)
    assert "already holds files" in refused(".", tmp_path)
    rundir.write_plan(rundir.create("train", "old", tmp_path), make_plan(), [], {})
    assert "already holds an earlier run" in refused("old", tmp_path)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EROFS, "is not writable (read-only file system)"),
        (errno.EACCES, "is not writable (permission denied)"),
        (errno.ENOSPC, "MB free"),
    ],
)
def test_a_read_only_or_full_place_is_one_line_with_the_fix(
    number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", fails)  # as root no mode bits would keep us out
    message = refused("runs", tmp_path)
    assert words in message
    assert "--out" in message


def test_too_little_space_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    assert "less than 16 MB free" in refused(None, tmp_path)


def test_a_failed_write_leaves_the_old_content_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    rundir.write_atomic(path, b"old")

    def fails(fd: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="full"):
        rundir.write_atomic(path, b"new and longer")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_written_files_are_private(tmp_path: Path) -> None:
    rundir.write_json(tmp_path / "a.json", {"x": 1})
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o600


def test_a_plan_survives_the_round_trip(tmp_path: Path) -> None:
    plan = make_plan(seed=3, env={"CUDA_VISIBLE_DEVICES": ""}, hang_timeout_s=2.0)
    rundir.write_plan(tmp_path, plan, ["torchrun"], {"A": "b"})
    assert rundir.read_plan(tmp_path) == plan


@pytest.mark.parametrize("content", [b"", b"[1, 2", b"[]", b'{"plan": {"run_id": 3}}', b"{" * 100_000])
def test_a_forged_plan_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(UsageError, match="plan"):
        rundir.read_plan(tmp_path)


def test_a_plan_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("{}")
    (tmp_path / "plan.json").symlink_to("elsewhere")
    with pytest.raises(UsageError, match="no regular file"):
        rundir.read_plan(tmp_path)


def test_logs_are_read_leniently_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "MAX_LOG_BYTES", 20)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank0.log").write_bytes(b"short \xff\n")
    (logs / "rank1.log").write_bytes(b"a" * 100 + b"z" * 100)
    (logs / "rank2.log").symlink_to("/etc/hostname")
    (logs / "agent.log").write_text("not a rank's")
    read = rundir.read_logs(tmp_path)
    assert set(read) == {0, 1}
    assert read[0] == "short \ufffd\n"
    assert read[1].startswith("a" * 10 + "\n[... 180 bytes left out")
    assert read[1].endswith("z" * 10)


# ---- found again


def make_run_folder(cwd: Path, name: str = "train") -> Path:
    folder = rundir.create(name, None, cwd)
    rundir.write_plan(folder, make_plan(), [], {})
    return folder


def test_locate_by_nothing_name_part_and_path(tmp_path: Path) -> None:
    first, second = make_run_folder(tmp_path, "alpha"), make_run_folder(tmp_path, "beta")
    assert rundir.locate(None, tmp_path) == second
    assert rundir.locate("latest", tmp_path) == second
    assert rundir.locate(first.name, tmp_path) == first
    assert rundir.locate("alpha", tmp_path) == first
    assert rundir.locate(str(first), tmp_path) == first
    assert rundir.locate(str(first / "plan.json"), tmp_path) == first


def test_locate_without_the_link_takes_the_newest(tmp_path: Path) -> None:
    make_run_folder(tmp_path, "alpha")
    newest = make_run_folder(tmp_path, "beta")
    (tmp_path / ".harness" / "latest").unlink()
    assert rundir.locate(None, tmp_path) == newest


def test_locate_refuses_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run yet"):
        rundir.locate(None, tmp_path)
    folder = make_run_folder(tmp_path, "alpha")
    with pytest.raises(UsageError, match="no run is called 'zeta'"):
        rundir.locate("zeta", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="is no run folder"):
        rundir.locate("empty", tmp_path)
    with pytest.raises(UsageError, match=f"did you mean {folder.name}"):
        rundir.locate(folder.name[:-1] + "x", tmp_path)


def test_room_for_the_last_word(tmp_path: Path) -> None:
    """The run folder holds back what the report will need, and gives it up for it; nothing of it stays."""
    folder = rundir.create("x", None, tmp_path)
    reserve = folder / rundir.RESERVE_FILE
    assert reserve.stat().st_size == rundir.RESERVE_BYTES and reserve.stat().st_blocks * 512 >= rundir.RESERVE_BYTES
    rundir.write_last(folder / "report.json", {"a": 1})
    assert not reserve.exists() and rundir.read_json(folder / "report.json") == {"a": 1}
    rundir.write_last(folder / "report.json", {"a": 2})  # a second time there is none to give up
    assert rundir.read_json(folder / "report.json") == {"a": 2}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("planted", ["folder", "link"])
def test_a_home_of_runs_that_another_user_planted_is_refused(tmp_path: Path, planted: str) -> None:
    home = tmp_path / ".harness"
    if planted == "folder":
        home.mkdir()
    else:
        (tmp_path / "elsewhere").mkdir()
        home.symlink_to(tmp_path / "elsewhere")
    os.chown(home, 65534, 65534, follow_symlinks=False)
    with pytest.raises(UsageError, match="belongs to another user"):
        rundir.create("train", None, tmp_path)
    assert not list((tmp_path / "elsewhere").glob("*")) if planted == "link" else not list(home.iterdir())
    assert rundir.create("train", "mine", tmp_path).is_dir()
