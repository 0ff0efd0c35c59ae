"""`harness config`: every setting, its value and where the value comes from."""

from __future__ import annotations

from harness.commands._options import SETTING_FLAGS, add_format, add_settings, flags_of

TYPE_CHECKING = False  # see _options
if TYPE_CHECKING:
    import argparse
    from typing import Any

KINDS = ("console", "json")


def add_parser(sub: Any) -> None:
    parser = sub.add_parser(
        "config",
        help="every setting with its value and origin",
        description="Prints every setting with its value and where it comes from: flag > HARNESS_* > header of the script > "
        "[tool.harness] in the nearest pyproject.toml > default.",
        allow_abbrev=False,
    )
    parser.add_argument("script", nargs="?", metavar="NAME|PATH", help="also read the header of this script")
    add_settings(parser, [f for f in SETTING_FLAGS if f != "format"])
    add_format(parser, KINDS)


def run(args: argparse.Namespace) -> int:
    import os
    from pathlib import Path

    from harness import catalog
    from harness.commands._output import as_json, emit, targets
    from harness.settings import SETTINGS, resolve

    header: dict[str, Any] = {}
    origin = ""
    if args.script is not None:
        path = catalog.find([args.script], Path.cwd())[0].path
        header, origin = dict(catalog.read_block(Path(path)).table), f"header of {Path(path).name}"
    flags = flags_of(args)
    flags.pop("format", None)  # of this verb, not of a run
    settled = resolve(flags, os.environ, Path.cwd(), header, origin)
    rows = [(s.key, settled[s.key], settled.origin(s.key), s.flag, s.env, s.help) for s in SETTINGS]
    emit(targets(args.format, "config", KINDS), {"console": lambda: _table(rows), "json": lambda: as_json([_entry(*row) for row in rows])})
    return 0


def shown(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(rows: list[Any]) -> str:
    width = max(len(row[0]) for row in rows)
    values = [shown(row[1]) for row in rows]
    value_width = max(len(v) for v in values)
    return "\n".join(f"{row[0]:{width}}  {value:{value_width}}  {row[2]}" for row, value in zip(rows, values, strict=True))


def _entry(key: str, value: Any, origin: str, flag: str, env: str, help: str) -> dict[str, Any]:
    return {
        "key": key,
        "value": list(value) if isinstance(value, tuple) else value,
        "origin": origin,
        "flag": flag,
        "env": env,
        "help": help,
    }
