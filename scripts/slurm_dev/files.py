"""What lies in the folder of a cluster before its daemons start."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from slurm_dev.cluster import Cluster, cgroups_usable


def write_files(c: Cluster) -> None:
    for part in ("etc", "munge", "state", "log", "dev", "db", *(f"spool/{node}" for node in c.nodes)):
        (c.folder / part).mkdir(mode=0o755, parents=True, exist_ok=True)
    key = c.folder / "munge/key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    for number in range(c.gpus):
        os.mknod(c.folder / f"dev/gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    _write(c, "etc/hosts", hosts(c))
    _write(c, "etc/slurm.conf", slurm_conf(c))
    _write(c, "etc/cgroup.conf", f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={c.folder}/cgroup\nCgroupAutomount=no\nConstrainRAMSpace=yes\n")
    if c.gpus:
        _write(c, "etc/gres.conf", f"Name=gpu File={c.folder}/dev/gpu[0-{c.gpus - 1}]\n")
    if c.accounting:
        _write(c, "etc/slurmdbd.conf", slurmdbd_conf(c))
        (c.folder / "etc/slurmdbd.conf").chmod(0o600)


def _write(c: Cluster, name: str, text: str) -> None:
    (c.folder / name).write_text(text)


def hosts(c: Cluster) -> str:
    """The machine's own entries, and ours: seen inside the namespace only."""
    ours = {"head", *c.nodes}
    kept = [line for line in Path("/etc/hosts").read_text().splitlines() if not ours & set(line.split("#")[0].split()[1:])]
    return "\n".join([*kept, f"{c.net}.10 head", *(f"{c.address(node)} {node}" for node in c.nodes), ""])


def slurm_conf(c: Cluster) -> str:
    track, task = ("cgroup", "task/cgroup") if cgroups_usable() else ("linuxproc", "task/none")
    settings = {
        "ClusterName": "harnessdev",
        "FirstJobId": 1000 + int(time.time()) % 10_000_000,  # ids are not given out twice by one cluster after another
        "SlurmctldHost": f"head({c.net}.10)",
        "SlurmctldPort": c.port,
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        "AuthInfo": f"socket={c.folder}/munge/socket,cred_expire=5",  # a requeued job waits for the credential's end: 2 minutes by default
        "CommunicationParameters": "NoCtldInAddrAny",
        "SlurmctldPidFile": f"{c.folder}/state/slurmctld.pid",
        "SlurmctldLogFile": f"{c.folder}/log/slurmctld.log",
        "StateSaveLocation": f"{c.folder}/state",
        "SlurmdPidFile": f"{c.folder}/state/slurmd-%n.pid",
        "SlurmdLogFile": f"{c.folder}/log/slurmd-%n.log",
        "SlurmdSpoolDir": f"{c.folder}/spool/%n",
        "SlurmdParameters": "config_overrides",  # believe the CPUs and memory written below
        "SlurmdTimeout": 10,
        "MailProg": "/bin/true",
        "MpiDefault": "none",
        "SwitchType": "switch/none",
        "ProctrackType": f"proctrack/{track}",
        "TaskPlugin": task,
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": "task=2",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU_Memory",
        "DefMemPerCPU": 1000,
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1",
        "PriorityType": "priority/basic",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "JobRequeue": 1,
        "KillWait": 8,
        "MinJobAge": 300,
        "InactiveLimit": 0,
        "ReturnToService": 2,
        "GresTypes": "gpu",
        "AccountingStorageType": "accounting_storage/none",
    }
    if c.accounting:
        settings |= {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": f"{c.net}.10",
            "AccountingStoragePort": c.port + 1,
            "AccountingStoragePass": f"{c.folder}/munge/socket",
        }
    gres = f" Gres=gpu:{c.gpus}" if c.gpus else ""
    lines = [f"{name}={value}" for name, value in settings.items()]
    for number, node in enumerate(c.nodes):
        lines.append(f"NodeName={node} NodeAddr={c.address(node)} Port={c.port + 10 + number} CPUs={c.cpus} RealMemory=32000{gres} State=UNKNOWN")
    lines += [
        "PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF",
        "PartitionName=scavenge Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE",
        "PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=100 PreemptMode=OFF",
    ]
    return "\n".join([*lines, ""])


def slurmdbd_conf(c: Cluster) -> str:
    settings = {
        "DbdHost": "head",
        "DbdAddr": f"{c.net}.10",
        "DbdPort": c.port + 1,
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={c.folder}/munge/socket",
        "LogFile": f"{c.folder}/log/slurmdbd.log",
        "PidFile": f"{c.folder}/state/slurmdbd.pid",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": "root",
        "StorageLoc": "slurm",
        "CommitDelay": 0,
    }
    return "\n".join([*(f"{name}={value}" for name, value in settings.items()), ""])
