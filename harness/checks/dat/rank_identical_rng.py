"""DAT109 rank-identical-rng: all ranks draw the same random numbers in training.

What it does
    Compares, step by step, the values that the script's own training code draws: noise, time steps, masks of the size of the local batch,
    and what a dataset draws for its samples. After a resume, whether the script put one random state back on all ranks that had been in
    states of their own, and drew alike from there on.

Why it is bad
    The n-th sample of every rank gets the same augmentation, noise or time step. The batch is less varied than its size says, and the
    gradient's variance does not fall with the number of ranks as it should.

Wrong
    torch.manual_seed(args.seed)                     # the same noise on every rank

    torch.set_rng_state(checkpoint["rng"])           # that of rank 0, on every rank

Right
    torch.manual_seed(args.seed)                     # equal weights
    model = DDP(build())
    torch.manual_seed(args.seed + rank)              # from here on each rank draws its own

Known limits
    Scalars that all ranks share (a drop decision, a mix-up weight) and draws for a global batch that is cut by rank are healthy; so are equal
    draws in a search without DDP, of which each rank trains a point. Equal generator states that only dropout uses are advice. What loader
    workers draw is DAT113.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import made_equal, noise, passes, together
from harness.checks.dat.noise import Source
from harness.checks.syn import members
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.record import Run, number

MIN_STEPS = 3


class RankIdenticalRng(Check):
    code = "DAT109"
    name = "rank-identical-rng"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        drawn = [s for s in noise.sources(run) if len(s.steps) >= MIN_STEPS]
        equal = [s for s in drawn if s.equal_steps >= 0.9 * len(s.steps) and not s.constant and _matters(run, s)]
        equal = [s for s in equal if not members.steps_alone(run, s.steps)]
        if equal:
            yield self._found(run, equal)
            return
        later = self._made_equal(run, drawn)
        if later is not None:
            yield later
            return
        owned = _own_generator(run)
        if owned is not None:
            yield owned_finding(self, run, *owned)
            return
        dropout = self._dropout(run)
        if dropout is not None:
            yield dropout
        elif not drawn and not any(e["dropout"] for _, e in run.events("layers")):
            raise NotApplicable("the script draws nothing at random in its training steps")

    def _found(self, run: Run, equal: list[Source]) -> Finding:
        first = equal[0]
        at = first.where
        seed = next((w for what in _kinds(first) if (w := noise.seeded_at(run, first.first.t_ns, what)) is not None), None)
        line = f"line {at.line} ({first.site[2]})" if at else first.site[2]
        return self.finding(
            f"{line} draws the same values on all ranks: {first.equal_steps} of {len(first.steps)} steps",
            where=seed if seed is not None and not first.first["generator"] else at,
            ranks=run.rank_ids,
            notes=[f"{number(first.first['numel'])} values a step on each rank; statements like it: {len(equal)}"],
            help="seed with seed + rank after the model is built (and wrapped), so that each rank draws its own",
        )

    def _made_equal(self, run: Run, drawn: list[Source]) -> Finding | None:
        """Noise, or the masks of dropout, that differ between the ranks until a state is put back."""
        on_cpu = all(d == "cpu" for _, e in run.events("params") for d in e["devices"] or ())  # a device has generators of its own
        dropout = on_cpu and any(e["dropout"] for _, e in run.events("layers"))
        for at in made_equal.restored(run):
            num, what = max(((made_equal.draws(s, at), s) for s in drawn if _matters(run, s)), key=lambda d: d[0], default=(0, None))
            of = f"line {what.where.line} ({what.site[2]})" if num and what is not None and what.where else "dropout"
            num = num or (made_equal.states(run, at) if dropout and at.event["what"] == "torch" else 0)
            if num:
                return self.finding(
                    f"the same random state is put back on all ranks at step {at.step}: from there on {of} draws the same on each of them",
                    where=at.event.where,
                    ranks=run.rank_ids,
                    notes=[f"equal at {num} of {num} steps behind it; before, each rank's generator was in a state of its own"],
                    help="save the state of every rank (all_gather_object) and put back that of this rank, or seed anew with seed + rank + step",
                )
        return None

    def _dropout(self, run: Run) -> Finding | None:
        """Equal states that move at every step, and a model with dropout: its masks are equal on all ranks."""
        if not any(e["dropout"] for _, e in run.events("layers")):
            return None
        states = []
        for step in run.steps():
            if step.complete and step.index < 64:
                if not step.same("rng"):
                    return None
                row = step.rows[0]
                states.append(row.rng if row is not None else 0)
        moves = sum(1 for a, b in pairwise(states) if a != b)
        if len(states) < MIN_STEPS or not all(states) or moves < 0.9 * (len(states) - 1):
            return None
        return self.finding(
            "dropout draws the same masks on all ranks: the generators are in equal states at every step",
            where=next((e.where for _, e in reversed(list(run.events("seed"))) if e["what"] == "torch"), None),
            ranks=run.rank_ids,
            notes=[f"{len(states)} of {len(states)} steps"],
            help="seed with seed + rank after the model is built",
            severity=Severity.ADVICE,
        )


def _kinds(source: Source) -> list[str]:
    return ["torch", "python", "numpy"] if source.site[2] not in protocol.PYTHON_RNG else ["python", "numpy", "torch"]


def _matters(run: Run, source: Source) -> bool:
    """Noise for samples: drawn inside a dataset, or as many as the local batch has samples."""
    event = source.first
    if source.site[3]:
        return event.where is not None and event.where.function != "__iter__"
    fed = {together.rows_fed(run, rank) for rank, r in enumerate(run.ranks) if r is not None}
    rows = {number(e["rows"]) for events in source.steps.values() for e in events}
    return bool(rows & fed - {0, 1}) and number(event["num"]) >= 1


def _own_generator(run: Run) -> tuple[passes.Pass, str] | None:
    """A dataset's own generator that is in the same state on all ranks before a pass, and is used in it by this process."""
    for group in passes.aligned(run, [p for p in passes.training(run) if not p.iterable and not number(p.opened["num_workers"])]):
        owns = [own_states(p) for p in group]
        for name in owns[0][0]:
            if len({repr(o[0].get(name)) for o in owns}) == 1 and all(o[0].get(name) != o[1].get(name) for o in owns):
                return group[0], str(name)
    return None


def own_states(one: passes.Pass) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """States of the dataset's own generators (before, after) a pass, by name."""
    found = one.closed["own"] if one.closed is not None else None
    if isinstance(found, list) and len(found) == 2 and all(isinstance(f, Mapping) for f in found):
        return found[0], found[1]
    return {}, {}


def owned_finding(check: Check, run: Run, one: passes.Pass, name: str) -> Finding:
    return check.finding(
        f"the dataset's own generator `{name}` is in the same state on all ranks: the n-th sample of every rank gets the same draws",
        where=one.made_dataset,
        ranks=run.rank_ids,
        notes=[f"{one.opened['dataset']}.{name}, before and during {number(one.num_samples)} samples"],
        help="seed the generator with seed + rank",
    )
