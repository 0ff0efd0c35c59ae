"""`--format kind[=file]`, the same on every verb: what goes to the terminal and what goes to files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from harness.commands._options import KINDS
from harness.errors import UsageError, did_you_mean


class Target(NamedTuple):
    kind: str
    file: str | None  # None: standard output


def targets(raw: Sequence[str] | None, verb: str, kinds: Sequence[str] = KINDS) -> list[Target]:
    """What was asked for. The console stays on standard output unless another kind takes it."""
    found = [_target(entry, verb, kinds) for entry in raw or ["console"]]
    on_stdout = [t for t in found if t.file is None]
    if len({t.kind for t in on_stdout}) > 1:
        raise UsageError(
            f"--format: {' and '.join(t.kind for t in on_stdout)} cannot share standard output; give one a file: {on_stdout[-1].kind}=FILE"
        )
    if not on_stdout:
        found.insert(0, Target("console", None))
    return found


def _target(entry: str, verb: str, kinds: Sequence[str]) -> Target:
    kind, equals, file = entry.partition("=")
    if kind not in kinds or (equals and not file):
        why = f"harness {verb} writes {', '.join(kinds)}"
        raise UsageError(
            f"--format {entry}: unknown format{did_you_mean(kind, kinds, why)}"
            if not equals or file
            else f"--format {entry}: no file named"
        )
    return Target(kind, file or None)


def console_on_stdout(wanted: Sequence[Target]) -> bool:
    return Target("console", None) in wanted


def emit(wanted: Sequence[Target], render: Mapping[str, Callable[[], str]]) -> None:
    """Write every kind that was asked for; the text of a kind is made once it is needed."""
    for target in wanted:
        text = render[target.kind]()
        if target.file is None:
            _print(text if text.endswith("\n") or not text else text + "\n")
        else:
            write_file(target, text)


def _print(text: str) -> None:
    """A reader that leaves early (`| head`) does not change the verdict, nor its exit code."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_file(target: Target, text: str) -> None:
    try:
        with open(str(target.file), "w", encoding="utf-8") as file:
            file.write(text if text.endswith("\n") else text + "\n")
    except OSError as error:
        raise UsageError(f"--format {target.kind}={target.file}: cannot be written: {(error.strerror or str(error)).lower()}") from None


def as_json(value: Any) -> str:
    import json

    return json.dumps(value, indent=1)
