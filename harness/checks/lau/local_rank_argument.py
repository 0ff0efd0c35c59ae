"""LAU112 local-rank-argument: the script expects `--local-rank` from the launcher, which no longer passes it.

What it does
    The script declares --local-rank (or --local_rank), the launcher did not pass it, its default is not this rank's LOCAL_RANK, and harm
    shows: no process group although several ranks were started, ranks that share a device or ask to be the same rank, or samplers that all
    deal the share of the default. An error.

Why it is bad
    `python -m torch.distributed.launch` passed the argument; torchrun sets LOCAL_RANK in the environment instead. The default -1 switches
    the distributed mode off on every rank, the default 0 puts all ranks on GPU 0. Nothing says so.

Wrong
    parser.add_argument("--local-rank", type=int, default=-1)

Right
    parser.add_argument("--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", -1)))

Known limits
    Only argparse is seen. A script that reads LOCAL_RANK afterwards and joins a group is silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes
from harness.checks.lau import rendezvous
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run, number


class LocalRankArgument(Check):
    code = "LAU112"
    name = "local-rank-argument"
    severity = Severity.ERROR
    substantial = False
    explains = ("LAU101", "LAU110", "LAU111", "LAU114", "DEV101", "DEV102", "HNG*", "SYN126", "DAT102", "DAT104", "OUT102", "OUT103", "CKP101")

    def end(self, run: Run) -> Iterable[Finding]:
        mains = rendezvous.mains(run)
        declared = [(rank, r, e) for rank, r in mains for e in r.of("local_rank_argument")[:1]]
        if len(mains) < 2:
            raise NotApplicable("fewer than two processes were started")
        passed = [rank for rank, r, _ in declared if any(a.startswith("--") and "local_rank" in a.replace("-", "_") for a in _argv(r))]
        wrong = [(rank, r, e) for rank, r, e in declared if rank not in passed and e["default"] != _local_rank(r)]
        harm = self._harm(run, mains) or _same_share(run, wrong)
        if not wrong or not harm:
            return
        event = wrong[-1][2]
        yield self.finding(
            f"the launcher passes no {event['option']}: its default {event['default']} holds on every rank, and {harm}",
            where=event.where,
            ranks=[rank for rank, _, _ in declared],
            notes=[f"LOCAL_RANK is {_local_rank(r)} on rank {rank}, {event['option']} stays {e['default']}" for rank, r, e in wrong[:4]],
            help=f'declare it as `add_argument("{event["option"]}", type=int, default=int(os.environ.get("LOCAL_RANK", -1)))`',
        )

    def _harm(self, run: Run, mains: list[tuple[int, Recording]]) -> str:
        if all(not r.of("pg") for _, r in mains) and any(r.num_steps for _, r in mains):
            return "no process group was made"
        by_local = {_local_rank(r): _device(r) for _, r in mains}
        devices = [d for d in by_local.values() if d]
        if len(devices) > 1 and len(set(devices)) < len(devices):
            return f"several ranks use device {devices[0]}"
        asked = [rendezvous.effective(r)[0] for _, r in mains]
        if len(asked) > 1 and asked[0] >= 0 and len(set(asked)) < len(asked):
            return f"every rank asks to be rank {asked[0]}"
        return ""


def _same_share(run: Run, wrong: list[tuple[int, Recording, Event]]) -> str:
    """The samplers of these ranks were made with the default for their rank."""
    if not wrong:
        return ""
    dealt = [p for p in passes.training(run) if p.distributed is not None and number(p.distributed.get("num_replicas")) == run.world_size]
    given = {p.rank: number((p.distributed or {}).get("rank"), -1) for p in dealt}
    default = wrong[0][2]["default"]
    return f"every rank draws the share of rank {default}" if all(given.get(rank) == default != rank for rank, _, _ in wrong) else ""


def _argv(recording: Recording) -> list[str]:
    argv = recording.start.get("argv")
    return [str(a).split("=")[0] for a in argv] if isinstance(argv, list) else []


def _local_rank(recording: Recording) -> int:
    value = recording.start.get("local_rank")
    return value if isinstance(value, int) else -1


def _device(recording: Recording) -> str:
    events: list[Event] = recording.of("devices")
    return str(events[-1]["uuid"] or "") if events else ""
