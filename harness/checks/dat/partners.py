"""With whom a rank trains: the ranks of the groups that its gradients are averaged over, and of its collectives between steps."""

from __future__ import annotations

from harness.probe import protocol
from harness.record import Recording, Run, number


def of(run: Run, rank: int) -> set[int]:
    """Every rank where the groups are not known; the rank alone where nothing went to another one from its first step to its last."""
    recording, everybody = run.ranks[rank], set(range(run.world_size))
    if recording is None:
        return everybody
    groups = [_averaged_over(e["group_ranks"], everybody) for e in recording.of("wrap")]
    for event in recording.of("coll"):
        if 0 < event.step < recording.num_steps and event["op"] != "barrier":
            size = number(event["group_size"])
            known = [g for g in groups if len(g) == size] or _subgroups(recording, rank, size)  # of one size: most likely that of the gradients
            groups += known if event["world"] is False and known else [everybody]
    if groups:
        return set().union(*groups)
    return {rank} if _silent(recording) else everybody


def _silent(recording: Recording) -> bool:
    """Whether no collective and no message was sent between its steps: folds, a sweep, one model a rank."""
    if recording.num_rows < 2 or any(e["sharded"] for e in recording.of(protocol.PARAMS)):
        return False
    talks = any(0 < e.step < recording.num_steps for e in recording.of("coll"))
    return not talks and len(set(recording.column("seq"))) == 1 and not any(recording.column("num_coll")[1:])


def apart(run: Run, some: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Whether none of these ranks trains with any of those: each team takes as many steps as its own model wants."""
    return not any(of(run, rank) & set(others) for rank in some) and not any(of(run, rank) & set(some) for rank in others)


def _averaged_over(ranks: object, everybody: set[int]) -> set[int]:
    return {number(r) for r in ranks} if isinstance(ranks, list) and ranks else everybody


def _subgroups(recording: Recording, rank: int, size: int) -> list[set[int]]:
    """The script's own groups of this size that hold the rank."""
    found = [{number(r) for r in e["ranks"]} for e in recording.of("new_group") if isinstance(e["ranks"], list)]
    return [ranks for ranks in found if rank in ranks and len(ranks) == size]
