"""EVL103 rank-local-decision: a rank leaves a training loop by its own judgement, the others go on.

What it does
    Finds the loop that one rank has left, not for lack of batches, while another goes on with it; names the statements that can end it.

Why it is bad
    A loss, a metric or a clock of its own lets each rank decide for itself. The one that stops no longer takes part in the collectives: the
    others hang, or fail with a closed connection.

Wrong
    if stopper.update(local_val_loss): break

Right
    dist.all_reduce(val_loss); val_loss /= world_size
    if stopper.update(val_loss): break            # the same number, so the same decision, on every rank

Known limits
    Which of several exits was taken is not recorded; the first of the loop is named, the others are noted.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import parting, passes
from harness.checks.hng import waits
from harness.checks.lau import blame
from harness.model import Finding, Severity
from harness.record import Run


class RankLocalDecision(Check):
    code = "EVL103"
    name = "rank-local-decision"
    severity = Severity.ERROR
    explains = ("HNG*", "LAU101", "LAU102", "OUT101", "SYN121", "SYN122", "SYN123", "SYN126", "SYN127", "EVL102")

    def end(self, run: Run) -> Iterable[Finding]:
        passes.several_ranks(run)
        if not any(True for _ in run.events("loop")):
            raise NotApplicable("no training loop was seen")
        if blame.fell_alone(run):
            return  # a rank failed by itself: it did not decide to leave
        found = parting.find(run)
        if found is None or found.exhausted or (not found.exits and (found.made is None or found.level == 0)):
            return
        left, stayed = found.left[0], found.stayed[0]
        if (recording := run.ranks[left]) is not None and any(e["how"] == "os._exit" for e in recording.of("exit_call")):
            return  # it did not leave a loop, it ended its process: HNG106
        what = "passes over the loader" if found.level and found.made else ("batches of the pass" if found.made else "steps")
        loop = "epoch loop" if found.level else "loop"
        notes = [f"{what} by rank: {', '.join(str(n) for n in found.counts[:8])}"]
        if len(found.exits) > 1:
            notes.append("the loop can also end at line " + ", ".join(str(w.line) for w in found.exits[1:5]))
        yield self.finding(
            f"rank {left} left the {loop}, rank {stayed} went on and waits for it: each rank decided by itself",
            where=found.exits[0] if found.exits else found.loop,
            ranks=found.left,
            notes=[*notes, *waits.standing(run)],
            help="all-reduce (or broadcast) what the decision rests on, so that every rank takes the same one",
        )
