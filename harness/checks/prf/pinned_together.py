"""PRF113 ranks-pinned-together: the script binds the ranks of a host to fewer cores than there are ranks, though each had as many

What it does
    Compares the cores that the ranks of one host may run on after the script's own `os.sched_setaffinity` (or psutil's `cpu_affinity`) with those
    they had before it.

Why it is bad
    Pinned to one core, the ranks take turns on it: N ranks need N times as long, and the other cores stand still. It happens where the core is
    chosen by an option or a variable that the launcher does not set, and that is 0 on every rank.

Wrong
    parser.add_argument("--local_rank", type=int, default=0)      # torchrun passes no such option
    os.sched_setaffinity(0, {args.local_rank})

Right
    os.sched_setaffinity(0, {int(os.environ["LOCAL_RANK"])})

Known limits
    What the launcher, a container or the scheduler bound the ranks to is inherited and not judged. Nor is a call before torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Run


class RanksPinnedTogether(Check):
    code = "PRF113"
    name = "ranks-pinned-together"
    severity = Severity.WARNING
    explains = ("PRF104", "PRF107")
    substantial = False

    def end(self, run: Run) -> Iterable[Finding]:
        by_host: dict[str, list[tuple[int, Event]]] = {}
        on_host: dict[str, int] = {}
        for rank, recording in enumerate(run.ranks):
            if recording is None:
                continue
            host = str(recording.start.get("host") or "")
            on_host[host] = on_host.get(host, 0) + 1
            if calls := [e for e in recording.of("pinned") if e["after"]]:
                by_host.setdefault(host, []).append((rank, calls[-1]))
        if not by_host:
            raise NotApplicable("the script binds no rank to cores")
        for host, pinned in by_host.items():
            cores = _cores(pinned, "after")
            if len(pinned) < 2 or len(pinned) < on_host[host] or len(cores) >= len(pinned) or len(_cores(pinned, "before")) < len(pinned):
                continue
            yield self.finding(
                f"{len(pinned)} ranks bind themselves to {len(cores)} core{'s' * (len(cores) > 1)} ({', '.join(map(str, sorted(cores)))}) "
                f"of the {len(_cores(pinned, 'before'))} that they were given",
                where=pinned[0][1].where,
                ranks=tuple(rank for rank, _ in pinned),
                help='take the core from the launcher, `int(os.environ["LOCAL_RANK"])`: an option that it does not set is the same on every rank',
            )
            return


def _cores(pinned: list[tuple[int, Event]], when: str) -> set[int]:
    return {int(core) for _, e in pinned for core in e[when] or () if isinstance(core, int)}
