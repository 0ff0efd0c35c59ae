"""LAU111 no-process-group: several ranks train, and none of them joined a process group.

What it does
    The launcher started more than one rank, every rank took optimizer steps, and no rank called init_process_group. An error; advice
    where the ranks clearly do different work (other learning rates or other models), as in a search over settings. Where the source calls it
    behind a condition that no rank met, points at what decided that.

Why it is bad
    Nothing is averaged: N processes train N models on the same data and write the same files. It costs N times the machine and gives the
    result of one process.

Wrong
    torchrun --nproc-per-node 8 train.py      # train.py never calls dist.init_process_group

    if args.world_size > 1: dist.init_process_group("nccl")        # torchrun sets WORLD_SIZE in the environment and passes no argument

Right
    dist.init_process_group("nccl")
    model = DistributedDataParallel(model)

Known limits
    Ranks that communicate by other means (MPI, files, sockets) look alike.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.lau import rendezvous
from harness.model import Finding, Severity, Where
from harness.record import Recording, Run, where_of

HELP = "call `dist.init_process_group(backend)` before the model is made and wrap it in DistributedDataParallel, or start one process"
HELP_UNREACHED = (
    "let the environment decide (`int(os.environ.get(\"WORLD_SIZE\", 1)) > 1`): torchrun sets RANK, LOCAL_RANK and WORLD_SIZE there and passes no "
    "argument; or start one process"
)


class NoProcessGroup(Check):
    code = "LAU111"
    name = "no-process-group"
    severity = Severity.ERROR
    substantial = False
    explains = ("SYN126", "DAT102", "DAT107", "DAT109", "OUT102", "OUT103", "OUT104", "CKP101", "EVL104", "SHM105")

    def end(self, run: Run) -> Iterable[Finding]:
        if run.plan.world_size < 2:
            raise NotApplicable("one process was started")
        if any(r.of("pg") for r in run.processes):
            raise NotApplicable("a process group was made")
        trained = [(rank, r) for rank, r in rendezvous.mains(run) if r.num_steps > 0]
        if len(trained) < 2:
            raise NotApplicable("fewer than two ranks took an optimizer step")
        differ = _differ([r for _, r in trained])
        ranks = [rank for rank, _ in trained]
        call, decided = _unreached([r for _, r in trained])
        yield self.finding(
            f"{len(trained)} ranks train and none joined a process group: {len(trained)} independent trainings",
            where=(decided if not differ else None) or _where(trained[0][1]),
            ranks=ranks,
            severity=Severity.ADVICE if differ else None,
            notes=[
                f"WORLD_SIZE is {run.plan.world_size}, init_process_group was never called",
                *([f"its call in line {call.line} was not reached: what stands before it kept every rank from it"] if call is not None else []),
                *([f"the ranks differ in {differ}"] if differ else []),
            ],
            help=HELP_UNREACHED if call is not None else HELP,
        )


def _unreached(recordings: list[Recording]) -> tuple[Where | None, Where | None]:
    """(the script's call that no rank came to, what decided that), where all tell the same."""
    told = [next(iter(r.of("unjoined")), None) for r in recordings]
    calls, decided = {e.where if e is not None else None for e in told}, {where_of(e["decided"]) if e is not None else None for e in told}
    return (calls.pop(), decided.pop()) if len(calls) == len(decided) == 1 else (None, None)


def _where(recording: Recording) -> Where | None:
    """The optimizer of the training that runs alone, else its backward."""
    for kind in ("params", "loss"):
        for event in recording.of(kind):
            if event.where is not None:
                return event.where
    return None


def _differ(recordings: list[Recording]) -> str:
    """What differs by design between trainings that are meant to be different; empty: nothing."""

    def shapes(r: Recording) -> object:
        return [e["shapes"] for e in r.of("params")]

    def hyper(r: Recording) -> object:
        return [r.row(0).hyper, r.row(0).lr] if r.num_rows else None

    if any(shapes(r) != shapes(recordings[0]) for r in recordings):
        return "the shapes of their models"
    if any(hyper(r) != hyper(recordings[0]) for r in recordings):
        return "learning rate or other hyperparameters from the first step on"
    return ""
