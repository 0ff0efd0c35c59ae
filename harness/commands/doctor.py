"""`harness doctor`: is this machine fit for a distributed run? What is, why it matters, what to do."""

from __future__ import annotations

from harness.commands._options import add_format

TYPE_CHECKING = False  # see _options
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Any

    from harness.doctor.line import Line

KINDS = ("console", "json")
VERSION = 1


def add_parser(sub: Any) -> None:
    parser = sub.add_parser(
        "doctor",
        help="look at this machine before a run",
        description="Looks at torch, GPUs, network, limits, folders and what earlier runs left. Starts no rank, ends nothing. "
        "Exits 1 where a line is an error.",
        allow_abbrev=False,
    )
    parser.add_argument("-n", "--nproc", metavar="N", help="processes a node that will be run (default: 2)")
    parser.add_argument("--nodes", metavar="N", help="nodes that will be used (default: 1)")
    parser.add_argument("--out", metavar="DIR", help="folder where the run will lie (default: .harness)")
    parser.add_argument("--no-torch", action="store_true", help="leave out what needs an import of torch (seconds)")
    add_format(parser, KINDS)


def run(args: argparse.Namespace) -> int:
    from harness.commands._output import as_json, emit, targets
    from harness.doctor.line import ERROR, examine

    wanted = targets(args.format, "doctor", KINDS)
    lines = examine(_host(args))
    emit(wanted, {"console": lambda: _console(lines), "json": lambda: as_json(_document(lines))})
    return int(any(line.level == ERROR for line in lines))


def _host(args: argparse.Namespace) -> Any:
    import os
    from pathlib import Path

    from harness.doctor import torch_child
    from harness.doctor.line import Host
    from harness.launch.slurm_shared import cluster_is_here
    from harness.settings import resolve

    flags = {"nproc": args.nproc, "nodes": args.nodes, "out": args.out}
    settled = resolve({k: v for k, v in flags.items() if v is not None}, os.environ, Path.cwd())
    host = Host(settled["nproc"], settled["nodes"], folder=None if settled["out"] is None else Path.cwd() / settled["out"])
    said = {} if args.no_torch else torch_child.ask(host.python, host.environ)
    return Host(host.nproc, host.nodes, cluster_is_here(host.nodes), folder=host.folder, torch=said)


def _console(lines: Sequence[Line]) -> str:
    import os
    import sys

    from harness.doctor.line import ERROR, OK, WARNING
    from harness.report.console import style_for
    from harness.report.text import one_line

    style = style_for(os.environ, sys.stdout.isatty())
    colours = {OK: "green", WARNING: "yellow", ERROR: "red"}
    width = max((len(line.name) for line in lines), default=0)
    shown = []
    for line in lines:
        shown.append(f"{style.paint(f'{line.level:7}', colours[line.level])}  {line.name:{width}}  {one_line(line.says, 400)}")
        if line.level != OK:
            shown += [f"{'':9}{'':{width}}  = {one_line(line.why, 400)}", *([f"{'':9}{'':{width}}  = help: {one_line(line.fix, 400)}"] if line.fix else [])]
    counts = {level: sum(line.level == level for line in lines) for level in (ERROR, WARNING, OK)}
    return "\n".join([*shown, "", f"{counts[ERROR]} errors, {counts[WARNING]} warnings, {counts[OK]} ok"])


def _document(lines: Sequence[Line]) -> dict[str, Any]:
    from dataclasses import asdict

    from harness.doctor.line import LEVELS
    from harness.report.json import plain

    return {
        "kind": "doctor",
        "version": VERSION,
        "counts": {level: sum(line.level == level for line in lines) for level in LEVELS},
        "lines": [plain(asdict(line)) for line in lines],
    }
