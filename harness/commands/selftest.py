"""`harness selftest`: breaks the built-in scenarios on purpose and says whether every fault was named and every healthy twin left alone."""

from __future__ import annotations

from harness.commands._options import add_format

TYPE_CHECKING = False  # see _options
if TYPE_CHECKING:
    import argparse
    from typing import Any

KINDS = ("console", "json")


def add_parser(sub: Any) -> None:
    parser = sub.add_parser(
        "selftest",
        help="plant every known fault and see that each is named, and no healthy twin is accused",
        description="Runs every planted fault and every healthy scenario. Exits 1 on a miss, a wrong cause, a false alarm, or a twin in which a check did not run.",
        allow_abbrev=False,
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO[/FAULT]", help="only these (default: all)")
    parser.add_argument("--list", action="store_true", help="list the planted faults and run nothing")
    add_format(parser, KINDS)


def run(args: argparse.Namespace) -> int:
    from harness.commands._selftest import selftest

    return selftest(args)
