"""Inside the namespace: its first process, and the first process of each node."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

from slurm_dev import network
from slurm_dev.cluster import CONTROL, SCRIPT, Cluster


def spawn(c: Cluster, name: str, *words: str, **more: str) -> subprocess.Popen[bytes]:
    """A daemon in the foreground of its own log."""
    with open(c.folder / f"log/{name}.out", "ab") as log:
        env = {**os.environ, **c.env, **more}
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)


def wait_for_port(address: str, port: int, limit_s: float = 20.0) -> None:
    until = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((address, port), 1).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.03)


def serve_cluster(c: Cluster) -> None:
    """The namespace's first process: starts the daemons, then obeys what is typed outside. Its death is the end of everything."""
    socket.sethostname("head")
    if c.network:
        network.make_switch(c)
    subprocess.run(["mount", "--bind", str(c.folder / "etc/hosts"), "/etc/hosts"], check=True)
    for group, seen in c.cgroups:
        group.mkdir(exist_ok=True)
        seen.mkdir(parents=True)
        subprocess.run(["mount", "--bind", str(group), str(seen)], check=True)
    munge = c.folder / "munge"
    subprocess.run(
        ["munged", "--num-threads=8", f"--key-file={munge}/key", f"--socket={munge}/socket", f"--pid-file={munge}/pid",
         f"--log-file={munge}/log", f"--seed-file={munge}/seed"], check=True,
    )  # fmt: skip
    if c.accounting:
        start_accounting(c)
    spawn(c, "slurmctld", "slurmctld", "-D")
    wait_for_port(f"{c.net}.10", c.port)
    nodes = {node: start_node(c, node) for node in c.nodes}
    obey(c, nodes)


def start_accounting(c: Cluster) -> None:
    data, unix = c.folder / "db", c.folder / "state/mysql"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g,mode=0700", "slurm-dev", str(data)], check=True)  # seconds faster than a disk
    with open(c.folder / "log/mariadb.out", "ab") as log:
        subprocess.run(
            ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root", "--auth-root-authentication-method=normal",
             "--skip-test-db", "--skip-name-resolve"], stdout=log, stderr=log, check=True,
        )  # fmt: skip
    spawn(
        c, "mariadb", "mariadbd", "--no-defaults", f"--datadir={data}", "--user=root", f"--socket={unix}", f"--pid-file={c.folder}/state/mariadb.pid",
        "--skip-networking", "--skip-log-bin", "--skip-name-resolve", "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M",
        "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0",
    )  # fmt: skip
    create = ["mariadb", "--no-defaults", "-S", str(unix), "-uroot", "-e", "create database if not exists slurm"]
    until = time.monotonic() + 20
    while subprocess.run(create, capture_output=True).returncode and time.monotonic() < until:
        time.sleep(0.05)
    spawn(c, "slurmdbd", "slurmdbd", "-D", MYSQL_UNIX_PORT=str(unix))
    wait_for_port(f"{c.net}.10", c.port + 1)


def start_node(c: Cluster, node: str) -> subprocess.Popen[bytes]:
    process = spawn(c, f"node-{node}", *c.namespace, sys.executable, "-I", SCRIPT, "_node", str(c.folder), node)
    if c.network:
        network.plug_in_node(node, process.pid)
    return process


def serve_node(c: Cluster, node: str) -> None:
    """The first process of a node: reaps what its jobs leave, and stays when slurmd goes, as a real machine does."""
    socket.sethostname(node)
    if c.network:
        network.configure_card(c, node)
    spawn(c, f"slurmd-{node}", "slurmd", "-N", node, "-D")
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(1)


def obey(c: Cluster, nodes: dict[str, subprocess.Popen[bytes]]) -> None:
    signal.signal(signal.SIGCHLD, lambda *_: None)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(c.folder / CONTROL))
    server.listen()
    while True:
        peer, _ = server.accept()
        with peer, contextlib.suppress(OSError, ValueError, subprocess.CalledProcessError):
            verb, node = peer.recv(200).decode().split()
            peer.sendall(do(c, nodes, verb, node).encode())


def do(c: Cluster, nodes: dict[str, subprocess.Popen[bytes]], verb: str, node: str) -> str:
    if node not in nodes:
        return f"no node {node}; there are {' '.join(nodes)}"
    if verb in ("cut-node", "join-node"):
        return do_cable(c, verb, node)
    running = nodes[node].poll() is None
    if verb == "kill-node":
        if not running:
            return f"{node} is down already"
        nodes[node].kill()
        nodes[node].wait()
    elif running:
        return f"{node} is up already"
    else:
        nodes[node] = start_node(c, node)
    return "ok"


def do_cable(c: Cluster, verb: str, node: str) -> str:
    if not c.network:
        return "the nodes of this cluster share one loopback device; a cluster whose cables can be pulled is made by: start --network"
    network.cut_node(node) if verb == "cut-node" else network.join_node(node)
    return "ok"
