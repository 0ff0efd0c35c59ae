"""LAU136 host-name: a node's own name does not lead to it.

What it does
    Each node looks up its host name. An error where it resolves to nothing, or only to the loopback address while the ranks of other nodes have to
    reach it.

Why it is bad
    gloo offers the address that the host name resolves to: with 127.0.1.1 (Debian's default in /etc/hosts) the other nodes connect to
    themselves. init_process_group then waits until its timeout, and its message names a socket, not /etc/hosts.

Wrong
    127.0.1.1  n17                      # in /etc/hosts of n17

Right
    10.0.0.17  n17
    export GLOO_SOCKET_IFNAME=ib0       # or: name the interface

Known limits
    NCCL chooses interfaces by itself; NCCL_SOCKET_IFNAME is what pins that one. Nodes of scripts/slurm-dev-cluster are loopback addresses by
    design: there loopback is right, and nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.lau import slurm_job
from harness.model import Finding, Severity
from harness.record import Run, texts


class HostName(Check):
    code = "LAU136"
    name = "host-name"
    severity = Severity.ERROR
    substantial = False
    explains = ("LAU113", "HNG104")

    def end(self, run: Run) -> Iterable[Finding]:
        slurm_job.scheduler(run)
        if run.plan.nodes < 2:
            raise NotApplicable("one node: nobody else has to reach it")
        if run.finished:
            return  # they met, whatever the name says
        for told in run.nodes:
            name, found, ip = str(told.get("host", "")), texts(told.get("addresses")), str(told.get("ip", ""))
            pinned = told.get("pinned")
            if isinstance(pinned, dict) and "GLOO_SOCKET_IFNAME" in pinned:
                continue
            if found and (not all(one.startswith(("127.", "::1")) for one in found) or ip.startswith("127.")):
                continue
            where = f"resolves to {', '.join(found)}, where no other node finds it" if found else "does not resolve"
            others = ", ".join(one for one in texts(told.get("interfaces")) if one != "lo")
            yield self.finding(
                f"the host name {name} {where}",
                notes=[f"its address towards the other nodes is {ip or 'unknown'}", f"interfaces: {others or 'none but lo'}"],
                help=f"name the interface: export GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) as one of {others or 'its interfaces'}, or mend "
                "/etc/hosts on the node",
            )
            return
