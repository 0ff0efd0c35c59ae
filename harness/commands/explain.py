"""`harness explain CODE`: the page of a check, which is the docstring of its file."""

from __future__ import annotations

from harness.commands._options import add_format

TYPE_CHECKING = False  # see _options
if TYPE_CHECKING:
    import argparse
    from typing import Any


KINDS = ("console", "json")


def add_parser(sub: Any) -> None:
    parser = sub.add_parser(
        "explain",
        help="what a finding means, why it is bad, and the edit that mends it",
        description="Prints the page of a finding; without a code, lists all codes.",
        allow_abbrev=False,
    )
    parser.add_argument("codes", nargs="*", metavar="CODE", help="codes, names, or families such as SYN (default: list all)")
    add_format(parser, KINDS)


def run(args: argparse.Namespace) -> int:
    from harness.commands._output import as_json, emit, targets
    from harness.commands._pages import all_pages
    from harness.planning import expand_codes

    pages = all_pages()
    wanted = targets(args.format, "explain", KINDS)
    if not args.codes:
        chosen = pages
        console = lambda: index(pages)  # noqa: E731
    else:
        codes = expand_codes(args.codes, {p.code: p.name for p in pages}, "harness explain")
        chosen = [p for p in pages if p.code in codes]
        console = lambda: "\n\n".join(p.text for p in chosen)  # noqa: E731
    emit(wanted, {"console": console, "json": lambda: as_json([p._asdict() for p in chosen])})
    return 0


def index(pages: list[Any]) -> str:
    width = max((len(p.name) for p in pages), default=0)
    return "\n".join(
        [*(f"{p.code}  {p.name:{width}}  {p.severity:7}  {p.title}" for p in pages), "", "read one with: harness explain CODE"]
    )
