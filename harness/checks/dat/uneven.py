"""DAT111 uneven-inputs: one rank has fewer batches than the others.

What it does
    Compares how many batches the ranks draw from a training loader until it is exhausted, if the run then hung, failed, or took different
    numbers of steps. Without a loader: whether a rank has left all loops around its steps, none of which can end early, while another is in them.

Why it is bad
    The rank that runs out goes on to its next collective (or ends); the others wait for its gradients. The run hangs until the timeout,
    or the rank that did nothing wrong reports "connection closed by peer".

Wrong
    data = [d for d in data[rank::world_size] if long_enough(d)]

    for _ in range(max(episode_length, least)): learn(memory.sample(n))     # the rank's own episode

Right
    data = [d for d in data if long_enough(d)]; data = data[: len(data) // world_size * world_size][rank::world_size]
    # or: with Join([model]): ..., or agree on the smallest number of batches

Known limits
    Unequal loaders that are cut to a common count, or run under Join, are healthy. Without a loader it is not known which of the loops around the
    steps turned more often: the innermost is named, the one around it noted.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import parting, passes
from harness.checks.hng import waits
from harness.checks.lau import blame
from harness.model import Finding, Severity
from harness.record import Run

SHORTLY_NS = 60_000_000_000


class UnevenInputs(Check):
    code = "DAT111"
    name = "uneven-inputs"
    severity = Severity.ERROR
    explains = ("HNG*", "LAU101", "LAU102", "OUT101", "SYN121", "SYN122", "SYN123", "SYN126", "SYN127", "DAT114")

    def end(self, run: Run) -> Iterable[Finding]:
        passes.several_ranks(run)
        if not any(p.trains for p in passes.all_passes(run)) and not any(e["of"] == "step" for _, e in run.events("loop")):
            raise NotApplicable("no training loop was seen")
        if _joined(run):
            return
        found = parting.find(run)
        if found is None or not (found.exhausted or _ran_out(found)):
            return
        if found.level:
            if found.ahead:
                yield self._other_turns(found, run)
            return
        few, many = found.left, found.stayed
        told = ", ".join(str(n) for n in found.counts[:8])
        unit = "batches" if found.exhausted else "steps"
        planned = [p.planned for p in passes.all_passes(run) if p.where == found.loop and p.planned]
        notes = [f"{unit} by rank: {told}" + ("" if run.finished else " (of a rank that was still inside: as many as it had completed)")]
        if len(set(planned)) > 1:
            notes.append(f"length of the loader: {min(planned)} to {max(planned)}")
        yield self.finding(
            f"rank {few[0]} ran out of batches and left the loop, rank {many[0]} went on and waits for its gradients",
            where=found.loop,
            ranks=few,
            notes=[*notes, *waits.standing(run)],
            help="give every rank as many batches (filter before sharding, drop_last, a common count), or use `with Join([model]):`",
        )

    def _other_turns(self, found: parting.Parting, run: Run) -> Finding:
        few, many = found.left, found.stayed
        around = [f"or it is the loop around it (line {found.loop.line}) that turns more often on some ranks"] if found.loop is not None else []
        return self.finding(
            f"{blame.plural(list(few))} took {'its' if len(few) == 1 else 'their'} last step and left this loop for good, {blame.plural(list(many))} "
            f"{'goes' if len(many) == 1 else 'go'} on with another: how often the loop turns is each rank's own",
            where=found.inner,
            ranks=few,
            notes=[
                *around,
                f"steps by rank: {', '.join(str(n) for n in found.counts[:8])} (of a rank that was still inside: as many as it had completed)",
                *(waits.standing(run) or ([waits.describe(broken)] if (broken := waits.broken(run)) else [])),
            ],
            help="let all ranks take as many steps: a number of turns that follows a rank's own data has to be agreed on first, "
            "say by all_reduce(..., op=ReduceOp.MIN)",
        )


def _ran_out(found: parting.Parting) -> bool:
    """A loop without any other way out."""
    return found.made is None and not found.exits and not found.may_skip


def _joined(run: Run) -> bool:
    """A Join context around the last training pass (or entered shortly before it) provides for uneven inputs."""
    opened: dict[int, int] = {}
    for one in passes.all_passes(run):
        if one.trains:
            opened[one.rank] = one.opened.t_ns
    return all(
        recording is not None and any(e.t_ns >= opened.get(rank, 0) - SHORTLY_NS for e in recording.of("join"))
        for rank, recording in enumerate(run.ranks)
    )
