"""`harness list`: the built-in scenarios."""

from __future__ import annotations

import argparse
from typing import Any

from harness.commands._output import add_format, as_json, emit, targets

KINDS = ("console", "json")


def add_parser(sub: Any) -> None:
    parser = sub.add_parser(
        "list", help="the built-in scenarios", description="Lists the built-in scenarios, or those that match.", allow_abbrev=False
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="names or globs (default: all)")
    parser.add_argument("--names", dest="only_names", action="store_true", help="names alone, one a line")
    add_format(parser, KINDS)


def run(args: argparse.Namespace) -> int:
    from harness import catalog
    from harness.errors import UsageError, did_you_mean

    known = catalog.names()
    chosen = known
    if args.names:
        from fnmatch import fnmatchcase

        chosen = [n for n in known if any(fnmatchcase(n, pattern) for pattern in args.names)]
        for pattern in args.names:
            if not any(fnmatchcase(n, pattern) for n in known):
                raise UsageError(f"no scenario is called {pattern!r}{did_you_mean(pattern, known, 'harness list shows all')}")
    if args.only_names:
        print("\n".join(chosen))
        return 0
    faults = catalog.fault_files()
    rows = [(scenario, scenario.name in faults) for scenario in map(catalog.builtin, chosen)]
    emit(targets(args.format, "list", KINDS), {"console": lambda: _table(rows), "json": lambda: as_json([_entry(*row) for row in rows])})
    return 0


def _table(rows: list[Any]) -> str:
    width = max((len(scenario.name) for scenario, _ in rows), default=0)
    lines = [f"{scenario.name:{width}}  {scenario.header.nproc or 2}x  {scenario.header.summary}" for scenario, _ in rows]
    return "\n".join([*lines, "", "run one with: harness run NAME; your own script with: harness run ./train.py -- ITS ARGUMENTS"])


def _entry(scenario: Any, has_faults: bool) -> dict[str, Any]:
    header = scenario.header
    return {
        "name": scenario.name,
        "path": scenario.path,
        "summary": header.summary,
        "nproc": header.nproc,
        "device": header.device,
        "timeout_s": header.timeout_s,
        "args": dict(header.args),
        "reference": header.reference_nproc is not None,
        "faults": has_faults,
    }
