"""SYN115 frozen-module-differs: a frozen model beside the trained one differs between ranks

What it does
    Compares the parameters of models that are called but neither trained nor wrapped, after the second step; what they were before the first
    tells a construction that differs from an update that does.

Why it is bad
    DDP broadcasts what it wraps. A frozen random projection, teacher or target network that each rank initialises for itself
    makes every rank learn another task.

Wrong
    torch.manual_seed(rank)
    projection = nn.Linear(64, 8).requires_grad_(False)

Right
    torch.manual_seed(0)                  # the same on every rank, or broadcast its parameters from rank 0

Known limits
    Only models that are called during the first three steps are compared, and those that all ranks measure with, each on its own samples: an
    average that rank 0 keeps for itself, measures and saves is its own affair. Nor are the models that evolution strategies try: no backward runs,
    the optimizer's parameters are equal on all ranks at every step, and each rank writes other weights into the model again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.checks.base import Check
from harness.checks.lau import blame
from harness.checks.syn import replicas
from harness.checks.syn.replicas import Replicas
from harness.model import Finding, Severity
from harness.record import Event, Run, where_of


class FrozenModuleDiffers(Check):
    code = "SYN115"
    name = "frozen-module-differs"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        columns = [r.of("others")[0]["models"] or [] for r in run.present if r.of("others")]
        if len(columns) < 2 or not all(columns):
            return
        for others in zip(*columns, strict=False):
            one = others[0]
            alike = all(o.get("module") == one.get("module") and o.get("num") == one.get("num") for o in others)
            equal_first = bool(one.get("first")) and len({o.get("first") for o in others}) == 1
            if not alike or _tried(facts, others) or not (all(o.get("called") for o in others) or (equal_first and _measured(run, str(one.get("module"))))):
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


def _measured(run: Run, module: str) -> bool:
    """Whether every rank measures with such a model, each on samples of its own and with other weights: the numbers are of several models."""
    columns = [[(e, w[1]) for e in r.of("evaluated") if (w := _weights(e, module)) is not None] for r in run.present]
    if len(columns) < run.world_size or not all(columns):
        return False
    return any(
        len({e.where for e, _ in told}) == 1 and len({w for _, w in told}) > 1 and len({e["inputs"] for e, _ in told}) > 1
        for told in zip(*columns, strict=False)
    )


def _weights(event: Event, module: str) -> Sequence[Any] | None:
    return next((w for w in event["weights"] or () if isinstance(w, list) and len(w) == 2 and w[0] == module), None)
