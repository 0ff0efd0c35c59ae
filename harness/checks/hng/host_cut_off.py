"""HNG107 host-cut-off: a host of the job no longer answers the others.

What it does
    When a run on several nodes is ended before its own end, each node looks at the connections of its ranks: a host that has not acknowledged three
    transmissions in a row is cut off. The finding names the host and its ranks; of two hosts that do not hear each other, both. An error.

Why it is bad
    Every rank waits in a collective whose call is right, and torch's own patience is 10 to 30 minutes. The script looks guilty, and is not.

Wrong
    RuntimeError: [..] Timed out waiting 1800000ms for recv operation      # on every rank, half an hour later

Right
    ping n17; scontrol show node n17                # is it the cable, the switch, the host?
    harness run ... --slurm exclude=n17

Known limits
    TCP only: gloo, the stores, NCCL over sockets; what InfiniBand loses is not seen. A host that was cut off for a while and comes back is no finding:
    the run goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from harness.checks.base import Check, NotApplicable
from harness.checks.hng import waits
from harness.checks.lau import blame, slurm_job
from harness.model import Finding, Severity
from harness.record import Run, texts


class HostCutOff(Check):
    code = "HNG107"
    name = "host-cut-off"
    severity = Severity.ERROR
    substantial = False
    explains = ("HNG*", "LAU101", "LAU113", "LAU121", "LAU122", "LAU124", "LAU126")

    def end(self, run: Run) -> Iterable[Finding]:
        slurm_job.scheduler(run)
        if run.plan.nodes < 2:
            raise NotApplicable("one node: nobody else has to reach it")
        pairs = _silences(run)
        apart = {frozenset((one, other)) for one, other, _ in pairs}
        hosts = cut_off(apart)
        if not hosts:
            return
        ranks = sorted(rank for host, held in slurm_job.ranks_by_host(run).items() if host in hosts for rank in held)
        yield self.finding(
            _sentence(hosts, len(apart) == 1),
            ranks=ranks,
            notes=[*dict.fromkeys(_words(*pair) for pair in pairs[:6]), *(waits.standing(run) or [f"{blame.plural(ranks)} ran there"])],
            help=f"look at the network of {' or '.join(hosts)} (ping, scontrol show node {hosts[0]}); run again without it: --slurm exclude=NODE",
        )


def cut_off(apart: set[frozenset[str]]) -> list[str]:
    """The hosts that account for all silences, those first that are out of touch with most others; of a pair alone, both."""
    found: set[str] = set()
    while rest := [pair for pair in apart if not pair & found]:
        counts = Counter(host for pair in rest for host in pair)
        most = max(counts.values())
        equal = sorted(host for host, count in counts.items() if count == most)
        found |= set(equal if most == 1 else equal[:1])
    return sorted(found)


def _sentence(hosts: list[str], only_pair: bool) -> str:
    if only_pair:
        return f"hosts {' and '.join(hosts)} no longer reach each other"
    return f"host {hosts[0]} no longer answers the others" if len(hosts) == 1 else f"hosts {', '.join(hosts)} no longer answer the others"


def _silences(run: Run) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(host, the host that it does not hear, what was seen)."""
    names = {ip: _host(told) for told in run.nodes for ip in (str(told.get("ip", "")), *texts(told.get("addresses")))}
    found = []
    for told in run.nodes:
        peers = told.get("silent")
        for peer in peers if isinstance(peers, list) else []:
            other = names.get(str(peer.get("ip", ""))) if isinstance(peer, dict) else None
            if other is not None and other != _host(told):
                found.append((_host(told), other, peer))
    return found


def _host(told: Mapping[str, Any]) -> str:
    return str(told.get("host") or told.get("node") or "")


def _words(one: str, other: str, seen: Mapping[str, Any]) -> str:
    return f"{other} has not acknowledged {seen.get('num_bytes')} bytes from {one}, sent {seen.get('retransmissions')} times more"
