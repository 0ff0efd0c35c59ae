"""Settings: flag > HARNESS_* > header block of the script > [tool.harness] in pyproject.toml > default. Each value remembers its origin."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import UsageError, did_you_mean

PREFIX = "HARNESS_"
TABLE = "[tool.harness]"
SITES = "site"  # in the table: profiles by name; which one is chosen by flag or environment
FORMATS = ("console", "json", "junit")


class Setting(NamedTuple):
    """One thing that can be set. `parse` takes what was written (text, or a TOML value) and gives the value, or raises ValueError(why)."""

    key: str
    default: Any
    parse: Callable[[Any], Any]
    flag: str
    help: str
    in_header: bool = False

    @property
    def env(self) -> str:
        return PREFIX + self.key.upper()


class Value(NamedTuple):
    """A settled value and where it comes from: "default", "-n/--nproc", "HARNESS_NPROC", "header of train.py", "pyproject.toml"."""

    value: Any
    origin: str

    @property
    def is_default(self) -> bool:
        return self.origin == "default"


# ---- parsers: each raises ValueError with "must be ..."


def whole_number(least: int) -> Callable[[Any], int]:
    def parse(raw: Any) -> int:
        try:
            number = int(raw) if isinstance(raw, str) else raw
        except ValueError:
            number = None
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"must be a whole number of {least} or more")
        return number

    return parse


def any_integer(raw: Any) -> int:
    try:
        number = int(raw) if isinstance(raw, str) else raw
    except ValueError:
        number = None
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError("must be a whole number")
    return number


def seconds(raw: Any) -> float:
    """Seconds; text may end in s, m or h."""
    value: float | None = None
    if isinstance(raw, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([smh]?)\s*", raw)
        try:
            value = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else None
        except ValueError:
            value = None
    elif isinstance(raw, (int, float)) and not isinstance(raw, bool):
        value = float(raw)
    if value is None or not math.isfinite(value) or value <= 0:
        raise ValueError("must be a positive number of seconds, such as 90 or 5m")
    return value


def memory_size(raw: Any) -> int:
    """Bytes; text may bear a unit: 2GiB, 500MB."""
    value: float | None = None
    if isinstance(raw, str):
        units = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", raw)
        if match and match[2].lower() in units:
            value = float(match[1]) * units[match[2].lower()]
    elif isinstance(raw, (int, float)) and not isinstance(raw, bool):
        value = float(raw)
    if value is None or not math.isfinite(value) or value < 1:
        raise ValueError("must be a size such as 2GiB or 500MB")
    return int(value)


SYNONYMS = {"gpu": "cuda"}  # for the hint only: by its letters, gpu is nearest to cpu


class OneOf:
    """Parses one of a few words; completion offers them."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def __call__(self, raw: Any) -> str:
        if raw not in self.choices:
            raise ValueError(f"must be one of {', '.join(self.choices)}{did_you_mean(SYNONYMS.get(str(raw), str(raw)), self.choices)}")
        return str(raw)


def switch(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("must be true or false")


def words(raw: Any) -> tuple[str, ...]:
    """A list of words; text separates them by commas or blanks."""
    if isinstance(raw, str):
        return tuple(w for w in re.split(r"[,\s]+", raw) if w)
    if isinstance(raw, (list, tuple)) and all(isinstance(w, str) for w in raw):
        return tuple(w for item in raw for w in words(item))
    raise ValueError("must be a list of words")


def verbatim(raw: Any) -> tuple[str, ...]:
    """A list of texts that are taken as they are; a single text is one entry."""
    entries = (raw,) if isinstance(raw, str) else raw
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, str) and entry for entry in entries):
        raise ValueError("must be a list of texts")
    return tuple(entries)


def text(raw: Any) -> str:
    if not isinstance(raw, str) or not raw:
        raise ValueError("must be text")
    return raw


def path_text(raw: Any) -> str:
    if not isinstance(raw, (str, os.PathLike)) or not str(raw):
        raise ValueError("must be a path")
    return str(raw)


def formats(raw: Any) -> tuple[str, ...]:
    """kind or kind=file, each; a file name may hold commas, so text is one entry."""
    entries = (raw,) if isinstance(raw, str) else raw
    if not isinstance(entries, (list, tuple)) or not all(isinstance(e, str) for e in entries):
        raise ValueError("must be a list of kind or kind=file")
    for entry in entries:
        kind, equals, file = entry.partition("=")
        if kind not in FORMATS or (equals and not file):
            raise ValueError(f"must be kind or kind=file with a kind of {', '.join(FORMATS)}{did_you_mean(kind, FORMATS)}")
    return tuple(entries)


SETTINGS = (
    Setting("nproc", 2, whole_number(1), "-n/--nproc", "processes a node", True),
    Setting("nodes", 1, whole_number(1), "--nodes", "nodes; above 1 needs a launcher that has nodes", True),
    Setting("launcher", "warm", OneOf("warm", "torchrun", "inline", "slurm"), "--launcher", "warm, torchrun, slurm or inline", True),
    Setting("device", "auto", OneOf("auto", "cpu", "cuda"), "--device", "auto, cpu or cuda", True),
    Setting("backend", "auto", OneOf("auto", "gloo", "nccl"), "--backend", "auto, gloo or nccl", True),
    Setting("timeout_s", 600.0, seconds, "--timeout", "wall time after which the run is ended", True),
    Setting(
        "hang_timeout_s", None, seconds, "--hang-timeout", "silence after which it counts as hung; unset: follows the run's own pace", True
    ),
    Setting("on_hang", "kill", OneOf("kill", "dump"), "--on-hang", "kill a run that hangs, or dump its stacks and let it go on", True),
    Setting("grace_s", 5.0, seconds, "--grace", "time between TERM and KILL when a run is ended", True),
    Setting("memory_budget", None, memory_size, "--memory-budget", "peak memory a rank may use", True),
    Setting("out", None, path_text, "--out", "folder of this run; unset: .harness/<stamp>-<name>"),
    Setting("seed", None, any_integer, "--seed", "seed, passed on as the header of the script says", True),
    Setting("data", None, path_text, "--data", "data folder, passed on as the header of the script says"),
    Setting("format", ("console",), formats, "--format", "console, json or junit, or kind=file"),
    Setting("select", (), words, "--select", "only these checks: codes, names, or families such as SYN", True),
    Setting("ignore", (), words, "--ignore", "not these checks: codes, names, or families such as SYN", True),
    Setting(
        "fail_on", "error", OneOf("error", "warning", "advice", "never"), "--fail-on", "least severity that makes the exit code 1", True
    ),
    Setting("slurm", (), verbatim, "--slurm", "options of sbatch: key=value, or a flag with its dashes"),
    Setting("site", None, text, "--site", "profile [tool.harness.site.NAME] with what a cluster needs"),
    Setting("max_pending_s", None, seconds, "--max-pending", "time a Slurm job may wait before it is cancelled; unset: for ever"),
    Setting("no_reference", False, switch, "--no-reference", "leave out the reference run", True),
    Setting("fail_fast", False, switch, "--fail-fast", "end a run at its first error", True),
)
BY_KEY = {setting.key: setting for setting in SETTINGS}
HEADER_KEYS = tuple(s.key for s in SETTINGS if s.in_header)


class Settings(Mapping[str, Any]):
    """Settled values by key; `origin(key)` says where one comes from."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values_with_origin = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self.values_with_origin[key].value

    def __iter__(self) -> Any:
        return iter(self.values_with_origin)

    def __len__(self) -> int:
        return len(self.values_with_origin)

    def origin(self, key: str) -> str:
        return self.values_with_origin[key].origin

    def with_value(self, key: str, value: Any) -> Settings:
        """The same, with one value changed; its origin stays."""
        return Settings({**self.values_with_origin, key: Value(value, self.origin(key))})


def parse_value(setting: Setting, raw: Any, origin: str, label: str = "") -> Any:
    try:
        return setting.parse(raw)
    except ValueError as error:
        raise UsageError(f"{label or origin}: {setting.key} is {_quote(raw)}; it {error}") from None


def _quote(raw: Any) -> str:
    if isinstance(raw, list) and len(raw) == 1:  # of an option that may be repeated
        raw = raw[0]
    return repr(raw) if isinstance(raw, str) else str(raw).lower() if isinstance(raw, bool) else str(raw)


# ---- sources


def from_flags(flags: Mapping[str, Any]) -> dict[str, Value]:
    found = {}
    for setting in SETTINGS:
        raw = flags.get(setting.key)
        if raw is not None and raw != []:
            found[setting.key] = Value(parse_value(setting, raw, setting.flag), setting.flag)
    return found


def from_environment(environ: Mapping[str, str]) -> dict[str, Value]:
    """HARNESS_*: ours are read; a near miss of one is an error; all others belong to somebody else."""
    found = {}
    for name, raw in environ.items():
        if not name.startswith(PREFIX):
            continue
        setting = BY_KEY.get(name[len(PREFIX) :].lower())
        if setting is None or setting.env != name:
            _refuse_near_miss(name)
        elif raw != "":
            found[setting.key] = Value(parse_value(setting, raw, name), name)
    return found


def _refuse_near_miss(name: str) -> None:
    import difflib

    word = name[len(PREFIX) :].lower()
    near = difflib.get_close_matches(word, BY_KEY, n=1, cutoff=0.75)
    unit = [key for key in BY_KEY if word and key in (f"{word}_s", f"{word}s")]
    if near or unit:
        meant = BY_KEY[(unit or near)[0]].env
        raise UsageError(f"environment variable {name} is unknown; did you mean {meant}? (unset it if it is not meant for harness)")


def from_table(table: Mapping[str, Any], origin: str, valid: tuple[str, ...], label: str = "") -> dict[str, Value]:
    """Values of a `[tool.harness]` table; `valid` are the setting keys that may stand there."""
    return {k: Value(parse_value(BY_KEY[k], raw, origin, label), origin) for k, raw in table.items() if k in valid}


def find_pyproject(cwd: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """The nearest pyproject.toml from `cwd` upward that has a `[tool.harness]` table."""
    for folder in (cwd, *cwd.parents):
        path = folder / "pyproject.toml"
        if not path.is_file():
            continue
        table = _harness_table(path)
        if table is not None:
            return path, table
    return None


def _harness_table(path: Path) -> Mapping[str, Any] | None:
    import tomllib

    try:
        text = path.read_text("utf-8")
        if "harness" not in text:
            return None
        table = tomllib.loads(text).get("tool", {}).get("harness")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    except AttributeError:
        raise UsageError(f"{path}: tool must be a table, written [tool.harness]") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}; chmod u+r {path}") from None
    if table is not None and not isinstance(table, dict):
        raise UsageError(f"{path}: tool.harness must be a table, written {TABLE}")
    return table


def from_pyproject(cwd: Path) -> dict[str, Value]:
    found = find_pyproject(cwd)
    if found is None:
        return {}
    path, table = found
    table = {key: value for key, value in table.items() if key != SITES}
    for key in table:
        if key not in BY_KEY:
            raise UsageError(f"{path}: unknown key {key!r} in {TABLE}{did_you_mean(key, BY_KEY, 'harness config lists the valid ones')}")
    values = from_table(table, str(path), tuple(BY_KEY))
    for key in ("out", "data"):  # a path in a file means: from the folder of that file
        if key in values:
            values[key] = Value(str(path.parent / values[key].value), str(path))
    return values


def site_profiles(cwd: Path) -> Mapping[str, Any]:
    """The tables `[tool.harness.site.NAME]` of the nearest pyproject.toml."""
    found = find_pyproject(cwd)
    sites = found[1].get(SITES, {}) if found is not None else {}
    if not isinstance(sites, dict):
        raise UsageError(f"{found[0] if found else ''}: site profiles are tables, written [tool.harness.site.NAME]; choose one with --site")
    return sites


def resolve(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    cwd: Path,
    header: Mapping[str, Any] | None = None,
    header_origin: str = "header",
) -> Settings:
    """Settle every setting. `header` is the script's `[tool.harness]` table, already checked by `catalog`."""
    values = {s.key: Value(s.default, "default") for s in SETTINGS}
    values.update(from_pyproject(cwd))
    values.update(from_table(header or {}, header_origin, HEADER_KEYS))
    values.update(from_environment(environ))
    values.update(from_flags(flags))
    return Settings(values)
