"""The flags of the settings, spelled once.

Values stay text here: `settings` parses them, so that every source is refused in the same words.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing.TYPE_CHECKING without typing, which costs as much as argparse
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Any

KINDS = ("console", "json", "junit")

# setting key -> (flags, metavar or None for a switch, help). Kept apart from settings.py, which `harness --help` must not import.
SETTING_FLAGS: dict[str, tuple[tuple[str, ...], str | None, str]] = {
    "nproc": (("-n", "--nproc"), "N", "processes a node (default: the script's header, else 2)"),
    "nodes": (("--nodes",), "N", "nodes; above 1 needs a launcher that has nodes"),
    "launcher": (("--launcher",), "NAME", "warm (default), torchrun, slurm or inline"),
    "device": (("--device",), "NAME", "auto (default), cpu or cuda"),
    "backend": (("--backend",), "NAME", "auto (default), gloo or nccl; reaches the script as its header says"),
    "timeout_s": (("--timeout",), "SECONDS", "wall time after which the run is ended, such as 90 or 5m (default: 600)"),
    "hang_timeout_s": (("--hang-timeout",), "SECONDS", "silence after which the run counts as hung (default: by its own pace)"),
    "on_hang": (("--on-hang",), "ACTION", "kill (default), or dump: show who waits where, and let the run go on"),
    "grace_s": (("--grace",), "SECONDS", "time between TERM and KILL when a run is ended (default: 5)"),
    "memory_budget": (("--memory-budget",), "SIZE", "peak memory a rank may use, such as 2GiB"),
    "out": (("--out",), "DIR", "folder of this run (default: .harness/<stamp>-<name>)"),
    "seed": (("--seed",), "N", "seed; reaches the script as its header says"),
    "data": (("--data",), "DIR", "data folder; reaches the script as its header says"),
    "select": (("--select",), "CODE[,..]", "only these checks: codes, names, or families such as SYN"),
    "ignore": (("--ignore",), "CODE[,..]", "not these checks"),
    "fail_on": (("--fail-on",), "SEVERITY", "error (default), warning, advice or never"),
    "slurm": (("--slurm",), "KEY=VALUE", "an option of sbatch, such as partition=gpu, or a flag verbatim: --slurm=--exclusive"),
    "site": (("--site",), "NAME", "profile of a cluster: [tool.harness.site.NAME] in pyproject.toml"),
    "max_pending_s": (("--max-pending",), "SECONDS", "cancel a Slurm job that waits longer (default: wait for ever)"),
    "no_reference": (("--no-reference",), None, "leave out the reference run"),
    "fail_fast": (("--fail-fast",), None, "end a run at its first error"),
}
REPEATABLE = ("select", "ignore", "slurm")


def add_settings(parser: argparse.ArgumentParser, keys: Sequence[str] = tuple(SETTING_FLAGS)) -> None:
    for key in keys:
        flags, metavar, text = SETTING_FLAGS[key]
        if metavar is None:
            parser.add_argument(*flags, dest=key, action="store_const", const="true", help=text)
        else:
            parser.add_argument(*flags, dest=key, metavar=metavar, action="append" if key in REPEATABLE else "store", help=text)


def flags_of(args: argparse.Namespace) -> dict[str, Any]:
    """What was typed, by setting key."""
    return {key: value for key in (*SETTING_FLAGS, "format") if (value := getattr(args, key, None)) is not None}


def add_format(parser: argparse.ArgumentParser, kinds: Sequence[str] = KINDS) -> None:
    parser.add_argument(
        "--format",
        action="append",
        metavar="KIND[=FILE]",
        help=f"{', '.join(kinds)}; with =FILE into a file; may be repeated (default: console)",
    )
