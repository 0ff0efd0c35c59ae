"""What the user says about Slurm: `--slurm key=value`, `--slurm=--flag`, and a site profile of the same words in pyproject.toml.

    [tool.harness.site.alpha]
    partition = "gpu"
    account = "proj42"
    modules = ["cuda/12.4"]
    ranks = "task"
    flags = ["--exclusive"]

A flag that begins with dashes goes to sbatch as it is; `key=value` is looked up in sbatch's options first, so that a slip is found here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from harness.errors import UsageError, did_you_mean
from harness.model import Slurm

# Words of ours, beside sbatch's own options.
OURS = ("modules", "setup", "ranks", "gpus-of", "cpus-per-rank", "parallel", "flags")
RANKS, GPUS_OF = ("agent", "task"), ("node", "task")
# What the layout of a run decides: a second opinion would only break it.
FORBIDDEN = {
    "nodes": "--nodes", "ntasks": "-n and --nodes", "ntasks-per-node": "-n", "array": "several scripts in one command", "output": "--out",
    "error": "--out", "chdir": "the folder you stand in", "open-mode": "nothing: logs are kept", "wrap": "a script",
}  # fmt: skip
SHORT = {"p": "partition", "A": "account", "q": "qos", "C": "constraint", "w": "nodelist", "x": "exclude", "t": "time", "c": "cpus-per-task", "G": "gpus"}
OPTIONS = frozenset([
    "account", "acctg-freq", "batch", "bb", "bbf", "begin", "cluster-constraint", "clusters", "comment", "constraint", "container",
    "contiguous", "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency",
    "distribution", "exclude", "exclusive", "export", "export-file", "extra", "extra-node-info", "get-user-env", "gid", "gpu-bind",
    "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "hint", "hold", "ignore-pbs",
    "immediate", "input", "job-name", "kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mcs-label", "mem", "mem-bind",
    "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nice", "no-kill", "no-requeue", "nodefile", "nodelist", "oversubscribe",
    "overcommit", "partition", "power", "prefer", "priority", "profile", "propagate", "qos", "reboot", "requeue", "reservation", "signal",
    "sockets-per-node", "spread-job", "switches", "thread-spec", "threads-per-core", "time", "time-min", "tmp", "tres-bind",
    "tres-per-task", "uid", "use-min-nodes", "wait-all-nodes", "wckey",
])  # fmt: skip


def make(words: Sequence[str], profile: Mapping[str, Any], origin: str, max_pending_s: float | None, allocation: str) -> Slurm:
    """Profile first, what was typed over it. `origin`: where the words were typed."""
    options: dict[str, str] = {}
    ours: dict[str, Any] = {}
    for key, value in profile.items():
        if key == "flags":
            for flag in _texts(key, value, "site profile"):
                options.update([_raw(flag, "site profile")])
        else:
            _take(str(key), value, options, ours, "site profile")
    explicit: list[str] = []
    for word in words:
        if word.startswith("-"):
            name, text = _raw(word, origin)
            options[name] = text
        else:
            name, equals, text = word.partition("=")
            if not equals:
                raise UsageError(f"{origin} {word}: write it as key=value, such as partition=gpu, or as a flag of sbatch with its dashes: --slurm=--{word}")
            _take(name, text, options, ours, f"{origin} {word}")
        explicit.append(name)
    modules = [f"module load {shlex.quote(name)} || exit 1" for name in _texts("modules", ours.get("modules", ()), origin)]
    setup = [*modules, *_texts("setup", ours.get("setup", ()), origin)]
    return Slurm(
        options=options,
        explicit=tuple(name for name in explicit if name in options),
        setup=tuple(setup),
        ranks=_choice("ranks", ours.get("ranks", "agent"), RANKS, origin),
        gpus=_choice("gpus-of", ours.get("gpus-of", "node"), GPUS_OF, origin),
        cpus_per_rank=_count("cpus-per-rank", ours.get("cpus-per-rank", 1), origin),
        parallel=_count("parallel", ours["parallel"], origin) if "parallel" in ours else 0,
        max_pending_s=max_pending_s,
        allocation=allocation,
    )


def _take(name: str, value: Any, options: dict[str, str], ours: dict[str, Any], origin: str) -> None:
    name = name.replace("_", "-")
    _refuse_forbidden(name, origin)
    if name in OURS:
        ours[name] = value
    elif name not in OPTIONS:
        raise UsageError(f"{origin}: sbatch has no option {name!r}{did_you_mean(name, [*OPTIONS, *OURS], 'as a flag with its dashes it would go there unread')}")
    elif value is True:
        options[name] = ""
    elif isinstance(value, (str, int, float)) and not isinstance(value, bool):
        options[name] = str(value)
    elif value is not False:
        raise UsageError(f"{origin}: {name} must be text, a number or true")


def _raw(word: str, origin: str) -> tuple[str, str]:
    """A flag of sbatch as it would be typed there."""
    if word.startswith("--"):
        name, _, value = word[2:].partition("=")
    elif len(word) > 1 and word[1] in SHORT:
        name, value = SHORT[word[1]], word[2:].lstrip("= ")
    else:
        raise UsageError(f"{origin}: {word!r} is no flag of sbatch that can be told apart; write its long form")
    _refuse_forbidden(name, origin)
    return name, value


def _refuse_forbidden(name: str, origin: str) -> None:
    if name in FORBIDDEN:
        raise UsageError(f"{origin}: {name} is what {FORBIDDEN[name]} says; leave it out here")


def _texts(key: str, value: Any, origin: str) -> list[str]:
    if isinstance(value, str):
        return [word for word in value.split(",") if word] if key == "modules" else [value]
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return list(value)
    raise UsageError(f"{origin}: {key} must be text or a list of texts")


def _choice(key: str, value: Any, valid: Sequence[str], origin: str) -> str:
    if value not in valid:
        raise UsageError(f"{origin}: {key} is {value!r}; it must be {' or '.join(valid)}")
    return str(value)


def _count(key: str, value: Any, origin: str) -> int:
    text = str(value)
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{origin}: {key} is {text!r}; it must be a whole number of 1 or more")
    return int(text)


def profile_of(profiles: Mapping[str, Any], name: str | None, origin: str) -> Mapping[str, Any]:
    """The site profile that is asked for; without a word the one called "default", or none."""
    if name is None:
        return _table(profiles["default"], "default") if "default" in profiles else {}
    if name not in profiles:
        raise UsageError(f"{origin}: no site profile {name!r}{did_you_mean(name, profiles, 'write one as [tool.harness.site.NAME] in pyproject.toml')}")
    return _table(profiles[name], name)


def _table(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"site profile {name} must be a table, written [tool.harness.site.{name}]")
    return value


def allocation_of(environ: Mapping[str, str]) -> str:
    """Id of the Slurm job that this shell stands in, as salloc and sbatch leave it; "" inside a step, where no further step can be had."""
    if environ.get("SLURM_STEP_ID", "").isdecimal() or not environ.get("SLURM_JOB_ID", "").isdecimal():
        return ""
    return environ["SLURM_JOB_ID"]
