"""SYN119 batch-skipped-on-one-rank: one rank skipped a batch and is paired with its peers' next one

What it does
    Counts the batches that each rank has drawn at the same optimizer step, and the backwards that it ran: a rank that left out only the
    optimizer's step is told apart.

Why it is bad
    A `continue` on one rank only pairs its gradients with the next batch of the others; the epoch then ends in a hang or a closed
    connection.

Wrong
    if torch.isnan(loss): continue

Right
    bad = torch.isnan(loss).float(); dist.all_reduce(bad)
    if bad: continue                      # every rank takes the same decision

Known limits
    Batches that a thread of the script's draws ahead are not counted, nor one that a rank has in hand when the ranks end a pass together.
    Ranks that have different numbers of batches at the end of an epoch are DAT111. A step that a GradScaler skips on one rank is OPT109's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks import regime
from harness.checks.base import Check
from harness.checks.syn import left_out, replicas
from harness.model import Finding, Severity, Where
from harness.record import Event, Recording, Run, where_of
from harness.steps import Step


class BatchSkipped(Check):
    code = "SYN119"
    name = "batch-skipped-on-one-rank"
    severity = Severity.ERROR
    explains = ("DAT111", "EVL103", "HNG*", "LAU101", "LAU102", "SYN122", "SYN123", "SYN127", "OUT101")

    def end(self, run: Run) -> Iterable[Finding]:
        left = left_out.of(run)
        if left is not None and not regime.other(run) and not any(True for _ in run.events("join")):
            yield self._without_step(run, left)
            return
        facts = replicas.require(run)
        if any(True for _ in run.events("join")):  # ranks may take different numbers of steps
            yield from self._went_dry(run, facts)
            return
        if any(e["aside"] for _, e in run.events("loader")):
            return  # a thread draws ahead: what is drawn by a step is a matter of timing
        drawn = [0] * run.world_size
        for step in run.steps():
            if not step.complete:
                break
            counts = step.number("num_batches")
            before = list(drawn)
            drawn = [a + b for a, b in zip(drawn, counts, strict=True)]
            if len(set(before)) == 1 and len(set(drawn)) > 1 and min(counts) >= 1:
                ahead = [r for r, n in enumerate(drawn) if n > min(drawn)]
                if _scaler_skipped(step, ahead):
                    return
                if replicas.same_pass(run, step.index):
                    yield self.finding(
                        f"rank {ahead[0]} drew {counts[ahead[0]]} batches before step {step.index}, the others {min(counts)}: "
                        "a batch was skipped there",
                        where=_continue_at(run, ahead[0], step.index) or facts.grad_site(step.number("opt")[0], step.index),
                        ranks=ahead,
                        notes=["gradients of different batches are averaged from here on"],
                        help="decide on all ranks together (all-reduce the condition) before skipping a batch",
                    )
                return
        yield from self._went_dry(run, facts)

    def _without_step(self, run: Run, left: left_out.LeftOut) -> Finding:
        """Every rank ran every batch's backward: what a rank skipped is the update alone."""
        conditions = [e.where for _, e in run.events("step_condition") if e.where is not None]
        return self.finding(
            f"the ranks take different numbers of optimizer steps for the same backwards: {', '.join(map(str, left.steps))} on ranks "
            f"{', '.join(map(str, run.rank_ids))}; the first is left out before step {left.first}",
            where=next(iter(conditions), None),
            ranks=left.ranks,
            notes=[f"backwards: {', '.join(map(str, left.backwards))}; no batch and no collective is missing, only the update"],
            help="decide on all ranks together whether the step is taken: by the averaged gradient, or by an all-reduced condition",
        )

    def _went_dry(self, run: Run, facts: replicas.Replicas) -> Iterable[Finding]:
        """A run that broke: a rank drew the rest of a pass without stepping, in a loop that stepped at every batch before."""
        if run.finished:
            return
        for rank, recording in enumerate(run.ranks):
            dry = [e for e in recording.of("pass") if _missed(e)] if recording is not None and _one_to_one(recording) else []
            others = [e for r, other in enumerate(run.ranks) if r != rank and other for e in other.of("pass") if _missed(e)]
            if dry and not others:
                yield self.finding(
                    f"rank {rank} drew {dry[0]['num_batches']} batches of a pass and took {dry[0]['steps']} steps: it skips batches that the others train on",
                    where=_continue_at(run, rank, dry[0].step) or facts.grad_site(0, max(0, dry[0].step - 1)),
                    ranks=(rank,),
                    notes=["before, it took a step for each batch"],
                    help="decide on all ranks together (all-reduce the condition) before skipping a batch; do not swallow an exception on one rank",
                )
                return


def _scaler_skipped(step: Step, ahead: Sequence[int]) -> bool:
    """Whether each batch of those that are ahead had its backward, and a GradScaler is at work: it skipped their step, no batch was skipped (OPT109)."""
    batches, backwards = step.number("num_batches"), step.number("num_backward")
    return any(step.number("scale")) and all(backwards[r] >= batches[r] for r in ahead)


def _continue_at(run: Run, rank: int, step: int) -> Where | None:
    """The condition of the one `continue` in the loop over the loader that this step belongs to."""
    recording = run.ranks[rank]
    over = next((e.where for e in recording.of("pass") if e["backwards"] and e.step >= step), None) if recording is not None else None
    loops = [e for e in recording.of("loop") if e["of"] == "loader" and e.where == over] if recording is not None and over else []
    exits = [x for e in loops for x in (e["exits"] or ()) if isinstance(x, dict) and x.get("kind") == "continue" and x.get("level") == 0]
    return where_of(exits[0].get("site")) if len(exits) == 1 else None


def _missed(one: Event) -> bool:
    """A pass that trained, in which more batches were drawn than steps taken; the last one of a pass that broke may be under way."""
    return bool(one["backwards"]) and one["num_batches"] > one["steps"] + (0 if one["complete"] else 1)


def _one_to_one(recording: Recording) -> bool:
    """Every step recorded so far took one batch; four at least."""
    return recording.num_rows >= 4 and all(row.num_batches == 1 for row in recording.all_rows())
