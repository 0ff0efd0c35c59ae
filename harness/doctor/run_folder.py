"""Where recordings will lie: writable, roomy, and shared where there are several nodes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from harness import mounts
from harness.doctor.line import ERROR, OK, WARNING, Host, Line

QUICK = True
WHY = "ranks speak to the controller through files in the run folder; what cannot be written cannot be judged"
LEAST_BYTES = 64_000_000


def look(host: Host) -> Iterable[Line]:
    folder = nearest(host.folder or host.cwd)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
        space = os.statvfs(folder)
    except OSError as error:
        return [Line("run folder", ERROR, f"{folder} cannot be written: {(error.strerror or str(error)).lower()}", WHY, "name another folder with --out")]
    free = space.f_bavail * space.f_frsize
    if free < LEAST_BYTES:
        return [Line("run folder", ERROR, f"{folder} has {free // 10**6} MB free", WHY, "free some, or name another folder with --out")]
    return [Line("run folder", OK, f"{folder} is writable, {free / 1e9:.0f} GB free", WHY), *_shared(host, folder)]


def nearest(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next((each for each in (folder, *folder.parents) if each.is_dir()), folder)


def _shared(host: Host, folder: Path) -> Iterable[Line]:
    if host.nodes == 1:
        return []
    kind = mounts.file_system_of(folder, host.proc)
    if kind in mounts.LOCAL and host.nodes_are_here:
        return [Line("run folder", OK, f"{folder} is {kind}, and the nodes of this Slurm are all this machine", WHY)]
    if kind in mounts.LOCAL:
        fix = "take --out in a folder that all nodes mount (nfs, lustre, gpfs)"
        return [Line("run folder", ERROR, f"{folder} is {kind}, a disk of this node alone, but {host.nodes} nodes write there", WHY, fix)]
    if not kind:
        return [Line("run folder", WARNING, f"whether {folder} is shared by {host.nodes} nodes is not known", WHY, "look at `df -T` on each node")]
    return [Line("run folder", OK, f"{folder} is {kind}, a shared file system", WHY)]
