"""Planted faults: edits of the built-in scenarios, read from scenarios/faults/<scenario>.toml and applied to their source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import catalog
from harness.errors import UsageError

KEYS = {"replace", "with", "finds", "story", "env", "at", "args"}


@dataclass(frozen=True)
class Planted:
    """One mistake, as a person would type it."""

    scenario: str
    name: str
    finds: str
    story: str
    source: str  # the edited script
    lines: tuple[int, int] | None  # where the finding has to stand: the edit, or `at`; None: the edit takes a statement out
    args: tuple[str, ...] = ()  # its own or the whole file's: a shorter run than the scenario's
    twin_args: tuple[str, ...] = ()  # of the healthy twin, where some check needs more of a healthy run than of a faulty one; else `args`
    env: Mapping[str, str] = field(default_factory=dict)  # e.g. a stand-in device table

    @property
    def full_name(self) -> str:
        return f"{self.scenario}/{self.name}"


def load(scenario: str, path: Path) -> list[Planted]:
    """The planted faults of one scenario; UsageError where an entry is malformed or does not match exactly once."""
    source = catalog.read_script(catalog.scenario_dir() / f"{scenario}.py")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None
    args = _words(table, "args", path)
    twin_args = _words(table, "twin_args", path) or args
    planted = [_plant(scenario, name, entry, source, path) for name, entry in table.items()]
    return [replace(plant, args=plant.args or args, twin_args=twin_args) for plant in planted]


def _words(table: dict[str, Any], key: str, where: Path | str) -> tuple[str, ...]:
    """Taken out of the table: what is left of a file are plants."""
    words = table.pop(key, [])
    if not isinstance(words, list):
        raise UsageError(f"{where}: {key} = {words!r} is no list of words")
    return tuple(map(str, words))


def _plant(scenario: str, name: str, entry: dict[str, Any], source: str, path: Path) -> Planted:
    where = f"{path} [{name}]"
    if not isinstance(entry, dict) or not {"replace", "with", "finds"} <= set(entry) or set(entry) - KEYS:
        raise UsageError(f"{where}: needs replace, with and finds, and knows only {', '.join(sorted(KEYS))}")
    old, new = str(entry["replace"]), str(entry["with"])
    count = source.count(old)
    if count != 1:
        raise UsageError(f"{where}: `replace` matches {scenario}.py {count} times, not once")
    edited = source.replace(old, new)
    first = source[: source.index(old)].count("\n") + 1
    return Planted(
        scenario,
        name,
        str(entry["finds"]),
        str(entry.get("story", "")),
        edited,
        _lines_of(edited, str(entry["at"]), where) if "at" in entry else _edited_lines(old, new, first),
        args=_words(entry, "args", where),
        env=dict(entry.get("env", {})),
    )


def _edited_lines(old: str, new: str, first: int) -> tuple[int, int] | None:
    """First and last line of the new text, which begins on line `first`; None where it only lacks lines that were there."""
    kept = iter(old.split("\n"))
    lines = new.split("\n")
    changed = [i for i, line in enumerate(lines) if line.strip()]
    if not changed or all(line in kept for line in lines):  # each found behind the one before: a part of the old text, in order
        return None
    return first + changed[0], first + changed[-1]


def _lines_of(edited: str, text: str, where: str) -> tuple[int, int]:
    """The one line that holds `text`: where the harm shows, for a mistake that no observer could trace to where it was typed."""
    found = [number for number, line in enumerate(edited.splitlines(), 1) if text in line]
    if len(found) != 1:
        raise UsageError(f"{where}: `at` is on {len(found)} lines of the edited script, not on one")
    return found[0], found[0]


def all_planted() -> list[Planted]:
    return [fault for scenario, path in catalog.fault_files().items() for fault in load(scenario, path)]
