"""`harness attach [RUN]`: follows a run on Slurm that an earlier harness left, to its verdict."""

from __future__ import annotations

from harness.commands._options import add_format

TYPE_CHECKING = False  # see _options
if TYPE_CHECKING:
    import argparse
    from typing import Any


def add_parser(sub: Any) -> None:
    parser = sub.add_parser(
        "attach",
        help="come back to a run on Slurm that was left",
        description="Follows a run on Slurm that was detached, or whose controller was killed, until it ends, and judges it. "
        "Ctrl-C leaves it again, a second one cancels the job.",
        allow_abbrev=False,
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run folder, its name or part of it (default: the latest)")
    parser.add_argument("--cancel", action="store_true", help="end the job in order, then judge what it left")
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from harness import replay, rundir
    from harness.commands._output import targets
    from harness.commands._run import follow_run
    from harness.errors import UsageError
    from harness.launch.slurm_jobs import job_of

    cwd = Path.cwd()
    wanted = targets(args.format, "attach")
    folder = replay.open_folder(rundir.locate(args.run, cwd))
    if folder.plan.launcher != "slurm" or not job_of(folder.path):
        raise UsageError(f"{folder.path} is no run that a Slurm job of its own carries; harness report judges what lies there")
    if folder.status == "done":
        raise UsageError(f"the run in {folder.path} has ended and was judged; harness report shows it")
    return follow_run(folder, wanted, cwd, cancel=args.cancel)
