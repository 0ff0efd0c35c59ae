"""`harness report [RUN]`: the verdict of a run folder, judged again from its recordings; finishes one that a killed controller left."""

from __future__ import annotations

from harness.commands._options import add_format

TYPE_CHECKING = False  # see _options
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Any


def add_parser(sub: Any) -> None:
    parser = sub.add_parser(
        "report",
        help="the verdict of an earlier run",
        description="Prints the verdict of a run, judged again from its recordings, and exits as that run did. "
        "A run whose controller was killed is finished from what lies in its folder.",
        allow_abbrev=False,
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run folder, its name or part of it (default: the latest)")
    parser.add_argument("--select", action="append", metavar="CODE[,..]", help="only these checks: codes, names, or families such as SYN")
    parser.add_argument("--ignore", action="append", metavar="CODE[,..]", help="not these checks")
    parser.add_argument(
        "--fail-on", dest="fail_on", metavar="SEVERITY", help="error, warning, advice or never (default: as the run had it)"
    )
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    import os
    import shlex
    import sys
    from pathlib import Path

    from harness import replay, rundir
    from harness.commands._alive import still_running
    from harness.commands._output import as_json, emit, targets
    from harness.report import console, junit
    from harness.report import json as report_json

    cwd = Path.cwd()
    wanted = targets(args.format, "report")
    folder = replay.open_folder(rundir.locate(args.run, cwd))
    judging = _judging(folder.judging, args)
    alive = still_running(folder)
    result, verdict = replay.recover(folder, judging, alive=alive)
    status = folder.status if folder.status not in ("", "running", "detached") else "running" if alive else "recovered"
    started_ns = folder.report.get("started_ns")
    document = report_json.finished(result, verdict, folder.command, started_ns if isinstance(started_ns, int) else 0, status)
    if status == "recovered" and folder.status != "recovered":
        _finish(folder, result, verdict, document, narrowed=judging != folder.judging)
    style = console.style_for(os.environ, sys.stdout.isatty())
    said = {
        "running": "this run still goes on; what follows is provisional"
        + (f"; harness attach {shlex.quote(folder.path.name)} follows it\n" if folder.plan.launcher == "slurm" else "\n"),
        "recovered": "the controller of this run was killed; judged from what it left\n",
    }
    emit(
        wanted,
        {
            "console": lambda: "\n".join(
                [console.header(folder.plan, style), said.get(status, ""), console.render(result, verdict, folder.path, str(cwd), style)]
            ),
            "json": lambda: as_json(document),
            "junit": lambda: junit.render([document]),
        },
    )
    return verdict.exit_code


def _judging(recorded: Any, args: argparse.Namespace) -> Any:
    from dataclasses import replace

    from harness import replay
    from harness.planning import expand_codes
    from harness.settings import BY_KEY, parse_value

    def codes(words: Sequence[str], flag: str) -> tuple[str, ...]:
        return tuple(sorted(expand_codes(words, replay.check_names(), flag)))

    changes: dict[str, Any] = {}
    if args.select:
        changes["select"] = codes(BY_KEY["select"].parse(args.select), "--select")
    if args.ignore:
        changes["ignore"] = {word: codes([word], "--ignore") for word in BY_KEY["ignore"].parse(args.ignore)}
    if args.fail_on is not None:
        changes["fail_on"] = parse_value(BY_KEY["fail_on"], args.fail_on, "--fail-on")
    return replace(recorded, **changes)


def _finish(folder: Any, result: Any, verdict: Any, document: dict[str, Any], *, narrowed: bool) -> None:
    """Completes the folder of a killed controller. What is stored is the verdict as the run had asked for it, not as this look narrows it."""
    from contextlib import suppress

    from harness import replay, rundir
    from harness.probe import protocol
    from harness.report import json as report_json

    if narrowed:
        result, verdict = replay.recover(folder, folder.judging)
        document = report_json.finished(result, verdict, folder.command, document["started_ns"], document["status"])
    with suppress(OSError):  # a folder that is only lent to us is read all the same
        rundir.write_last(folder.path / protocol.REPORT_FILE, document)
