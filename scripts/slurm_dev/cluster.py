"""What a cluster is: its folder, its names and addresses, how it is asked."""

from __future__ import annotations

import json
import os
import subprocess
import zlib
from pathlib import Path

STATE, CONTROL = "cluster.json", "control"
PORTS_A_CLUSTER = 100
CGROUP_ROOT, CONTROLLERS = Path("/sys/fs/cgroup"), ("freezer", "memory")
SCRIPT = str(Path(__file__).resolve().parents[1] / "slurm-dev-cluster")
NAMESPACE = ["unshare", "--fork", "--kill-child=KILL", "--pid", "--mount", "--mount-proc", "--uts", "--propagation", "private"]


class Failed(Exception):
    """A cluster that could have been had did not come up."""


class Refused(Exception):
    """Something the user can mend."""


class Cluster:
    def __init__(self, folder: Path, spec: dict[str, object]) -> None:
        self.folder, self.spec = folder, spec
        self.num_nodes, self.cpus, self.gpus = int(str(spec["nodes"])), int(str(spec["cpus"])), int(str(spec["gpus"]))
        self.port, self.accounting = int(str(spec["port"])), bool(spec["accounting"])
        self.network = bool(spec.get("network"))
        self.net = f"{'198.18' if self.network else '127.77'}.{(self.port // PORTS_A_CLUSTER) % 200}"

    @classmethod
    def load(cls, folder: Path) -> Cluster:
        try:
            return cls(folder, json.loads((folder / STATE).read_text()))
        except (OSError, ValueError, KeyError):
            raise Refused(f"no cluster in {folder}; make one with: slurm-dev-cluster start") from None

    @property
    def nodes(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.num_nodes + 1)]

    def address(self, node: str) -> str:
        return f"{self.net}.{10 + int(node[1:])}"

    @property
    def namespace(self) -> list[str]:
        """The command that gives its child namespaces of its own."""
        return [*NAMESPACE, *(["--net"] if self.network else [])]

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "etc/slurm.conf")}

    @property
    def mark(self) -> str:
        """Tells this cluster's things outside its folder from another's: a port does not, for a cluster with a network of its own leaves it free here."""
        return f"{zlib.crc32(os.fsencode(self.folder)):08x}"

    @property
    def cgroups(self) -> list[tuple[Path, Path]]:
        """(control group, where our slurmds see it as the root): everything of this cluster's lies below these, whatever else this machine runs."""
        return [(CGROUP_ROOT / name / f"harness-{self.mark}", self.folder / "cgroup" / name) for name in CONTROLLERS] if cgroups_usable() else []

    def client(self, *words: str) -> str:
        """What a Slurm command prints; empty while the controller does not answer."""
        try:
            done = subprocess.run(words, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=5)
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout if done.returncode == 0 else ""

    def num_idle(self) -> int:
        words = self.client("sinfo", "-h", "-p", "debug", "-t", "idle", "-o", "%D").split()
        return int(words[0]) if words else 0


def cgroups_usable() -> bool:
    """Version 1 controllers, writable: what Slurm can use without systemd."""
    return all(os.access(CGROUP_ROOT / name, os.W_OK) for name in CONTROLLERS)
