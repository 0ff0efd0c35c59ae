"""Finds scripts and reads their header block (PEP 723) without importing them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness import briefs
from harness.errors import UsageError, did_you_mean
from harness.model import Header, Scenario
from harness.settings import BY_KEY, HEADER_KEYS

ARG_OPTIONS = ("seed", "data", "device", "backend")  # our options that a header may map to arguments of the script
OTHER_KEYS = ("summary", "args", "reference", "expect")
MAX_SCRIPT_BYTES = 16_000_000


class Block(NamedTuple):
    """The `[tool.harness]` table of a script, and the script's line on which each part of it stands."""

    path: str
    table: Mapping[str, Any]
    lines: Mapping[str, int]  # dotted key -> line

    def at(self, key: str) -> str:
        return f"{self.path}:{self.lines.get(key, 1)}"


# ---- where scenarios lie


def scenario_dir() -> Path:
    return Path(briefs.scenario_dir())


def names() -> list[str]:
    """Names of the built-in scenarios."""
    return briefs.names()


def fault_files() -> dict[str, Path]:
    """Scenario name -> its TOML of planted faults."""
    folder = scenario_dir() / "faults"
    return {p.stem: p for p in sorted(folder.glob("*.toml"))} if folder.is_dir() else {}


def builtin(name: str) -> Scenario:
    path = scenario_dir() / f"{name}.py"
    return Scenario(name, str(path), read_header(path), builtin=True)


def all_builtin() -> list[Scenario]:
    return [builtin(name) for name in names()]


# ---- what the user typed


def find(words: list[str], cwd: Path) -> list[Scenario]:
    """Scripts for names, paths, globs and `all`, in the order typed, each once."""
    found: dict[str, Scenario] = {}
    for word in words:
        for scenario in _find_one(word, cwd):
            found.setdefault(scenario.path, scenario)
    return list(found.values())


def _find_one(word: str, cwd: Path) -> list[Scenario]:
    known = names()
    if word in known:
        return [builtin(word)]
    if word == "all":
        if not known:
            raise UsageError(f"no scenarios in {scenario_dir()}; reinstall harness")
        return [builtin(name) for name in known]
    if any(c in word for c in "*?[") and not os.path.exists(cwd / word):  # noqa: PTH110  (never raises)
        return _glob(word, known, cwd)
    return [user_script(word, cwd)]


def _glob(pattern: str, known: list[str], cwd: Path) -> list[Scenario]:
    if "/" not in pattern and not pattern.endswith(".py"):
        from fnmatch import fnmatchcase

        matches = [builtin(name) for name in known if fnmatchcase(name, pattern)]
    else:
        import glob

        matches = [user_script(p, cwd) for p in sorted(glob.glob(pattern, root_dir=cwd)) if (cwd / p).is_file()]  # noqa: PTH207  (absolute patterns)
    if not matches:
        raise UsageError(
            f"{pattern!r} matches no scenario and no script; harness list shows the scenarios, ./{pattern} would look for files here"
        )
    return matches


def user_script(word: str, cwd: Path) -> Scenario:
    """The user's own script, checked to be a readable file before any process is started."""
    if not word:
        raise UsageError("the name of a script is empty; give a scenario (harness list shows them) or a path")
    path = Path(os.path.expanduser(word)) if word.startswith("~") else cwd / word  # noqa: PTH111
    try:
        is_dir, is_file = path.is_dir(), path.is_file()
    except PermissionError:
        raise UsageError(f"script {word} lies in a folder that may not be entered; chmod u+x {path.parent}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"script {word!r} cannot be opened: {error}") from None
    if is_dir:
        raise UsageError(f"{word} is a directory; name a script in it, such as {Path(word) / 'train.py'}")
    if not is_file:
        raise UsageError(_unknown(word, path, cwd))
    shown = str(path) if word.startswith("~") else word  # as typed: it becomes argv[0], as under torchrun
    return Scenario(path.stem, shown, header_of(parse_block(read_script(path), shown)))


def _unknown(word: str, path: Path, cwd: Path) -> str:
    if path.exists():
        return f"{word} is no regular file; give a Python script"
    if path.is_symlink():
        return f"script {word} is a link to {os.readlink(path)}, which does not exist"  # noqa: PTH115
    scripts = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    if "/" in word or word.endswith(".py"):
        prefix = word[: len(word) - len(path.name)]
        if not path.parent.is_dir():
            return f"script {word} does not exist: there is no folder {path.parent}"
        hint = did_you_mean(word, [prefix + s for s in scripts] + names(), f"it was looked for in {path.parent}")
        return f"script {word} does not exist{hint}"
    otherwise = "harness list shows the scenarios, and arguments for a script go after --"
    return f"no scenario and no script is called {word!r}{did_you_mean(word, names() + scripts, otherwise)}"


# ---- the header block


def read_script(path: Path) -> str:
    try:
        with path.open("rb") as file:
            blob = file.read(MAX_SCRIPT_BYTES + 1)
    except PermissionError:
        raise UsageError(f"script {path} is not readable; chmod u+r {path}") from None
    except OSError as error:
        raise UsageError(f"script {path} cannot be read: {error.strerror or error}") from None
    if len(blob) > MAX_SCRIPT_BYTES or b"\0" in blob[:4096]:
        raise UsageError(f"{path} is not Python source; give the script itself, not a compiled file or an archive")
    return blob.decode("utf-8", "replace")


def read_header(path: Path) -> Header:
    """The header of a script; an empty one where it has none."""
    return header_of(read_block(path))


def read_block(path: Path) -> Block:
    return parse_block(read_script(path), str(path))


def parse_block(source: str, path: str) -> Block:
    """The `[tool.harness]` table of the `# /// script` block, validated; every error names file, line and fix."""
    start, content = _block_lines(source, path)
    if start is None:
        return Block(path, {}, {})
    import tomllib

    try:
        document = tomllib.loads("\n".join(content) + "\n")
    except tomllib.TOMLDecodeError as error:
        raise UsageError(_toml_error(str(error), path, start, len(content))) from None
    tool = document.get("tool", {})
    table = tool.get("harness", {}) if isinstance(tool, dict) else {}
    block = Block(path, table if isinstance(table, dict) else {}, _key_lines(content, start))
    if not isinstance(table, dict):
        raise UsageError(f"{block.at('tool')}: tool.harness must be a table, written [tool.harness]")
    _validate(block)
    return block


def _block_lines(source: str, path: str) -> tuple[int | None, list[str]]:
    """(line of the first content line, content without the comment signs)."""
    if "# /// script" not in source:
        return None, []
    lines = source.splitlines()
    starts = [i for i, line in enumerate(lines) if line.rstrip() == "# /// script"]
    if not starts:
        return None, []
    content: list[str] = []
    for number, line in enumerate(lines[starts[0] + 1 :], starts[0] + 2):
        if line.rstrip() == "# ///":
            after = [s for s in starts[1:] if s + 1 > number]
            if after:
                raise UsageError(f"{path}:{after[0] + 1}: a second '# /// script' block; keep one")
            return starts[0] + 2, content
        if not line.startswith("#") or (line.rstrip() != "#" and not line.startswith("# ")):
            raise UsageError(f"{path}:{number}: the '# /// script' block of line {starts[0] + 1} is not closed; end it with a line '# ///'")
        content.append(line[2:])
    raise UsageError(f"{path}:{starts[0] + 1}: the '# /// script' block is never closed; end it with a line '# ///'")


def _toml_error(message: str, path: str, start: int, num_lines: int) -> str:
    match = re.search(r" \(at line (\d+), column (\d+)\)", message)
    line = start + int(match[1]) - 1 if match else start + num_lines - 1
    what = message.replace(match[0], "") if match else message.replace(" (at end of document)", "")
    what = what[:1].lower() + what[1:]
    return f"{path}:{line}: malformed header block: {what}; write TOML behind '# ', such as nproc = 2"


def _key_lines(content: list[str], start: int) -> dict[str, int]:
    """Lines of tables and keys below `[tool.harness]`, as dotted keys. Rough: good enough to point at a line."""
    table, found = "", {"tool": start}
    for number, line in enumerate(content, start):
        head = re.match(r"\s*\[([\w.\-]+)\]", line)
        key = re.match(r"\s*([\w.\-]+)\s*=", line)
        if head:
            table = head[1].removeprefix("tool.harness").lstrip(".")
            found.setdefault(table, number)
        elif key:
            found.setdefault(f"{table}.{key[1]}".lstrip("."), number)
    return found


def _validate(block: Block) -> None:
    valid = (*HEADER_KEYS, *OTHER_KEYS)
    for key, raw in block.table.items():
        if key not in valid:
            raise UsageError(
                f"{block.at(key)}: unknown key {key!r} in [tool.harness]{did_you_mean(key, valid, 'valid are ' + ', '.join(valid))}"
            )
        if key in BY_KEY:
            _check_setting(block, key, raw)
    summary = block.table.get("summary", "")
    if not isinstance(summary, str) or "\n" in summary:
        raise UsageError(f"{block.at('summary')}: summary must be one line of text in quotes")
    _validate_args(block)
    _validate_reference(block)
    if not isinstance(block.table.get("expect", {}), dict):
        raise UsageError(f"{block.at('expect')}: expect must be a table, written [tool.harness.expect]")


def _check_setting(block: Block, key: str, raw: Any) -> None:
    try:
        BY_KEY[key].parse(raw)
    except ValueError as error:
        raise UsageError(f"{block.at(key)}: {key} = {raw!r} in the header; it {error}") from None


def _validate_args(block: Block) -> None:
    args = block.table.get("args", {})
    if not isinstance(args, dict):
        raise UsageError(f'{block.at("args")}: args must be a table, written [tool.harness.args], with lines such as seed = "--seed {{}}"')
    for option, template in args.items():
        at = block.at(f"args.{option}")
        if option not in ARG_OPTIONS:
            hint = did_you_mean(option, ARG_OPTIONS, "valid are " + ", ".join(ARG_OPTIONS))
            raise UsageError(f"{at}: unknown option {option!r} in [tool.harness.args]{hint}")
        if not isinstance(template, str) or template.count("{}") != 1:
            raise UsageError(f'{at}: {option} must be text with one {{}} in it, such as {option} = "--{option} {{}}"')
        try:
            shlex.split(template)
        except ValueError as error:
            raise UsageError(f"{at}: {option} = {template!r}: {error}") from None


def _validate_reference(block: Block) -> None:
    reference = block.table.get("reference", {})
    if not isinstance(reference, dict):
        raise UsageError(f"{block.at('reference')}: reference must be a table, written [tool.harness.reference], with nproc and args")
    for key in reference:
        if key not in ("nproc", "args"):
            raise UsageError(f"{block.at(f'reference.{key}')}: unknown key {key!r} in [tool.harness.reference]; valid are nproc, args")
    nproc = reference.get("nproc", 1)
    if not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1:
        raise UsageError(
            f"{block.at('reference.nproc')}: nproc = {nproc!r} in [tool.harness.reference]; it must be a whole number of 1 or more"
        )
    args = reference.get("args", [])
    if not isinstance(args, list) or not all(isinstance(a, str) for a in args):
        raise UsageError(f'{block.at("reference.args")}: args must be a list of text, such as args = ["--no-bf16"]')


def header_of(block: Block) -> Header:
    table = block.table
    reference = table.get("reference")
    return Header(
        nproc=_parsed(table, "nproc"),
        device=table.get("device"),
        timeout_s=_parsed(table, "timeout_s"),
        summary=table.get("summary", ""),
        args=dict(table.get("args", {})),
        reference_nproc=None if reference is None else reference.get("nproc", 1),
        reference_args=tuple(reference.get("args", ())) if reference is not None else (),
        expect=dict(table.get("expect", {})),
    )


def _parsed(table: Mapping[str, Any], key: str) -> Any:
    return BY_KEY[key].parse(table[key]) if key in table else None
