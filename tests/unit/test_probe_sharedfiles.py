"""Open files that forked workers share, as two of them would use them; the workers are played here, one after another."""

from __future__ import annotations

import mmap
import os
import sys
import zipfile
from collections.abc import Callable
from multiprocessing import Lock
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.probe import sharedfiles

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]
SIZE = 3000


class Rows:
    def __init__(self, path: Path) -> None:
        self.path, self.file = path, open(path, "rb")  # noqa: SIM115

    def close(self) -> None:
        self.file.close()


class Deeper:
    def __init__(self, path: Path) -> None:
        self.parts = {"rows": [Rows(path)]}


class Numbered:
    """Its descriptor is set by the constructor alone."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY)

    def row(self, at: int) -> bytes:
        os.lseek(self.fd, SIZE * at, os.SEEK_SET)
        return os.read(self.fd, SIZE)


class Again(Numbered):
    def open_again(self) -> None:
        self.fd = os.open("x", os.O_RDONLY)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "rows.bin"
    made.write_bytes(bytes(range(250)) * 12 * 64)
    return made


Fetch = Callable[[Any, int, int], Any]  # (data set, worker, number of the fetch)


def told(monkeypatch: pytest.MonkeyPatch, dataset: Any, fetch: Fetch, workers: int = 2, **loader: Any) -> dict[str, Any] | None:
    page = mmap.mmap(-1, sharedfiles.BYTES)
    sharedfiles.note(SimpleNamespace(dataset=dataset, num_workers=workers, **loader), page, 0)
    for worker in range(workers):
        monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda worker=worker: SimpleNamespace(id=worker))
        for nth in range(2):
            end = sharedfiles.watch_fetch(page, 0)
            fetch(dataset, worker, nth)
            if end is not None:
                end()
    assert sys.getprofile() is None
    return sharedfiles.told(page, 0)


def seek_and_read(rows: Any, worker: int, nth: int) -> None:
    rows.file.seek(SIZE * (7 * worker + 20 * nth))
    rows.file.read(SIZE)


def test_one_position_for_two_workers(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    found = told(monkeypatch, Rows(path), seek_and_read)
    assert found == {"name": "file", "workers": 2, "site": found["site"] if found else None}
    inside = told(monkeypatch, Deeper(path), lambda held, worker, nth: seek_and_read(held.parts["rows"][0], worker, nth))
    assert inside is not None and inside["name"] == "parts.file"


class Lazy(Rows):
    """The parent has read a sample before it forks."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None  # type: ignore[assignment]

    def row(self) -> bytes:
        if self.file is None:
            self.file = open(self.path, "rb")  # noqa: SIM115
        return self.file.read(SIZE)


def test_where_it_is_opened(path: Path) -> None:
    lazy = Lazy(path)
    assert sharedfiles.of(lazy) == []
    lazy.row()
    (held,) = sharedfiles.of(lazy)
    assert held.made is not None and held.made[2] == "row"


def test_bare_descriptors(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    found = told(monkeypatch, Numbered(path), lambda rows, worker, nth: rows.row(7 * worker + 20 * nth))
    assert found is not None and found["name"] == "fd"
    assert told(monkeypatch, Again(path), lambda rows, worker, nth: rows.row(7 * worker + 20 * nth)) is None
    assert told(monkeypatch, Numbered(path), lambda rows, worker, nth: rows.row(7 * worker + 20 * nth), worker_init_fn=print) is None  # opens it again?
    pair = SimpleNamespace(files=[Numbered(path), Numbered(path)])
    assert told(monkeypatch, pair, lambda held, worker, nth: held.files[worker].row(7 * worker + 20 * nth)) is None  # one for each worker


def test_an_archive(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    packed = path.with_suffix(".zip")
    with zipfile.ZipFile(packed, "w") as archive:
        for name in "abcd":
            archive.write(path, name)
    held = SimpleNamespace(zip=zipfile.ZipFile(packed))
    found = told(monkeypatch, held, lambda one, worker, nth: one.zip.read("abcd"[2 * nth + worker]))
    assert found is not None and found["name"] == "zip.fp"


def opened_again(rows: Any, worker: int, nth: int) -> None:
    if nth == 0:
        rows.file.close()
        rows.file = None
        rows.file = open(rows.path, "rb")  # noqa: SIM115
    seek_and_read(rows, worker, nth)


def by_position(rows: Any, worker: int, nth: int) -> None:
    os.pread(rows.file.fileno(), SIZE, SIZE * (7 * worker + 20 * nth))


def mapped(rows: Any, worker: int, nth: int) -> None:
    rows.map = mmap.mmap(rows.file.fileno(), 0, access=mmap.ACCESS_READ)
    rows.map.seek(SIZE * worker)
    rows.map.read(SIZE)


def one_of_them(rows: Any, worker: int, nth: int) -> None:
    if worker == 0:
        seek_and_read(rows, worker, nth)


LOCK = Lock()


def under_a_lock(rows: Any, worker: int, nth: int) -> None:
    with LOCK:
        seek_and_read(rows, worker, nth)


def by_directory(rows: Any, worker: int, nth: int) -> None:
    lock = rows.path.with_suffix(".lock")
    lock.mkdir()
    seek_and_read(rows, worker, nth)
    lock.rmdir()


class Proxy:
    """As multiprocessing.managers makes them."""

    def _callmethod(self, name: str) -> None:
        assert name


def by_manager(rows: Any, worker: int, nth: int) -> None:
    Proxy()._callmethod("acquire")
    seek_and_read(rows, worker, nth)


def in_order(rows: Any, worker: int, nth: int) -> None:
    rows.file.read(SIZE)


@pytest.mark.parametrize("fetch", [opened_again, by_position, mapped, one_of_them, under_a_lock, by_directory, by_manager, in_order])
def test_workers_that_share_no_position(monkeypatch: pytest.MonkeyPatch, path: Path, fetch: Fetch) -> None:
    assert told(monkeypatch, Rows(path), fetch) is None


def test_what_is_no_file_to_read(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    closed = Rows(path)
    closed.close()
    assert sharedfiles.of(closed) == []
    assert sharedfiles.of(SimpleNamespace(log=open(path.with_suffix(".log"), "w"))) == []  # noqa: SIM115
    assert sharedfiles.of(SimpleNamespace(pipe=open(os.devnull, "rb"), fd=3, none=None)) == []  # noqa: SIM115
    assert told(monkeypatch, Rows(path), seek_and_read, workers=1) is None


def test_the_scripts_own_profiler_goes_on(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    calls: list[str] = []
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        sharedfiles.watch(sharedfiles.of(Rows(path)), lambda at, flags: None)()
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
