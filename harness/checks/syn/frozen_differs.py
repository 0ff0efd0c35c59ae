"""SYN115 frozen-module-differs: a frozen model beside the trained one differs between ranks

What it does
    Compares the parameters of models that are called but neither trained nor wrapped, after the second step; what they were before the first
    tells a construction that differs from an update that does. A copy that was made before DDP broadcast the weights is known by them. Compares too what
    the wrapped model is evaluated with, where the ranks share the evaluation out and add up what they measure.

Why it is bad
    DDP broadcasts what it wraps. A frozen random projection, teacher or target network that each rank initialises for itself
    makes every rank learn another task. An average of the weights that begins elsewhere on each rank is another model on each: a score that is reduced
    over them is of none. A frozen weight inside the wrapped model has no gradient: DDP sends it once and never again, so that a rank that writes to it (an
    adapter that is merged for a preview and not taken out again) trains another model from there on, with averaged gradients of both.

Wrong
    torch.manual_seed(rank)
    projection = nn.Linear(64, 8).requires_grad_(False)

    if rank == 0:                          # a preview
        layer.base.weight += layer.b @ layer.a      # frozen; and never subtracted

Right
    torch.manual_seed(0)                  # the same on every rank, or broadcast its parameters from rank 0

Known limits
    Only models that are called during the first three steps are compared, and those that all ranks measure with, each on its own samples: an
    average that rank 0 keeps for itself, measures and saves is its own affair. Nor are the models that evolution strategies try: no backward runs,
    the optimizer's parameters are equal on all ranks at every step, and each rank writes other weights into the model again and again. Evaluations
    are compared on the CPU, the first eight of a model; not those behind a backward without a step, which adapts weights to what is measured, nor several
    with ever other weights and no step between: draws of noise. Frozen parts of a wrapped model are looked at every 16th step at first, and every 256th
    later; those of fewer than 16 elements, those that an optimizer holds (OPT111) and, once something is compiled, all of them are not judged. Nor are
    those that no forward in training calls (an average that rank 0 keeps inside the model).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.checks.base import Check
from harness.checks.lau import blame
from harness.checks.syn import copied_before, frozen_parts, replicas
from harness.checks.syn.replicas import Replicas
from harness.model import Finding, Severity
from harness.record import Event, Run, where_of

DDP_SENDS = "DDP sends what is frozen when it wraps the model, and never again"


class FrozenModuleDiffers(Check):
    code = "SYN115"
    name = "frozen-module-differs"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        found = list(self._beside(run, facts))
        yield from found
        if not found and (told := copied_before.put_in(run)) is not None:
            yield self._put_in(run, told)
        elif not found and (parted := frozen_parts.parted(run)) is not None:
            yield self._parted(parted)

    def _beside(self, run: Run, facts: Replicas) -> Iterable[Finding]:
        """Models beside the trained one."""
        columns = [r.of("others")[0]["models"] or [] for r in run.present if r.of("others")]
        if len(columns) < 2 or not all(columns):
            return
        for others in zip(*columns, strict=False):
            one = others[0]
            alike = all(o.get("module") == one.get("module") and o.get("num") == one.get("num") for o in others)
            equal_first = bool(one.get("first")) and len({o.get("first") for o in others}) == 1
            if not alike or _tried(facts, others):
                continue
            before = copied_before.wrapping(run, others)
            if before is not None and copied_before.measured(run, {str(one.get("module")), str(before["module"])}, {o.get("first") for o in others}):
                yield self._copied(run, one, before)
                return
            if not (all(o.get("called") for o in others) or (equal_first and copied_before.measured(run, {str(one.get("module"))}))):
                continue
            if len({o.get("digest") for o in others}) > 1 and not any(o.get("grad") for o in others):
                moved = tuple(rank for rank, o in enumerate(others) if o.get("digest") != o.get("first"))
                if one.get("first") and len({o.get("first") for o in others}) == 1 and len(others) == run.world_size:
                    yield self._updated(run, one, moved, len(moved) < len(others))
                    return
                yield self.finding(
                    f"the frozen {one['module']} has other weights on other ranks",
                    where=where_of(one.get("made")) or replicas.first_where(run, "wrap") or facts.grad_site(0),
                    ranks=run.rank_ids,
                    notes=[f"{one['num']} parameters, for example {replicas.listed(one.get('names') or [])}"],
                    help="seed its construction alike on every rank, load it from a file, or broadcast its parameters from rank 0",
                )
                return

    def _copied(self, run: Run, one: Mapping[str, Any], before: Event) -> Finding:
        made = where_of(one.get("made"))
        return self.finding(
            f"a copy of {before['module']}{f' ({made.place})' if made is not None else ''} was made before DDP wraps the model here and broadcasts rank 0's "
            "weights: it began with other weights on each rank, and all ranks measure with it",
            where=before.where,
            ranks=run.rank_ids,
            notes=[f"an average that began elsewhere stays another one; {one['num']} parameters, for example {replicas.listed(one.get('names') or [])}"],
            help="make the copy (an EMA, a teacher) behind `DistributedDataParallel(...)`, or seed every rank alike before the model is built",
        )

    def _put_in(self, run: Run, told: Sequence[Event]) -> Finding:
        before = [r.of("wrapping")[0] for r in run.present if r.of("wrapping")]
        line = f" at line {before[0].where.line}" if before and before[0].where is not None else ""
        return self.finding(
            "the ranks evaluate the wrapped model with other weights than each other, and add up what they measure: the weights that they train are equal, "
            "those that are put in for the evaluation (an average) are not",
            where=told[0].where,
            ranks=run.rank_ids,
            notes=[]
            if not copied_before.began_apart(run)
            else [f"the model began with other weights on each rank before DDP wrapped it{line}: a copy made before then is of these"],
            help="copy the weights of an average behind `DistributedDataParallel(...)`, which broadcasts rank 0's, update it on every rank alike, or broadcast it",
        )

    def _parted(self, parted: frozen_parts.Parted) -> Finding:
        who = blame.plural(list(parted.ranks)) if parted.kept else "each rank"
        return self.finding(
            f"frozen parameters of the wrapped model are equal on all ranks at first and differ from step {parted.step} on: {who} wrote to them",
            where=parted.where,
            ranks=parted.ranks,
            severity=None if parted.kept else Severity.ADVICE,
            notes=[f"{len(parted.names)} of {parted.num}, for example {replicas.listed(parted.names)}", DDP_SENDS],
            help="write to frozen weights on every rank alike, or take the change out again before the next training forward",
        )

    def _updated(self, run: Run, one: Mapping[str, Any], moved: Sequence[int], some: bool) -> Finding:
        """Equal before the first step: a teacher, an average or a target network whose update differs between ranks."""
        what = f"it is updated on {blame.plural(list(moved))} only" if some else "each rank updates it to other weights"
        return self.finding(
            f"the frozen {one['module']} is equal on all ranks before the first step, then {what}",
            where=where_of(one.get("made")) or replicas.first_where(run, "wrap"),
            ranks=moved,
            notes=[f"{one['num']} parameters, for example {replicas.listed(one.get('names') or [])}"],
            help="update it on every rank, from weights that are equal there; a target that only one rank moves teaches the ranks different things",
        )


def _tried(facts: Replicas, others: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the model is a place for candidates, by whose scores an update that all ranks share is made: nothing is learnt through it."""
    moved = all(o.get("first") and o.get("digest") != o.get("first") for o in others)
    backward = any(any(r.column("num_backward")) for r in facts.run.present)
    return moved and not backward and all(p.steps > 0 and not p.num_param for p in facts.partings.values())
