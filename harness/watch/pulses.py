"""The processes of a Slurm job, seen through what each node's supervisor writes once a second: their pids mean nothing on this host.

A node whose pulse stands still says nothing: its processes count as living and idle, and Slurm decides what became of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import attempt


class Pulses:
    """All nodes of one attempt; read anew at each `look`."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / attempt.NODES_DIR
        self._pages: dict[str, Mapping[str, Any]] = {}
        self._seen: set[str] = set()

    def look(self) -> None:
        try:
            names = [entry.name for entry in self._folder.iterdir() if entry.name.endswith(".pulse")]
        except OSError:
            return
        for name in names:
            if page := attempt.read_json_note(self._folder / name):
                self._pages[name.removesuffix(".pulse")] = page

    def lives(self, stem: str) -> bool:
        """Whether its node still lists it; a process that was never listed has only just begun."""
        node, _, identity = stem.partition("-")
        listed = identity in _table(self._pages.get(node))
        if listed:
            self._seen.add(stem)
        return listed or stem not in self._seen

    def cpu_s(self, stem: str) -> float:
        node, _, identity = stem.partition("-")
        value = _table(self._pages.get(node)).get(identity, 0.0)
        return float(value) if isinstance(value, (int, float)) else 0.0

    def below_cpu_s(self, stem: str) -> float:
        """Not told: a node's page lists processes without their parents."""
        return 0.0

    def delayed_s(self, stem: str) -> float:
        """Not told, and neither is the load: nodes of a job are seldom shared."""
        return 0.0

    def load_per_core(self) -> float:
        return 0.0

    def holds_gpu(self, stem: str) -> bool:
        node, _, identity = stem.partition("-")
        gpu = self._pages.get(node, {}).get("gpu")
        return isinstance(gpu, list) and any(str(pid) == identity.partition("-")[0] for pid in gpu)


def _table(page: Mapping[str, Any] | None) -> Mapping[str, Any]:
    table = page.get("cpu_s") if page is not None else None
    return table if isinstance(table, dict) else {}
