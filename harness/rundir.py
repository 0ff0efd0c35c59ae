"""The run folder: what lies where, made private, written atomically, read back without trust.

<run>/plan.json          what exactly is run; written before any process is started
<run>/report.json        the verdict; says "running" until the end, so that a killed controller leaves a valid one
<run>/rec/               recordings of the ranks (harness/probe/protocol.py)
<run>/logs/rank<R>.log   both streams of each rank, verbatim
<run>/supervisor.jsonl   what the supervisor did
<run>/reference/         the reference run: a run folder of its own
<run>/nodes/             of a Slurm job: what each node's supervisor tells (see harness/attempt.py)
<run>/attempt-<K>/       of a job that was requeued K times: rec/, logs/ and nodes/ of that attempt; those of earlier ones are never read again
<run>/slurm/             what was submitted, submitit's pickle, the job's own output
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.model import Plan
from harness.probe import protocol

ROOT = ".harness"
LATEST = "latest"
REFERENCE_DIR = "reference"
OWN_FILES = frozenset({protocol.PLAN_FILE, protocol.REPORT_FILE, protocol.SUPERVISOR_FILE})  # of a run folder, at its top
MIN_FREE_BYTES = 16_000_000  # a recording is kept under 10 MB a rank; with less the run would end half-recorded
MAX_LOG_BYTES = 2_000_000  # of one rank's log that checks and reports look at: the first and the last half of it
RESERVE_FILE = ".reserve"
RESERVE_BYTES = 1_000_000  # a report is 20 to 200 kB
MAX_JSON_BYTES = 200_000_000


# ---- writing


def write_atomic(path: Path, data: bytes) -> None:
    """Readers see the old content or the new one, never half of it, whenever we are killed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # some network file systems cannot sync a folder
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


# ---- room for the last word


def reserve(folder: Path) -> None:
    """Room on the disk that is kept for the report: a script that fills the disk must not cost the verdict."""
    with suppress(OSError):
        fd = os.open(folder / RESERVE_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"\0" * RESERVE_BYTES)  # not posix_fallocate: some file systems promise what they do not have
        finally:
            os.close(fd)


def write_last(path: Path, value: Any) -> None:
    """The final report, in the room that was kept for it."""
    with suppress(OSError):
        (path.parent / RESERVE_FILE).unlink()
    write_json(path, value)


# ---- making a folder


def create(name: str, out: str | None, cwd: Path) -> Path:
    """A fresh private folder for one run: `out`, or `.harness/<stamp>-<name>` with `latest` beside it."""
    try:
        folder = _take(cwd / out) if out is not None else _fresh(cwd / ROOT, name)
        for part in (protocol.REC_DIR, protocol.LOG_DIR):
            (folder / part).mkdir(mode=0o700)
        _require_space(folder)
        reserve(folder)
        if out is None:
            point_latest(folder)
    except OSError as error:
        raise UsageError(_why(error, out)) from None
    return folder


def _fresh(root: Path, name: str) -> Path:
    root.mkdir(mode=0o700, exist_ok=True)
    _refuse_a_strangers(root)
    _keep_out_of_git(root)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{safe_name(name)}"
    for count in range(1, 1000):
        folder = root / (stem if count == 1 else f"{stem}-{count}")
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return folder
    raise UsageError(f"{root} already holds 999 runs called {stem}; remove old ones")


def _refuse_a_strangers(root: Path) -> None:
    """Who owns the folder above may put another one in a run's place, or send us elsewhere by a link: what lies there would not be ours alone."""
    if {root.lstat().st_uid, root.stat().st_uid} - {os.getuid(), 0}:
        raise UsageError(f"{root} belongs to another user, who could change what runs leave there; name a folder of your own with --out")


def _keep_out_of_git(root: Path) -> None:
    note = root / ".gitignore"
    if not note.exists():
        note.write_text("*\n")


def _take(folder: Path) -> Path:
    """`--out`: a folder that does not exist yet, or an empty one."""
    folder = Path(os.path.abspath(folder))  # noqa: PTH100  (resolve() would follow a link that the user may want to keep)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()):
        held = "an earlier run" if (folder / protocol.PLAN_FILE).exists() else "files"
        raise UsageError(f"--out {folder} already holds {held}; name a new or an empty folder")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def _require_space(folder: Path) -> None:
    space = os.statvfs(folder)
    if space.f_bavail * space.f_frsize < MIN_FREE_BYTES:
        raise OSError(errno.ENOSPC, "No space left on device")


def _why(error: OSError, out: str | None) -> str:
    place = f"--out {out}" if out is not None else f"{ROOT} in the current folder"
    fix = "name another folder with --out"
    if error.errno == errno.ENOSPC:
        return f"{place} has less than {MIN_FREE_BYTES // 1_000_000} MB free; free some, or {fix}"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"{place} is not writable ({os.strerror(error.errno).lower()}); {fix}"
    return f"{place} cannot be used as the run folder: {(error.strerror or str(error)).lower()}; {fix}"


def safe_name(name: str) -> str:
    """A script's name as part of a folder's."""
    kept = "".join(c if c.isalnum() or c in "-_." else "_" for c in name).strip(".")
    return kept[:60] or "run"


def point_latest(folder: Path) -> None:
    """Swap the `latest` link in one step; a reader never finds it missing."""
    link = folder.parent / LATEST
    temporary = folder.parent / f".{LATEST}.{os.getpid()}.tmp"
    with suppress(OSError):
        temporary.unlink()
    with suppress(OSError):  # a file system without links: the run works all the same
        temporary.symlink_to(folder.name)
        temporary.replace(link)


def create_reference(folder: Path) -> Path:
    """The folder of the reference run, inside that of the run."""
    inner = folder / REFERENCE_DIR
    for part in (inner, inner / protocol.REC_DIR, inner / protocol.LOG_DIR):
        part.mkdir(mode=0o700)
    return inner


# ---- reading


def locate(word: str | None, cwd: Path) -> Path:
    """The run folder that a user means: a path, a folder's name under `.harness`, part of one, or the latest."""
    try:
        return _locate(word, cwd)
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise UsageError(f"{error.filename or word} cannot be read: {(error.strerror or str(error)).lower()}; name another run folder") from None


def _locate(word: str | None, cwd: Path) -> Path:
    from harness.errors import did_you_mean

    root = cwd / ROOT
    if word is None or word == LATEST:
        held = _runs_in(root)
        if (root / LATEST / protocol.PLAN_FILE).is_file():
            return (root / LATEST).resolve()
        if not held:
            raise UsageError(f"no run yet in {root}; make one with harness run NAME, or name a run folder")
        return root / held[-1]
    for folder in (cwd / word, root / word):
        if folder.is_file() and folder.name in (protocol.PLAN_FILE, protocol.REPORT_FILE):
            folder = folder.parent
        if (folder / protocol.PLAN_FILE).is_file():
            return folder.resolve()
        if folder.is_dir() and word != ROOT:
            raise UsageError(f"{folder} holds no {protocol.PLAN_FILE}, so it is no run folder")
    held = _runs_in(root)
    return root / _only_match(word, held, did_you_mean(word, held, f"runs lie in {root}"))


def _runs_in(root: Path) -> list[str]:
    """Names of the run folders, oldest first: they begin with their time."""
    return sorted(p.name for p in root.iterdir() if p.name != LATEST and (p / protocol.PLAN_FILE).is_file()) if root.is_dir() else []


def _only_match(word: str, held: list[str], hint: str) -> str:
    matches = sorted(name for name in held if word in name)
    if not matches:
        raise UsageError(f"no run is called {word!r}{hint}")
    return matches[-1]


def read_json(path: Path) -> Any:
    """A JSON file of a run folder; a link, a monster or garbage is refused, because folders may be mailed."""
    try:
        if path.is_symlink() or not path.is_file():
            raise UsageError(f"{path} is missing or no regular file")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise UsageError(f"{path} is larger than {MAX_JSON_BYTES} bytes, so harness did not write it")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None


def read_plan(folder: Path) -> Plan:
    import msgspec

    data = read_json(folder / protocol.PLAN_FILE)
    try:
        return msgspec.convert(data.get("plan") if isinstance(data, dict) else data, Plan)
    except msgspec.ValidationError as error:
        raise UsageError(f"{folder / protocol.PLAN_FILE} is no plan of this harness: {error}") from None


def write_plan(folder: Path, plan: Plan, command: list[str], env: Mapping[str, str], **more: Any) -> None:
    """The plan with the exact command, so that a run can be repeated by hand, and what a later judgement needs to know."""
    import msgspec

    document = {"format": protocol.FORMAT, "plan": msgspec.to_builtins(plan), "command": command, "env": dict(env), **more}
    try:
        write_json(folder / protocol.PLAN_FILE, document)
    except OSError as error:
        raise UsageError(_why(error, str(folder))) from None


def read_logs(folder: Path) -> dict[int, str]:
    """Launched rank -> its output, decoded leniently; the middle of a very long one is left out."""
    logs: dict[int, str] = {}
    log_dir = folder / protocol.LOG_DIR
    if not log_dir.is_dir() or log_dir.is_symlink():
        return logs
    for path in sorted(log_dir.glob("rank*.log")):
        digits = path.stem.removeprefix("rank")
        if digits.isdecimal() and path.is_file() and not path.is_symlink():
            logs[int(digits)] = _ends_of(path)
    return logs


def _ends_of(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= MAX_LOG_BYTES:
            return file.read(MAX_LOG_BYTES).decode("utf-8", "replace")
        head = file.read(MAX_LOG_BYTES // 2)
        file.seek(size - MAX_LOG_BYTES // 2)
        tail = file.read(MAX_LOG_BYTES // 2)
    return f"{head.decode('utf-8', 'replace')}\n[... {size - MAX_LOG_BYTES} bytes left out ...]\n{tail.decode('utf-8', 'replace')}"
