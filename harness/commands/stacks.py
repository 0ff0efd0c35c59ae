"""`harness stacks [RUN]`: where every rank of a run that goes on stands right now. The run is not disturbed."""

from __future__ import annotations

from harness.commands._options import add_format

TYPE_CHECKING = False  # see _options
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Any

KINDS = ("console", "json")
VERSION = 1


def add_parser(sub: Any) -> None:
    parser = sub.add_parser(
        "stacks",
        help="where every rank of a live run stands",
        description="Asks all ranks of a run that goes on for their stacks, and says what each waits in. Needs no signal and no debugger; "
        "the run goes on.",
        allow_abbrev=False,
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run folder, its name or part of it (default: the latest)")
    add_format(parser, KINDS)


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from harness import replay, rundir
    from harness.commands import _standing
    from harness.commands._alive import still_running
    from harness.commands._output import as_json, emit, targets
    from harness.errors import UsageError
    from harness.watch import standing

    wanted = targets(args.format, "stacks", KINDS)
    folder = replay.open_folder(rundir.locate(args.run, Path.cwd()))
    if not still_running(folder):
        raise UsageError(f"{folder.path.name} has ended, so nobody can be asked; harness report {folder.path.name} tells how")
    try:
        found = standing.ask(folder.path, folder.plan)
    except OSError as error:
        raise UsageError(f"{folder.path}: the request cannot be written: {(error.strerror or str(error)).lower()}") from None
    emit(
        wanted,
        {
            "console": lambda: _standing.text(found, str(Path.cwd())),
            "json": lambda: as_json(_document(folder.plan.run_id, found)),
        },
    )
    return 0


def _document(run_id: str, found: Sequence[Any]) -> dict[str, Any]:
    from dataclasses import asdict

    from harness.report.json import plain

    return {"kind": "stacks", "version": VERSION, "run_id": run_id, "processes": [plain(asdict(one)) for one in found]}
