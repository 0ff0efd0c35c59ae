"""What the user types: start, stop, status, and words for the first process of the namespace."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from slurm_dev import network
from slurm_dev.cluster import CONTROL, NAMESPACE, PORTS_A_CLUSTER, SCRIPT, STATE, Cluster, Failed, Refused, cgroups_usable
from slurm_dev.files import write_files

PACKAGES = "slurmctld slurmd slurm-client slurmdbd munge mariadb-server-core mariadb-client-core"
DAEMONS = ("munged", "slurmctld", "slurmd", "srun")
WITH_ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb")
START_LIMIT_S, NODE_LIMIT_S = 60.0, 20.0
DONE = {
    "kill-node": "is gone; Slurm notices within half a minute",
    "start-node": "is starting",
    "cut-node": "is cut off; Slurm notices within half a minute",
    "join-node": "is on the network again",
}
MAX_FOLDER = 60  # a unix socket's path is at most 107 bytes, and munge and MariaDB put theirs below


def init_pid(folder: Path) -> int | None:
    """The process on this machine that holds the cluster's namespace; None where it is gone or the pid is somebody else's by now."""
    try:
        pid, ticks = (int(word) for word in (folder / "init").read_text().split())
        return pid if start_ticks(pid) == ticks else None
    except (OSError, ValueError, IndexError):
        return None


def start_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def require(accounting: bool, install: bool, with_network: bool) -> None:
    if os.geteuid() != 0:
        raise Refused("only root may make namespaces of this kind; run it with sudo, or in a container that has root")
    wanted = (*DAEMONS, *(WITH_ACCOUNTING if accounting else ()))
    missing = [name for name in wanted if shutil.which(name) is None]
    if missing and install:
        install_packages()
        missing = [name for name in wanted if shutil.which(name) is None]
    if missing:
        raise Refused(f"{', '.join(missing)} not found; on Debian or Ubuntu: slurm-dev-cluster start --install, which runs apt-get install {PACKAGES}")
    tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True)
    if tried.returncode:
        raise Refused(f"namespaces are not allowed here ({tried.stderr.strip()}), and without them neither nodes nor a clean stop can be had")
    if with_network:
        network.require()


def install_packages() -> None:
    if shutil.which("apt-get") is None:
        raise Refused(f"--install knows apt-get only, and it is not here; what is needed: {PACKAGES}")
    print(f"slurm-dev-cluster: apt-get install {PACKAGES}", file=sys.stderr)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *PACKAGES.split()]):
        if subprocess.run(["apt-get", *words], env=env, stdout=sys.stderr).returncode:
            raise Refused(f"apt-get {words[0]} failed")


def free_port() -> int:
    """The first block of ports in which nobody listens."""
    for base in range(17000, 30000, PORTS_A_CLUSTER):
        if all(_is_free(port) for port in (base, base + 1, *range(base + 10, base + 20))):
            return base
    raise Refused("no free ports between 17000 and 30000")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def start(args: argparse.Namespace, folder: Path) -> str:
    require(args.accounting, args.install, args.network)
    if init_pid(folder) is not None:
        raise Refused(f"a cluster runs in {folder} already; stop it first")
    if len(os.fsencode(folder)) > MAX_FOLDER:
        raise Refused(f"{folder} is too long: unix sockets below it may have 107 bytes; name a shorter one with --dir")
    if folder.exists() and any(folder.iterdir()) and not (folder / STATE).is_file():
        raise Refused(f"{folder} holds files that are not a cluster's; name another one with --dir")
    begun = time.monotonic()
    remove(folder)
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    spec = {
        "nodes": args.nodes, "cpus": args.cpus, "gpus": args.gpus, "accounting": args.accounting, "network": args.network,
        "port": args.port or free_port(),
    }  # fmt: skip
    (folder / STATE).write_text(json.dumps(spec))
    c = Cluster(folder, spec)
    write_files(c)
    with open(folder / "log/init.out", "ab") as log:
        process = subprocess.Popen(
            [*c.namespace, sys.executable, "-I", SCRIPT, "_init", str(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    (folder / "init").write_text(f"{process.pid} {start_ticks(process.pid)}")
    if c.network:
        network.plug_in_this_machine(c, process.pid)
    wait_until_idle(c, process)
    limits = "" if cgroups_usable() else "\nno writable cgroup v1 here: memory limits are not enforced, and a job's orphans end with the cluster only"
    return f"{c.num_nodes} nodes idle after {time.monotonic() - begun:.1f} s{limits}\nexport SLURM_CONF={c.env['SLURM_CONF']}"


def wait_until_idle(c: Cluster, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_LIMIT_S
    while c.num_idle() < c.num_nodes:
        if process.poll() is not None or time.monotonic() > until:
            logs = "\n".join(f"{path.name}: {path.read_text()[-600:]}" for path in sorted((c.folder / "log").iterdir()) if path.stat().st_size)
            stop(c.folder)
            raise Failed(f"the cluster did not come up\n{logs}")
        time.sleep(0.05)


def stop(folder: Path) -> str:
    """Kills the namespace's first process; the kernel ends all others in it before that one is gone."""
    c = Cluster.load(folder)
    pid = init_pid(folder)
    if pid is not None:
        inner = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        os.kill(pid, signal.SIGKILL)
        for one in (pid, *inner):
            wait_gone(one)
    left = remove_cgroups(c)
    remove(folder)
    return f"stopped{'' if not left else '; these control groups could not be removed: ' + ' '.join(left)}"


def wait_gone(pid: int, limit_s: float = 20.0) -> None:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.02)


def remove_cgroups(c: Cluster, limit_s: float = 5.0) -> list[str]:
    """The control groups of our jobs, innermost first. A process that was killed leaves its group when the kernel is done with it, not before."""
    until = time.monotonic() + limit_s
    while left := [str(group) for top, _ in c.cgroups for group in reversed(inward(top)) if not removed(group)]:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return left


def inward(top: Path) -> list[Path]:
    return [top, *(path for path in sorted(top.rglob("*")) if path.is_dir())] if top.is_dir() else []


def removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True


def remove(folder: Path) -> None:
    if (folder / STATE).is_file():
        shutil.rmtree(folder)


def tell_node(folder: Path, verb: str, node: str) -> str:
    c = Cluster.load(folder)
    if not re.fullmatch(r"n\d+", node) or node not in c.nodes:
        raise Refused(f"no node {node}; there are {' '.join(c.nodes)}")
    try:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(NODE_LIMIT_S)
            peer.connect(str(folder / CONTROL))
            peer.sendall(f"{verb} {node}".encode())
            answer = peer.recv(1000).decode()
    except OSError as error:
        raise Refused(f"the cluster in {folder} does not answer: {error}") from None
    if answer != "ok":
        raise Refused(answer)
    return f"{node} {DONE[verb]}"


def status(folder: Path) -> str:
    c = Cluster.load(folder)
    if init_pid(folder) is None:
        raise Refused(f"the cluster in {folder} does not run")
    return c.client("sinfo", "-N", "-l") + c.client("squeue")
