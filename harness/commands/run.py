"""`harness run`: scripts, watched and judged."""

from __future__ import annotations

from harness.commands._options import add_format, add_settings

TYPE_CHECKING = False  # see _options
if TYPE_CHECKING:
    import argparse
    from typing import Any


def add_parser(sub: Any) -> None:
    parser = sub.add_parser(
        "run",
        help="run scripts and say whether they train correctly",
        description="Runs built-in scenarios or your own scripts and judges them. What stands after -- goes to the script verbatim.",
        epilog="example: harness run ./train.py -n 2 -- --lr 0.1",
        allow_abbrev=False,
    )
    parser.add_argument("scripts", nargs="*", metavar="NAME|PATH", help="scenarios, scripts or globs; all: every scenario")
    add_settings(parser)
    add_format(parser)
    parser.add_argument("--detach", action="store_true", help="submit to Slurm and leave; harness attach comes back")
    parser.add_argument("--dry-run", action="store_true", help="print the exact command and environment, and start nothing")


def run(args: argparse.Namespace) -> int:
    from harness.commands._run import run_scripts

    return run_scripts(args)
