"""`harness list`: the built-in scenarios."""

from __future__ import annotations

from harness.commands._options import add_format

TYPE_CHECKING = False  # see _options
if TYPE_CHECKING:
    import argparse
    from typing import Any

KINDS = ("console", "json")


def add_parser(sub: Any) -> None:
    parser = sub.add_parser(
        "list", help="the built-in scenarios", description="Lists the built-in scenarios, or those that match.", allow_abbrev=False
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="names or globs (default: all)")
    parser.add_argument("--names", dest="only_names", action="store_true", help="names alone, one a line")
    add_format(parser, KINDS)


def run(args: argparse.Namespace) -> int:
    from harness import briefs

    chosen = _chosen(args.names, briefs.names())
    if args.only_names:
        print("\n".join(chosen))
    elif args.format is None:
        print(_table([(name, *briefs.brief(name)) for name in chosen]))
    else:
        _emit(args.format, chosen)
    return 0


def _chosen(patterns: list[str], known: list[str]) -> list[str]:
    from harness.briefs import glob_match

    for pattern in patterns:
        if not any(glob_match(name, pattern) for name in known):
            from harness.errors import UsageError, did_you_mean

            raise UsageError(f"no scenario is called {pattern!r}{did_you_mean(pattern, known, 'harness list shows all')}")
    return [name for name in known if not patterns or any(glob_match(name, pattern) for pattern in patterns)]


def _table(rows: list[tuple[str, int, str]]) -> str:
    width = max((len(name) for name, _, _ in rows), default=0)
    lines = [f"{name:{width}}  {nproc}x  {summary}" for name, nproc, summary in rows]
    return "\n".join([*lines, "", "run one with: harness run NAME; your own script with: harness run ./train.py -- ITS ARGUMENTS"])


def _emit(raw: list[str], chosen: list[str]) -> None:
    from harness import briefs, catalog
    from harness.commands._output import as_json, emit, targets

    faults = catalog.fault_files()
    render = {
        "console": lambda: _table([(name, *briefs.brief(name)) for name in chosen]),
        "json": lambda: as_json([_entry(catalog.builtin(name), name in faults) for name in chosen]),
    }
    emit(targets(raw, "list", KINDS), render)


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
